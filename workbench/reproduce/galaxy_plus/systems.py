"""Every method of the evaluation in an environment: its plan, and the simulated seconds of one sequence (Galaxy+, section IV-A).

The seconds of one sequence as the paper prints them: Eq. 5-7, with the overlap of Fig. 9 and 10 (Galaxy+, sections III-C and III-D).
Every block ends in a synchronization.  In a split block, the first product overlaps the all-gather tile by tile; attention starts when
all tiles are present; the second product overlaps the reduce-scatter tile by tile; then the connection follows.  (The schedules of this
workbench continue without waiting, and take a tile through both products of a feed-forward block at once: they overlap more than the
paper describes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners import galaxy_plus
from workbench.reproduce.galaxy_plus.testbed import Constants, cluster, handling, profile
from workbench.reproduce.result import OOM


def printed_s(
    plan: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: Sequence[int],
    handling_s_per_byte: Sequence[float] = (),
) -> float:
    """Return the seconds of one sequence.

    lengths: tokens of each stack.  handling_s_per_byte: by rank, the processor time for a byte sent while a product is computed, because
    the device has no other processor to handle it.

    Baselines, and plans without overlap, overlap nothing (planners.galaxy_plus.price_plan).
    """
    priced = galaxy_plus.price_plan(plan, profile, cluster, length=lengths[0], decoder_length=lengths[-1])
    if plan.paradigm != "hybrid" or not plan.overlap:
        return priced.total_s
    total, first = priced.ends_s, 0
    for stack, shape in enumerate(profile.stacks):
        second = plan.schemes[first : first + shape.num_layers].count(2)
        first += shape.num_layers
        ring = _Ring(plan, profile, cluster, stack, plan.tokens(lengths[stack]), handling_s_per_byte)
        units, columns = plan.cut(shape)
        own, n = lengths[stack], plan.num_positions

        def attend(keys: int, kind: str, units: Sequence[int] = units, own: int = own, stack: int = stack) -> float:
            costs = [profile.costs[rank][stack] for rank in plan.ranks]
            return max(each.seconds(kind, own * keys, count) for each, count in zip(costs, units, strict=True))

        attention = ring.gathered("QKV", units) + attend(own, "ATT") + ring.scattered("OUT", units)
        if shape.has_cross_attention:
            memory = [profile.costs[rank][stack].seconds("CKV", lengths[0], units[i]) for i, rank in enumerate(plan.ranks)]
            attention += ring.gathered("CQ", units) + max(memory) + attend(lengths[0], "CATT") + ring.scattered("COUT", units)
        split = ring.gathered("UP", columns) + ring.scattered("DOWN", columns)
        whole = max(galaxy_plus.mlp_sequence_s(profile, plan.ranks[i], stack, ring.tokens[i]) for i in range(n))
        connections = max(galaxy_plus.con_s(profile, plan.ranks[i], stack, ring.tokens[i]) for i in range(n))
        total += shape.num_layers * (attention + connections) + (shape.num_layers - second) * split + second * whole
    return total


class _Ring:
    """The ring of one stack: tiles of `tokens` go from each position to the next."""

    def __init__(
        self,
        plan: InferencePlan,
        profile: InferenceProfile,
        cluster: Cluster,
        stack: int,
        tokens: Sequence[int],
        handling_s_per_byte: Sequence[float],
    ) -> None:
        self.tokens, self._count = tokens, plan.num_positions
        self._costs = [profile.costs[rank][stack] for rank in plan.ranks]
        nbytes = profile.stacks[stack].hidden_bytes
        links = [cluster.link(rank, plan.ranks[(i + 1) % self._count]) for i, rank in enumerate(plan.ranks)] if self._count > 1 else []
        self._handling = [
            [count * nbytes * (handling_s_per_byte[rank] if handling_s_per_byte else 0.0) for count in tokens] for rank in plan.ranks
        ]
        self._hops = [[link.transfer_s(count * nbytes) if count else 0.0 for count in tokens] for link in links]

    def gathered(self, kind: str, parts: Sequence[int]) -> float:
        """Return the seconds of a product that overlaps the all-gather of its input (Fig. 9)."""
        n = self._count
        there = [0.0] * n  # time at which position i has the tile that it multiplies in this step
        done, sent = [0.0] * n, [0.0] * n
        for step in range(n):
            tile = [(i - step) % n for i in range(n)]
            done = [max(done[i], there[i]) + self._costs[i].seconds(kind, self.tokens[tile[i]], parts[i]) for i in range(n)]
            if step < n - 1:
                done = [done[i] + self._handling[i][tile[i]] for i in range(n)]
                sent = [max(sent[i], there[i]) + self._hops[i][tile[i]] for i in range(n)]
                there = [sent[i - 1] for i in range(n)]
        return max(done)

    def scattered(self, kind: str, parts: Sequence[int]) -> float:
        """Return the seconds of a product that overlaps the reduce-scatter of its output (Fig. 10)."""
        n = self._count
        done, sent, there = [0.0] * n, [0.0] * n, [0.0] * n  # there: arrival of the sum of the tiles so far
        for step in range(n):
            tile = [(i - step - 1) % n for i in range(n)]
            done = [done[i] + self._costs[i].seconds(kind, self.tokens[tile[i]], parts[i]) for i in range(n)]
            if step:
                done = [max(done[i], there[i]) + self._costs[i].seconds("ADD", self.tokens[tile[i]]) for i in range(n)]
            if step < n - 1:
                done = [done[i] + self._handling[i][tile[i]] for i in range(n)]
                sent = [max(sent[i], done[i]) + self._hops[i][tile[i]] for i in range(n)]
                there = [sent[i - 1] for i in range(n)]
        return max(done)


def _staged(problem: galaxy_plus.SequenceProblem) -> InferencePlan:
    """Return EdgeShard as the paper must have run it: a pipeline through all devices whose slowest stage is as fast as possible.

    EdgeShard's programme for throughput aims at this; among equally good stages those on fast devices are filled first.
    """
    costs, on = problem.profile, problem.cluster
    layer_s = [1 / galaxy_plus.capacity(costs, rank, problem.lengths) for rank in range(on.world_size)]
    slowest = sorted(count * seconds for seconds in layer_s for count in range(1, costs.num_layers + 1))
    rooms = ([int(limit / seconds + 1e-9) for seconds in layer_s] for limit in slowest)
    room = next(each for each in rooms if min(each) and sum(each) >= costs.num_layers)
    left, shares = costs.num_layers - on.world_size, [1] * on.world_size
    for rank in sorted(range(on.world_size), key=lambda each: layer_s[each]):
        more = min(left, room[rank] - 1)
        shares[rank] += more
        left -= more
    ranks = tuple(range(on.world_size))
    plan = InferencePlan(method="edgeshard", paradigm="pipeline", ranks=ranks, layers=tuple(shares), length=problem.length)
    problem.check(plan)
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

    def speed_up(self, other: Run) -> float | None:
        """Return another method's seconds over these; None if one of them runs out of memory."""
        return None if self.seconds is None or other.seconds is None else other.seconds / self.seconds


@lru_cache(maxsize=8192)
def run_system(
    constants: Constants,
    model: str,
    environment: str,
    system: str,
    mbit_per_s: float | None = None,
) -> Run:
    """Return a method's plan under the paper's memory accounting and its simulated seconds for a model in an environment."""
    on = cluster(constants, environment, mbit_per_s, collectives=system in (MEGATRON, SEQUENCE))
    costs = profile(constants, model, environment)
    length, decoder_length = constants.length(model), constants.decoder_tokens
    problem = galaxy_plus.SequenceProblem(costs, on, length=length, decoder_length=decoder_length, memory=constants.memory_rule)
    try:
        plan = PLANNERS[system](problem)
    except PlanError as error:
        return Run(reason=str(error))
    handled = handling(constants, on)
    ways = [plan, replace(plan, overlap=False)] if plan.overlap and environment in WITH_GPUS else [plan]
    seconds = {way: printed_s(way, costs, on, problem.lengths, handled) for way in ways}
    best = min(ways, key=lambda way: seconds[way])
    return Run(plan=best, seconds=seconds[best])
