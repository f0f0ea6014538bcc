"""Cut a sequence so that connections, sequence-parallel networks and ring collectives take least (partition S of Galaxy+ Eq. 5-7)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from workbench.core.inference import proportional_parts
from workbench.planners.galaxy_plus.tables import Parts, Ranks, Tables

MOST_IN_PROGRAMME = 10
"""Rings of more devices are not given to the linear programme, whose size is their square."""


def token_cuts(tables: Tables, ranks: Ranks, holders: Sequence[bool]) -> list[Parts]:
    """Return cuts worth a look, tokens only for holders: equal, by speed, and between."""
    n = tables.num_tokens
    speed = []
    for rank, holds in zip(ranks, holders, strict=True):
        each = sum(
            layers * (tables.line("con", rank, stack)[1] + tables.line("sequence", rank, stack)[1])
            for stack, layers in enumerate(tables.layers)
        )
        speed.append(1.0 / max(each, 1e-15) if holds else 0.0)
    whole, count = sum(speed), sum(map(bool, holders))
    found: dict[Parts, None] = {}
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        weights = [part * one / whole + (1 - part) * holds / count for one, holds in zip(speed, holders, strict=True)]
        found[proportional_parts(n, weights)] = None
    return list(found)


def programmed_cuts(tables: Tables, ranks: Ranks, holders: Sequence[bool], seconds: Iterable[tuple[int, ...]]) -> list[Parts]:
    """Return the linear programme's cuts, one for each of `seconds`; none for a ring that is too small or too large for it."""
    if not 2 < len(ranks) <= MOST_IN_PROGRAMME:
        return []
    best = [_programme(tables, ranks, holders, second) for second in dict.fromkeys(seconds)]
    return list(dict.fromkeys(proportional_parts(tables.num_tokens, parts) for parts in best if parts is not None))


def _programme(tables: Tables, ranks: Ranks, holders: Sequence[bool], second: Sequence[int]) -> list[float] | None:
    """Return the best tokens, not whole numbers, as if a device without tokens had fixed costs too; None if HiGHS finds none."""
    n, m = len(ranks), tables.num_tokens
    rows: list[dict[int, float]] = []
    limits: list[float] = []
    price = [0.0] * n

    def new(weight: float) -> int:
        price.append(weight)
        return len(price) - 1

    def below(row: dict[int, float], limit: float) -> None:
        rows.append(row)
        limits.append(limit)

    for stack, (layers, q, rings) in enumerate(zip(tables.layers, second, tables.rings(second), strict=True)):
        scale = tables.lengths[stack] / m
        for what, weight in (("con", layers), ("sequence", q)):
            if weight:
                slowest = new(float(weight))
                for i, rank in enumerate(ranks):
                    fixed, slope = tables.line(what, rank, stack)
                    if holders[i]:
                        below({i: slope * scale, slowest: -1.0}, -fixed)
        for shift in (0, 1):
            last, ends = new(float(rings)), {}
            for step in range(n - 1):
                for i in range(n):
                    owner, to = (i - step - shift) % n, ranks[(i + 1) % n]
                    latency, each = tables.hop(ranks[i], to, stack)
                    if shift:
                        add = tables.line("add", to, stack)
                        latency, each = latency + add[0], each + add[1]
                    if not holders[owner]:
                        latency = 0.0
                    ends[step, i] = new(0.0)
                    row = {owner: each * scale, ends[step, i]: -1.0}
                    if step:
                        below(row | {ends[step - 1, i]: 1.0}, -latency)
                        below(row | {ends[step - 1, (i - 1) % n]: 1.0}, -latency)
                    else:
                        below(row, -latency)
                    if step == n - 2:
                        below({ends[step, i]: 1.0, last: -1.0}, 0.0)
    at = [(number, column, value) for number, row in enumerate(rows) for column, value in row.items()]
    row_at, column_at, values = zip(*at, strict=True)
    matrix = csr_matrix((values, (row_at, column_at)), shape=(len(rows), len(price)))
    whole = csr_matrix(([1.0] * n, ([0] * n, range(n))), shape=(1, len(price)))
    bounds = np.zeros((len(price), 2))
    bounds[:, 1] = np.inf
    bounds[:n, 1] = [m if holds else 0 for holds in holders]
    answer = linprog(price, A_ub=matrix, b_ub=limits, A_eq=whole, b_eq=[m], bounds=bounds, method="highs-ds")
    return [max(0.0, float(number)) for number in answer.x[:n]] if answer.status == 0 else None


def polish_tokens(tables: Tables, ranks: Ranks, tokens: Parts, second: Sequence[int], *, first_step: int = 1) -> Parts:
    """Return tokens after moves from position to position that each save time; nobody without tokens gets any, nor loses the last."""
    best, step = tables.tokens_s(ranks, tokens, second), first_step
    while step:
        moved = False
        for giver, taker in moves(tokens):
            if tokens[giver] <= step or not tokens[taker]:
                continue
            parts = list(tokens)
            parts[giver] -= step
            parts[taker] += step
            moved_parts = tuple(parts)
            if tables.tokens_bound_s(ranks, moved_parts, second) >= best * (1 - 1e-12):
                continue
            value = tables.tokens_s(ranks, moved_parts, second)
            if value < best * (1 - 1e-12):
                best, tokens, moved = value, moved_parts, True
        if not moved:
            step //= 2
    return tokens


def moves(parts: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of a giver and a taker: all of few positions, of many those from the two largest parts to the eight smallest."""
    n = len(parts)
    if n <= MOST_IN_PROGRAMME:
        return list(itertools.permutations(range(n), 2))
    by_size = sorted(range(n), key=lambda position: -parts[position])
    return [(giver, taker) for giver in by_size[:2] for taker in by_size[-8:] if giver != taker]
