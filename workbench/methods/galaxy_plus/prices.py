"""A plan's program, its simulated time, its best tiles, and small changes that make it faster (Galaxy+, sections III-C
and III-D).

A planner's formulas ignore the order of tiles in a ring; only the simulation shows which device waits for which.
SequencePrice simulates only a few layers.  Consecutive layers of one scheme soon take equal times, or every second one
does.  (A schedule whose transfers never contend for an interface is a max-plus linear system, periodic from some layer
on.)  So a long run of layers is simulated as a short one, and its last two steps are repeated.  On shared air transfers
do contend, and all layers are simulated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, StackTimes
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS, lengths_of
from workbench.methods.galaxy_plus.planners import plans as candidates
from workbench.methods.galaxy_plus.planners.search import Search
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_costs, inference_schedule
from workbench.planners.problem import Problem
from workbench.simulator import simulate

KEPT_PROGRAMS = 128
"""Maximum number of programs that a rank keeps (least recently used go first): a task's lengths, or the steps of a
text."""


class Prepared(NamedTuple):
    """A program, and the tokens, heads and columns that its operations compute."""

    layout: InferenceLayout
    program: Program


class Programs:
    """The programs of one cluster, by plan and lengths.  profile: the devices' costs; None: they run at full speed."""

    def __init__(
        self,
        cluster: Cluster,
        stacks: tuple[StackShape, ...],
        profile: InferenceProfile | None,
        *,
        message_s: float = MESSAGE_S,
    ) -> None:
        self.cluster, self.stacks, self._message_s = cluster, stacks, message_s
        self._profile = profile or InferenceProfile(
            model="",
            source="analytic",
            stacks=stacks,
            costs=((StackTimes(pieces={}),) * len(stacks),) * cluster.world_size,
        )
        self._prepared = lru_cache(maxsize=KEPT_PROGRAMS)(self._prepare)

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...], *, room: int = 0) -> Prepared:
        """Return the program of one sequence (one length for each stack).  room: number of tokens for whose keys and
        values a device reserves memory, if a text goes on.
        """
        return self._prepared(InferenceLayout.build(plan, self.stacks, lengths, room))

    def token(self, plan: InferencePlan, lengths: tuple[int, ...], *, rows: int = 1, room: int = 0) -> Prepared:
        """Return the program of one more token in each of `rows` texts, after so many tokens of each stack in the mean.
        room: see sequence; without it, as many as there are.
        """
        memory_length = lengths[0] if len(lengths) > 1 else 0
        return self._prepared(
            InferenceLayout.decode(
                plan, self.stacks, past=lengths[-1], memory_length=memory_length, rows=rows, room=room
            )
        )

    def _prepare(self, layout: InferenceLayout) -> Prepared:
        schedule = inference_schedule(layout, self.cluster.world_size)
        costs = inference_costs(self._profile, self.cluster, layout, message_s=self._message_s)
        return Prepared(layout, Program.on(self.cluster, schedule, costs))


WORTH = 4.0
"""Minimum ratio of transfer time to per-message overhead: 48 KB at 1000 Mbit/s and 0.1 ms."""

GAIN = 0.998
"""Accept a change only if it shortens the time by this factor: simulated times are not exact to a thousandth."""

PIECES = (2, 3, 4, 6, 8)
"""Numbers of pieces into which the largest tile may be cut."""


def choose_tiles(plan: InferencePlan, price: SequencePrice, **ways: Any) -> InferencePlan:
    """Return the plan with the overlap, the tile size and the direction of the ring that take the least time.  ways:
    see variants.

    A tile is cut into more pieces only while a piece is worth its message (see `smallest_tile`).  Of equal times the
    fewest messages win; an emulation or a device with a slow processor prefers these too.
    """
    best, *others = variants(plan, price, **ways)
    for tried in others:
        if price(tried) < GAIN * price(best):
            best = tried
    return best


def variants(
    plan: InferencePlan,
    price: SequencePrice,
    *,
    overlap: bool | None = True,
    both_ways: bool | None = None,
    tile_tokens: int | None = None,
) -> list[InferencePlan]:
    """Return a plan with each overlap, tile size and direction, the plain one first.  None: any that may be worth its
    messages.
    """
    if plan.paradigm != "hybrid" or plan.num_positions < 2:
        return [replace(plan, overlap=False, both_ways=False)]
    sizes, smallest, largest = [tile_tokens or 0], 0, 0
    if tile_tokens is None:
        smallest, largest = smallest_tile(price, plan.ranks), max(plan.tokens(price.lengths[0]))
        sizes += [-(-largest // count) for count in PIECES if largest / count >= smallest]

    def turns(size: int, streams: bool) -> list[bool]:
        is_able = streams and plan.num_positions > 2
        return [False, is_able and (size or largest / 2) >= smallest] if both_ways is None else [both_ways and is_able]

    plans = [
        replace(plan, overlap=streams, tile_tokens=size, both_ways=turned)
        for streams in ((True, False) if overlap is None else (overlap,))
        for size in (sizes if streams else sizes[:1])
        for turned in turns(size, streams)
    ]
    return list(dict.fromkeys(plans))


def smallest_tile(price: SequencePrice, ranks: Sequence[int]) -> int:
    """Return the fewest tokens whose transfer takes WORTH times the overhead of their message, on the fastest link in
    use.
    """
    fastest = max(price.cluster.link(a, b).bytes_per_s for a in ranks for b in ranks if a != b)
    return max(1, round(WORTH * price.message_s * fastest / price.profile.stacks[0].hidden_bytes))


KEPT_LAYERS = 4
"""The number of layers simulated of a run of equal layers."""


@dataclass(slots=True)
class SequencePrice:
    """The simulated seconds of plans of one problem: price(plan).  Results are cached.

    message_s: cost of a message.
    """

    problem: Problem[InferenceProfile]
    message_s: float = MESSAGE_S
    _priced: dict[InferencePlan, float] = field(default_factory=dict, init=False)

    @property
    def profile(self) -> InferenceProfile:
        """Return the costs on every device."""
        return self.problem.profile

    @property
    def cluster(self) -> Cluster:
        """Return the devices."""
        return self.problem.cluster

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each stack."""
        return lengths_of(self.problem)

    def __call__(self, plan: InferencePlan) -> float:
        """Return the seconds from the request's start to the answer, both on the plan's first device."""
        plan = replace(plan, method="", predicted_s=0.0, notes=(), length=0)
        if plan not in self._priced:
            self._priced[plan] = self._price(plan)
        return self._priced[plan]

    def timeline(self, plan: InferencePlan, *, title: str = "") -> Timeline:
        """Return the simulation of all layers, without the bytes in use."""
        return simulate(self._prepared(plan, self.profile.stacks).program, memory=False, title=title)

    def _price(self, plan: InferencePlan) -> float:
        if plan.paradigm == "pipeline" or self.cluster.medium == "wifi":
            return self.timeline(plan).makespan_s
        schemes = plan.schemes if plan.paradigm == "hybrid" else (1,) * self.profile.num_layers
        short_schemes: list[int] = []
        stacks: list[StackShape] = []
        repeated: list[tuple[int, int]] = []  # (layer of the short model, number of repetitions)
        start = 0
        for shape in self.profile.stacks:
            before = len(short_schemes)
            for scheme, run in groupby(schemes[start : start + shape.num_layers]):
                count = len(list(run))
                short_schemes += [scheme] * min(count, KEPT_LAYERS)
                if count > KEPT_LAYERS:
                    repeated.append((len(short_schemes) - 1, count - KEPT_LAYERS))
            stacks.append(replace(shape, num_layers=len(short_schemes) - before))
            start += shape.num_layers
        short = replace(plan, schemes=tuple(short_schemes) if plan.paradigm == "hybrid" else ())
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
    problem: Problem[InferenceProfile],
    plans: Iterable[InferencePlan],
    price: SequencePrice,
    *,
    schemes: int | None = None,
    portal: int | None = None,
    tries: int = TRIES,
    **ways: Any,
) -> InferencePlan:
    """Return the fastest of some plans after its tiles were chosen and work was shifted between devices.

    A planner's formulas ignore the tiles.  So the best plans get tiles, and two of them, if possible of other schemes
    or directions, are improved step by step by their simulated time, as long as they fit.
    schemes: the scheme of all layers, if it may not change.  portal: the device that stays first.  tries: number of
    plans to simulate for each of the two.
    ways: see variants.
    """
    search = Search(problem, method="galaxy_plus", portal=portal, schemes=schemes)

    def climbed(plan: InferencePlan) -> InferencePlan:
        return search.climb(plan, price, most=tries)[0] if plan.num_positions > 1 else plan

    variants_of_all = sorted((variants(plan, price, **ways)[0] for plan in plans), key=price)
    rated = sorted(
        dict.fromkeys([*variants_of_all, *(choose_tiles(plan, price, **ways) for plan in variants_of_all[:3])]),
        key=price,
    )  # the first of equal times
    best = rated[0]
    second = next(
        (plan for plan in rated if (plan.configuration, plan.both_ways) != (best.configuration, best.both_ways)), best
    )
    best = min((best, climbed(best), climbed(second)), key=price)
    while best.num_positions > 1:  # new shares may need new tiles, and these new shares
        again = choose_tiles(best, price, **ways)
        if price(again) >= GAIN * price(best):
            break
        best = min(again, climbed(again), key=price)
    return replace(best, predicted_s=price(best))


def replan(
    old: InferencePlan,
    problem: Problem[InferenceProfile],
    *,
    excluded: Collection[int] = (),
    price: SequencePrice | None = None,
) -> InferencePlan:
    """Return a plan of the same method on all devices of the problem except the excluded ones; it keeps their ranks.

    'galaxy_plus' plans with less effort than at first, and keeps the first device of the ring if it is still present;
    any other method uses its own planner.  Raises PlanError if no device is left or nothing fits.
    """
    remaining = [rank for rank in problem.members if rank not in excluded]
    if not remaining:
        raise PlanError(
            f"A plan of '{problem.profile.model}' without {sorted(excluded)} was asked for.",
            f"Cluster '{problem.cluster.name}' has no other device.",
            "Wait until a device is back.",
        )
    problem = replace(problem, ranks=remaining)
    planner = INFERENCE_SYSTEMS.get(old.method)
    if old.method == "galaxy_plus" or planner is None:
        portal = old.ranks[0] if old.ranks[0] in remaining else None
        plans = candidates(problem, portal=portal, effort=1, method=old.method)
        if price is None:
            return plans[0]
        ways: dict[str, Any] = {"overlap": old.overlap or old.num_positions == 1, "both_ways": old.both_ways}
        return tune(problem, plans, price, portal=portal, tries=10, tile_tokens=old.tile_tokens, **ways)
    plan = planner(problem)
    plan = replace(plan, tile_tokens=old.tile_tokens, both_ways=old.both_ways and plan.paradigm == "hybrid")
    return plan if price is None else replace(plan, predicted_s=price(plan))
