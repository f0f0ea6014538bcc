"""One rank of the single-shot inference benchmark: every system's plan on the same weights, links and pacing, turn by
turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from workbench.core.inference import InferencePlan
from workbench.core.schedule import COMMUNICATION, RECV, Schedule, Value
from workbench.core.timeline import Span
from workbench.methods.galaxy_plus.operation_costs import StackTimes
from workbench.methods.galaxy_plus.prepare import Request
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.methods.galaxy_plus.schedules import InferenceLayout
from workbench.methods.galaxy_plus.session import Holding, InferenceHandlers, InferenceSession, SessionSetup
from workbench.models.configuration import import_family
from workbench.runtime.context import RankContext
from workbench.runtime.process_group import group
from workbench.runtime.step_values import empty

OVERLAP_ROUNDS = 3
DTENSOR = "DTensor"
"""The side with torch's own tensor parallelism."""
DTENSOR_PLAN = {
    "attention.self.query": ColwiseParallel(),
    "attention.self.key": ColwiseParallel(),
    "attention.self.value": ColwiseParallel(),
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}
"""The plan of PyTorch's tutorial on tensor parallelism, with BERT's names: two all-reduces a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side to time.  plan: None for DTensor.  ids: (1, t).  rounds: it is timed only in the first so many."""

    name: str
    plan: InferencePlan | None
    ids: Tensor
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SidesJob:
    """The job for every rank.  setup.model: a folder with random weights.  overlap: a plan whose blocks are also timed
    separately.
    """

    setup: SessionSetup
    sides: tuple[Side, ...]
    overlap: InferencePlan | None = None


@dataclass(kw_only=True)
class SidesResult:
    """A rank's results.  seconds: each side's, only on the first device of its plan.

    outputs: those of each side's warm-up, only there.  late_s, paced_s: sums over all sides.  spans: those of each
    side's last turn.
    blocks[what]: for each round the seconds by block, see `_blocks`.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    late_s: float = 0.0
    paced_s: float = 0.0
    spans: dict[str, tuple[Span, ...]] = field(default_factory=dict)
    blocks: dict[str, list[dict[int, float]]] = field(default_factory=dict)


def run_sides(context: RankContext, job: SidesJob) -> SidesResult:
    """Load every side, warm it up, and time all of them in turn; the first side changes from round to round."""
    import_family(job.setup.model)
    result = SidesResult()
    with (
        torch.no_grad(),
        group(context, job.setup.timeout_s) as process_group,
        InferenceSession(context, job.setup, process_group) as session,
    ):
        run = {side.name: _runner(session, side) for side in job.sides}
        session.barrier()
        for side in job.sides:
            output, _, _ = run[side.name]()
            session.barrier()
            if output is not None:
                result.outputs[side.name] = output.clone()
        for turn in range(max(side.rounds for side in job.sides)):
            for side in job.sides if turn % 2 else reversed(job.sides):
                if turn < side.rounds:
                    _time(session, side, run[side.name], result)
        if job.overlap is not None:
            result.blocks = _blocks(session, job.overlap, job.sides[0].ids)
    return result


Ran = tuple[Tensor | None, float, tuple[Span, ...]]
"""A side's output on the first device of its plan, its seconds, and this rank's spans."""


def _runner(session: InferenceSession, side: Side) -> Callable[[], Ran]:
    """Return a function that runs a side once."""
    if side.plan is None:
        theirs = tensor_parallel_bert(session, side.ids.shape[1])

        def run_theirs() -> Ran:
            begin = time.monotonic()
            output = theirs(input_ids=side.ids).last_hidden_state
            return (output if session.rank == 0 else None), time.monotonic() - begin, ()

        return run_theirs
    holding = session.load(side.plan)
    request = Request(length=side.ids.shape[1], ids=side.ids)

    def run_ours() -> Ran:
        answer = session.answer(holding, request)
        return answer.output, answer.end_s - answer.start_s, answer.spans

    return run_ours


def _time(session: InferenceSession, side: Side, run: Callable[[], Ran], result: SidesResult) -> None:
    pacer = session.pacer
    late_s, paced_s = pacer.late_s, pacer.paced_s
    session.barrier()
    output, seconds, spans = run()
    if output is not None:
        result.seconds.setdefault(side.name, []).append(seconds)
    result.spans[side.name] = spans
    result.late_s += pacer.late_s - late_s
    result.paced_s += pacer.paced_s - paced_s
    session.barrier()


def _blocks(session: InferenceSession, plan: InferencePlan, ids: Tensor) -> dict[str, list[dict[int, float]]]:
    """Return for each round every block's monotonic end times on this rank: overlapped, only communication, and only
    computation.

    'computation': this rank's operations one after the other, with all received values present: busy seconds by block.
    'communication': the same transfers; every operation returns tensors of the right size at once.
    """
    holding = session.load(plan)
    request = Request(length=ids.shape[1], ids=ids)
    times: dict[str, list[dict[int, float]]] = {"both": [], "computation": [], "communication": []}
    kinds: dict[str, Callable[[], tuple[Span, ...]]] = {
        "both": lambda: session.answer(holding, request).spans,
        "computation": lambda: _compute(session, holding, request),
        "communication": lambda: _communicate(session, holding, request),
    }
    for number in range(OVERLAP_ROUNDS + 1):
        for side, run in kinds.items():
            session.barrier()
            spans = run()
            if number:
                times[side].append(_busy(spans) if side == "computation" else block_ends(spans))
    return times


def _compute(session: InferenceSession, holding: Holding, request: Request) -> tuple[Span, ...]:
    """Run this rank's compute operations alone."""
    layout, program = session.programs.sequence(holding.plan, request.lengths)
    shard, rank = holding.shard, session.rank
    if shard is None:
        return ()
    full = program.schedule
    received = tuple(op.writes[0] for op in full.ops[rank] if op.kind == RECV)
    alone = tuple(op for op in full.ops[rank] if op.kind not in COMMUNICATION)
    ops = tuple(alone if other == rank else () for other in range(full.world_size))
    inputs = tuple((*full.inputs[rank], *received) if other == rank else () for other in range(full.world_size))
    schedule = Schedule(ops=ops, inputs=inputs, outputs=full.outputs)
    with torch.inference_mode():
        contents: dict[Value, Any] = {value: empty(program.costs.spec(value)).zero_() for value in received}
        contents |= {value: request.ids for value in full.inputs[rank]}
        run = shard.begin(request.length)
        session.executor.idle()
        outcome = session.executor.run(
            replace(program, schedule=schedule), InferenceHandlers(shard, layout, run).table(), contents
        )
    return tuple(outcome.spans)


def _communicate(session: InferenceSession, holding: Holding, request: Request) -> tuple[Span, ...]:
    """Run the transfers alone."""
    _, program = session.programs.sequence(holding.plan, request.lengths)
    schedule, rank = program.schedule, session.rank
    sent_values = {value for op in schedule.ops[rank] if op.kind in COMMUNICATION for value in op.reads}
    dummies = {value: empty(program.costs.spec(value)).zero_() for value in sent_values}
    handlers = {
        op.kind: lambda op, reads: tuple(dummies.get(value) for value in op.writes)
        for op in schedule.ops[rank]
        if op.kind not in COMMUNICATION
    }
    factor, session.pacer.factor = session.pacer.factor, 0.0
    try:
        outcome = session.executor.run(program, handlers, dict.fromkeys(schedule.inputs[rank], request.ids))
    finally:
        session.pacer.factor = factor
    return tuple(outcome.spans)


def _busy(spans: tuple[Span, ...]) -> dict[int, float]:
    seconds: dict[int, float] = {}
    for span in spans:
        seconds[span.op.stage] = seconds.get(span.op.stage, 0.0) + span.end_s - span.start_s
    return seconds


def block_ends(spans: tuple[Span, ...]) -> dict[int, float]:
    """Return the end times of this rank's last connection in each block."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.op.kind == "CONN":
            ends[span.op.stage] = max(ends.get(span.op.stage, 0.0), span.end_s)
    return ends


def tensor_parallel_bert(session: InferenceSession, length: int) -> Any:
    """Return a Hugging Face BERT in equal parts on all ranks of the session's group, split by torch's DTensor over
    gloo.

    Every operation is paced as ours of the same kind, tokens and units, for a sequence of `length` tokens.
    """
    from transformers import AutoModel

    model = AutoModel.from_pretrained(session.setup.model, attn_implementation="sdpa", add_pooling_layer=False).eval()
    count = session.context.world_size
    mesh = DeviceMesh.from_group(session.group, "cpu")
    shape, host = session.stacks[0], session.setup.host
    units, columns = shape.num_units // count, shape.columns // count
    costs: StackTimes | None = (
        None if host is None else host.costs[0][0].scaled(1 / (session.context.device.host_share or 1.0))
    )

    def pace(module: nn.Module, units: int, kind: str, further: str = "") -> None:
        """Pace a module's own computation like our operation; its collectives run in hooks around it and are not
        paced.
        """
        if costs is None:
            return
        seconds = costs.seconds(kind, length, units) + (costs.seconds(further, length**2, units) if further else 0.0)
        forward = module.forward

        def paced(*args: Any, **options: Any) -> Any:
            return session.pacer.run(lambda: forward(*args, **options), seconds).result

        module.forward = paced

    pace(model.embeddings, 1, "EMB")
    for layer in model.encoder.layer:
        parallelize_module(layer, mesh, DTENSOR_PLAN)
        pace(layer.attention.self, units, "QKV", "ATT")
        pace(layer.attention.output.dense, units, "OUT")
        pace(layer.attention.output.LayerNorm, 1, "CONN")
        pace(layer.intermediate, columns, "UP")
        pace(layer.output.dense, columns, "DOWN")
        pace(layer.output.LayerNorm, 1, "CONN")
    return model


def overlap_point(
    plan: InferencePlan, price: SequencePrice, results: Sequence[SidesResult], *, dilation: float = 1.0
) -> dict[str, Any]:
    """For attention and feed-forward blocks of scheme 1, return the seconds overlapped and of each side alone, and the
    ratio of a layer.

    A block begins when the last connection of the previous block has ended on all devices, and ends when its last
    connection has.  The first layer is left out, because its tiles come from the embedding.  Computation alone is the
    busiest device's.
    dilation: the seconds are divided by it.
    The ratio compares both blocks together with the longer side of each.  A block's first tiles start before the last
    tiles of the block before it have ended, so a block that seems shorter makes the other seem longer.
    """
    layout = InferenceLayout.build(plan, price.profile.stacks, price.lengths)
    rounds = [
        {side: [result.blocks[side][turn] for result in results] for side in ("both", "computation", "communication")}
        for turn in range(len(results[0].blocks["both"]))
    ]
    blocks: dict[str, dict[str, float]] = {}
    for kind in ("attention", "feed_forward"):
        numbers = [block.number for block in layout.blocks if block.kind == kind and block.layer > 0]
        both = median(_spaces(turn["both"], numbers) for turn in rounds)
        communication = median(_spaces(turn["communication"], numbers) for turn in rounds)
        computation = median(
            fmean(max(rank.get(n, 0.0) for rank in turn["computation"]) for n in numbers) for turn in rounds
        )
        seconds = {"both_s": both, "computation_s": computation, "communication_s": communication}
        blocks[kind] = {name: value / dilation for name, value in seconds.items()}
    longer_s = sum(max(block["computation_s"], block["communication_s"]) for block in blocks.values())
    tiles = {"tile_tokens": plan.tile_tokens, "both_ways": plan.both_ways}
    return {
        "overlap": sum(block["both_s"] for block in blocks.values()) / longer_s,
        "overlap blocks": blocks,
        "overlap tiles": tiles,
    }


def _spaces(ends: Sequence[dict[int, float]], numbers: Sequence[int]) -> float:
    """Return the mean time between a block's end and the end of the block before it, both on the last device."""
    last = {
        number: max(rank[number] for rank in ends if number in rank)
        for number in {n - 1 for n in numbers} | set(numbers)
    }
    return fmean(last[number] - last[number - 1] for number in numbers)
