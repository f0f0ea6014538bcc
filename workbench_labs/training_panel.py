"""Watch a language model learn with forward passes, and continue a training inside an inference engine (P-RGE, section
3.3).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from markupsafe import Markup
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.units import size_words
from workbench.methods.p_rge.inference_engine import EngineConfig, EngineTrainer, export_program, require_executorch
from workbench.methods.p_rge.zeroth_order import CausalModel, Prge
from workbench.tasks.tokenize import padded_length
from workbench.trainings.queries import Curve, QueryTraining, Trial
from workbench.widgets.controls import Headline, Message, WorkPanel, button
from workbench.widgets.fields import Field, lab_controls, ranged, require_valid
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.tables import Table
from workbench_labs.plots.zeroth_order import learning

STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The result.  losses: (step, mean loss) in the engine.  scores: by where, on the validation split.

    difference: the largest relative difference of a pass's loss.  values: the largest difference of a trained value, as
    a share of the largest one.  why: what was missing, '' if nothing was; if something was, the numbers are 0.
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
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> Markup:
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = [
            ("the program", f"{size_words(self.file_bytes)}, exported in {self.export_s:.1f} s"),
            ("a step in the engine", f"{self.step_s * 1e3:.0f} ms"),
            ("the same step in PyTorch", f"{self.eager_step_s * 1e3:.0f} ms"),
            (f"losses of {len(self.losses)} steps", f"differ by {self.difference:.1e} at most"),
            ("trained values", f"differ by {self.values:.1e} of the largest"),
            *((f"validation score, {name}", f"{score:.3f}") for name, score in self.scores),
        ]
        return Table(("", ""), [] if self.why else rows, note=self.why)


def continue_in_engine(training: QueryTraining, folder: Path, *, steps: int) -> EngineRun:
    """Export the current model and make `steps` more steps in ExecuTorch and in PyTorch, with the same noise and
    samples.

    The engine's trained values are set in the model for a score; afterwards the training has its former state again.
    If ExecuTorch is not installed, or for no steps, the result says so.
    """
    if steps < 1:
        return EngineRun(
            why="Not run: no step was asked for. Exporting takes longer than all other cells at the smallest settings."
        )
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
    with _put_back(theta) as initial:
        run = _steps_beside(engine, training, steps)
        trained, in_torch = torch.from_numpy(engine.theta().copy()), theta.detach().clone()
        scores = [(f"after {steps} steps in PyTorch", training.score())]
        with torch.no_grad():
            theta.copy_(trained)
            scores.append((f"after {steps} steps in the engine", training.score()))
            theta.copy_(initial)
        scores.insert(0, ("before", training.score()))
    return replace(
        run,
        path=exported.path,
        file_bytes=exported.file_bytes,
        export_s=exported.export_s,
        values=float((trained - in_torch).abs().max() / in_torch.abs().max().clamp(min=1e-30)),
        scores=tuple(scores),
    )


def _steps_beside(engine: EngineTrainer, training: QueryTraining, steps: int) -> EngineRun:
    """Make the same steps in the engine and in PyTorch."""
    settings, estimator = training.settings, Prge(training.model, training.settings.zeroth_order)
    losses, difference, seconds, eager_seconds = [], 0.0, [], []
    for step in range(training.curve.steps, training.curve.steps + steps):
        batch = training.batch(step)
        begin = time.perf_counter()
        ours = engine.step(batch, settings.learning_rate)
        middle = time.perf_counter()
        result = estimator.step(batch, step)
        seconds.append(middle - begin)
        eager_seconds.append(time.perf_counter() - middle)
        losses.append((step + 1, ours.loss))
        pairs = zip(ours.losses, result.losses.tolist(), strict=True)
        difference = max([difference, *(abs(loss - other) / abs(other) for loss, other in pairs)])
    return EngineRun(
        losses=tuple(losses), difference=difference, step_s=median(seconds), eager_step_s=median(eager_seconds)
    )


@contextmanager
def _put_back(theta: Tensor) -> Iterator[Tensor]:
    """Yield the trained values, and restore them at the end, also after an error: the log does not contain these
    steps.
    """
    initial = theta.detach().clone()
    try:
        yield initial
    finally:
        with torch.no_grad():
            theta.copy_(initial)


@contextmanager
def _native_messages_dropped() -> Iterator[None]:
    """Keep messages of the runtime's C++ code about the processor out of the notebook at start-up; its errors come as
    exceptions.  Some go to the process's stream, some to Python's, which in a notebook is another one.
    """
    former, nowhere = os.dup(STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, STDERR)
        with redirect_stderr(StringIO()):
            yield
    finally:
        os.dup2(former, STDERR)
        os.close(former)
        os.close(nowhere)


REFRESH_S = 1.0
FIELDS = ("queries", "batch_size", "epsilon", "learning_rate", "loss")
LOSSES = {"vocabulary": "over all tokens", "label_words": "among the label words"}


class TrainingPanel(WorkPanel):
    """Trains in a thread; `trained()` gives a cell the finished training.

    folder: where the logs of steps are, one for each setting.  A stopped training resumes from its log, also after a
    restart of the kernel.
    None: no log.
    """

    def __init__(self, settings: Trial, steps: int, *, folder: Path | None = None) -> None:
        self._origin, self._folder = settings, folder
        first = {name: getattr(settings, name) for name in FIELDS}
        self.controls = dict(zip(FIELDS, lab_controls("forward_passes", **first), strict=True))
        self.steps = ranged("Steps", steps, "Steps in all, those of the log included", 1, 100_000)
        self.run_button = button("Learn", "Train in this process, on one thread or more", "play", self.start, "success")
        self.stop_button = button("Pause", "End after this step; Learn goes on from it", "pause", self.stop, "warning")
        self.message, self.headline, self.figure = Message(), Headline(), FigureBox()
        self._training: QueryTraining | None = None
        self._drawn_at = 0.0
        queries, samples, *others = self.controls.values()
        rows = [[queries, samples, self.steps], others, [self.run_button, self.stop_button]]
        super().__init__([*map(widgets.HBox, rows), self.message, self.headline, self.figure])
        self.figure.layout.display = "none"

    @property
    def settings(self) -> Trial:
        """Return the settings of the fields."""
        return replace(self._origin, **{name: control.value for name, control in self.controls.items()})

    @property
    def log_path(self) -> Path:
        """Return the log file for the fields' settings.  Raises ConfigError if the panel keeps none."""
        if self._folder is None:
            raise ConfigError("A log of steps was asked for.", "The panel keeps none.", "Give it a folder.")
        return self.settings.steps_path(self._folder)

    def start(self) -> None:
        """Start or resume in a thread."""
        self._start(self._in_thread)

    def trained(self) -> QueryTraining:
        """Return the training of the fields' settings after the fields' number of steps; missing steps are done now.

        Raises the errors of the training.
        """
        self.wait()
        described = self._described()
        with self._in_cell():
            return self._train(*described)

    def _in_thread(self, described: tuple[Trial, int]) -> Callable[[], None]:
        self._train(*described)
        return self.message.clear

    def _described(self) -> tuple[Trial, int]:
        require_valid(control for control in (*self.controls.values(), self.steps) if isinstance(control, Field))
        settings = self.settings
        _ = settings.zeroth_order  # refuses invalid settings
        return settings, self.steps.value

    def _train(self, settings: Trial, steps: int) -> QueryTraining:
        if self._training is None or self._training.settings != settings:
            self.headline.value = Markup("<div role='status'>Loading {} and {} ...</div>").format(
                settings.model, settings.task
            )
            self._training = QueryTraining(settings, self._folder)
        self._training.score_untrained()
        self._training.run(steps, self._tell, self._stop.is_set)
        self._show(self._training.curve)
        return self._training

    def _enable(self) -> None:
        self.run_button.disabled, self.stop_button.disabled = self.running, not self.running

    def _tell(self, curve: Curve) -> None:
        now = time.monotonic()
        if now - self._drawn_at >= REFRESH_S:
            self._drawn_at = now
            self._show(curve)

    def _show(self, curve: Curve) -> None:
        training = self._training
        assert training is not None
        self.figure.layout.display = None
        self.figure.show(figure_of(training))
        q, batch_size = training.settings.queries, training.settings.batch_size
        last = f", {training.task.metric} {curve.scores[-1][1]:.3f} after {curve.scores[-1][0]}" if curve.scores else ""
        note = f" ({curve.resumed} of them from the log)" if curve.resumed else ""
        passes = f"{curve.steps * 2 * q:,} forward passes of {batch_size} samples, no backward pass"
        self.headline.say(f"{curve.steps} steps{note}{last}", f"{passes}; {curve.step_s * 1e3:.0f} ms a step")


def frozen_and_trained(model: CausalModel) -> tuple[int, int]:
    """Return the number of frozen weights and the number of trained weights."""
    unique = {
        tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)
    }
    trained = model.trainables.num_values
    return sum(unique.values()) - trained, trained


def figure_of(training: QueryTraining, engine: Sequence[tuple[int, float]] = ()) -> go.Figure:
    """Return the curve of a training.  engine: losses of an inference engine that continued it."""
    settings, curve = training.settings, training.curve
    loss, sizes = LOSSES[settings.loss], f"q = {settings.queries}, E = {settings.batch_size}"
    label = f"{settings.model}, {settings.task}, loss {loss}, {sizes}"
    return learning(
        curve.losses,
        curve.scores,
        baselines=curve.baselines,
        engine=engine,
        label="measured in this process",
        metric=training.task.metric,
        subtitle=f"{label}, {len(training.task.validation)} validation samples",
    )
