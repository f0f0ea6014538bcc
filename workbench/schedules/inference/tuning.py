"""Simulate the time of a plan and tune it: the size of its tiles, their direction on the ring, and small shifts between devices.

A planner's formulas ignore the order of tiles in a ring; only the simulation shows which device waits for which.
InferencePrices simulates only a few layers.  Consecutive layers of one scheme soon take equal times, or every second one does.  (A
schedule whose transfers never contend for an interface is a max-plus linear system, periodic from some layer on.)  So a long run of
layers is simulated as a short one, and its last two steps are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

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

TRIES = 60


PIECES = (2, 3, 4, 6, 8)
"""Numbers of pieces into which the largest tile may be cut."""


def choose_tiles(plan: InferencePlan, price: InferencePrices) -> InferencePlan:
    """Return the plan with the tile size and the direction of the ring that take the least time.

    A tile is cut into more pieces only while a piece is worth its message (see `smallest_tile`).  Of equal times the fewest messages win;
    an emulation or a device with a slow processor prefers these too.
    """
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return replace(plan, tile_tokens=0, group_tokens=0, merge_tokens=0, both_ways=False)
    smallest, tokens = smallest_tile(price, plan.ranks), plan.tokens(price.lengths[0])
    largest = max(tokens)
    sizes = [0, *(-(-largest // count) for count in PIECES if largest / count >= smallest)]
    plan = found = replace(plan, tile_tokens=0, group_tokens=0, merge_tokens=0, both_ways=False)
    best_s = price(found)
    for tile_tokens in dict.fromkeys(sizes):
        for both_ways in (False, True):
            tried = replace(plan, tile_tokens=tile_tokens, both_ways=both_ways)
            if both_ways and (plan.num_positions < 3 or (tile_tokens or largest / 2) < smallest):
                continue
            for group_tokens in (0, largest) if tile_tokens else (0,):
                tried = replace(tried, group_tokens=group_tokens)
                seconds = price(tried)
                if seconds < GAIN * best_s:
                    found, best_s = tried, seconds
    ordered = sorted(tokens, reverse=True)
    for merged in range(2, plan.num_positions):  # the own tile is there from the start
        tried = replace(found, merge_tokens=sum(ordered[:merged]))
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


def tune(
    plans: Iterable[InferencePlan],
    price: InferencePrices,
    *,
    fits: Callable[[InferencePlan], bool] = lambda plan: True,
    is_scheme_free: bool = True,
    tries: int = TRIES,
) -> InferencePlan:
    """Return the fastest plan, from plans of one paradigm or of several: choose its tiles, then shift work between devices.

    The two best hybrid plans are improved step by step.  A step moves tokens, units or columns from one device to another, or changes the
    order of the ring after the first device; it is kept if it saves time and the plan still fits.
    is_scheme_free: layers may change their scheme.  tries: the number of plans simulated on the way, for each of the two.
    """
    ordered = sorted({choose_tiles(plan, price) if plan.overlap else plan for plan in plans}, key=price)
    first = ordered[0]
    if first.overlap and is_scheme_free:  # tiles that are multiplied together can make the other scheme faster
        others = [replace(first, schemes=(scheme,) * len(first.schemes)) for scheme in (1, 2)]
        for other in others:
            if other.schemes != first.schemes and fits(other):
                ordered.append(choose_tiles(other, price))
        ordered.sort(key=price)
    best = min((*(_shifted(plan, price, fits, tries) for plan in ordered[:2]), *ordered[:1]), key=price)
    while best.overlap:  # new shares may need new tiles, and these new shares
        again = choose_tiles(best, price)
        if price(again) >= GAIN * price(best):
            break
        best = min(again, _shifted(again, price, fits, tries), key=price)
    return best


def _shifted(plan: InferencePlan, price: InferencePrices, fits: Callable[[InferencePlan], bool], tries: int) -> InferencePlan:
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return plan
    length = price.lengths[0]
    found, best_s = replace(plan, shares=tuple(map(float, plan.tokens(length)))), price(plan)
    left, has_gained = tries, True
    while has_gained and left > 0:
        has_gained = False
        for change in _changes(found, length):
            if left == 0:
                break
            tried = change(found)
            if tried is None or not fits(tried):
                continue
            left -= 1
            seconds = price(tried)
            while seconds < GAIN * best_s:
                found, best_s, has_gained = tried, seconds, True
                further = change(found)
                if left == 0 or further is None or not fits(further):
                    break
                left, tried = left - 1, further
                seconds = price(tried)
    return found


def _changes(plan: InferencePlan, length: int) -> Iterator[Callable[[InferencePlan], InferencePlan | None]]:
    """Return small changes, largest first.  Each is a function that may be repeated; it returns None if the change is impossible."""
    pairs = [(a, b) for a in range(plan.num_positions) for b in range(plan.num_positions) if a != b]
    for a, b in pairs:
        yield partial(_moved, name="units", source=a, destination=b, amount=1)
    for share in (16, 40, 100):
        tokens = max(1, length // share)
        for a, b in pairs:
            yield partial(_moved, name="shares", source=a, destination=b, amount=tokens)
        if 1 in plan.schemes:
            columns = max(1, sum(plan.columns) // (2 * share))
            for a, b in pairs:
                yield partial(_moved, name="columns", source=a, destination=b, amount=columns)
    for a, b in pairs:
        if 0 < a < b:
            yield partial(_swapped, a=a, b=b)


def _moved(plan: InferencePlan, name: str, source: int, destination: int, amount: int) -> InferencePlan | None:
    parts = list(getattr(plan, name))
    if parts[source] < amount:
        return None
    parts[source] -= amount
    parts[destination] += amount
    return replace(plan, **{name: tuple(parts)})  # type: ignore[arg-type]


def _swapped(plan: InferencePlan, a: int, b: int) -> InferencePlan:
    order = list(range(plan.num_positions))
    order[a], order[b] = order[b], order[a]
    return replace(
        plan,
        ranks=tuple(plan.ranks[at] for at in order),
        units=tuple(plan.units[at] for at in order),
        columns=tuple(plan.columns[at] for at in order),
        shares=tuple(plan.shares[at] for at in order),
    )


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
