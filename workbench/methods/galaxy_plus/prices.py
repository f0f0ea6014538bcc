"""A plan's program, its simulated time, its best tiles, and small changes that make it faster (Galaxy+, sections III-C and III-D).

A planner's formulas ignore the order of tiles in a ring; only the simulation shows which device waits for which.
InferencePrices simulates only a few layers.  Consecutive layers of one scheme soon take equal times, or every second one does.  (A
schedule whose transfers never contend for an interface is a max-plus linear system, periodic from some layer on.)  So a long run of
layers is simulated as a short one, and its last two steps are repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackCosts, StackShape
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.planners.galaxy_plus import SequenceProblem
from workbench.planners.galaxy_plus.search import Search
from workbench.schedules.inference import MESSAGE_S, InferenceCosts, InferenceLayout, decode_schedule, inference_schedule
from workbench.simulator import simulate

KEPT_PROGRAMS = 128
"""Maximum number of programs that a rank keeps (least recently used go first): a task's lengths, or the steps of a text."""


class Prepared(NamedTuple):
    """A program, and the tokens, heads and columns that its operations compute."""

    layout: InferenceLayout
    program: Program


class Programs:
    """The programs of one cluster, by plan and lengths.  profile: the devices' costs; None: they run at full speed."""

    def __init__(
        self, cluster: Cluster, stacks: tuple[StackShape, ...], profile: InferenceProfile | None, *, message_s: float = MESSAGE_S
    ) -> None:
        self.cluster, self.stacks, self._message_s = cluster, stacks, message_s
        self._profile = profile or InferenceProfile(
            model="", source="analytic", stacks=stacks, costs=((StackCosts(pieces={}),) * len(stacks),) * cluster.world_size
        )
        self._kept = lru_cache(maxsize=KEPT_PROGRAMS)(self._made)

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...]) -> Prepared:
        """Return the program of one sequence (one length for each stack)."""
        return self._kept(plan, lengths)

    def token(self, plan: InferencePlan, *, past: int, memory_length: int) -> Prepared:
        """Return the program of one more token after `past` tokens."""
        return self._kept(plan, None, past, memory_length)

    def _made(self, plan: InferencePlan, lengths: tuple[int, ...] | None, past: int = 0, memory_length: int = 0) -> Prepared:
        if lengths is None:
            layout = InferenceLayout.decode(plan, self.stacks, past=past, memory_length=memory_length)
            schedule = decode_schedule(layout, self.cluster.world_size)
        else:
            layout = InferenceLayout.build(plan, self.stacks, lengths)
            schedule = inference_schedule(layout, self.cluster.world_size)
        costs = InferenceCosts(self._profile, self.cluster, layout, message_s=self._message_s)
        return Prepared(layout, Program.on(self.cluster, schedule, costs))


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


@dataclass(slots=True)
class InferencePrices:
    """Seconds of plans on one profile and cluster: prices(plan).  Results are cached.

    lengths: of each stack's sequence.  message_s: cost of a message.
    """

    profile: InferenceProfile
    cluster: Cluster
    lengths: tuple[int, ...]
    message_s: float = MESSAGE_S
    _known: dict[InferencePlan, float] = field(default_factory=dict)

    def __call__(self, plan: InferencePlan) -> float:
        """Return the seconds from the request's start to the answer, both on the plan's first device."""
        plan = replace(plan, method="", predicted_s=0.0, notes=(), length=0)
        if plan not in self._known:
            self._known[plan] = self._price(plan)
        return self._known[plan]

    def timeline(self, plan: InferencePlan, *, title: str = "") -> Timeline:
        """Return the simulation of all layers, without the bytes in use."""
        return simulate(self._prepared(plan, self.profile.stacks).program, memory=False, title=title)

    def _price(self, plan: InferencePlan) -> float:
        if plan.paradigm == "pipeline":
            return self.timeline(plan).makespan_s
        schemes = plan.schemes if plan.paradigm == "hybrid" else (1,) * self.profile.num_layers
        kept: list[int] = []
        stacks: list[StackShape] = []
        repeated: list[tuple[int, int]] = []  # (layer of the short model, number of repetitions)
        at = 0
        for shape in self.profile.stacks:
            before = len(kept)
            for scheme, run in groupby(schemes[at : at + shape.num_layers]):
                count = len(list(run))
                kept += [scheme] * min(count, KEPT_LAYERS)
                if count > KEPT_LAYERS:
                    repeated.append((len(kept) - 1, count - KEPT_LAYERS))
            stacks.append(replace(shape, num_layers=len(kept) - before))
            at += shape.num_layers
        short = replace(plan, schemes=tuple(kept) if plan.paradigm == "hybrid" else ())
        layout, program = self._prepared(short, tuple(stacks))
        timeline = simulate(program, memory=False)
        ends_s = _layer_ends(timeline, layout)
        return timeline.makespan_s + sum(times * (ends_s[layer] - ends_s[layer - 2]) / 2 for layer, times in repeated)

    def _prepared(self, plan: InferencePlan, stacks: tuple[StackShape, ...]) -> Prepared:
        return Programs(self.cluster, stacks, self.profile, message_s=self.message_s).sequence(plan, self.lengths)


def _layer_ends(timeline: Timeline, layout: InferenceLayout) -> list[float]:
    """Return when each layer's last connection ended."""
    ends_s = [0.0] * (layout.blocks[-1].layer + 1)
    for span in timeline.spans:
        if span.op.kind == "CONN":
            layer = layout.blocks[span.op.stage].layer
            ends_s[layer] = max(ends_s[layer], span.end_s)
    return ends_s


TRIES = 120
"""Number of changes of a plan that are simulated before it is accepted, about 10 ms each."""


def tune(
    problem: SequenceProblem, plans: Iterable[InferencePlan], price: InferencePrices, *, schemes: int | None = None, tries: int = TRIES
) -> InferencePlan:
    """Return the fastest of some plans after its tiles were chosen and work was shifted between devices.

    A planner's formulas ignore the tiles.  So the two best plans with their tiles are improved step by step by their simulated time, as
    long as they fit.  schemes: of all layers, if it may not change.  tries: plans simulated on the way, for each of the two.
    """
    search = Search(problem, method="galaxy_plus", portal=None, schemes=schemes, is_ring=False)

    def climbed(one: InferencePlan) -> InferencePlan:
        return search.climb(one, price, most=tries)[0] if one.num_positions > 1 else one

    ordered = sorted({choose_tiles(one, price) if one.overlap else one for one in plans}, key=price)
    best = min((*map(climbed, ordered[:2]), ordered[0]), key=price)
    while best.overlap:  # new shares may need new tiles, and these new shares
        again = choose_tiles(best, price)
        if price(again) >= GAIN * price(best):
            break
        best = min(again, climbed(again), key=price)
    return best
