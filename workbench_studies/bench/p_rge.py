"""`workbench bench p_rge`: steps of MeZO, as published, over steps of P-RGE, interleaved in one process (P-RGE, section
4.2, Fig. 6).

And peak memory of P-RGE, inference and first-order LoRA-FA, each in its own child process (Table 3): the peak resident
memory minus the process's memory after loading the runtime and before loading the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from statistics import median
from typing import Any, Literal, get_args

import torch

from workbench.core.names import StorageType
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.options import Execution
from workbench.methods.p_rge.zeroth_order import (
    CausalModel,
    Copies,
    FirstOrder,
    Mezo,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
)
from workbench.models.matmul import matmul_backend
from workbench.models.quantization import QuantizationConfig
from workbench.profiler.descriptions import MODELS
from workbench.profiler.timing import torch_threads
from workbench.runtime.memory import measured_in_child
from workbench.tasks import load_task
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, collate_prompts
from workbench.tasks.prompts.encoding import EncodedRow
from workbench_studies.bench.frame import (
    LONG_S,
    Figures,
    Progress,
    Step,
    interleaved,
    line_of,
    peak_bytes,
    ratios,
    require_words,
)
from workbench_studies.papers.p_rge.counted import MemoryRule, forward_memory

Side = Literal["inference", "P-RGE", "P-RGE, kept copies", "first-order LoRA-FA"]
SETTINGS = ((1, 16), (4, 4), (16, 1))
"""(q, E): the same total batch of 16; with both signs, P-RGE has 32 rows in a pass, and so does inference."""
STEPS = 3
SMALL = "tiny-llama"
"""Runs before anything is measured, so that all libraries are loaded."""
SENTENCES = 400


@cache
def prompts(model: str, length: int, loss: str = "vocabulary") -> EncodedPrompts:
    """Return prompts of `length` tokens for a model: the tokens of real sentences, truncated, then the prompt's own end
    and label word.

    loss: 'vocabulary', or 'label_words' alone.
    """
    task = load_task("sentiment", prompted=True, train_samples=SENTENCES)
    encoded = model_encoder(task.template, model, length).split(task.train.prompts)
    stream = list(chain.from_iterable(row.ids for row in encoded.rows))
    rows = []
    for index in range(min(len(stream) // length, len(encoded))):
        end = encoded.rows[index]
        filled = [*stream[index * length : (index + 1) * length - len(end.ids)], *end.ids]
        rows.append(EncodedRow(ids=tuple(filled[-length:]), targets=end.targets, first_position=length - 1))
    count = len(rows)
    choices = encoded.label_ids if loss == "label_words" else ()
    return replace(
        encoded, rows=tuple(rows), labels=encoded.labels[:count], sample_ids=encoded.sample_ids[:count], choices=choices
    )


def batch_of(encoded: EncodedPrompts, count: int, first: int = 0) -> PromptBatch:
    """Return a batch of so many rows."""
    return collate_prompts(encoded, [index % len(encoded) for index in range(first, first + count)])


def prge_step(causal: CausalModel, batch: PromptBatch, queries: int, **settings: Any) -> Step:
    """Return P-RGE's step on a batch."""
    config = ZerothOrderConfig(queries=queries, learning_rate=LEARNING_RATE, **settings)
    return partial(Prge(causal, config).step, batch)


def memory_points(model: str, length: int, progress: Progress) -> list[Figures]:
    """Return each side's peak, and its ratio to the peak of inference with the same number of rows."""
    points = []
    for queries, batch in SETTINGS:
        peaks = {
            side: measured_in_child(side_peak_bytes, side, model, length, queries, batch) for side in get_args(Side)
        }
        for side, peak in peaks.items():
            points.append(
                {
                    "side": side,
                    "q": queries,
                    "E": batch,
                    "peak_mb": peak / 1e6,
                    "over_inference": peak / peaks["inference"],
                    "counted_mb": _counted_mb(side, model, length, queries, batch),
                }
            )
            progress(line_of(points[-1]))
    return points


def side_peak_bytes(side: str, model: str, length: int, queries: int, batch: int) -> int:
    """Return this process's peak minus the memory of the runtime alone."""
    torch.set_num_threads(2)
    rows = prompts(model, length)
    _run(side, load_causal_model(SMALL, TrainableConfig()), prompts(SMALL, length), 1, 1)
    return peak_bytes(
        lambda: load_causal_model(model, TrainableConfig()), lambda causal: _run(side, causal, rows, queries, batch)
    )


def _run(side: str, causal: CausalModel, rows: EncodedPrompts, queries: int, batch: int) -> None:
    step: Step
    if side == "inference":
        all_rows = batch_of(rows, 2 * queries * batch)
        step = torch.inference_mode()(lambda number: causal.part_losses(all_rows))
    elif side == "first-order LoRA-FA":
        reference = FirstOrder(causal, "sgd", LEARNING_RATE)
        step = partial(reference.step, batch_of(rows, queries * batch))
    else:
        copies: Copies = "kept" if side.endswith("copies") else "per_layer"
        step = prge_step(causal, batch_of(rows, batch), queries, copies=copies)
    for number in range(STEPS):
        step(number)


def _counted_mb(side: str, model: str, length: int, queries: int, batch: int) -> float | None:
    """Return the analytic model's megabytes in float32, where it describes the side: forward-only, logits of label
    words alone.
    """
    if model not in MODELS or side.startswith("first-order"):
        return None
    rule = MemoryRule(weight_bytes=4.0, logit_bytes=8.0, activation_bytes=4.0, copy_bytes=4.0)
    copies = 2 * queries if side.endswith("copies") else 1
    rows = 2 * queries * batch
    return (
        sum(forward_memory(MODELS[model], rule, rows=rows, sequence_length=length, copies=copies, targets=1).values())
        / 1e6
    )


MODEL, LENGTH, THREADS = "SmolLM2-135M", 64, 2
GRID = tuple(product((1, 4, 16), (1, 4, 16)))
"""(q, E)"""
ROUNDS = 5
CHOICE_ROUNDS = 2
"""Rounds in which 'auto' tries the executions, before the measured rounds."""
CLEARLY = 0.03
"""Batched passes are chosen if they save at least this fraction over one pass after the other, which needs least
memory."""
LEARNING_RATE = 1e-6
"""Small, so that the timed training stays stable."""
STORAGES: tuple[StorageType, ...] = ("nf4", "int8")
STORED = ((1, 1), (4, 1))
"""(q, E) for which whole steps are also compared with quantized weights."""
AGAINST = {
    "steps": "MeZO, LoRA-FA",
    "copies": "all copies kept",
    "full": "MeZO, all parameters",
    "quantized": "one sign after the other",
}
"""The baseline of P-RGE in each section."""
WORDS = (*AGAINST, "memory")
"""The sections."""

Grid = Sequence[tuple[int, int]]
Points = Iterator[Figures]


def bench(
    progress: Progress = print,
    *,
    only: Sequence[str] = (),
    model: str = MODEL,
    length: int = LENGTH,
    grid: Grid = GRID,
    rounds: int = ROUNDS,
) -> Figures:
    """Return step times of each side and their ratios, with the spread over the rounds, and peak memory of child
    processes.

    only: sections to measure: steps, copies (all copies of B stored, or made layer by layer), full (MeZO over all
    parameters), quantized, memory; none is all.
    grid: (q, E) pairs.  Every row of a batch has `length` tokens.
    Raises ConfigError for an unknown section.
    """
    require_words(only, WORDS)
    sections = tuple(only) or WORDS
    points: list[Figures] = []
    with torch_threads(THREADS), torch.random.fork_rng(devices=[]):
        for point in _points(sections, model, length, grid, rounds):
            points.append(point)
            progress(line_of(point))
        memory = memory_points(model, length, progress) if "memory" in sections else []
    return {
        "label": "measured on this machine, one process; memory in a child process for each side",
        "what": f"MeZO's step over P-RGE's at {length} tokens; both with LoRA-FA (rank 16, q and v) and the same "
        "noise, "
        "median of"
        f" {rounds} interleaved rounds ({rounds // 2} where one takes over {LONG_S:.0f} s); P-RGE's execution is "
        "the fastest of"
        f" {CHOICE_ROUNDS} rounds before, or sequential where none takes {CLEARLY:.0%} less",
        "model": model,
        "threads": THREADS,
        "products": matmul_backend(),
        "sequence_length": length,
        "smallest_ratio": min((point["ratio"] for point in points if point["section"] == "steps"), default=None),
        "memory": memory,
        "points": points,
    }


def _points(sections: Sequence[str], model: str, length: int, grid: Grid, rounds: int) -> Points:
    data = prompts(model, length)
    if "steps" in sections:
        yield from _step_points(load_causal_model(model, TrainableConfig()), data, grid, rounds, "float32")
    if "copies" in sections:
        yield from _copies_points(load_causal_model(model, TrainableConfig()), data, grid, rounds)
    if "full" in sections:
        yield from _full_points(model, data, rounds)
    for storage in STORAGES if "quantized" in sections else ():
        quantized = load_causal_model(model, TrainableConfig(), quantization=QuantizationConfig(storage=storage))
        yield from _storage_points(quantized, data, grid, rounds, storage)
        yield from _step_points(quantized, data, [point for point in grid if point in STORED], rounds, storage)


def _step_points(model: CausalModel, data: EncodedPrompts, grid: Grid, rounds: int, storage: str) -> Points:
    """Yield MeZO's steps over P-RGE's, both over LoRA-FA, for each (q, E).

    bound: MeZO's step over the forward passes alone, without noise and updates, all rows together or one pass after
    another, whichever is faster.
    """
    for queries, batch in grid:
        rows = batch_of(data, batch)
        # With one query there is nothing to batch in the outer loop.
        executions = get_args(Execution) if queries > 1 else ("sequential", "both")
        sides = {name: prge_step(model, rows, queries, execution=name) for name in executions}
        num_passes = 2 * queries
        passes = {
            "together": _passes(model, [batch_of(data, num_passes * batch)]),
            "apart": _passes(model, [rows] * num_passes),
        }
        measured = interleaved(sides | passes, CHOICE_ROUNDS)
        tried = {name: median(measured[name]) for name in executions}
        alone = {f"passes_{name}_ms": 1e3 * median(measured[name]) for name in passes}
        chosen = _fastest(tried)
        mezo = Mezo(model, ZerothOrderConfig(queries=queries, learning_rate=LEARNING_RATE))
        seconds = interleaved({"MeZO": partial(mezo.step, rows), "P-RGE": sides[chosen]}, rounds)
        others = {f"{name}_ms": 1e3 * tried_s for name, tried_s in tried.items()}
        point = _point("steps", queries, batch, seconds.values(), storage, chosen)
        yield point | {"bound": point["against_ms"] / min(alone.values()), **alone, "tried": others}


def _passes(model: CausalModel, batches: Sequence[PromptBatch]) -> Step:
    """Return a function that computes the losses of some batches, one after another."""

    def losses(number: int) -> None:
        with torch.inference_mode():
            for batch in batches:
                model.part_losses(batch)

    return losses


def _fastest(seconds: Mapping[str, float]) -> str:
    """Return the fastest execution: the sequential one, unless another is clearly faster."""
    best = min(seconds, key=lambda execution: seconds[execution])
    return best if seconds[best] < (1 - CLEARLY) * seconds["sequential"] else "sequential"


def _copies_points(model: CausalModel, data: EncodedPrompts, grid: Grid, rounds: int) -> Points:
    """Yield steps with all perturbed copies in memory over steps with one B, whose copies are made for one layer at a
    time, for E = 1.
    """
    rows = batch_of(data, 1)
    for queries in dict.fromkeys(queries for queries, _ in grid):
        sides = {copies: prge_step(model, rows, queries, copies=copies) for copies in ("kept", "per_layer")}
        yield _point("copies", queries, 1, interleaved(sides, rounds).values())


def _full_points(model: str, data: EncodedPrompts, rounds: int) -> Points:
    """Yield MeZO over all parameters, and first-order LoRA-FA, over P-RGE at q = 1 and q = 4 with E = 1 and 4.

    All use the same number of samples per step: the baselines' batches have q x E rows.
    """
    adapted = load_causal_model(model, TrainableConfig())
    full = load_causal_model(model, TrainableConfig(technique="full"))
    first_order = FirstOrder(load_causal_model(model, TrainableConfig()), "sgd", LEARNING_RATE)
    mezo = Mezo(full, ZerothOrderConfig(queries=1, epsilon=1e-3, learning_rate=LEARNING_RATE))
    for queries, batch in ((1, 1), (1, 4), (4, 1), (4, 4)):
        all_rows = batch_of(data, queries * batch)
        sides: dict[str, Step] = {
            "MeZO": partial(mezo.step, all_rows),
            "P-RGE": prge_step(adapted, batch_of(data, batch), queries),
            "first-order": partial(first_order.step, all_rows),
        }
        *compared, first_order_s = interleaved(sides, rounds).values()
        yield _point("full", queries, batch, compared) | {"first_order_ms": 1e3 * median(first_order_s)}


def _storage_points(model: CausalModel, data: EncodedPrompts, grid: Grid, rounds: int, storage: str) -> Points:
    """Yield the two passes of one query one after the other over both in one, as in Fig. 6, for each E.

    Separately, every pass dequantizes all weights.
    """
    for batch in dict.fromkeys(batch for _, batch in grid):
        rows = batch_of(data, batch)
        sides = {execution: prge_step(model, rows, 1, execution=execution) for execution in ("sequential", "inner")}
        yield _point("quantized", 1, batch, interleaved(sides, rounds).values(), storage, "inner")


def _point(
    section: str,
    queries: int,
    batch: int,
    seconds: Iterable[Sequence[float]],
    weights: str = "float32",
    execution: str = "both",
) -> Figures:
    """Return a point: medians, and the ratio round by round, of the baseline's seconds and those of P-RGE."""
    slow, fast = seconds
    sides = {"against": AGAINST[section], "against_ms": 1e3 * median(slow), "prge_ms": 1e3 * median(fast)}
    settings = {"weights": weights, "execution": execution}
    return {"section": section, "q": queries, "E": batch, **sides, **ratios(slow, fast), **settings}
