"""Time the operations of one layer on this host and fit each to its PieceCost (Galaxy+, section III-C, 'Galaxy+ Profiler').

Each kind is timed over a small grid of tokens x units on one thread, all in turn (timing.py).  The fit is non-negative least squares of the
relative errors: a negative cost per token would make some partition appear free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from workbench.core.errors import ConfigError
from workbench.core.inference import InferenceProfile, PieceCost, StackCosts
from workbench.profiler.cache import cached
from workbench.profiler.inference import StackSizes, working_bytes
from workbench.profiler.timing import Call, time_calls

Makers = Mapping[str, Callable[[int, int], Call]]
"""The functions to time for one stack: kind -> function of (tokens, units).  ATT and CATT get the query tokens and have as many keys."""

TOKENS = (8, 32, 96, 192, 320)
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of a layer's units and columns in the grid."""
PAIRED = ("ATT", "CATT")
UNCUT = ("CONN", "ADD", "EMB", "ENTER", "HEAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSample:
    """One cell of the grid.  tokens: query-key pairs for ATT and CATT.  seconds: measured; fitted_s: by the fit."""

    tokens: int
    units: int
    seconds: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Return the relative error of the fit."""
        return self.fitted_s / self.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFit:
    """One kind's fit in one stack."""

    stack: int
    kind: str
    cost: PieceCost
    samples: tuple[PieceSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredInference:
    """One core of this host: a profile of one device, and the quality of its fit."""

    profile: InferenceProfile
    fits: tuple[PieceFit, ...]


def measure_inference(
    name: str,
    stacks: Sequence[StackSizes],
    makers: Sequence[Makers],
    *,
    tokens: Sequence[int],
    shares: Sequence[float],
    budget_s: float,
    first_bytes: int = 0,
    last_bytes: int = 0,
) -> MeasuredInference:
    """Return the costs of each stack's operations on one core of this host.

    makers: the functions to time, by stack.  tokens, shares: the grid; at least one head.
    """
    if len(makers) != len(stacks) or not stacks:
        raise ConfigError(f"Measuring '{name}' was asked for.", f"{len(stacks)} stacks, {len(makers)} sets of calls.", "Give one for each.")
    cells: dict[tuple[int, str, int, int], Call] = {}
    for index, (sizes, made) in enumerate(zip(stacks, makers, strict=True)):
        for kind, make in made.items():
            for units in _units(sizes, kind, shares):
                for count in tokens:
                    cells[index, kind, count, units] = make(count, units)
    with torch.inference_mode():
        timings = time_calls(cells, budget_s=budget_s)
    fits = []
    for index, made in enumerate(makers):
        for kind in made:
            found = [
                (count * count if kind in PAIRED else count, units, timings[index, kind, count, units])
                for stack, own, count, units in cells
                if (stack, own) == (index, kind)
            ]
            fits.append(fit_piece(index, kind, found))
    costs = tuple(StackCosts(pieces={fit.kind: fit.cost for fit in fits if fit.stack == index}) for index in range(len(stacks)))
    profile = InferenceProfile(
        model=name,
        source="measured",
        stacks=tuple(sizes.shape for sizes in stacks),
        costs=(costs,),
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        working_bytes_per_token=max(map(working_bytes, stacks)),
    )
    return MeasuredInference(profile=profile, fits=tuple(fits))


def cached_inference(
    key: Mapping[str, Any], measure: Callable[[], MeasuredInference], *, folder: Path | None = None, refresh: bool = False
) -> tuple[MeasuredInference, str]:
    """Return the measurement cached under `key` on this machine, or measure and cache it; and a note on its source (profiler.cache)."""
    return cached({"inference": 1, **key}, measure, MeasuredInference, folder=folder, refresh=refresh)


def fit_piece(stack: int, kind: str, found: Sequence[tuple[int, int, float]]) -> PieceFit:
    """Return the cost that fits (tokens, units, seconds) with the least squares of relative errors, no part of it negative.

    Parts that the samples cannot separate (units that never vary) stay 0.
    """
    if not found or min(seconds for _, _, seconds in found) <= 0:
        raise ConfigError(f"Fitting the cost of {kind} was asked for.", f"{len(found)} samples, or none took time.", "Time it longer.")
    terms: dict[str, Callable[[int, int], float]] = {"fixed_s": lambda t, u: 1.0, "token_s": lambda t, u: t}
    if len({units for _, units, _ in found}) > 1:
        terms |= {"unit_s": lambda t, u: u, "token_unit_s": lambda t, u: t * u}
    rows = np.array([[term(tokens, units) / seconds for term in terms.values()] for tokens, units, seconds in found])
    scale = rows.max(axis=0)  # for very unequal sizes: pairs times units against 1
    solution, _ = nnls(rows / scale, np.ones(len(found)))
    cost = PieceCost(**{name: float(value) for name, value in zip(terms, solution / scale, strict=True)})
    samples = tuple(
        PieceSample(tokens=tokens, units=units, seconds=seconds, fitted_s=cost.seconds(tokens, units)) for tokens, units, seconds in found
    )
    return PieceFit(stack=stack, kind=kind, cost=cost, samples=samples)


def _units(sizes: StackSizes, kind: str, shares: Sequence[float]) -> tuple[int, ...]:
    if kind in UNCUT:
        return (1,)
    whole = sizes.shape.columns if kind in ("UP", "DOWN") else sizes.shape.num_units
    return tuple(sorted({max(1, round(share * whole)) for share in shares}))
