"""Predict the seconds of one sequence under a plan in closed form (Galaxy+, section III-C).

First the terms of Eq. 5-7 and 10: the blocks of a layer and the ring's collectives.  Then Eq. 6-7 for Galaxy+'s plans,
and the same terms for the baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import collective_s, on_air_s
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape, proportional_parts
from workbench.core.schedule import ALLREDUCE, Ranks
from workbench.planners.problem import Problem

Line = tuple[float, float]
"""Fixed seconds and seconds per item, of a time that is 0 for no items."""


def stack_lengths(profile: InferenceProfile, length: int, decoder_length: int | None = None) -> tuple[int, ...]:
    """Return the tokens of one sequence in each stack.

    decoder_length: number of tokens in the second stack (default: `length`).
    """
    lengths = (length, length if decoder_length is None else decoder_length)[: len(profile.stacks)]
    if min(lengths) < 1:
        raise ConfigError(
            f"A plan for a sequence of {length} tokens was asked for.",
            f"The stacks of '{profile.model}' would see {lengths}.",
            "Give at least one token.",
        )
    return lengths


def lengths_of(problem: Problem[InferenceProfile]) -> tuple[int, ...]:
    """Return the tokens of each stack, for timing.  Raises ConfigError for less than one token."""
    return stack_lengths(problem.profile, problem.sequence_length, problem.decoder_length)


def num_blocks(shape: StackShape) -> int:
    """Return how many blocks of a layer end in a synchronisation under scheme 1: 2, or 3 with cross-attention."""
    return 3 if shape.has_cross_attention else 2


def attention_s(
    profile: InferenceProfile, rank: int, stack: int, units: int, lengths: Sequence[int], tokens: int | None = None
) -> tuple[float, ...]:
    """Return T(MHA, A_d, d) of Eq. 5, one number for each attention block of a layer of the stack (two in a T5
    decoder).

    Every query is paired with every key, also under a causal mask, whose upper half is computed and masked.  The
    cross-attention reads the first stack's output, lengths[0] tokens.  tokens: with sequence parallelism the device's
    own tokens; None: all.
    """
    costs, memory = profile.costs[rank][stack], lengths[0]
    n = lengths[stack] if tokens is None else tokens
    self_s = (
        costs.seconds("QKV", n, units)
        + costs.seconds("ATT", n * lengths[stack], units)
        + costs.seconds("OUT", n, units)
    )
    if not n or not profile.stacks[stack].has_cross_attention:
        return (self_s,)
    cross = costs.seconds("CQ", n, units) + costs.seconds("CKV", memory, units)
    return self_s, cross + costs.seconds("CATT", n * memory, units) + costs.seconds("COUT", n, units)


def mha_s(profile: InferenceProfile, rank: int, stack: int, units: int, lengths: Sequence[int]) -> float:
    """Return T(MHA, A_d, d) of Eq. 5: all attention blocks of one layer."""
    return sum(attention_s(profile, rank, stack, units, lengths))


def mlp_tensor_s(profile: InferenceProfile, rank: int, stack: int, columns: int, lengths: Sequence[int]) -> float:
    """Return T(MLP, B_d, d) of Eq. 5, tensor parallel: some columns, every token."""
    costs, n = profile.costs[rank][stack], lengths[stack]
    return costs.seconds("UP", n, columns) + costs.seconds("DOWN", n, columns)


def mlp_sequence_s(profile: InferenceProfile, rank: int, stack: int, tokens: int) -> float:
    """Return T(MLP, S_d, d) of Eq. 5, sequence parallel: every column, some tokens."""
    costs, columns = profile.costs[rank][stack], profile.stacks[stack].columns
    return costs.seconds("UP", tokens, columns) + costs.seconds("DOWN", tokens, columns)


def con_s(profile: InferenceProfile, rank: int, stack: int, tokens: int) -> float:
    """Return T(CON, S_d, d) of Eq. 5: all connections of a layer, one after each block (Eq. 6 has one term
    for them).
    """
    return num_blocks(profile.stacks[stack]) * profile.costs[rank][stack].seconds("CONN", tokens)


def block_lines(profile: InferenceProfile, rank: int, stack: int, lengths: Sequence[int]) -> dict[str, Line]:
    """Return fixed seconds and seconds for each unit ('own' and 'cross' attention), column ('tensor') or token (the
    others) of a layer.

    Every time is affine from 1 on, and 0 for no items.
    """
    shape = profile.stacks[stack]
    times: dict[str, tuple[Callable[[int], float], int]] = {
        "own": (lambda count: attention_s(profile, rank, stack, count, lengths)[0], shape.num_units),
        "tensor": (lambda count: mlp_tensor_s(profile, rank, stack, count, lengths), shape.columns),
        "sequence": (lambda count: mlp_sequence_s(profile, rank, stack, count), lengths[stack]),
        "con": (lambda count: con_s(profile, rank, stack, count), lengths[stack]),
        "add": (lambda count: profile.costs[rank][stack].seconds("ADD", count), lengths[stack]),
    }
    if shape.has_cross_attention:
        times["cross"] = (lambda count: attention_s(profile, rank, stack, count, lengths)[1], shape.num_units)
    lines = {}
    for part, (seconds, most) in times.items():
        low, high = seconds(1), seconds(most)
        slope = (high - low) / (most - 1) if most > 1 else 0.0
        lines[part] = low - slope, slope
    return lines


def layer_s(profile: InferenceProfile, rank: int, stack: int, lengths: Sequence[int]) -> float:
    """Return the seconds of one whole layer on one device."""
    shape, n = profile.stacks[stack], lengths[stack]
    layer_s_in_all = mha_s(profile, rank, stack, shape.num_units, lengths) + mlp_tensor_s(
        profile, rank, stack, shape.columns, lengths
    )
    return layer_s_in_all + con_s(profile, rank, stack, n)


def ends_s(profile: InferenceProfile, rank: int, lengths: Sequence[int]) -> float:
    """Return the seconds of embedding and head on the device at position 0."""
    pairs = zip(profile.costs[rank], lengths, strict=True)
    return sum(costs.seconds("EMB", n) + costs.seconds("HEAD", n) for costs, n in pairs)


def capacity(profile: InferenceProfile, rank: int, lengths: Sequence[int]) -> float:
    """Return V_d of Eq. 10, layers per second: the inverse of one layer's time, with two stacks of the mean layer's
    time.
    """
    seconds = sum(
        shape.num_layers * layer_s(profile, rank, stack, lengths) for stack, shape in enumerate(profile.stacks)
    )
    return 1.0 / max(seconds / profile.num_layers, 1e-12)


def slowest_s(lines: Sequence[Line], counts: Sequence[int]) -> float:
    """Return the seconds of the slowest device; a device without a unit, column or token takes no time."""
    return max(fixed + slope * count if count else 0.0 for (fixed, slope), count in zip(lines, counts, strict=True))


def all_gather_s(cluster: Cluster, ranks: Sequence[int], tokens: Sequence[int], token_bytes: int) -> float:
    """Return T_AG: every position's tokens make n - 1 hops around the ring, in seconds.

    A position forwards its own tokens, then the tokens that arrived before, one message at a time.  A hop takes its
    link's latency and the time of its bytes; no tokens take no time.  The slowest chain of hops counts, so unequal
    links and shares are included.
    """
    return max(
        ring_s(hop_lines(cluster, ranks, token_bytes), tokens, shift=0),
        sum(map(mul, air_slopes(cluster, ranks, token_bytes, shift=0), tokens)),
    )


def air_slopes(cluster: Cluster, ranks: Sequence[int], token_bytes: int, *, shift: int) -> list[float]:
    """Return, for each position, the seconds for which each of its tokens occupies shared air in a ring collective, all
    hops together; 0 on a switch.  shift: see ring_s.
    """
    count = len(ranks)
    if count < 2:
        return [0.0]
    hop_s = [on_air_s(cluster, [(rank, ranks[(at + 1) % count], token_bytes)]) for at, rank in enumerate(ranks)]
    steps = range(shift, count - 1 + shift)
    return [sum(hop_s[(owner + step) % count] for step in steps) for owner in range(count)]


def hop_lines(
    cluster: Cluster, ranks: Sequence[int], token_bytes: int, adds: Sequence[Line] | None = None
) -> list[Line]:
    """Return the line over tokens of each position's hop to the next.

    adds: seconds that each position of a reduce-scatter needs to add the received tokens.
    """
    lines = []
    for position, rank in enumerate(ranks if len(ranks) > 1 else ()):
        to = (position + 1) % len(ranks)
        link, (fixed, slope) = cluster.link(rank, ranks[to]), adds[to] if adds else (0.0, 0.0)
        lines.append((link.latency_s + fixed, token_bytes / link.bytes_per_s + slope))
    return lines


def ring_s(lines: Sequence[Line], tokens: Sequence[int], shift: int) -> float:
    """Return the end of a ring collective.

    lines: the line of each position's hop; empty for a ring of one device.

    shift 0, all-gather: in step j position i sends the tokens of i - j.  shift 1, reduce-scatter: those of i - j - 1.
    """
    hops = [[fixed + slope * count if count else 0.0 for count in tokens] for fixed, slope in lines]
    done = [0.0] * len(hops)
    for step in range(shift, len(hops) - 1 + shift):
        # The data sent now arrived in the previous step, over the link that was busy until then.
        before = enumerate(zip(done, done[-1:] + done[:-1], hops, strict=True))
        done = [(own_s if own_s > other else other) + row[position - step] for position, (own_s, other, row) in before]
    return max(done, default=0.0)


class SequenceTimes(NamedTuple):
    """Seconds of one sequence without overlap.

    layers_s: seconds of all layers, the objective of Eq. 9 for a hybrid plan.

    ends_s: seconds of embedding, head, and the transfer of tokens to their devices and back, which Eq. 6-7 leave out.
    """

    layers_s: float
    ends_s: float

    @property
    def total_s(self) -> float:
        """Return the seconds of the layers and of both ends."""
        return self.layers_s + self.ends_s


def price_plan(
    plan: InferencePlan,
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int | None = None,
    decoder_length: int | None = None,
) -> SequenceTimes:
    """Return the predicted seconds of a sequence of `length` tokens (default: the plan's), for any paradigm."""
    lengths = stack_lengths(profile, length or plan.length or 1, decoder_length)
    of_paradigm = {"hybrid": _hybrid, "tensor": _tensor, "sequence": _sequence, "pipeline": _pipeline}
    layers, ways = of_paradigm[plan.paradigm](plan, profile, cluster, lengths)
    return SequenceTimes(layers, ways + ends_s(profile, plan.ranks[0], lengths))


class Cut(NamedTuple):
    """A hybrid plan in the search: the partitions, and the number of scheme-2 layers in each stack, which come first in
    the stack.
    """

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


class Equation9:
    """Predicts the time of hybrid plans of one profile and cluster by Eq. 6 + Eq. 7; caches each partition, as a move
    changes only one.
    """

    def __init__(self, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> None:
        self.profile, self.cluster, self.lengths = profile, cluster, tuple(lengths)
        self.lines = cache(lambda rank, stack: block_lines(profile, rank, stack, self.lengths))
        self._ring_lines = cache(self._of_ring)
        self._mha_s, self._tensor_s, self._tokens_s = (
            cache(self._of_units),
            cache(self._of_columns),
            cache(self._of_tokens),
        )

    def __call__(self, cut: Cut) -> float:
        """Return the seconds of all layers: Eq. 9."""
        mha, tensor, tokens = (
            self._mha_s(cut.ranks, cut.units),
            self._tensor_s(cut.ranks, cut.columns),
            self._tokens_s(cut.ranks, cut.shares),
        )
        total_s = 0.0
        for stack, (shape, q) in enumerate(zip(self.profile.stacks, cut.second, strict=True)):
            p, (sequence, con, gather, scatter) = shape.num_layers - q, tokens[stack]
            rings = shape.num_layers * num_blocks(shape) - q
            total_s += (
                shape.num_layers * (mha[stack] + con) + p * tensor[stack] + q * sequence + rings * (gather + scatter)
            )
        return total_s

    def ways_s(self, cut: Cut) -> float:
        """Return the seconds to send tokens to their devices and back, and to gather the first stack's output for a
        second.
        """
        total_s = 0.0
        for shape, length in zip(self.profile.stacks, self.lengths, strict=True):
            total_s += _star_s(cut.ranks, self.cluster, proportional_parts(length, cut.shares), shape.hidden_bytes)
            if shape.has_cross_attention:
                first = proportional_parts(self.lengths[0], cut.shares)
                total_s += all_gather_s(self.cluster, cut.ranks, first, self.profile.stacks[0].hidden_bytes)
        return total_s

    def _of(self, part: str, ranks: Ranks, stack: int) -> list[Line]:
        return [self.lines(rank, stack)[part] for rank in ranks]

    def _of_units(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MHA) of a layer of each stack."""
        seconds = []
        for stack, shape in enumerate(self.profile.stacks):
            units = proportional_parts(shape.num_units, parts)
            blocks = ("own", "cross")[: num_blocks(shape) - 1]
            seconds.append(sum(slowest_s(self._of(block, ranks, stack), units) for block in blocks))
        return seconds

    def _of_columns(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MLP), tensor parallel, of a layer of each stack."""
        shapes = enumerate(self.profile.stacks)
        return [
            slowest_s(self._of("tensor", ranks, stack), proportional_parts(shape.columns, parts))
            for stack, shape in shapes
        ]

    def _of_tokens(self, ranks: Ranks, shares: tuple[float, ...]) -> list[tuple[float, float, float, float]]:
        """Return T(MLP), sequence parallel, T(CON), T_AG and T_RS of a layer of each stack."""
        seconds = []
        for stack, length in enumerate(self.lengths):
            tokens = proportional_parts(length, shares)
            sequence, con, hops, adding, airs = self._ring_lines(ranks, stack)
            gather_s, scatter_s = (sum(map(mul, slopes, tokens)) for slopes in airs)
            seconds.append(
                (
                    slowest_s(sequence, tokens),
                    slowest_s(con, tokens),
                    max(ring_s(hops, tokens, 0), gather_s),
                    max(ring_s(adding, tokens, 1), scatter_s),
                )
            )
        return seconds

    def _of_ring(
        self, ranks: Ranks, stack: int
    ) -> tuple[list[Line], list[Line], list[Line], list[Line], tuple[list[float], list[float]]]:
        """Return the lines over tokens of the network, the connections, the hops, and the hops with the receivers'
        additions; and of both collectives the seconds of each token on shared air.
        """
        sequence, con, adds = (self._of(part, ranks, stack) for part in ("sequence", "con", "add"))
        nbytes = self.profile.stacks[stack].hidden_bytes
        gather, scatter = (air_slopes(self.cluster, ranks, nbytes, shift=shift) for shift in (0, 1))
        hops, adding = (hop_lines(self.cluster, ranks, nbytes, added) for added in (None, adds))
        return sequence, con, hops, adding, (gather, scatter)


def _star_s(ranks: Ranks, cluster: Cluster, tokens: Sequence[int], token_bytes: int) -> float:
    """Return the seconds in which position 0 sends every other position its tokens and receives them back."""
    first, total = ranks[0], 0.0
    for rank, count in list(zip(ranks, tokens, strict=True))[1:]:
        if count:
            total += cluster.link(first, rank).transfer_s(count * token_bytes) + cluster.link(rank, first).transfer_s(
                count * token_bytes
            )
    return total


def _hybrid(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return Galaxy+'s seconds: those of the layers (Eq. 6 + Eq. 7), and those of the transfers at both ends."""
    pricer, cut = Equation9(profile, cluster, lengths), cut_of(plan, profile)
    return pricer(cut), pricer.ways_s(cut)


def _tensor(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return Megatron-LM's seconds: an all-reduce of the whole sequence after each block, connections computed on all
    devices.
    """
    layers = ways = 0.0
    for stack, shape in enumerate(profile.stacks):
        units, columns = plan.cut(shape)
        n, nbytes = lengths[stack], lengths[stack] * shape.hidden_bytes
        each = [
            attention_s(profile, rank, stack, count, lengths) for rank, count in zip(plan.ranks, units, strict=True)
        ]
        layer = sum(max(block) for block in zip(*each, strict=True))
        layer += max(
            mlp_tensor_s(profile, rank, stack, count, lengths) for rank, count in zip(plan.ranks, columns, strict=True)
        )
        layer += max(con_s(profile, rank, stack, n) for rank in plan.ranks)
        layers += shape.num_layers * (layer + num_blocks(shape) * collective_s(cluster, ALLREDUCE, plan.ranks, nbytes))
        ways += max((cluster.link(plan.ranks[0], rank).transfer_s(nbytes) for rank in plan.ranks[1:]), default=0.0)
    return layers, ways


def _sequence(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return sequence parallelism's seconds: keys and values of all tokens are gathered, two all-gathers per layer
    (section IV-A).
    """
    layers = ways = 0.0
    for stack, shape in enumerate(profile.stacks):
        tokens, units = plan.tokens(lengths[stack]), shape.num_units
        both = list(zip(plan.ranks, tokens, strict=True))
        attention = max(sum(attention_s(profile, rank, stack, units, lengths, num_tokens)) for rank, num_tokens in both)
        mlp = max(mlp_sequence_s(profile, rank, stack, num_tokens) for rank, num_tokens in both)
        con = max(con_s(profile, rank, stack, num_tokens) for rank, num_tokens in both)
        # One message contains a token's keys and values.
        width = units * shape.kv_unit_bytes if shape.kv_unit_bytes else 2 * shape.hidden_bytes
        layers += shape.num_layers * (attention + mlp + con + all_gather_s(cluster, plan.ranks, tokens, width))
        ways += _star_s(plan.ranks, cluster, tokens, shape.hidden_bytes)
        if shape.has_cross_attention:
            ways += all_gather_s(cluster, plan.ranks, plan.tokens(lengths[0]), profile.stacks[0].hidden_bytes)
    return layers, ways


def _pipeline(
    plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]
) -> tuple[float, float]:
    """Return EdgeShard's seconds for one sequence: one device after the other, with the result sent back to
    the first.
    """
    seconds, layer = 0.0, 0
    for rank, following, count in zip(plan.ranks, (*plan.ranks[1:], plan.ranks[0]), plan.layers, strict=True):
        seconds += sum(
            layer_s(profile, rank, profile.stack_of(number), lengths) for number in range(layer, layer + count)
        )
        layer += count
        if following != rank:
            seconds += cluster.link(rank, following).transfer_s(boundary_bytes(profile, layer, lengths))
    return seconds, 0.0


def boundary_bytes(profile: InferenceProfile, layer: int, lengths: Sequence[int]) -> int:
    """Return the bytes that one device sends to the next before a layer: hidden states, and in a decoder the encoder's
    output too.
    """
    last = profile.num_layers
    stack = profile.stack_of(min(layer, last - 1))
    hidden = lengths[stack] * profile.stacks[stack].hidden_bytes
    if profile.stacks[stack].has_cross_attention and layer < last:
        hidden += lengths[0] * profile.stacks[0].hidden_bytes
    return hidden
