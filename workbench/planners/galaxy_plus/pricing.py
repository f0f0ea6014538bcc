"""Predict the seconds of one sequence under a plan in closed form: Galaxy+ Eq. 5-7 for its plans, the same terms for the baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import ring_allreduce_s
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.times import (
    Line,
    all_gather_s,
    attention_s,
    block_lines,
    con_s,
    ends_s,
    hop_lines,
    mlp_sequence_s,
    mlp_tensor_s,
    num_blocks,
    ring_s,
    slowest_s,
    stack_lengths,
)

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePrice:
    """Seconds of one sequence without overlap; each part is summed over all layers.

    ends_s: embedding, head, and the transfer of tokens to their devices and back, which Eq. 6-7 leave out.
    """

    mha_s: float = 0.0
    mlp_s: float = 0.0
    con_s: float = 0.0
    all_gather_s: float = 0.0
    reduce_scatter_s: float = 0.0
    all_reduce_s: float = 0.0
    transfer_s: float = 0.0
    ends_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Return the seconds of the layers' computation."""
        return self.mha_s + self.mlp_s + self.con_s

    @property
    def communication_s(self) -> float:
        """Return the seconds of the layers' communication."""
        return self.all_gather_s + self.reduce_scatter_s + self.all_reduce_s + self.transfer_s

    @property
    def layers_s(self) -> float:
        """Return the seconds of all layers: the objective of Eq. 9 for a hybrid plan."""
        return self.compute_s + self.communication_s

    @property
    def total_s(self) -> float:
        """Return the seconds of the layers and of both ends."""
        return self.layers_s + self.ends_s


def price_plan(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, *, length: int | None = None, decoder_length: int | None = None
) -> InferencePrice:
    """Return the predicted seconds of a sequence of `length` tokens (default: the plan's), for any paradigm."""
    lengths = stack_lengths(profile, length or plan.length or 1, decoder_length)
    of_paradigm = {"hybrid": _hybrid, "tensor": _tensor, "sequence": _sequence, "pipeline": _pipeline}
    found = of_paradigm[plan.paradigm](plan, profile, cluster, lengths)
    return replace(found, ends_s=found.ends_s + ends_s(profile, plan.ranks[0], lengths))


class Cut(NamedTuple):
    """A hybrid plan in the search: the partitions, and the number of scheme-2 layers in each stack, which come first in the stack."""

    ranks: Ranks
    units: tuple[int, ...]
    columns: tuple[int, ...]
    shares: tuple[float, ...]
    second: tuple[int, ...]


def cut_of(plan: InferencePlan, profile: InferenceProfile) -> Cut:
    """Return the plan's cut."""
    ends = list(accumulate(shape.num_layers for shape in profile.stacks))
    second = tuple(plan.schemes[first:last].count(2) for first, last in zip([0, *ends], ends, strict=False))
    return Cut(plan.ranks, plan.units, plan.columns, plan.shares, second)


class HybridPricer:
    """Predicts the time of hybrid plans of one profile and cluster by Eq. 6 + Eq. 7; caches each partition, as a move changes only one."""

    def __init__(self, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> None:
        self.profile, self.cluster, self.lengths = profile, cluster, tuple(lengths)
        self.lines = cache(lambda rank, stack: block_lines(profile, rank, stack, self.lengths))
        self._ring_lines = cache(self._of_ring)
        self._mha_s, self._tensor_s, self._tokens_s = cache(self._of_units), cache(self._of_columns), cache(self._of_tokens)

    def __call__(self, cut: Cut) -> float:
        """Return the seconds of all layers: Eq. 9."""
        return sum(
            (p + q) * (mha + con) + p * tensor + q * sequence + (p * blocks + q * (blocks - 1)) * (gather + scatter)
            for p, q, blocks, mha, tensor, (sequence, con, gather, scatter) in self.rows(cut)
        )

    def rows(self, cut: Cut) -> Iterator[tuple[int, int, int, float, float, tuple[float, float, float, float]]]:
        """Yield for each stack its layers of either scheme, the blocks of a layer, and the seconds of each part of a layer."""
        mha, tensor, tokens = (
            self._mha_s(cut.ranks, cut.units),
            self._tensor_s(cut.ranks, cut.columns),
            self._tokens_s(cut.ranks, cut.shares),
        )
        for stack, (shape, q) in enumerate(zip(self.profile.stacks, cut.second, strict=True)):
            yield shape.num_layers - q, q, num_blocks(shape), mha[stack], tensor[stack], tokens[stack]

    def ways_s(self, cut: Cut) -> float:
        """Return the seconds to send tokens to their devices and back, and to gather the first stack's output for a second."""
        found = 0.0
        for shape, length in zip(self.profile.stacks, self.lengths, strict=True):
            found += _star_s(cut.ranks, self.cluster, proportional_parts(length, cut.shares), shape.hidden_bytes)
            if shape.has_cross_attention:
                first = proportional_parts(self.lengths[0], cut.shares)
                found += all_gather_s(self.cluster, cut.ranks, first, self.profile.stacks[0].hidden_bytes)
        return found

    def _of(self, what: str, ranks: Ranks, stack: int) -> list[Line]:
        return [self.lines(rank, stack)[what] for rank in ranks]

    def _of_units(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MHA) of a layer of each stack."""
        found = []
        for stack, shape in enumerate(self.profile.stacks):
            units = proportional_parts(shape.num_units, parts)
            blocks = ("own", "cross")[: num_blocks(shape) - 1]
            found.append(sum(slowest_s(self._of(block, ranks, stack), units) for block in blocks))
        return found

    def _of_columns(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MLP), tensor parallel, of a layer of each stack."""
        shapes = enumerate(self.profile.stacks)
        return [slowest_s(self._of("tensor", ranks, stack), proportional_parts(shape.columns, parts)) for stack, shape in shapes]

    def _of_tokens(self, ranks: Ranks, shares: tuple[float, ...]) -> list[tuple[float, float, float, float]]:
        """Return T(MLP), sequence parallel, T(CON), T_AG and T_RS of a layer of each stack."""
        found = []
        for stack, length in enumerate(self.lengths):
            tokens = proportional_parts(length, shares)
            sequence, con, hops, adding = self._ring_lines(ranks, stack)
            found.append((slowest_s(sequence, tokens), slowest_s(con, tokens), ring_s(hops, tokens, 0), ring_s(adding, tokens, 1)))
        return found

    def _of_ring(self, ranks: Ranks, stack: int) -> tuple[list[Line], list[Line], list[Line], list[Line]]:
        """Return the lines over tokens of the network, the connections, the hops, and the hops with the receivers' additions."""
        sequence, con, adds = (self._of(what, ranks, stack) for what in ("sequence", "con", "add"))
        nbytes = self.profile.stacks[stack].hidden_bytes
        return sequence, con, hop_lines(self.cluster, ranks, nbytes), hop_lines(self.cluster, ranks, nbytes, adds)


def _star_s(ranks: Ranks, cluster: Cluster, tokens: Sequence[int], token_bytes: int) -> float:
    """Return the seconds in which position 0 sends every other position its tokens and receives them back."""
    first, total = ranks[0], 0.0
    for rank, count in list(zip(ranks, tokens, strict=True))[1:]:
        if count:
            total += cluster.link(first, rank).transfer_s(count * token_bytes) + cluster.link(rank, first).transfer_s(count * token_bytes)
    return total


def _hybrid(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> InferencePrice:
    """Return Galaxy+'s seconds: Eq. 6 + Eq. 7."""
    pricer, cut = HybridPricer(profile, cluster, lengths), cut_of(plan, profile)
    total = InferencePrice(ends_s=pricer.ways_s(cut))
    for p, q, blocks, mha, tensor, (sequence, con, gather, scatter) in pricer.rows(cut):
        rings = p * blocks + q * (blocks - 1)
        total = replace(
            total,
            mha_s=total.mha_s + (p + q) * mha,
            mlp_s=total.mlp_s + p * tensor + q * sequence,
            con_s=total.con_s + (p + q) * con,
            all_gather_s=total.all_gather_s + rings * gather,
            reduce_scatter_s=total.reduce_scatter_s + rings * scatter,
        )
    return total


def _tensor(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> InferencePrice:
    """Return Megatron-LM's seconds: an all-reduce of the whole sequence after each block, connections computed on all devices."""
    total = InferencePrice()
    for stack, shape in enumerate(profile.stacks):
        units, columns = plan.cut(shape)
        n, blocks = lengths[stack], num_blocks(shape)
        each = [attention_s(profile, rank, stack, count, lengths) for rank, count in zip(plan.ranks, units, strict=True)]
        tensor = max(mlp_tensor_s(profile, rank, stack, count, lengths) for rank, count in zip(plan.ranks, columns, strict=True))
        reduce = ring_allreduce_s(cluster, plan.ranks, n * shape.hidden_bytes)
        sent = max((cluster.link(plan.ranks[0], rank).transfer_s(n * shape.hidden_bytes) for rank in plan.ranks[1:]), default=0.0)
        total = InferencePrice(
            mha_s=total.mha_s + shape.num_layers * sum(max(block) for block in zip(*each, strict=True)),
            mlp_s=total.mlp_s + shape.num_layers * tensor,
            con_s=total.con_s + shape.num_layers * max(con_s(profile, rank, stack, n) for rank in plan.ranks),
            all_reduce_s=total.all_reduce_s + shape.num_layers * blocks * reduce,
            ends_s=total.ends_s + sent,
        )
    return total


def _sequence(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> InferencePrice:
    """Return sequence parallelism's seconds: keys and values of all tokens are gathered, two all-gathers per layer (section IV-A)."""
    total = InferencePrice()
    for stack, shape in enumerate(profile.stacks):
        tokens, n, blocks = plan.tokens(lengths[stack]), lengths[stack], num_blocks(shape)
        attention, mlp, con = [], [], []
        for rank, own in zip(plan.ranks, tokens, strict=True):
            costs, units = profile.costs[rank][stack], shape.num_units
            seconds = costs.seconds("QKV", own, units) + costs.seconds("ATT", own * n, units) + costs.seconds("OUT", own, units)
            if shape.has_cross_attention and own:
                memory = lengths[0]
                seconds += costs.seconds("CQ", own, units) + costs.seconds("CKV", memory, units)
                seconds += costs.seconds("CATT", own * memory, units) + costs.seconds("COUT", own, units)
            attention.append(seconds)
            mlp.append(mlp_sequence_s(profile, rank, stack, own))
            con.append(blocks * costs.seconds("CONN", own))
        # One message contains a token's keys and values.
        width = shape.num_units * shape.kv_unit_bytes if shape.kv_unit_bytes else 2 * shape.hidden_bytes
        gather = all_gather_s(cluster, plan.ranks, tokens, width)
        ends = _star_s(plan.ranks, cluster, tokens, shape.hidden_bytes)
        if shape.has_cross_attention:
            ends += all_gather_s(cluster, plan.ranks, plan.tokens(lengths[0]), profile.stacks[0].hidden_bytes)
        total = InferencePrice(
            mha_s=total.mha_s + shape.num_layers * max(attention),
            mlp_s=total.mlp_s + shape.num_layers * max(mlp),
            con_s=total.con_s + shape.num_layers * max(con),
            all_gather_s=total.all_gather_s + shape.num_layers * gather,
            ends_s=total.ends_s + ends,
        )
    return total


def _pipeline(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> InferencePrice:
    """Return EdgeShard's seconds for one sequence: one device after the other, with the result sent back to the first."""
    mha = mlp = con = 0.0
    transfer, layer = 0.0, 0
    for position, (rank, count) in enumerate(zip(plan.ranks, plan.layers, strict=True)):
        for number in range(layer, layer + count):
            stack = profile.stack_of(number)
            mha += sum(attention_s(profile, rank, stack, profile.stacks[stack].num_units, lengths))
            mlp += mlp_tensor_s(profile, rank, stack, profile.stacks[stack].columns, lengths)
            con += con_s(profile, rank, stack, lengths[stack])
        layer += count
        if position + 1 < plan.num_positions:
            transfer += cluster.link(rank, plan.ranks[position + 1]).transfer_s(boundary_bytes(profile, layer, lengths))
    if plan.num_positions > 1:
        transfer += cluster.link(plan.ranks[-1], plan.ranks[0]).transfer_s(boundary_bytes(profile, profile.num_layers, lengths))
    return InferencePrice(mha_s=mha, mlp_s=mlp, con_s=con, transfer_s=transfer)


def boundary_bytes(profile: InferenceProfile, layer: int, lengths: Sequence[int]) -> int:
    """Return the bytes that one device sends to the next before a layer: hidden states, and in a decoder the encoder's output too."""
    last = profile.num_layers
    stack = profile.stack_of(min(layer, last - 1))
    hidden = lengths[stack] * profile.stacks[stack].hidden_bytes
    if profile.stacks[stack].has_cross_attention and layer < last:
        hidden += lengths[0] * profile.stacks[0].hidden_bytes
    return hidden
