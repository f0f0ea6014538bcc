"""The time of a plan from a simulation of a few layers, for planners that compare dozens of plans; and how large its tiles should be.

Layers of one scheme that follow each other soon take equal times, or every second one does (a schedule whose transfers never contend for
an interface is a max-plus linear system, periodic from some layer on), so a run of many is simulated as a few and its last two steps are
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.schedules.inference.costs import MESSAGE_S, InferenceCosts
from workbench.schedules.inference.layout import InferenceLayout

KEPT_LAYERS = 4
"""Of a run of alike layers: so many are simulated."""

WORTH = 4.0
"""A message should be under way so many times as long as it costs beside its bytes: 48 KB at 1000 Mbit/s and 0.1 ms."""

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
        return self.simulate(
            self.build(layout, self.cluster.world_size),
            InferenceCosts(self.profile, self.cluster, layout, message_s=self.message_s),
            device_names=[device.name for device in self.cluster.devices],
            memory=memory,
            title=title,
        )


def choose_tiles(
    plan: InferencePlan,
    price: Callable[[InferencePlan], float],
    *,
    profile: InferenceProfile,
    cluster: Cluster,
    length: int,
    message_s: float = MESSAGE_S,
    pieces: Iterable[int] = (1, 2, 3, 4, 6, 8),
) -> InferencePlan:
    """Return the plan with the tile size and the direction of the ring that take the least time.

    A tile is cut into more pieces only while a piece is worth its message (see `smallest_tile`); of equal prices the fewest messages
    win, which is also what an emulation or a device with a slow processor prefers.
    """
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return replace(plan, tile_tokens=0, both_ways=False)
    smallest = smallest_tile(profile, cluster, plan.ranks, message_s=message_s)
    largest = max(plan.tokens(length))
    sizes = [0, *(-(-largest // count) for count in pieces if count > 1 and largest / count >= smallest)]
    found = replace(plan, tile_tokens=0, both_ways=False)
    best_s = price(found)
    for tile_tokens in dict.fromkeys(sizes):
        for both_ways in (False, True):
            tried = replace(plan, tile_tokens=tile_tokens, both_ways=both_ways)
            if both_ways and (plan.num_positions < 3 or (tile_tokens or largest / 2) < smallest):
                continue
            seconds = price(tried)
            if seconds < 0.998 * best_s:
                found, best_s = tried, seconds
    return found


def smallest_tile(profile: InferenceProfile, cluster: Cluster, ranks: Sequence[int], *, message_s: float = MESSAGE_S) -> int:
    """Return the fewest tokens whose message is under way WORTH times as long as it costs beside its bytes, on the fastest link in use."""
    fastest = max(cluster.link(a, b).bytes_per_s for a in ranks for b in ranks if a != b)
    return max(1, round(WORTH * message_s * fastest / profile.stacks[0].hidden_bytes))


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
