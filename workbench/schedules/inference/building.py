"""Build an inference schedule: operations by position, sends in their place, receives inserted by one rule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from workbench.core.errors import ScheduleError
from workbench.core.schedule import NONE, Op, Schedule, Value, send
from workbench.schedules.inference.layout import InferenceLayout
from workbench.schedules.lowering import insert_receives


@lru_cache(maxsize=4096)
def after(positions: tuple[int, ...], first: int, direction: int, num_positions: int) -> tuple[int, ...]:
    """Return the positions other than `first` in the order in which the ring visits them from there (direction +1 or -1)."""
    others = [position for position in positions if position != first]
    return tuple(sorted(others, key=lambda position: (position - first) * direction % num_positions))


class Builder:
    """The operation lists of all positions, and the schedule's inputs and outputs."""

    def __init__(self, layout: InferenceLayout) -> None:
        self.layout = layout
        self.lists: list[list[Op]] = [[] for _ in range(layout.num_positions)]
        self._inputs: list[list[Value]] = [[] for _ in range(layout.num_positions)]
        self._outputs: list[list[Value]] = [[] for _ in range(layout.num_positions)]

    def add(
        self,
        position: int,
        kind: str,
        stage: int,
        part: int,
        reads: Sequence[Value],
        writes: Sequence[Value],
        *,
        step: int = NONE,
        stream: str = "compute",
    ) -> None:
        """Append a compute operation to a position's list."""
        self.lists[position].append(Op(kind, stage, step, part, tuple(reads), tuple(writes), (), stream))

    def collective(self, kind: str, stage: int, reads: Sequence[Sequence[Value]], write: Value) -> None:
        """Append a collective of all positions; reads: by position."""
        for position, values in enumerate(reads):
            self.lists[position].append(Op(kind, stage, NONE, NONE, tuple(values), (write,), self.layout.plan.ranks, "collective"))

    def send(self, value: Value, source: int, destination: int) -> None:
        """Append the SEND of a transfer between two positions."""
        ranks = self.layout.plan.ranks
        self.lists[source].append(send(value, ranks[source], ranks[destination]))

    def embed(self, stack: int, writes: Sequence[Value]) -> None:
        """Append EMB of a stack on the first position."""
        first = self.layout.first_blocks[stack]
        ids = Value("ids", first)
        self._inputs[0].append(ids)
        self.add(0, "EMB", first, NONE, (ids,), writes)

    def head(self, reads: Sequence[Value]) -> None:
        """Append HEAD on the first position."""
        out = Value("out", self.layout.end)
        self.add(0, "HEAD", self.layout.end, NONE, reads, (out,))
        self._outputs[0].append(out)

    def schedule(self, world_size: int | None) -> Schedule:
        """Return the schedule over ranks, complete with its receives; ranks that the plan does not use have no operations."""
        ranks = self.layout.plan.ranks
        size = max(ranks) + 1 if world_size is None else world_size
        if max(ranks) >= size:
            raise ScheduleError(f"A schedule for {size} ranks was asked for.", f"The plan uses {ranks}.", "Give the cluster's size.")
        ops: list[tuple[Op, ...]] = [()] * size
        inputs: list[tuple[Value, ...]] = [()] * size
        outputs: list[tuple[Value, ...]] = [()] * size
        for position, rank in enumerate(ranks):
            ops[rank] = tuple(self.lists[position])
            inputs[rank], outputs[rank] = tuple(self._inputs[position]), tuple(self._outputs[position])
        return insert_receives(Schedule(ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs)))
