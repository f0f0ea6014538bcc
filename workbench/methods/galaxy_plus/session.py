"""A rank's state while it answers requests: its group, links, pacing, and its slices of the model (Galaxy+, section
III-A).

Its handlers are the runtime's dispatch table for the operations of an inference schedule (section III-B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.errors import DeviceLostError, require_numbers
from workbench.core.inference import InferencePlan
from workbench.core.schedule import ALLREDUCE, BROADCAST, Op, Value
from workbench.methods.common.session import DeviceSession
from workbench.methods.galaxy_plus.costs import scaled_to
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.prepare import Answer, Request, check_request
from workbench.methods.galaxy_plus.prices import Prepared, Programs
from workbench.methods.galaxy_plus.schedules import InferenceLayout
from workbench.models.generation import GenerationRules
from workbench.models.sharding import (
    KeyValueCache,
    ModelLayout,
    ModelShard,
    Row,
    Run,
    ShardSpec,
    WeightSource,
    model_layout,
    open_weights,
    shard_spec,
)
from workbench.models.sharding.held import What
from workbench.models.speculation import MOST_ROWS, DraftChoice
from workbench.runtime.context import RankContext
from workbench.runtime.executor import Contents, Execution, Handler
from workbench.runtime.pacing import Pacer


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """The setup of every rank.

    host: the profile of one unslowed core, for pacing; None (always for real devices): run at full speed.  costs: of
    real devices, by which a service of texts finds slow ones.

    draft: which model guesses tokens of texts, if any, and draft_costs its costs on the devices.

    report_every_s: seconds between two reports of a device to its coordinator.  is_run: whether it is a run, in which
    memory budgets are enforced and an error of one device ends the run; a service continues without a device that
    fails.
    """

    model: str
    cluster: Cluster
    host: InferenceProfile | None = None
    costs: InferenceProfile | None = None
    timeout_s: float = 20.0
    report_every_s: float = math.inf
    is_run: bool = False
    draft: DraftChoice | None = None
    draft_costs: InferenceProfile | None = None

    def paced_by(self, context: RankContext) -> InferenceProfile | None:
        """Return the device costs used for pacing; None if devices are not slowed down."""
        return None if self.host is None or context.fidelity == "real" else scaled_to(self.host, self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A rank's weights for a plan.  shard: None on a device outside the plan.  programs: a draft's own."""

    plan: InferencePlan
    shard: ModelShard | None
    programs: Programs | None = None


class Slices:
    """Reads a device's slices of a model from its disk."""

    def __init__(self, model: str, layout: ModelLayout) -> None:
        self._model, self._layout = model, layout
        self._source: WeightSource | None = None

    def read(self, spec: ShardSpec, old: ModelShard | None, *, release: bool = False) -> tuple[ModelShard, int]:
        """Return the slices of a specification, and the bytes read for them.

        old: the current slices, of which as much as possible is reused; release: see ModelShard.
        """
        if self._source is None:
            self._source = open_weights(self._model, layout=self._layout)
        source, before = self._source, self._source.bytes_read
        try:
            shard = ModelShard(self._layout, spec, source, old, release=release)
            return shard, source.bytes_read - before
        finally:
            if not (source.is_on_disk or self._model.startswith("tiny-")):
                self.close()  # it contains the whole model

    def close(self) -> None:
        """Close the weights' source."""
        if self._source is not None:
            self._source.close()
            self._source = None


class InferenceSession(DeviceSession):
    """A DeviceSession that answers requests.

    devices: the devices that remain after a failure.  programs: the programs built so far.
    """

    def __init__(
        self,
        context: RankContext,
        setup: SessionSetup,
        group: dist.ProcessGroup,
        *,
        devices: Sequence[int] | None = None,
        layout: ModelLayout | None = None,
        pacer: Pacer | None = None,
        programs: Programs | None = None,
    ) -> None:
        is_paced = setup.host is not None
        super().__init__(
            context, setup.cluster, group, timeout_s=setup.timeout_s, is_paced=is_paced, devices=devices, pacer=pacer
        )
        self.setup, self.layout = setup, layout or model_layout(setup.model)
        self.stacks = self.layout.stacks
        self._slices = Slices(setup.model, self.layout)
        self.control = ControlChannel(group=group, rank=self.rank, peers=self._peers, timeout_s=self.timeout_s)
        self.programs = programs or Programs(setup.cluster, self.stacks, setup.paced_by(context) or setup.costs)

    @cached_property
    def text_rules(self) -> GenerationRules:
        """Return the choice of next tokens by the model's settings."""
        return GenerationRules(self.setup.model)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._slices.close()

    def load(self, plan: InferencePlan) -> Holding:
        """Return this rank's slices for a plan, read from disk."""
        position = plan.position_of(self.rank)
        shard = None if position is None else self._slices.read(shard_spec(plan, position, self.stacks), None)[0]
        return Holding(plan=plan, shard=shard)

    def answer(self, holding: Holding, request: Request, *, cache: KeyValueCache | None = None) -> Answer:
        """Run a plan on one sequence, together with the plan's other devices.  A device outside the plan returns at
        once.

        Raises DeviceLostError if a device is lost or silent, ConfigError for a request that the model cannot read.
        """
        shard = holding.shard
        if shard is None:
            now = self.context.now_s()
            return Answer(None, now, now)
        check_request(request, self.layout)
        programs = holding.programs or self.programs
        prepared = programs.sequence(holding.plan, request.lengths, room=0 if cache is None else cache.capacity)
        begin_s = self.context.now_s()
        with torch.inference_mode():
            run = shard.begin(request.length, target_length=max(1, request.decoder_length), cache=cache)
            handlers = InferenceHandlers(shard, prepared.layout, run, output=request.what)
            inputs = self._inputs(prepared, [request.ids, request.decoder_ids])
            self.executor.idle()
            done = self.run(prepared.program, handlers.table(), inputs)
        return _answer_of(done, begin_s, [] if cache is None else [cache])

    def respond(self, holding: Holding, request: Request, num_tokens: int) -> tuple[Tensor | None, list[Answer]]:
        """Return the output for a request, on the plan's first device, and the answers of its steps.

        num_tokens: 0 for the output that the request asks for.  Otherwise so many tokens are generated greedily after a
        text, and every device caches the keys and values of its units.  The output has the new tokens up to an end
        of the text (see models.generation.GenerationRules), and the answers are those of the text and of each further
        token.
        Raises ConfigError for a model that cannot generate, ScheduleError for sequence parallelism, which cannot divide
        a token.
        """
        shard = holding.shard
        if num_tokens:
            request = request._replace(what="last")
        if not num_tokens or shard is None:
            answer = self.answer(holding, request)
            return answer.output, [answer]
        cache = shard.new_cache((request.decoder_length or request.length) + num_tokens)
        tokens, answers = list[int](), [self.answer(holding, request, cache=cache)]
        rules = self.text_rules.rules(request.decoder_length or request.length, num_tokens)
        is_first = self.rank == holding.plan.ranks[0]
        while True:
            if is_first:
                text, logits = request.decoder_ids if request.decoder_length else request.ids, answers[-1].output
                assert text is not None and logits is not None
                ids = torch.cat([text, torch.tensor([tokens], dtype=text.dtype)], dim=1)
                logits = require_numbers(logits, "Tokens").flatten(0, -2)
                tokens.append(int(rules(ids, logits).argmax(-1)))
            if len(answers) == num_tokens:
                return torch.tensor(self.text_rules.until_end(tokens)) if is_first else None, answers
            before = (*request.lengths[:-1], cache.length)
            prepared = self.programs.token(holding.plan, before, room=cache.capacity)
            answers.append(self.rows(prepared, shard, [Row(cache, cache.length)], tokens[-1:]))
            cache.length += 1

    def rows(self, prepared: Prepared, shard: ModelShard, rows: Sequence[Row], tokens: Sequence[int]) -> Answer:
        """Return the answer for one more token in each row's text: logits (1, rows, vocabulary).

        prepared: see Programs.token.  tokens: one for each row, on the plan's first device.
        """
        begin_s = self.context.now_s()
        with torch.inference_mode():
            handlers = InferenceHandlers(shard, prepared.layout, shard.positions.step(rows), output="all")
            inputs = self._inputs(prepared, [torch.tensor([tokens])] * len(self.stacks))
            self.executor.idle()
            done = self.run(prepared.program, handlers.table(), inputs)
        return _answer_of(done, begin_s, [row.cache for row in rows])

    def _inputs(self, prepared: Prepared, ids: Sequence[Tensor | None]) -> dict[Value, Tensor | None]:
        """Return this rank's inputs of a program.  ids: the tokens of each stack."""
        blocks, values = prepared.layout.blocks, prepared.program.schedule.inputs[self.rank]
        return {value: ids[blocks[value.stage].stack] for value in values}


def _answer_of(done: Execution, begin_s: float, caches: Sequence[KeyValueCache]) -> Answer:
    """Return the answer of a rank's step.  begin_s: when it began, for a rank that has computed nothing.  caches: those
    whose memory it holds.
    """
    computed = [span for span in done.spans if not span.op.is_communication]
    kept_bytes = sum(cache.nbytes for cache in caches)
    return Answer(
        next(iter(done.outputs.values()), None),
        min((span.start_s for span in computed), default=begin_s),
        done.ended_s if computed else begin_s,
        tuple(done.spans),
        tuple(sample._replace(nbytes=sample.nbytes + kept_bytes) for sample in done.memory),
    )


MESSAGE_NUMBERS = 2 + 2 * MOST_ROWS
"""Numbers in a message between two devices."""
_TAG = 1 << 30
"""Above the numbers of a Transport's messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlChannel:
    """One rank's end of the channel.  Messages between two ranks arrive in the order in which they were sent.

    peers: the group's number of each device.  A device that is silent for timeout_s counts as lost.  Both methods raise
    DeviceLostError if the other device is gone.
    """

    group: dist.ProcessGroup
    rank: int
    peers: Mapping[int, int]
    timeout_s: float

    def tell(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        """Send MESSAGE_NUMBERS numbers or fewer to some devices, and return when they have been sent."""
        message = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        message[: len(numbers)] = torch.tensor(numbers)
        try:
            for work in [self.group.send([message], self.peers[rank], _TAG) for rank in ranks if rank != self.rank]:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def listen(self, rank: int) -> list[int]:
        """Return the next message of a device, filled up with zeros."""
        message = torch.empty(MESSAGE_NUMBERS, dtype=torch.int64)
        try:
            self.group.recv([message], self.peers[rank], _TAG).wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise _lost(error) from error
        return message.tolist()


def _lost(error: RuntimeError) -> DeviceLostError:
    problem = f"It failed: {str(error).splitlines()[0]}."
    return DeviceLostError(
        "A message to or from another device was under way.", problem, "See the first device that failed."
    )


class InferenceHandlers:
    """The operations on one rank of one request, or of further tokens (a Run of ModelShard.step).

    output: the result that HEAD returns.  A value that covers several tiles is one tensor, with the tiles in token
    order.  If one operation writes several values for the next one on this rank (`ctx`), the first contains all.
    """

    def __init__(self, shard: ModelShard, layout: InferenceLayout, run: Run, *, output: What = "hidden") -> None:
        self._shard, self._layout, self._run, self._what = shard, layout, run, output
        self._is_sequence = layout.plan.paradigm == "sequence"

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        is_divided = self._layout.is_decoding
        return {
            "EMB": self._embed,
            "ENTER": self._enter,
            "QKV": self._query_key_value,
            "ATT": self._attend,
            "CQ": lambda op, reads: (self._shard.qkv(op.stage, _joined(reads)),),
            "CKV": lambda op, reads: (self._shard.cross_keys_values(op.stage, _joined(reads)),),
            "CATT": self._cross_attend,
            "OUT": self._leave,
            "COUT": self._leave,
            "UP": lambda op, reads: (self._shard.up(op.stage, _joined(reads), is_divided=is_divided),),
            "DOWN": lambda op, reads: self._split(op, self._shard.down(op.stage, reads[0])),
            "ADD": lambda op, reads: (reads[1].add_(reads[0]),),
            "CONN": self._connect,
            "HEAD": lambda op, reads: (self._shard.head(_joined(reads), self._what),),
            ALLREDUCE: self._term,
            BROADCAST: lambda op, reads: (reads[0].contiguous() if reads else self._empty(op),),
        }

    def _embed(self, op: Op, reads: Contents) -> Contents:
        stack = self._layout.blocks[op.stage].stack
        return self._split(op, self._shard.embed(stack, reads[0], self._run.positions))

    def _enter(self, op: Op, reads: Contents) -> Contents:
        return (self._shard.enter(op.stage, reads[0]), reads[0])[: len(op.writes)]

    def _query_key_value(self, op: Op, reads: Contents) -> Contents:
        projected = self._shard.qkv(op.stage, _joined(reads))
        return (projected, self._shard.keys_values(op.stage, projected)) if self._is_sequence else (projected,)

    def _attend(self, op: Op, reads: Contents) -> Contents:
        start, stop = self._layout.span(op)
        if self._is_sequence:
            return (self._shard.attend_own(op.stage, reads[0], reads[1:], self._run, start),)
        context = self._shard.attend(op.stage, reads, self._run, start, stop)
        return (context, *(None for _ in op.writes[1:]))

    def _cross_attend(self, op: Op, reads: Contents) -> Contents:
        context = self._shard.cross_attend(op.stage, reads[:1], reads[1:], self._run)
        return (context, *(None for _ in op.writes[1:]))

    def _leave(self, op: Op, reads: Contents) -> Contents:
        return self._split(op, self._shard.out(op.stage, reads[0]))

    def _connect(self, op: Op, reads: Contents) -> Contents:
        total = (
            reads[0]
            if len(reads) == 2
            else torch.add(*reads[:-1])
            if len(reads) == 3
            else torch.stack(reads[:-1]).sum(0)
        )
        residual, hidden = self._shard.connect(op.stage, total, reads[-1])
        return (residual,) if op.writes[0].name == "emb" else (hidden, residual)[: len(op.writes)]

    def _term(self, op: Op, reads: Contents) -> Contents:
        """Return the tensor to sum in place; a rank that computed nothing adds nothing."""
        return (reads[0].contiguous() if reads else self._empty(op).zero_(),)

    def _empty(self, op: Op) -> Tensor:
        stack = self._layout.blocks[op.stage].stack
        return torch.empty(1, self._layout.lengths[stack], self._layout.stacks[stack].hidden_size)

    def _split(self, op: Op, content: Tensor) -> Contents:
        """Return a tensor split into the tiles that the operation writes."""
        if len(op.writes) == 1:
            return (content,)
        tiles = self._layout.tiles[self._layout.blocks[op.stage].stack]
        return content.split([tiles[value.part].tokens for value in op.writes], dim=1)


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tuple(tiles), dim=1)
