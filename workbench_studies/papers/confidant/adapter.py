"""The cost of converting a stage's output from one framework to another (Confidant, section 5.5, Fig. 7)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any, Literal

import torch

from workbench.models.cross_framework import from_torch
from workbench_studies.papers.confidant.faults import Phones
from workbench_studies.papers.confidant.four_fields import Adapted
from workbench_studies.papers.confidant.testbed import PAPER, description
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Series, Settings, read_constants

MODELS, BATCHES, TOKENS = ("BERT-Base", "GPT2-Medium", "LLaMA-7B"), (1, 2, 4, 8), 256
REPEATS = {"binary": 10, "json": 3}
THIS_MACHINE = "this machine"
MS = 1e3


def timed_ms(call: Callable[[], Any], repeats: int) -> float:
    """Return the median processor time of a call in milliseconds, in which other programs on the machine count less."""
    durations_ms = []
    for _ in range(repeats):
        begin_s = time.process_time()
        call()
        durations_ms.append(MS * (time.process_time() - begin_s))
    return median(durations_ms)


def sides(
    shape: tuple[int, ...], form: Literal["binary", "json"], sender: str, receiver: str, repeats: int
) -> tuple[float, float, int]:
    """Return the sender's and the receiver's milliseconds for float32 values of a shape, and the message's bytes."""
    tensor = from_torch(torch.randn(shape, generator=torch.Generator().manual_seed(0)), sender)
    message = Adapted.of(tensor).message(form)
    send_ms = timed_ms(lambda: Adapted.of(tensor).message(form), repeats)
    return send_ms, timed_ms(lambda: Adapted.read(message, form).to(receiver), repeats), len(message)


def fig7(item: Item, settings: Settings) -> Result:
    """Measure both directions between PyTorch and JAX, or NumPy if JAX is not installed, with both message formats.

    The authors' own values, which their public code has, stand next to them under their devices.
    """
    other = "jax" if find_spec("jax") else "numpy"
    models, batches = (MODELS[:1], BATCHES[:2]) if settings.quick else (MODELS, BATCHES)
    rows, series = [], Series()
    totals: dict[tuple[str, int, str], tuple[float, int]] = {}
    comparisons = [item.cell(labels, value, None, "ms") for labels, value in item.printed.items()]
    for model in models:
        for form, repeats in REPEATS.items():
            for direction, sender, receiver in (("to PyTorch", other, "torch"), ("from PyTorch", "torch", other)):
                points = []
                for batch in batches:
                    shape = (batch, TOKENS, description(model).hidden)
                    send_ms, received, nbytes = sides(shape, form, sender, receiver, 1 if settings.quick else repeats)  # type: ignore[arg-type]
                    labels = (model, direction, form, str(batch))
                    comparisons.append(item.cell((*labels, THIS_MACHINE), None, send_ms + received))
                    rows.append((*labels, send_ms, received, nbytes / 1e6))
                    points.append((float(batch), send_ms + received))
                    totals[form, batch, model] = send_ms + received, nbytes
                if receiver == "torch":
                    series[f"{model}, {form}"] = tuple(points)
    constants = read_constants(PAPER, dict[str, Any], "table7")
    batch, model = batches[-1], models[0]
    phones = Phones(**constants | {"batch": batch, "tokens": TOKENS})
    plan = phones.plan(0, 1, 2)
    step_ms = MS * phones.pace_s(plan)
    share = {form: 100 * totals[form, batch, model][0] / step_ms for form in REPEATS}
    authors_ms = Counter[str]()
    for (of_model, _, _, of_batch, device), value in item.printed.items():
        if (of_model, of_batch) == (model, str(batch)):
            authors_ms[device] += value
    return item.result(
        comparisons,
        tables={"sides": rows},
        series=series,
        model=model,
        batch=batch,
        tokens=TOKENS,
        other="JAX" if other == "jax" else "NumPy",
        step=step_ms / MS,
        binary_share=share["binary"],
        json_share=share["json"],
        authors_least=100 * min(authors_ms.values()) / step_ms,
        authors_most=100 * max(authors_ms.values()) / step_ms,
        larger=totals["json", batch, model][1] / totals["binary", batch, model][1],
    )
