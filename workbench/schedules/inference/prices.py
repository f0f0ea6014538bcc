"""The time of a plan from a simulation of a few layers, for planners that compare dozens of plans.

Layers of one scheme that follow each other soon take equal times, or every second one does (a schedule whose transfers never contend for
an interface is a max-plus linear system, periodic from some layer on), so a run of many is simulated as a few and its last two steps are
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.schedules.inference.costs import MESSAGE_S, InferenceCosts
from workbench.schedules.inference.layout import InferenceLayout

KEPT_LAYERS = 4
"""Of a run of alike layers: so many are simulated."""

Simulate = Callable[..., Timeline]
Build = Callable[[InferenceLayout, int], Schedule]


@dataclass(slots=True, kw_only=True)
class InferencePrices:
    """Seconds of plans on one profile and cluster: prices(plan).  Remembers what it has priced.

    lengths: of each stack's sequence.  build: inference_schedule.  simulate: simulator.simulate (another package of this floor, so it is
    passed in).
    """

    profile: InferenceProfile
    cluster: Cluster
    lengths: tuple[int, ...]
    build: Build
    simulate: Simulate
    message_s: float = MESSAGE_S
    _known: dict[InferencePlan, float] = field(default_factory=dict)

    def __call__(self, plan: InferencePlan) -> float:
        """Return the seconds from the request's start to the answer, both on the first device of the plan."""
        plan = replace(plan, method="", predicted_s=0.0, notes=(), length=0)
        if plan not in self._known:
            self._known[plan] = self._price(plan)
        return self._known[plan]

    def timeline(self, plan: InferencePlan, *, title: str = "") -> Timeline:
        """Return the simulation of all layers, with the bytes in use."""
        return self._simulated(plan, self.profile.stacks, memory=True, title=title)

    def _price(self, plan: InferencePlan) -> float:
        if plan.paradigm == "pipeline":
            return self._simulated(plan, self.profile.stacks).makespan_s
        schemes = plan.schemes if plan.paradigm == "hybrid" else (1,) * self.profile.num_layers
        kept: list[int] = []
        stacks: list[StackShape] = []
        repeated: list[tuple[int, int]] = []  # (layer of the short model, how often more)
        at = 0
        for shape in self.profile.stacks:
            before = len(kept)
            for scheme, count in _runs(schemes[at : at + shape.num_layers]):
                kept += [scheme] * min(count, KEPT_LAYERS)
                if count > KEPT_LAYERS:
                    repeated.append((len(kept) - 1, count - KEPT_LAYERS))
            stacks.append(replace(shape, num_layers=len(kept) - before))
            at += shape.num_layers
        short = replace(plan, schemes=tuple(kept) if plan.paradigm == "hybrid" else ())
        timeline = self._simulated(short, tuple(stacks))
        ends_s = _layer_ends(timeline, self._layout(short, tuple(stacks)))
        return timeline.makespan_s + sum(times * (ends_s[layer] - ends_s[layer - 2]) / 2 for layer, times in repeated)

    def _layout(self, plan: InferencePlan, stacks: Sequence[StackShape]) -> InferenceLayout:
        return InferenceLayout.build(plan, stacks, self.lengths)

    def _simulated(self, plan: InferencePlan, stacks: Sequence[StackShape], *, memory: bool = False, title: str = "") -> Timeline:
        layout = self._layout(plan, stacks)
        costs = InferenceCosts(self.profile, self.cluster, layout, message_s=self.message_s)
        return self.simulate(Program.on(self.cluster, self.build(layout, self.cluster.world_size), costs), memory=memory, title=title)


def _runs(schemes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (scheme, how many in a row)."""
    runs: list[tuple[int, int]] = []
    for scheme in schemes:
        if runs and runs[-1][0] == scheme:
            runs[-1] = (scheme, runs[-1][1] + 1)
        else:
            runs.append((scheme, 1))
    return runs


def _layer_ends(timeline: Timeline, layout: InferenceLayout) -> list[float]:
    """Return when each layer's last connection ended."""
    ends_s = [0.0] * (layout.blocks[-1].layer + 1)
    for span in timeline.spans:
        if span.op.kind == "CONN":
            layer = layout.blocks[span.op.stage].layer
            ends_s[layer] = max(ends_s[layer], span.end_s)
    return ends_s
