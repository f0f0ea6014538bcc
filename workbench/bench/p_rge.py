"""`workbench bench p_rge`: steps of MeZO, as published, over steps of P-RGE, interleaved in one process (P-RGE, section 4.2, Fig. 6)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, get_args

import torch

from workbench.bench.p_rge_batches import Prompts, prompts
from workbench.bench.p_rge_memory import memory_points
from workbench.core.errors import ConfigError, did_you_mean
from workbench.models.products import library
from workbench.models.quantization import QuantizationConfig
from workbench.models.quantization.config import StorageType
from workbench.models.zeroth_order import (
    CausalModel,
    Copies,
    Execution,
    FirstOrder,
    Mezo,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
)
from workbench.tasks.prompts import PromptBatch

MODEL, LENGTH, THREADS = "SmolLM2-135M", 64, 2
QUERIES, BATCHES = (1, 4, 16), (1, 4, 16)
ROUNDS = 5
CHOICE_ROUNDS = 2
"""Rounds in which 'auto' tries the executions, before those that count."""
CLEARLY = 0.03
"""An execution that batches passes is chosen where it takes at least so much less than one after the other, which needs least memory."""
LONG_S = 30.0
"""Where a round takes longer there are half as many."""
LEARNING_RATE = 1e-6
"""Small: what is timed is not to wander off."""
STORAGES: tuple[StorageType, ...] = ("nf4", "int8")
STORED = ((1, 1), (4, 1))
"""(q, E) at which whole steps are compared on stored weights too."""
SECTIONS = ("steps", "copies", "full", "quantized", "memory")

Step = Callable[[int], object]
Progress = Callable[[str], None]


def bench(
    progress: Progress = print,
    *,
    only: Sequence[str] = (),
    model: str = MODEL,
    length: int = LENGTH,
    grid: Sequence[tuple[int, int]] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Return step times of each side and their ratios, with the spread over the rounds, and peak memory of child processes.

    only: sections to measure: steps, copies (all of B kept, or made layer by layer), full (MeZO over all parameters), quantized, memory;
    none is all.
    grid: (q, E) pairs, None for all of QUERIES x BATCHES.  Every row of a batch has `length` tokens.
    Raises ConfigError for an unknown section.
    """
    sections = tuple(only) or SECTIONS
    for name in sections:
        if name not in SECTIONS:
            todo = did_you_mean(name, SECTIONS)
            raise ConfigError(f"The section '{name}' of the benchmark was asked for.", f"There are {', '.join(SECTIONS)}.", todo)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with torch.random.fork_rng(devices=[]):
            return _bench(progress, sections, model, length, _grid() if grid is None else tuple(grid), rounds)
    finally:
        torch.set_num_threads(threads)


def _bench(
    progress: Progress, sections: Sequence[str], model: str, length: int, grid: Sequence[tuple[int, int]], rounds: int
) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    data = prompts(model, length)
    if "steps" in sections:
        points += _step_points(load_causal_model(model, TrainableConfig()), data, grid, rounds, progress, "float32")
    if "copies" in sections:
        points += _copies_points(load_causal_model(model, TrainableConfig()), data, grid, rounds, progress)
    if "full" in sections:
        points += _full_points(model, data, rounds, progress)
    if "quantized" in sections:
        for storage in STORAGES:
            quantized = load_causal_model(model, TrainableConfig(), quantization=QuantizationConfig(storage=storage))
            points += _storage_points(quantized, data, grid, rounds, progress, storage)
            points += _step_points(quantized, data, [point for point in grid if point in STORED], rounds, progress, storage)
    memory = memory_points(model, length, progress) if "memory" in sections else []
    return {
        "name": "p_rge",
        "label": "measured on this machine, one process; memory in a child process for each side",
        "what": f"MeZO's step over P-RGE's at {length} tokens; both with LoRA-FA (rank 16, q and v) and the same noise, median of"
        f" {rounds} interleaved rounds ({rounds // 2} where one takes over {LONG_S:.0f} s); P-RGE's execution is the fastest of"
        f" {CHOICE_ROUNDS} rounds before, or sequential where none takes {CLEARLY:.0%} less",
        "model": model,
        "threads": THREADS,
        "products": library(),
        "sequence_length": length,
        "smallest_ratio": min((point["ratio"] for point in points if point["section"] == "steps"), default=None),
        "memory": memory,
        "points": points,
    }


def _grid() -> tuple[tuple[int, int], ...]:
    return tuple((queries, batch) for queries in QUERIES for batch in BATCHES)


def _step_points(
    model: CausalModel, data: Prompts, grid: Sequence[tuple[int, int]], rounds: int, progress: Progress, storage: str
) -> list[dict[str, Any]]:
    """Return MeZO's steps over P-RGE's, both over LoRA-FA, for each (q, E)."""
    found = []
    for queries, batch in grid:
        config = ZerothOrderConfig(queries=queries, learning_rate=LEARNING_RATE)
        rows = data.rows(batch)
        estimators = {execution: Prge(model, replace(config, execution=execution)) for execution in _sensible(queries)}
        sides = {str(execution): _steps(estimator, rows) for execution, estimator in estimators.items()}
        tried = interleaved(sides, CHOICE_ROUNDS)
        chosen = _fastest({execution: median(seconds) for execution, seconds in tried.items()})
        mezo = Mezo(model, config)
        seconds = interleaved({"MeZO": _steps(mezo, rows), "P-RGE": sides[chosen]}, rounds)
        point = _ratio_point("steps", queries, batch, seconds["MeZO"], seconds["P-RGE"])
        others = {f"{execution}_ms": 1e3 * median(tried[execution]) for execution in estimators}
        found.append(point | {"weights": storage, "execution": chosen, "tried": others})
        progress(_line(found[-1]))
    return found


def _fastest(seconds: Mapping[str, float]) -> str:
    """Return the fastest execution: the sequential one, unless another is clearly faster."""
    best = min(seconds, key=lambda execution: seconds[execution])
    return best if seconds[best] < (1 - CLEARLY) * seconds["sequential"] else "sequential"


def _copies_points(
    model: CausalModel, data: Prompts, grid: Sequence[tuple[int, int]], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return steps with all perturbed copies kept over steps with one B, whose copies are made for one layer at a time, for E = 1."""
    found = []
    for queries in dict.fromkeys(queries for queries, _ in grid):
        config, rows = ZerothOrderConfig(queries=queries, learning_rate=LEARNING_RATE), data.rows(1)
        sides = {copies: _steps(Prge(model, replace(config, copies=copies)), rows) for copies in get_args(Copies)}
        seconds = interleaved(sides, rounds)
        point = _ratio_point("copies", queries, 1, seconds["kept"], seconds["per_layer"])
        found.append(point | {"weights": "float32", "execution": config.execution})
        progress(_line(found[-1]))
    return found


def _full_points(model: str, data: Prompts, rounds: int, progress: Progress) -> list[dict[str, Any]]:
    """Return MeZO over all parameters, and first-order LoRA-FA, over P-RGE at q = 1 and q = 4 with E = 1 and 4.

    Both at as many samples a step: their batches have q x E rows.
    """
    adapted, whole = load_causal_model(model, TrainableConfig()), load_causal_model(model, TrainableConfig(technique="full"))
    first_order = FirstOrder(load_causal_model(model, TrainableConfig()), "sgd", LEARNING_RATE)
    found = []
    for queries, batch in ((1, 1), (1, 4), (4, 1), (4, 4)):
        own = Prge(adapted, ZerothOrderConfig(queries=queries, learning_rate=LEARNING_RATE))
        mezo = Mezo(whole, ZerothOrderConfig(queries=1, epsilon=1e-3, learning_rate=LEARNING_RATE))
        rows, all_rows = data.rows(batch), data.rows(queries * batch)
        sides: dict[str, Step] = {
            "P-RGE": _steps(own, rows),
            "MeZO": _steps(mezo, all_rows),
            "first-order": _first_order_steps(first_order, all_rows),
        }
        seconds = interleaved(sides, rounds)
        point = _ratio_point("full", queries, batch, seconds["MeZO"], seconds["P-RGE"])
        found.append(point | {"weights": "float32", "execution": "both", "first_order_ms": 1e3 * median(seconds["first-order"])})
        progress(_line(found[-1]))
    return found


def _storage_points(
    model: CausalModel, data: Prompts, grid: Sequence[tuple[int, int]], rounds: int, progress: Progress, storage: str
) -> list[dict[str, Any]]:
    """Return the two passes of one query one after the other over both in one, as Fig. 6 has it, for each E.

    Apart, every pass dequantizes all weights for itself.
    """
    found = []
    for batch in dict.fromkeys(batch for _, batch in grid):
        config = ZerothOrderConfig(queries=1, learning_rate=LEARNING_RATE)
        apart, together = (Prge(model, replace(config, execution=execution)) for execution in _SIGNS)
        rows = data.rows(batch)
        seconds = interleaved({"apart": _steps(apart, rows), "together": _steps(together, rows)}, rounds)
        found.append(
            _ratio_point("quantized", 1, batch, seconds["apart"], seconds["together"]) | {"weights": storage, "execution": "inner"}
        )
        progress(_line(found[-1]))
    return found


_SIGNS: tuple[Execution, Execution] = ("sequential", "inner")


def interleaved(sides: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side's step in each round, the order turned round from one to the next, after a step to warm up.

    Where the warm-up takes longer than LONG_S it counts as a round, and there are half as many rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}

    def play(turn: int, step: int) -> float:
        begun = time.perf_counter()
        for name in sorted(sides, reverse=bool(turn % 2)):
            begin = time.perf_counter()
            sides[name](step)
            seconds[name].append(time.perf_counter() - begin)
        return time.perf_counter() - begun

    if play(0, 0) > LONG_S:
        for turn in range(1, rounds // 2):
            play(turn, turn)
        return seconds
    for of_side in seconds.values():
        of_side.clear()
    for turn in range(rounds):
        play(turn, turn + 1)
    return seconds


def _steps(estimator: Prge | Mezo, rows: PromptBatch) -> Step:
    return lambda step: estimator.step(rows, step)


def _first_order_steps(estimator: FirstOrder, rows: PromptBatch) -> Step:
    return lambda step: estimator.step(rows)


def _sensible(queries: int) -> tuple[Execution, ...]:
    """Return the executions that differ: with one query the outer loop has nothing to batch."""
    known: tuple[Execution, ...] = get_args(Execution)
    return tuple(one for one in known if queries > 1 or one in ("sequential", "both"))


AGAINST = {
    "steps": "MeZO, LoRA-FA",
    "copies": "all copies kept",
    "full": "MeZO, all parameters",
    "quantized": "one sign after the other",
}
"""What P-RGE is compared with in each section."""


def _ratio_point(section: str, queries: int, batch: int, slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """Return a point: medians, and the ratio round by round."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    return {
        "section": section,
        "q": queries,
        "E": batch,
        "against": AGAINST[section],
        "against_ms": 1e3 * median(slow),
        "prge_ms": 1e3 * median(fast),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def _line(point: Mapping[str, Any]) -> str:
    sides = f"{point['against']} {point['against_ms']:.0f} ms over P-RGE {point['prge_ms']:.0f} ms ({point['execution']})"
    ratio = f"{point['ratio']:.2f} ({point['ratio_min']:.2f} to {point['ratio_max']:.2f})"
    return f"{point['weights']} q={point['q']} E={point['E']}: {sides} = {ratio}"
