"""Simulate the time of a plan, and choose the size of its tiles and their direction on the ring.

A planner's formulas ignore the order of tiles in a ring; only the simulation shows which device waits for which.
InferencePrices simulates only a few layers.  Consecutive layers of one scheme soon take equal times, or every second one does.  (A
schedule whose transfers never contend for an interface is a max-plus linear system, periodic from some layer on.)  So a long run of
layers is simulated as a short one, and its last two steps are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.schedules.inference.baselines import inference_schedule
from workbench.schedules.inference.costs import MESSAGE_S, InferenceCosts
from workbench.schedules.inference.layout import InferenceLayout

WORTH = 4.0
"""Minimum ratio of transfer time to per-message overhead: 48 KB at 1000 Mbit/s and 0.1 ms."""

GAIN = 0.998
"""Accept a change only if it shortens the time by this factor: simulated times are not exact to a thousandth."""

PIECES = (2, 3, 4, 6, 8)
"""Numbers of pieces into which the largest tile may be cut."""


def choose_tiles(plan: InferencePlan, price: InferencePrices) -> InferencePlan:
    """Return the plan with the tile size and the direction of the ring that take the least time.

    A tile is cut into more pieces only while a piece is worth its message (see `smallest_tile`).  Of equal times the fewest messages win;
    an emulation or a device with a slow processor prefers these too.
    """
    plan = found = replace(plan, tile_tokens=0, both_ways=False)
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return plan
    smallest, largest = smallest_tile(price, plan.ranks), max(plan.tokens(price.lengths[0]))
    best_s = price(found)
    for tile_tokens in dict.fromkeys((0, *(-(-largest // count) for count in PIECES if largest / count >= smallest))):
        for both_ways in (False, True):
            if both_ways and (plan.num_positions < 3 or (tile_tokens or largest / 2) < smallest):
                continue
            tried = replace(plan, tile_tokens=tile_tokens, both_ways=both_ways)
            seconds = price(tried)
            if seconds < GAIN * best_s:
                found, best_s = tried, seconds
    return found


def smallest_tile(price: InferencePrices, ranks: Sequence[int]) -> int:
    """Return the fewest tokens whose transfer takes WORTH times the overhead of their message, on the fastest link in use."""
    fastest = max(price.cluster.link(a, b).bytes_per_s for a in ranks for b in ranks if a != b)
    return max(1, round(WORTH * price.message_s * fastest / price.profile.stacks[0].hidden_bytes))


def tile_options(length: int) -> tuple[int, ...]:
    """Return the tile sizes for which a planner should make plans to tune: whole shares, quarters and sixths of the sequence."""
    return tuple(dict.fromkeys((0, -(-length // 4), -(-length // 6))))


KEPT_LAYERS = 4
"""The number of layers simulated of a run of equal layers."""

Simulate = Callable[..., Timeline]


@dataclass(slots=True, kw_only=True)
class InferencePrices:
    """Seconds of plans on one profile and cluster: prices(plan).  Results are cached.

    lengths: of each stack's sequence.  simulate: simulator.simulate; it is passed in, because that package is on the same layer as this
    one.
    """

    profile: InferenceProfile
    cluster: Cluster
    lengths: tuple[int, ...]
    simulate: Simulate
    message_s: float = MESSAGE_S
    _known: dict[InferencePlan, float] = field(default_factory=dict)

    def __call__(self, plan: InferencePlan) -> float:
        """Return the seconds from the request's start to the answer, both on the plan's first device."""
        plan = replace(plan, method="", predicted_s=0.0, notes=(), length=0)
        if plan not in self._known:
            self._known[plan] = self._price(plan)
        return self._known[plan]

    def timeline(self, plan: InferencePlan, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the simulation of all layers.  memory: with the bytes in use."""
        return self._simulated(plan, self.profile.stacks, memory=memory, title=title)

    def _price(self, plan: InferencePlan) -> float:
        if plan.paradigm == "pipeline":
            return self._simulated(plan, self.profile.stacks).makespan_s
        schemes = plan.schemes if plan.paradigm == "hybrid" else (1,) * self.profile.num_layers
        kept: list[int] = []
        stacks: list[StackShape] = []
        repeated: list[tuple[int, int]] = []  # (layer of the short model, number of repetitions)
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
        ends_s = _layer_ends(timeline, InferenceLayout.build(short, stacks, self.lengths))
        return timeline.makespan_s + sum(times * (ends_s[layer] - ends_s[layer - 2]) / 2 for layer, times in repeated)

    def _simulated(self, plan: InferencePlan, stacks: Sequence[StackShape], *, memory: bool = False, title: str = "") -> Timeline:
        layout = InferenceLayout.build(plan, stacks, self.lengths)
        costs = InferenceCosts(self.profile, self.cluster, layout, message_s=self.message_s)
        program = Program.on(self.cluster, inference_schedule(layout, self.cluster.world_size), costs)
        return self.simulate(program, memory=memory, title=title)


def _runs(schemes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (scheme, length) of each run of layers."""
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
