"""The terms of Eq. 5-7 and 10: seconds of a layer's blocks, and of the ring's collectives (Galaxy+, section III-C)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.costs import on_air_s
from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.planners.problem import Problem

Line = tuple[float, float]
"""Fixed seconds and seconds per item, of a time that is 0 for no items."""
LARGE_RING = 20
"""Positions from which on arrays compute the steps of a ring faster than lists."""


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


def problem_for(
    profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int], **kept: Any
) -> Problem[InferenceProfile]:
    """Return the problem of planning sequences with so many tokens in each stack.  kept: kept_tokens and kept_texts of
    Problem.
    """
    decoder_length = lengths[1] if len(lengths) > 1 else None
    return Problem(profile, cluster, sequence_length=lengths[0], decoder_length=decoder_length, **kept)


def num_blocks(shape: StackShape) -> int:
    """Return how many blocks of a layer end in a synchronisation under scheme 1: 2, or 3 with cross-attention."""
    return 3 if shape.has_cross_attention else 2


class LayerTimes:
    """Seconds of one layer's blocks on one device (Eq. 5).

    stack: the layer's stack.  lengths: tokens of each stack.  Every query is paired with every key, also under a causal
    mask, whose upper half is computed and masked.
    """

    def __init__(self, profile: InferenceProfile, rank: int, stack: int, lengths: Sequence[int]) -> None:
        self._shape, self._costs = profile.stacks[stack], profile.costs[rank][stack]
        self._length, self._memory_length = lengths[stack], lengths[0]

    def attention_s(self, units: int, tokens: int | None = None) -> tuple[float, ...]:
        """Return T(MHA, A_d, d), one number for each attention block (two in a T5 decoder, whose cross-attention reads
        the first stack's output).

        tokens: with sequence parallelism the device's own tokens; None: all.
        """
        n, seconds = self._length if tokens is None else tokens, self._costs.seconds
        self_s = seconds("QKV", n, units) + seconds("ATT", n * self._length, units) + seconds("OUT", n, units)
        if not n or not self._shape.has_cross_attention:
            return (self_s,)
        cross = seconds("CQ", n, units) + seconds("CKV", self._memory_length, units)
        return self_s, cross + seconds("CATT", n * self._memory_length, units) + seconds("COUT", n, units)

    def mlp_s(self, *, columns: int | None = None, tokens: int | None = None) -> float:
        """Return T(MLP): of some columns of every token (B_d, tensor parallel), or of every column of some tokens (S_d,
        sequence parallel).
        """
        tokens = self._length if tokens is None else tokens
        columns = self._shape.columns if columns is None else columns
        return self._costs.seconds("UP", tokens, columns) + self._costs.seconds("DOWN", tokens, columns)

    def con_s(self, tokens: int) -> float:
        """Return T(CON, S_d, d): all connections of the layer, one after each block (Eq. 6 has one term for them)."""
        return num_blocks(self._shape) * self._costs.seconds("CONN", tokens)

    def whole_s(self) -> float:
        """Return the seconds of the whole layer on this device."""
        return sum(self.attention_s(self._shape.num_units)) + self.mlp_s() + self.con_s(self._length)

    def lines(self) -> dict[str, Line]:
        """Return fixed seconds and seconds for each unit ('own' and 'cross' attention), column ('tensor') or token (the
        others).

        Every time is affine from 1 on, and 0 for no items.
        """
        shape = self._shape
        times: dict[str, tuple[Callable[[int], float], int]] = {
            "own": (lambda count: self.attention_s(count)[0], shape.num_units),
            "tensor": (lambda count: self.mlp_s(columns=count), shape.columns),
            "sequence": (lambda count: self.mlp_s(tokens=count), self._length),
            "con": (self.con_s, self._length),
            "add": (lambda count: self._costs.seconds("ADD", count), self._length),
        }
        if shape.has_cross_attention:
            times["cross"] = (lambda count: self.attention_s(count)[1], shape.num_units)
        lines = {}
        for part, (seconds, most) in times.items():
            low, high = seconds(1), seconds(most)
            slope = (high - low) / (most - 1) if most > 1 else 0.0
            lines[part] = low - slope, slope
        return lines


def ends_s(profile: InferenceProfile, rank: int, lengths: Sequence[int]) -> float:
    """Return the seconds of embedding and head on the device at position 0."""
    pairs = zip(profile.costs[rank], lengths, strict=True)
    return sum(costs.seconds("EMB", n) + costs.seconds("HEAD", n) for costs, n in pairs)


def capacity(profile: InferenceProfile, rank: int, lengths: Sequence[int]) -> float:
    """Return V_d of Eq. 10, layers per second: the inverse of one layer's time, with two stacks of the mean layer's
    time.
    """
    seconds = sum(
        shape.num_layers * LayerTimes(profile, rank, stack, lengths).whole_s()
        for stack, shape in enumerate(profile.stacks)
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
    if count < 2 or cluster.medium == "switch":
        return [0.0] * count
    hop_s = [on_air_s(cluster, [(rank, ranks[(place + 1) % count], token_bytes)]) for place, rank in enumerate(ranks)]
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
    steps = range(shift, len(lines) - 1 + shift)
    if len(lines) >= LARGE_RING:
        places, (fixed_s, slopes_s) = np.arange(len(lines)), np.array(lines).T[:, :, None]
        hops_s = np.where(np.array(tokens) > 0, fixed_s + slopes_s * tokens, 0.0)
        done_s = np.zeros(len(lines) + 1)  # of the last position, and of all from the first
        for sent_s in hops_s[places, places - np.array(steps)[:, None]]:
            done_s[1:] = np.maximum(done_s[1:], done_s[:-1]) + sent_s
            done_s[0] = done_s[-1]
        return float(done_s.max())
    hops = [[fixed + slope * count if count else 0.0 for count in tokens] for fixed, slope in lines]
    done = [0.0] * len(hops)
    for step in steps:
        # The data sent now arrived in the previous step, over the link that was busy until then.
        before = enumerate(zip(done, done[-1:] + done[:-1], hops, strict=True))
        done = [(own_s if own_s > other else other) + row[position - step] for position, (own_s, other, row) in before]
    return max(done, default=0.0)


def star_s(ranks: Ranks, cluster: Cluster, tokens: Sequence[int], token_bytes: int) -> float:
    """Return the seconds in which position 0 sends every other position its tokens and receives them back."""
    first, total = ranks[0], 0.0
    for rank, count in list(zip(ranks, tokens, strict=True))[1:]:
        if count:
            total += cluster.link(first, rank).transfer_s(count * token_bytes) + cluster.link(rank, first).transfer_s(
                count * token_bytes
            )
    return total


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
