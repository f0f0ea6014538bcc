"""Peak memory and time of one training step: by forward passes, by backpropagation, and with checkpointing.

Each is measured in a separate process, above the memory of the loaded model.

Checkpointing: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

import gc
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Literal, get_args

from workbench.core.errors import check_choice
from workbench.methods.p_rge.zeroth_order import CausalModel, FirstOrder, Prge
from workbench.models.configuration import import_family
from workbench.models.recomputation import recomputed
from workbench.runtime.memory import measured_in_child, read_memory, reset_peak
from workbench.trainings.queries import QueryTraining, Trial
from workbench.widgets.tables import Table

Side = Literal["forward passes", "backpropagation", "with checkpointing"]
Peaks = dict[Side, tuple[float, float]]
"""Each side's peak MB, and its seconds."""
TOKENS = 64


def measure(model: str, side: Side, queries: int, samples: int) -> tuple[int, float]:
    """Return the peak bytes of a step in this process above the loaded model, and the seconds of another step.

    samples: number of samples of a step; forward passes divide them among the queries.  The peak is 0 where the system
    cannot reset it.
    """
    check_choice("side", side, get_args(Side))
    batch_size = samples // queries if side == "forward passes" else samples
    method: Any = "P-RGE" if side == "forward passes" else "FO-SGD"
    trial = Trial(
        model=model, method=method, queries=queries, batch_size=batch_size, max_length=TOKENS, samples=(64, 1, 1)
    )
    training = QueryTraining(trial)
    if side == "with checkpointing":
        with_checkpoints(training.model)
    step = (
        Prge(training.model, trial.zeroth_order).step
        if side == "forward passes"
        else FirstOrder(training.model, "sgd", 1e-3).step
    )
    batch = training.batch(0)
    gc.collect()
    before = read_memory().rss_bytes
    can_reset = reset_peak()
    step(batch, 0)
    peak = read_memory().peak_rss_bytes - before if can_reset else 0
    begin = time.perf_counter()
    step(batch, 1)
    return peak, time.perf_counter() - begin


def with_checkpoints(model: CausalModel) -> None:
    """Let a model's layers keep only their inputs, and compute the rest again for the backward pass."""
    for layer in model.backbone.layers.values():
        layer.forward = recomputed(layer.forward)


def step_memory(model: str, queries: int, samples: int) -> Peaks:
    """Return each side's peak MB above the loaded model, and its seconds, each measured in a separate process."""
    measured = measured_in_child(measure_each, model, queries, samples)
    return {side: (peak_bytes / 1e6, seconds) for side, (peak_bytes, seconds) in measured.items()}


def measure_each(model: str, queries: int, samples: int) -> dict[Side, tuple[int, float]]:
    """Return what `measure` gives for each side, in a process forked for it: the libraries are loaded once."""
    import_family(model)
    measured = {}
    for side in get_args(Side):
        with ProcessPoolExecutor(1, get_context("fork")) as process:
            measured[side] = process.submit(measure, model, side, queries, samples).result()
    return measured


def memory_table(peaks: Peaks, *, title: str) -> Table:
    """Return the peaks and the times."""
    rows = [
        (side, f"{peak:.0f}" if peak else "unknown here", f"{seconds:.2f}") for side, (peak, seconds) in peaks.items()
    ]
    return Table(("a step by", "peak above the model (MB)", "seconds"), rows, title=title)


def ratio(measured: Peaks) -> float | str:
    """Return the peak of backpropagation over that of forward passes."""
    forward, backward = measured["forward passes"][0], measured["backpropagation"][0]
    return backward / forward if forward and backward else "unknown here: this system does not reset a peak"
