"""The seconds of one sequence as the paper prints them: Eq. 5-7, with the overlap of Fig. 9 and 10 (Galaxy+, sections III-C and III-D).

Every block ends in a synchronization.  A split block's first product runs tile by tile beside the all-gather, its attention when all
tiles are there, its second product tile by tile beside the reduce-scatter, then the connection.  (The schedules of this workbench go on
without waiting, and take a tile through both products of a feed-forward block at once: they overlap more than the paper tells.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackCosts
from workbench.planners.galaxy_plus import con_s, mlp_sequence_s, price_plan

Piece = Callable[[StackCosts, int, int], float]
"""Seconds of a product: (costs, tokens, units or columns)."""


def printed_s(
    plan: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: Sequence[int],
    handling_s_per_byte: Sequence[float] = (),
) -> float:
    """Return the seconds of one sequence.

    lengths: tokens of each stack.  handling_s_per_byte: by rank, what a byte that is sent while a product is computed takes of the
    processor, which has no other to handle it.

    Baselines, and plans without overlap, have nothing overlapped (planners.galaxy_plus.price_plan).
    """
    priced = price_plan(plan, profile, cluster, length=lengths[0], decoder_length=lengths[-1])
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
        whole = max(mlp_sequence_s(profile, plan.ranks[i], stack, ring.tokens[i]) for i in range(n))
        connections = max(con_s(profile, plan.ranks[i], stack, ring.tokens[i]) for i in range(n))
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
        """Return the seconds of a product beside the all-gather of what it reads (Fig. 9)."""
        n = self._count
        there = [0.0] * n  # when position i has the tile that it multiplies in this step
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
        """Return the seconds of a product beside the reduce-scatter of what it writes (Fig. 10)."""
        n = self._count
        done, sent, there = [0.0] * n, [0.0] * n, [0.0] * n  # there: when the sum of the tiles so far has come
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
