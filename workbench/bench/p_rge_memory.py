"""Peak memory of P-RGE compared with inference and first-order LoRA-FA, each in its own child process (P-RGE, section 4.2, Table 3).

The figure is the peak resident memory minus the process's memory after loading the runtime and before loading the model.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, get_args

import torch

from workbench.bench.frame import Progress, Step, child_peak_bytes, line_of, peak_bytes
from workbench.methods.common.result import model_encoder
from workbench.models.zeroth_order import CausalModel, Copies, FirstOrder, Prge, TrainableConfig, ZerothOrderConfig, load_causal_model
from workbench.profiler.descriptions import MODELS
from workbench.profiler.zeroth_order import MemoryRule, forward_memory
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, collate_prompts, load_prompt_task
from workbench.tasks.prompts.encoding import EncodedRow

Side = Literal["inference", "P-RGE", "P-RGE, kept copies", "first-order LoRA-FA"]
SETTINGS = ((1, 16), (4, 4), (16, 1))
"""(q, E): the same total batch of 16; with both signs, P-RGE has 32 rows in a pass, and so does inference."""
STEPS = 3
SMALL = "tiny-llama"
"""Runs before anything is measured, so that all libraries are loaded."""
SENTENCES = 400


def prompts(model: str, length: int, loss: str = "vocabulary") -> EncodedPrompts:
    """Return prompts of `length` tokens for a model: the tokens of real sentences, truncated, then the prompt's own end and label word.

    loss: 'vocabulary', or 'label_words' alone.
    """
    task = load_prompt_task("sentiment", train_samples=SENTENCES)
    encoded = model_encoder(task.prompt, model, length).split(task.train)
    stream = list(chain.from_iterable(row.ids for row in encoded.rows))
    rows = []
    for index in range(min(len(stream) // length, len(encoded))):
        end = encoded.rows[index]
        filled = [*stream[index * length : (index + 1) * length - len(end.ids)], *end.ids]
        rows.append(EncodedRow(ids=tuple(filled[-length:]), targets=end.targets, first_position=length - 1))
    count = len(rows)
    choices = encoded.label_ids if loss == "label_words" else ()
    return replace(encoded, rows=tuple(rows), labels=encoded.labels[:count], sample_ids=encoded.sample_ids[:count], choices=choices)


def batch_of(encoded: EncodedPrompts, count: int, first: int = 0) -> PromptBatch:
    """Return a batch of so many rows."""
    return collate_prompts(encoded, [index % len(encoded) for index in range(first, first + count)])


def memory_points(model: str, length: int, progress: Progress) -> list[dict[str, Any]]:
    """Return each side's peak, and its ratio to the peak of inference with the same number of rows."""
    found = []
    for queries, batch in SETTINGS:
        peaks = {side: child_peak_bytes(__name__, side, model, length, queries, batch) for side in get_args(Side)}
        for side, peak in peaks.items():
            found.append(
                {
                    "side": side,
                    "q": queries,
                    "E": batch,
                    "peak_mb": peak / 1e6,
                    "over_inference": peak / peaks["inference"],
                    "counted_mb": _counted_mb(side, model, length, queries, batch),
                }
            )
            progress(line_of(found[-1]))
    return found


def _child(side: str, model: str, length: int, queries: int, batch: int) -> int:
    """Return this process's peak minus the memory of the runtime alone."""
    torch.set_num_threads(2)
    rows = prompts(model, length)
    _run(side, load_causal_model(SMALL, TrainableConfig()), prompts(SMALL, length), 1, 1)
    return peak_bytes(lambda: load_causal_model(model, TrainableConfig()), lambda causal: _run(side, causal, rows, queries, batch))


def _run(side: str, causal: CausalModel, rows: EncodedPrompts, queries: int, batch: int) -> None:
    step: Step
    if side == "inference":
        all_rows = batch_of(rows, 2 * queries * batch)
        step = torch.inference_mode()(lambda number: causal.part_losses(all_rows))
    elif side == "first-order LoRA-FA":
        reference = FirstOrder(causal, "sgd", 1e-6)
        step = lambda number: reference.step(batch_of(rows, queries * batch))  # noqa: E731
    else:
        copies: Copies = "kept" if side.endswith("copies") else "per_layer"
        estimator = Prge(causal, ZerothOrderConfig(queries=queries, learning_rate=1e-6, copies=copies))
        step = lambda number: estimator.step(batch_of(rows, batch), number)  # noqa: E731
    for number in range(STEPS):
        step(number)


def _counted_mb(side: str, model: str, length: int, queries: int, batch: int) -> float | None:
    """Return the analytic model's megabytes in float32, where it describes the side: forward-only, logits of label words alone."""
    if model not in MODELS or side.startswith("first-order"):
        return None
    rule = MemoryRule(weight_bytes=4.0, logit_bytes=8.0, activation_bytes=4.0, copy_bytes=4.0)
    copies = 2 * queries if side.endswith("copies") else 1
    rows = 2 * queries * batch
    return sum(forward_memory(MODELS[model], rule, rows=rows, sequence_length=length, copies=copies, targets=1).values()) / 1e6


if __name__ == "__main__":
    print(_child(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
