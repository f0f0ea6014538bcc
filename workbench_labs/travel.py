"""Look into the messages of a ring that trains: what the receiving devices got, on emulated devices (RingAda, section
III).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity, Job
from workbench.core.run_folder import scratch_folder
from workbench.core.schedule import RECV, Op, Value
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import RankSession
from workbench.methods.ringada.method import RingAda
from workbench.methods.ringada.phases import RingPhase
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.worker import TrainingWorker
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.tokenizer import TextTokenizer
from workbench.plots import lines
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import default_pool
from workbench.runtime.executor import Handler
from workbench.runtime.process_group import group
from workbench.tasks.tokenize import TokenizedSplit, collate
from workbench.widgets.tables import Table
from workbench_labs.planning import on_this_computer

share_module(__name__)  # its functions run on devices

KINDS = {
    "emb": "embedded mini-batch",
    "act": "hidden state after a device's blocks",
    "grad": "gradient",
    "head": "head with its optimizer state",
    "free": "token: the next may begin",
}
Inversion = Callable[[list[list[float]], list[list[float]]], Sequence[int]]
"""(hidden states, embeddings of the candidates) -> the place of a candidate for each state."""
MOST_CANDIDATES = 1000
"""Words among which a hidden state's is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message from one device to another.  kind: a key of KINDS.  stage: the ring's stage.  content: the content as
    it arrived.
    """

    kind: str
    stage: int
    sender: int
    receiver: int
    micro_batch: int
    content: Tensor

    @property
    def numbers(self) -> list[float]:
        """Return the content as a flat list."""
        return [float(number) for number in self.content.flatten().tolist()]


class _Watched(RingPhase):
    """A phase that keeps what other devices have sent."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.messages_by_value: dict[Value, Message] = {}

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        rank = self.session.rank
        program = self.rank_job.program(self.shape(planned))
        senders = {op.writes[0]: op.ranks[0] for op in program.schedule.ops[rank] if op.kind == RECV}

        def watched(handle: Handler) -> Handler:
            def call(op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
                for value, content in zip(op.reads, reads, strict=True):
                    if value in senders and isinstance(content, Tensor):
                        self.messages_by_value[value] = Message(
                            kind=value.name,
                            stage=value.stage,
                            sender=senders[value],
                            receiver=rank,
                            micro_batch=value.microbatch,
                            content=content.detach().clone(),
                        )
                return handle(op, reads)

            return call

        return {kind: watched(handle) for kind, handle in super().handlers(epoch, planned).items()}


def _watch_rank(context: RankContext, job: RingRankJob) -> list[Message]:
    """Do a rank's part of the training; return the messages that it has received."""
    phases: list[_Watched] = []

    def phases_on(session: RankSession[RingRankJob], result: RankResult) -> tuple[_Watched, ...]:
        phases.append(_Watched(session, session.rank_job.phases()[0], result))
        return (phases[0],)

    with (
        group(context, job.timeout_s) as process_group,
        TrainingWorker(phases_on, context.dilation) as worker,
    ):
        worker.train(context, process_group, job, Controls())
    return list(phases[0].messages_by_value.values())


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One round of a ring whose messages were recorded.  samples: rows of the split in each micro-batch."""

    model: str
    label: str
    names: tuple[str, ...]
    messages: tuple[Message, ...]
    split: TokenizedSplit
    samples: tuple[tuple[int, ...], ...]

    def tokens(self, micro_batch: int) -> list[list[int]]:
        """Return the token ids of each sentence of a micro-batch."""
        return [list(map(int, self.split.ids[row])) for row in self.samples[micro_batch]]

    @cached_property
    def secrets(self) -> dict[str, list[list[int]]]:
        """Return what no device but its own may see: the tokens of each sentence, the labels of each mini-batch."""
        numbers = range(len(self.samples))
        return {
            "the tokens of a sentence": [ids for number in numbers for ids in self.tokens(number)],
            "the labels of a mini-batch": [[int(self.split.labels[row]) for row in rows] for rows in self.samples],
        }

    @cached_property
    def candidates(self) -> list[int]:
        """Return token ids: those of the sentences, others up to MOST_CANDIDATES; none whose embedding is zero."""
        used_tokens = sorted({int(token) for ids in self.split.ids for token in ids})
        unused_tokens = set(self.embeddings.any(dim=1).nonzero().flatten().tolist()) - set(used_tokens)
        others = sorted(unused_tokens)
        return [
            *used_tokens,
            *(token for token, _ in zip(others, range(MOST_CANDIDATES - len(used_tokens)), strict=False)),
        ]

    @cached_property
    def embeddings(self) -> Tensor:
        """Return the model's word embeddings (words, width), which everybody can download."""
        stack = load_stack(self.model)
        return max((parameter for parameter in stack.embedding.parameters() if parameter.ndim == 2), key=len).detach()

    @cached_property
    def state(self) -> Message:
        """Return a hidden state that travelled behind the first device's blocks."""
        return next(message for message in self.messages if (message.kind, message.stage) == ("act", 0))

    def read(self, invert: Inversion, states: Tensor) -> list[int]:
        """Return the tokens that a student's function reads from hidden states, (tokens, width)."""
        places = invert(states.tolist(), self.embeddings[self.candidates].tolist())
        return [self.candidates[int(place)] for place in places]

    def sentence(self, invert: Inversion) -> tuple[list[int], list[int]]:
        """Return the tokens of the first sentence of `state`, and those that a student's function reads."""
        ids = self.tokens(self.state.micro_batch)[0]
        return ids, self.read(invert, self.state.content[0, : len(ids)])


def watch(
    model: str,
    cluster_name: str,
    *,
    task: str = "sentiment",
    batch_size: int = 8,
    max_length: int = 32,
    seed: int = 0,
    fidelity: Fidelity = "auto",
) -> Watched:
    """Train one round on emulated devices, each with its own sentences, and keep every message.

    Blocks are planned by the catalogue's speeds, so nothing is measured first.
    """
    cluster = on_this_computer(load_cluster(cluster_name))
    size = cluster.world_size
    job = Job(
        method="ringada",
        model=model,
        task=task,
        epochs=1,
        seed=seed,
        batch_size=batch_size,
        max_length=max_length,
        micro_batches=1,
        train_samples=batch_size * size,
        validation_samples=8,
        test_samples=8,
        options={"local_iterations": 1, "depth": 2},
    )
    method = RingAda()
    prepared = method.prepare(job, lambda event: None)
    profile = method.catalogue(prepared, cluster)
    plan = method.plan(prepared, profile, cluster)
    with scratch_folder() as folder:
        job_of_all = replace(method.rank_job(prepared, profile, cluster, plan), folder=folder)
        engines = default_pool().acquire(cluster, fidelity)
        messages_of = engines.run(_watch_rank, [job_of_all.on_rank(rank) for rank in range(size)])
    return Watched(
        model=model,
        label=f"emulated, {engines.fidelity} links",
        names=cluster.names,
        messages=tuple(message for messages in messages_of for message in messages),
        split=job_of_all.split,
        samples=tuple(tuple(rows) for rows in job_of_all.planned_epoch(0)[0].samples),
    )


def message_table(watched: Watched) -> Table:
    """Return what travelled, by kind: messages, shape and bytes of one, where the first went."""
    rows = []
    for kind, words in KINDS.items():
        of_kind = [message for message in watched.messages if message.kind == kind]
        if of_kind:
            first = of_kind[0]
            shape = " x ".join(map(str, first.content.shape))
            where = f"{watched.names[first.sender]} to {watched.names[first.receiver]}"
            rows.append((words, len(of_kind), shape, f"{first.content.nbytes:,}", where))
    columns = ("what", "messages", "shape of the first", "bytes", "from, to")
    return Table(columns, rows, title=f"Messages of one round ({watched.label})")


def leak_table(watched: Watched, leak: Callable[[list[float], list[int]], bool]) -> Table:
    """Return in how many messages a student's detector finds each kind of secret, and whether it finds planted ones."""
    rows = []
    for name, secrets in watched.secrets.items():
        planted = [0.5, *map(float, secrets[0]), 0.5]
        count = sum(_finds(leak, message.numbers, secrets) for message in watched.messages if message.kind != "free")
        rows.append((name, len(secrets), count, "found" if _finds(leak, planted, secrets[:1]) else "not found"))
    columns = ("looked for", "how many", "messages with one", "planted by hand")
    return Table(columns, rows, title=f"{len(watched.messages)} messages ({watched.label})")


def _finds(leak: Callable[[list[float], list[int]], bool], numbers: list[float], secrets: Iterable[list[int]]) -> bool:
    return any(leak(numbers, secret) for secret in secrets)


def reading_table(watched: Watched, invert: Inversion) -> Table:
    """Return a sentence next to what a student's function reads from its hidden state, as it travelled."""
    message, words, (ids, recovered) = watched.state, load_tokenizer(watched.model), watched.sentence(invert)
    assert isinstance(words, TextTokenizer)
    where = f"{watched.names[message.sender]} to {watched.names[message.receiver]}"
    rows = [("its owner has", words.decode(ids)), ("read from the message", words.decode(recovered))]
    right = f"{_equal(ids, recovered)} of {len(ids)} tokens"
    title = f"{KINDS[message.kind].capitalize()}, {where}: {right} ({watched.label})"
    return Table(("", "sentence"), rows, title=title)


def words_read(watched: Watched, invert: Inversion) -> float:
    """Return the share of a sentence's tokens, in per cent, that a student's function reads from the message."""
    ids, recovered = watched.sentence(invert)
    return round(100 * _equal(ids, recovered) / len(ids), 1)


def _equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens of two texts of one length are the same."""
    return sum(token == other for token, other in zip(tokens, others, strict=True))


def readable_by_depth(watched: Watched, invert: Inversion) -> go.Figure:
    """Return the share of tokens that a student's function reads from the hidden states after every block."""
    stack = load_stack(watched.model)
    batch = collate(watched.split, list(watched.samples[0])[:4])
    with torch.no_grad():
        states = stack.stage(0, stack.num_layers)(batch.input_ids, batch.attention_mask)[1]
    mask = batch.attention_mask.bool()
    true = batch.input_ids[mask].tolist()
    points = [
        (float(depth), 100 * _equal(true, watched.read(invert, state[mask])) / len(true))
        for depth, state in enumerate(states[: stack.num_layers + 1])
    ]
    words = {"title": "Tokens read from a hidden state", "label": "executed", "subtitle": watched.model}
    return lines({"nearest embedding": points}, x_title="blocks passed", y_title="tokens read, %", **words)
