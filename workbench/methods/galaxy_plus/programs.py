"""The programs that a rank executes for requests: one for each plan and sequence length, made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackCosts, StackShape
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.schedules.inference import Exchange, InferenceCosts, InferenceLayout, decode_schedule, inference_schedule

KEPT_PROGRAMS = 128
"""Programs that a rank keeps, the least used go first: a task's lengths, or the steps of a text."""


class Prepared(NamedTuple):
    """A program, and which tokens, heads and columns its operations compute."""

    layout: InferenceLayout
    program: Program


class Programs:
    """The programs of one cluster, by plan and lengths.  profile: what its devices cost; None: they run as fast as they can."""

    def __init__(self, cluster: Cluster, stacks: tuple[StackShape, ...], profile: InferenceProfile | None) -> None:
        self.cluster, self.stacks = cluster, stacks
        self._profile = profile or InferenceProfile(
            model="", source="analytic", stacks=stacks, costs=((StackCosts(pieces={}),) * len(stacks),) * cluster.world_size
        )
        self._kept: OrderedDict[tuple, Prepared] = OrderedDict()

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...]) -> Prepared:
        """Return the program of one sequence (one length for each stack)."""
        return self._program(
            (plan, lengths),
            lambda: InferenceLayout.build(plan, self.stacks, lengths),
            lambda layout: inference_schedule(layout, self.cluster.world_size),
        )

    def token(self, plan: InferencePlan, *, past: int, memory_length: int, exchange: Exchange) -> Prepared:
        """Return the program of one more token behind `past`."""
        return self._program(
            (plan, past, memory_length, exchange),
            lambda: InferenceLayout.decode(plan, self.stacks, past=past, memory_length=memory_length),
            lambda layout: decode_schedule(layout, self.cluster.world_size, exchange=exchange),
        )

    def _program(
        self, key: tuple, layout_of: Callable[[], InferenceLayout], schedule_of: Callable[[InferenceLayout], Schedule]
    ) -> Prepared:
        found = self._kept.get(key)
        if found is None:
            layout = layout_of()
            costs = InferenceCosts(self._profile, self.cluster, layout)
            found = Prepared(layout, Program.on(self.cluster, schedule_of(layout), costs))
            self._kept[key] = found
            if len(self._kept) > KEPT_PROGRAMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found
