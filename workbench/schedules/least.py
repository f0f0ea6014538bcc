"""The least seconds of a pipeline's mini-batch: its longest chain of operations and messages, as if no message waited
for an interface.

A search need not build and simulate the schedule of a plan that takes too long even so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from workbench.core.costs import TableCosts
from workbench.core.plan import Plan
from workbench.core.schedule import ALLREDUCE, NONE, STEP, Op, Value, send
from workbench.schedules.pieces import Piece, boundary_pieces
from workbench.schedules.pipeline import FORWARD, Order


class Pass(NamedTuple):
    """One of a stage's operations on a micro-batch.  message: the name of what it sends on to the next stage."""

    kind: str
    message: str


class Passes(NamedTuple):
    """A stage's operations on a micro-batch, as pipeline.assemble lists them."""

    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]


BACKPROPAGATION = Passes((Pass("F", "act"),), (Pass("B", "grad"),))
HYBRID = Passes((Pass("F", "act"), Pass("SF", "side")), (Pass("SB", "sgrad"),))


def least_s(
    plan: Plan, sizes: Sequence[int], lengths: Sequence[int], costs: TableCosts, order: Order, passes: Passes
) -> float:
    """Return a lower bound of the simulated seconds of a mini-batch, whose stages keep their activations; 0 on shared
    air, where messages may be early.

    sizes[m], lengths[m]: samples and tokens of micro-batch m.  costs: the schedule's (see costs.plan_costs).
    """
    if costs.cluster is not None and costs.cluster.air is not None:
        return 0.0
    chains = _Chains(plan, sizes, lengths, costs, passes)
    count = len(plan.stages)
    waiting = [iter(order(count, stage, len(sizes))) for stage in range(count)]
    slots = [next(left) for left in waiting]
    unfinished = set(range(count))
    while unfinished:
        for stage in sorted(unfinished):
            while chains.is_ready(stage, *slots[stage]):
                chains.add(stage, *slots[stage])
                following = next(waiting[stage], None)
                if following is None:
                    unfinished.discard(stage)
                    break
                slots[stage] = following
    return max(map(chains.end_s, range(count)))


class _Chains:
    """The ends of the longest chains so far.

    _free_s: when each rank has done its last operation.  _arrived_s: by message, stage and micro-batch, when each rank
    has all pieces.
    """

    def __init__(
        self, plan: Plan, sizes: Sequence[int], lengths: Sequence[int], costs: TableCosts, passes: Passes
    ) -> None:
        self._stages, self._sizes, self._lengths, self._costs, self._passes = plan.stages, sizes, lengths, costs, passes
        self._pieces = {size: [boundary_pieces(*pair, size) for pair in pairwise(plan.stages)] for size in set(sizes)}
        self._busy = {
            size: [
                [rank for rank, (first, end) in zip(stage.ranks, stage.split(size), strict=True) if end > first]
                for stage in plan.stages
            ]
            for size in set(sizes)
        }
        self._free_s = {rank: 0.0 for stage in plan.stages for rank in stage.ranks}
        self._arrived_s: dict[tuple[str, int, int], dict[int, float]] = {}
        self._pass_s: dict[tuple[str, int, int, int], float] = {}
        self._send_s: dict[tuple[str, int, int, int, int], float] = {}

    def is_ready(self, stage: int, phase: str, m: int) -> bool:
        """Return whether what a stage's operations wait for has been added."""
        if phase == FORWARD:
            return stage == 0 or (self._passes.forward[-1].message, stage, m) in self._arrived_s
        return stage == len(self._stages) - 1 or (self._passes.backward[-1].message, stage, m) in self._arrived_s

    def add(self, stage: int, phase: str, m: int) -> None:
        """Add a stage's operations on a micro-batch, and the messages that they send on."""
        size, free_s = self._sizes[m], self._free_s
        forth = phase == FORWARD
        target = stage + 1 if forth else stage - 1
        pieces: tuple[Piece, ...] = ()
        if 0 <= target < len(self._stages):
            pieces = self._pieces[size][min(stage, target)]
        for kind, message in self._passes.forward if forth else self._passes.backward:
            arrived_s = self._arrived_s.pop((message, stage, m), {})
            for rank in self._busy[size][stage]:
                begin_s = arrived_s.get(rank, 0.0)
                free_s[rank] = max(free_s[rank], begin_s) + self._seconds(rank, kind, stage, m)
            if pieces:
                arrivals_s = self._arrived_s[message, target, m] = dict[int, float]()
                for piece in pieces:
                    source, destination = (
                        (piece.source, piece.destination) if forth else (piece.destination, piece.source)
                    )
                    arrives_s = free_s[source] + self._message_s(message, stage, m, piece.index, source, destination)
                    if arrives_s > arrivals_s.get(destination, 0.0):
                        arrivals_s[destination] = arrives_s

    def end_s(self, stage: int) -> float:
        """Return when a stage's devices have summed their gradients and updated the weights."""
        ranks = sorted(self._stages[stage].ranks)
        updates_s = max(self._costs.seconds(rank, Op(STEP, stage)) for rank in ranks)
        sums_s = 0.0
        if len(ranks) > 1:
            total = Value("gsum", stage, NONE, ranks[0])
            sums_s = self._costs.seconds(ranks[0], Op(ALLREDUCE, stage, writes=(total,), ranks=tuple(ranks)))
        return max(self._free_s[rank] for rank in ranks) + sums_s + updates_s

    def _seconds(self, rank: int, kind: str, stage: int, m: int) -> float:
        key = kind, rank, self._sizes[m], self._lengths[m]
        if key not in self._pass_s:
            self._pass_s[key] = self._costs.seconds(rank, Op(kind, stage, m))
        return self._pass_s[key]

    def _message_s(self, name: str, stage: int, m: int, part: int, source: int, destination: int) -> float:
        key = name, stage, part, self._sizes[m], self._lengths[m]
        if key not in self._send_s:
            op = send(Value(name, stage, m, part), source, destination)
            self._send_s[key] = self._costs.seconds(source, op)
        return self._send_s[key]
