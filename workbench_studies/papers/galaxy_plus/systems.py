"""Every method of the evaluation in an environment: its plan, and the seconds of one sequence by formulas (Galaxy+,
section IV-A).

The seconds of one sequence as the paper prints them: Eq. 5-7, with the overlap of Fig. 9 and 10 (Galaxy+, sections
III-C and III-D).
Every block ends in a synchronization.  In a split block, the first product overlaps the all-gather tile by tile;
attention starts when all tiles are present; the second product overlaps the reduce-scatter tile by tile; then the
connection follows.  (The schedules of this workbench continue without waiting, and take a tile through both products of
a feed-forward block at once: they overlap more than the paper describes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus import planners as galaxy_plus
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, StackTimes
from workbench.planners import Problem
from workbench_studies.papers.galaxy_plus.printed_times import price_plan
from workbench_studies.papers.galaxy_plus.testbed import Constants, cluster, handling, problem, profile
from workbench_studies.papers.result import OOM


def printed_s(
    plan: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: Sequence[int],
    handling_s_per_byte: Sequence[float] = (),
) -> float:
    """Return the seconds of one sequence.

    lengths: tokens of each stack.  handling_s_per_byte: by rank, the processor time for a byte sent while a product is
    computed, because the device has no other processor to handle it.

    Baselines, and plans without overlap, overlap nothing (see price_plan).
    """
    priced = price_plan(plan, profile, cluster, length=lengths[0], decoder_length=lengths[-1])
    if plan.paradigm != "hybrid" or not plan.overlap:
        return priced.total_s
    total, first = priced.ends_s, 0
    for stack, shape in enumerate(profile.stacks):
        second = plan.schemes[first : first + shape.num_layers].count(2)
        first += shape.num_layers
        own_tokens, memory, (units, columns) = lengths[stack], lengths[0], plan.cut(shape)
        tokens, costs = plan.tokens(own_tokens), [profile.costs[rank][stack] for rank in plan.ranks]
        lines = galaxy_plus.hop_lines(cluster, plan.ranks, shape.hidden_bytes)
        hops = [[fixed + slope * count if count else 0.0 for count in tokens] for fixed, slope in lines]
        byte_s = [handling_s_per_byte[rank] if handling_s_per_byte else 0.0 for rank in plan.ranks]
        handled = [[count * shape.hidden_bytes * seconds for count in tokens] for seconds in byte_s]
        ring, slowest = partial(_ring_s, costs, tokens, hops, handled), partial(_slowest_s, costs)
        attention = (
            ring("QKV", units) + slowest("ATT", own_tokens * own_tokens, units) + ring("OUT", units, scatters=True)
        )
        if shape.has_cross_attention:
            attention += ring("CQ", units) + slowest("CKV", memory, units)
            attention += slowest("CATT", own_tokens * memory, units) + ring("COUT", units, scatters=True)
        split = ring("UP", columns) + ring("DOWN", columns, scatters=True)
        layers = [galaxy_plus.LayerTimes(profile, rank, stack, lengths) for rank in plan.ranks]
        sequence_s = max(times.mlp_s(tokens=count) for times, count in zip(layers, tokens, strict=True))
        connections = max(times.con_s(count) for times, count in zip(layers, tokens, strict=True))
        total += (
            shape.num_layers * (attention + connections) + (shape.num_layers - second) * split + second * sequence_s
        )
    return total


def _slowest_s(costs: Sequence[StackTimes], kind: str, items: int, parts: Sequence[int]) -> float:
    return max(each.seconds(kind, items, count) for each, count in zip(costs, parts, strict=True))


def _ring_s(
    costs: Sequence[StackTimes],
    tokens: Sequence[int],
    hops: Sequence[Sequence[float]],
    handled: Sequence[Sequence[float]],
    kind: str,
    parts: Sequence[int],
    *,
    scatters: bool = False,
) -> float:
    """Return the seconds of a product that overlaps the all-gather of its input (Fig. 9), or the reduce-scatter of its
    output (Fig. 10).

    Tiles of `tokens` go from each position to the next.  hops, handled: seconds by position and tile, of the link and
    of the processor.
    """
    n = len(costs)
    done, sent_s, arrived_s = (
        [0.0] * n,
        [0.0] * n,
        [0.0] * n,
    )  # there: arrival of a tile, or of the sum of the tiles so far
    for step in range(n):
        tile = [(i - step - scatters) % n for i in range(n)]
        begin = done if scatters else list(map(max, done, arrived_s))
        done = [begin[i] + costs[i].seconds(kind, tokens[tile[i]], parts[i]) for i in range(n)]
        if step and scatters:
            done = [max(done[i], arrived_s[i]) + costs[i].seconds("ADD", tokens[tile[i]]) for i in range(n)]
        if step < n - 1:
            done = [done[i] + handled[i][tile[i]] for i in range(n)]
            ready = done if scatters else arrived_s
            sent_s = [max(sent_s[i], ready[i]) + hops[i][tile[i]] for i in range(n)]
            arrived_s = [sent_s[i - 1] for i in range(n)]
    return max(done)


def _staged(problem: Problem[InferenceProfile]) -> InferencePlan:
    """Return EdgeShard as the paper must have run it: a pipeline through all devices whose slowest stage is as fast as
    possible.

    EdgeShard's programme for throughput aims at this; among equally good stages those on fast devices are filled first.
    """
    costs, on = problem.profile, problem.cluster
    layer_s = [1 / galaxy_plus.capacity(costs, rank, galaxy_plus.lengths_of(problem)) for rank in range(on.world_size)]
    slowest = sorted(count * seconds for seconds in layer_s for count in range(1, costs.num_layers + 1))
    rooms = ([int(limit / seconds + 1e-9) for seconds in layer_s] for limit in slowest)
    room = next(each for each in rooms if min(each) and sum(each) >= costs.num_layers)
    remaining, shares = costs.num_layers - on.world_size, [1] * on.world_size
    for rank in sorted(range(on.world_size), key=lambda each: layer_s[each]):
        more = min(remaining, room[rank] - 1)
        shares[rank] += more
        remaining -= more
    ranks = tuple(range(on.world_size))
    plan = InferencePlan(
        method="edgeshard", paradigm="pipeline", ranks=ranks, layers=tuple(shares), length=problem.sequence_length
    )
    galaxy_plus.check(problem, plan)
    return plan


OURS, GALAXY, MEGATRON, SEQUENCE, EDGESHARD = "Galaxy+", "Galaxy", "M-LM", "SP", "ES"
PLANNERS: dict[str, galaxy_plus.InferencePlanner] = {
    OURS: galaxy_plus.algorithm_1,
    GALAXY: galaxy_plus.galaxy,
    MEGATRON: galaxy_plus.megatron_lm,
    SEQUENCE: galaxy_plus.sequence_parallel,
    EDGESHARD: _staged,
}
WITH_GPUS = ("Env. C", "Env. D")
"""Here overlap costs kernel launches and no processor time; it is used only where it is faster."""
BASELINES = (MEGATRON, SEQUENCE, EDGESHARD, GALAXY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A method's result.  plan, seconds: None if it runs out of memory, for the given reason."""

    plan: InferencePlan | None = None
    seconds: float | None = None
    reason: str = ""

    @property
    def configuration(self) -> str:
        """Return the layers of both schemes as '[P,Q]', or OOM."""
        return OOM if self.plan is None else "[{},{}]".format(*self.plan.configuration)


@lru_cache(maxsize=8192)
def run_system(
    constants: Constants,
    model: str,
    environment: str,
    system: str,
    mbit_per_s: float | None = None,
) -> Run:
    """Return a method's plan under the paper's memory accounting, and its seconds for a model in an environment."""
    on = cluster(constants, environment, mbit_per_s, collectives=system in (MEGATRON, SEQUENCE))
    costs = profile(constants, model, environment)
    lengths = galaxy_plus.stack_lengths(costs, constants.length(model), constants.decoder_tokens)
    try:
        plan = PLANNERS[system](problem(constants, costs, on, lengths[0]))
    except PlanError as error:
        return Run(reason=str(error))
    handled = handling(constants, on)
    ways = [plan, replace(plan, overlap=False)] if plan.overlap and environment in WITH_GPUS else [plan]
    seconds = {way: printed_s(way, costs, on, lengths, handled) for way in ways}
    best = min(ways, key=lambda way: seconds[way])
    return Run(plan=best, seconds=seconds[best])


def speed_up(
    constants: Constants, model: str, environment: str, system: str, mbit_per_s: float | None = None
) -> float | None:
    """Return a method's seconds over Galaxy+'s; None if one of them runs out of memory."""
    ours_s, other_s = (run_system(constants, model, environment, each, mbit_per_s).seconds for each in (OURS, system))
    return None if ours_s is None or other_s is None else other_s / ours_s
