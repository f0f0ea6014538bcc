"""Time the operations of one layer on this host and fit each to its PieceCost (Galaxy+, section III-C, 'Galaxy+
Profiler').

Each kind is timed over a small grid of tokens x units on one thread, all in turn (timing.py).  The fit is non-negative
least squares of the relative errors: a negative cost per token would make some partition appear free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.methods.galaxy_plus.costs import working_bytes
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.profiler.timing import Call, core_clock, time_calls

Makers = Mapping[str, Callable[[int, int], Call]]
"""The functions to time for one stack: kind -> function of (tokens, units).  ATT and CATT get the query tokens and have
as many keys."""

TOKENS = (8, 32, 96, 192, 320)
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of a layer's units and columns in the grid."""
PAIRED = ("ATT", "CATT")
UNCUT = ("CONN", "ADD", "EMB", "ENTER", "HEAD")


def measure_inference(
    name: str,
    stacks: Sequence[StackShape],
    makers: Sequence[Makers],
    *,
    tokens: Sequence[int],
    shares: Sequence[float],
    budget_s: float,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> InferenceProfile:
    """Return the costs of each stack's operations on one core of this host, as a profile of one device.

    makers: the functions to time, by stack.  tokens, shares: the grid; at least one head.
    """
    if len(makers) != len(stacks) or not stacks:
        raise ConfigError(
            f"Measuring '{name}' was asked for.",
            f"{len(stacks)} stacks, {len(makers)} sets of calls.",
            "Give one for each.",
        )
    cells: dict[tuple[int, str, int, int], Call] = {}
    for index, (sizes, stack_makers) in enumerate(zip(stacks, makers, strict=True)):
        for kind, make in stack_makers.items():
            for units in _units(sizes, kind, shares):
                for count in tokens:
                    cells[index, kind, count, units] = make(count, units)
    with torch.inference_mode():
        timings = time_calls(cells, budget_s=budget_s, clock=core_clock())
    samples: list[dict[str, list[tuple[int, int, float]]]] = [defaultdict(list) for _ in stacks]
    for (index, kind, count, units), seconds in timings.items():
        samples[index][kind].append((count * count if kind in PAIRED else count, units, seconds))
    costs = tuple(
        StackTimes(pieces={kind: fit_piece(kind, kind_points) for kind, kind_points in kind_samples.items()})
        for kind_samples in samples
    )
    return InferenceProfile(
        model=name,
        source="measured",
        stacks=tuple(stacks),
        costs=(costs,),
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        working_bytes_per_token=max(map(working_bytes, stacks)),
    )


def fit_piece(kind: str, points: Sequence[tuple[int, int, float]]) -> PieceCost:
    """Return the cost that fits (tokens, units, seconds) with the least squares of relative errors, no part of it
    negative.

    Parts that the samples cannot separate (units that never vary) stay 0.
    """
    if not points or min(seconds for _, _, seconds in points) <= 0:
        raise ConfigError(
            f"Fitting the cost of {kind} was asked for.",
            f"{len(points)} samples, or none took time.",
            "Time it longer.",
        )
    terms: dict[str, Callable[[int, int], float]] = {"fixed_s": lambda t, u: 1.0, "token_s": lambda t, u: t}
    if len({units for _, units, _ in points}) > 1:
        terms |= {"unit_s": lambda t, u: u, "token_unit_s": lambda t, u: t * u}
    rows = np.array([[term(tokens, units) / seconds for term in terms.values()] for tokens, units, seconds in points])
    scale = rows.max(axis=0)  # for very unequal sizes: pairs times units against 1
    from scipy.optimize import nnls  # slow to import, and only measurements need it

    solution, _ = nnls(rows / scale, np.ones(len(points)))
    return PieceCost(**{name: float(value) for name, value in zip(terms, solution / scale, strict=True)})


def _units(sizes: StackShape, kind: str, shares: Sequence[float]) -> tuple[int, ...]:
    if kind in UNCUT:
        return (1,)
    full_size = sizes.columns if kind in ("UP", "DOWN") else sizes.num_units
    return tuple(sorted({max(1, round(share * full_size)) for share in shares}))
