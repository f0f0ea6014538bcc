"""Watch a language model learn with forward passes: settings, Run and Stop, and a figure that grows during the training."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from markupsafe import Markup

from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.models.zeroth_order import CausalModel
from workbench.plots.zeroth_order import learning
from workbench.reproduce.p_rge.executed_training import Curve, QueryTraining, Trial
from workbench.widgets.controls import BIG_FIRST, FigureBox, Html, Message, Panel, button, described, number

REFRESH_S = 1.0
LOSSES = {"vocabulary": "over all tokens", "label_words": "among the label words"}


class TrainingPanel(Panel):
    """Trains in a thread, so that the kernel stays free; `trained()` gives a cell the finished training.

    folder: for the logs of steps, one for each setting.  A stopped training resumes from its log, also after a restart of the kernel.
    None: no log.
    """

    def __init__(self, settings: Trial, steps: int, *, folder: Path | None = None) -> None:
        self._origin, self._folder = settings, folder
        self._stop = threading.Event()
        losses, told = [(words, name) for name, words in LOSSES.items()], "What the right word's probability is taken from"
        self.controls: dict[str, Any] = {
            "queries": number("Queries q", settings.queries, "Random directions of a step; each takes two forward passes"),
            "batch_size": number("Samples E", settings.batch_size, "Samples of each query; q times E is what a step costs"),
            "epsilon": number("Epsilon", settings.epsilon, "How far from theta the losses are taken"),
            "learning_rate": number("Learning rate", settings.learning_rate, "How far a step goes"),
            "loss": described(widgets.Dropdown, "Loss", told, options=losses, value=settings.loss),
        }
        self.steps = number("Steps", steps, "Steps in all, those of the log included")
        self.run_button = button("Learn", "Train in this process, on one thread or more", "play", self.start, "success")
        self.stop_button = button("Pause", "End after this step; Learn goes on from it", "pause", self._stop.set, "warning")
        self.stop_button.disabled = True
        self.message, self.headline, self.figure = Message(), Html(), FigureBox()
        self._training: QueryTraining | None = None
        self._thread: threading.Thread | None = None
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
        self.message.clear()
        try:
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeSetupError("Training was asked for.", "It is going on.", "Wait, or press Pause.")
            settings, steps = self._described()
        except Exception as error:  # nobody would see the error of a callback
            self.message.show_exception(error)
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, args=(settings, steps), name="workbench-training", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread is done."""
        if self._thread is not None:
            self._thread.join()

    def trained(self) -> QueryTraining:
        """Return the training of the fields' settings after the fields' number of steps; missing steps are done now.

        Raises the errors of the training.
        """
        self.wait()
        self._stop.clear()
        settings, steps = self._described()
        return self._train(settings, steps)

    def _described(self) -> tuple[Trial, int]:
        settings = self.settings
        _ = settings.zeroth_order  # refuses invalid settings
        if settings.batch_size < 1 or self.steps.value < 1:
            raise ConfigError(
                f"{self.steps.value} steps of {settings.batch_size} samples were asked for.", "Nothing would be learnt.", "Give at least 1."
            )
        return settings, self.steps.value

    def _train(self, settings: Trial, steps: int) -> QueryTraining:
        if self._training is None or self._training.settings != settings:
            if self._training is not None:
                self._training.close()
            self.headline.value = Markup("<div role='status'>Loading {} and {} ...</div>").format(settings.model, settings.task)
            self._training = QueryTraining(settings, self._folder)
        self._training.score_untrained()
        self._training.run(steps, self._tell, self._stop.is_set)
        self._show(self._training.curve)
        return self._training

    def _work(self, settings: Trial, steps: int) -> None:
        self.run_button.disabled, self.stop_button.disabled = True, False
        try:
            self._train(settings, steps)
        except BaseException as error:
            self.message.show_exception(error)
        finally:
            self.run_button.disabled, self.stop_button.disabled = False, True

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
        q, each = training.settings.queries, training.settings.batch_size
        last = f", {training.task.metric} {curve.scores[-1][1]:.3f} after {curve.scores[-1][0]}" if curve.scores else ""
        known = f" ({curve.resumed} of them from the log)" if curve.resumed else ""
        passes = f"{curve.steps * 2 * q:,} forward passes of {each} samples, no backward pass"
        self.headline.value = BIG_FIRST.format(f"{curve.steps} steps{known}{last}", f"{passes}; {curve.step_s * 1e3:.0f} ms a step")


def frozen_and_trained(model: CausalModel) -> tuple[int, int]:
    """Return the number of frozen weights and the number of trained weights."""
    unique = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)}
    trained = model.trainables.num_values
    return sum(unique.values()) - trained, trained


def figure_of(training: QueryTraining, engine: list[tuple[int, float]] | None = None) -> go.Figure:
    """Return the curve of a training.  engine: losses of an inference engine that continued it."""
    at, curve = training.settings, training.curve
    what = f"{at.model}, {at.task}, loss {LOSSES[at.loss]}, q = {at.queries}, E = {at.batch_size}"
    return learning(
        curve.losses,
        curve.scores,
        baselines=curve.baselines,
        engine=engine or (),
        label="measured in this process",
        metric=training.task.metric,
        subtitle=f"{what}, {len(training.task.validation)} validation samples",
    )
