"""Continue a training inside an inference engine, and make the same steps in PyTorch (P-RGE, section 3.3)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from markupsafe import Markup
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.inference_engine import EngineConfig, EngineTrainer, export_program, require_executorch
from workbench.models.zeroth_order import Prge
from workbench.reproduce.p_rge.executed_training import QueryTraining
from workbench.tasks.tokenize import padded_length
from workbench.widgets.tables import Table

STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The result.  losses: (step, mean loss) in the engine.  scores: by where, on the validation split.

    difference: the largest relative difference of a pass's loss.  values: the largest difference of a trained value, as a share of the
    largest one.  why: what was missing, '' if nothing was; if something was, the numbers are 0.
    """

    why: str = ""
    path: str = ""
    file_bytes: int = 0
    export_s: float = 0.0
    losses: tuple[tuple[int, float], ...] = ()
    difference: float = 0.0
    values: float = 0.0
    step_s: float = 0.0
    eager_step_s: float = 0.0
    scores: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        """Return the run in a few lines."""
        return self.why or "\n".join(f"{name}: {value}" for name, value in self._rows())

    __repr__ = __str__

    def _repr_html_(self) -> Markup:
        if self.why:
            return Markup("<div role='status' style='border-left:4px solid #B04A00;padding:4px 10px'>{}</div>").format(self.why)
        return Table(("", ""), self._rows())._repr_html_()

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("the program", f"{self.file_bytes / 1e6:.1f} MB, exported in {self.export_s:.1f} s"),
            ("a step in the engine", f"{self.step_s * 1e3:.0f} ms"),
            ("the same step in PyTorch", f"{self.eager_step_s * 1e3:.0f} ms"),
            (f"losses of {len(self.losses)} steps", f"differ by {self.difference:.1e} at most"),
            ("trained values", f"differ by {self.values:.1e} of the largest"),
        ]
        return rows + [(f"validation score, {name}", f"{score:.3f}") for name, score in self.scores]


def continue_in_engine(training: QueryTraining, folder: Path, *, steps: int) -> EngineRun:
    """Export the current model and make `steps` more steps in ExecuTorch and in PyTorch, with the same noise and samples.

    The engine's trained values are set in the model for a score; afterwards the training has its former state again.
    If ExecuTorch is not installed, or for no steps, the result says so.
    """
    if steps < 1:
        return EngineRun(why="Not run: no step was asked for. Exporting takes longer than all other cells at the smallest settings.")
    try:
        require_executorch()
    except ConfigError as error:
        return EngineRun(why=f"Not run: {error}")
    settings, theta = training.settings, training.model.trainables.flat
    assert theta is not None
    config = EngineConfig(
        queries=settings.queries,
        batch_size=settings.batch_size,
        sequence_length=padded_length(training.train.lengths),
        num_targets=training.train.max_targets,
        epsilon=settings.epsilon,
        choices=training.train.choices,
    )
    exported = export_program(training.model, folder / "training.pte", config, name=settings.model)

    def noise_of(seed: int, size: int) -> Any:
        return training.model.trainables.noise(seed).numpy()[:size]

    with _native_messages_dropped():
        engine = EngineTrainer(exported.path, seed=settings.seed, noise_of=noise_of, threads=torch.get_num_threads())
    engine.step_number = training.curve.steps
    with _put_back(theta) as begun:
        made = _steps_beside(engine, training, steps)
        trained, kept = torch.from_numpy(engine.theta().copy()), theta.detach().clone()
        scores = [(f"after {steps} steps in PyTorch", training.score())]
        with torch.no_grad():
            theta.copy_(trained)
            scores.append((f"after {steps} steps in the engine", training.score()))
            theta.copy_(begun)
        scores.insert(0, ("before", training.score()))
    return replace(
        made,
        path=exported.path,
        file_bytes=exported.file_bytes,
        export_s=exported.export_s,
        values=float((trained - kept).abs().max() / kept.abs().max().clamp(min=1e-30)),
        scores=tuple(scores),
    )


def _steps_beside(engine: EngineTrainer, training: QueryTraining, steps: int) -> EngineRun:
    """Make the same steps in the engine and in PyTorch."""
    settings, estimator = training.settings, Prge(training.model, training.settings.zeroth_order)
    losses, difference, seconds, eager_seconds = [], 0.0, [], []
    for at in range(training.curve.steps, training.curve.steps + steps):
        batch = training.batch(at)
        begin = time.perf_counter()
        ours = engine.step(batch, settings.learning_rate)
        middle = time.perf_counter()
        result = estimator.step(batch, at)
        seconds.append(middle - begin)
        eager_seconds.append(time.perf_counter() - middle)
        losses.append((at + 1, ours.loss))
        pairs = zip(ours.losses, result.losses.tolist(), strict=True)
        difference = max([difference, *(abs(one - other) / abs(other) for one, other in pairs)])
    return EngineRun(losses=tuple(losses), difference=difference, step_s=median(seconds), eager_step_s=median(eager_seconds))


@contextmanager
def _put_back(theta: Tensor) -> Iterator[Tensor]:
    """Yield the trained values, and restore them at the end, also after an error: the log does not contain these steps."""
    begun = theta.detach().clone()
    try:
        yield begun
    finally:
        with torch.no_grad():
            theta.copy_(begun)


@contextmanager
def _native_messages_dropped() -> Iterator[None]:
    """Keep messages of the runtime's C++ code about the processor out of the notebook at start-up; its errors come as exceptions."""
    kept, nowhere = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STDERR)
        yield
    finally:
        os.dup2(kept, STDERR)
        os.close(kept)
        os.close(nowhere)
