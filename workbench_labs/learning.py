"""Trainings in this process as on a ring: policies of unfreezing, and splits of the data (RingAda, section IV)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import get_args

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.methods.ringada.options import Unfreezing
from workbench.methods.ringada.prepare import Policy
from workbench.methods.ringada.published import FEDERATED, RING, layer_times, load_constants
from workbench.models.configuration import model_facts
from workbench.plots import lines
from workbench.trainings.rings import Curve, Training, train_in_turn
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench.widgets.run_panel import bar
from workbench.widgets.tables import Table

SAID_EVERY = 10
"""Mini-batches after which a training says how far it is."""
DEVICES = 4
BY_NUMBER = ("steps", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting: when one more adapter is unfrozen, which device owns which sentences, and ring or federated
    averaging.

    policy: a policy of the student's, which counts instead of unfreezing: (rounds done, losses, depth) -> depth.
    """

    unfreezing: Unfreezing = "steps"
    every: int = 8
    rule: str = "iid"
    scheme: str = RING
    policy: Callable[[int, Sequence[float], int], int] | None = None

    @property
    def name(self) -> str:
        """Describe it in a legend."""
        if self.policy is not None:
            return f"{self.rule}, yours"
        often = f" every {self.every}" if self.unfreezing in BY_NUMBER else ""
        return f"{self.rule}, {FEDERATED if self.scheme == FEDERATED else f'{self.unfreezing}{often}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """curve: trained here.  times: layer times after each of its points (simulated).  depths: trained layers by
    mini-batch.
    """

    curve: Curve
    times: tuple[float, ...]
    depths: tuple[int, ...]


def learn(training: Training, tried: Tried, counted: Callable[[range], Iterable[int]]) -> Learned:
    """Train in this process, and simulate the time as that of twelve blocks on four equal devices.  counted: see
    train_in_turn.
    """
    num_layers, constants, depths = model_facts(training.model).num_layers, load_constants(), list[int]()
    policy, is_federated = (
        Policy(num_layers=num_layers, unfreezing=tried.unfreezing, every=tried.every),
        tried.scheme == FEDERATED,
    )

    def trained(step: int, num_layers: int, history: Sequence[float]) -> int:
        done = step // DEVICES  # rounds of one mini-batch on each device
        means = [fmean(history[DEVICES * number : DEVICES * (number + 1)]) for number in range(done)]
        if tried.policy is not None:
            before = depths[-1] if depths else 1
            lowest = num_layers - (before if step % DEVICES else min(num_layers, tried.policy(done, means, before)))
        elif policy.is_adaptive:
            lowest = policy.adapted(means)[-1]
        else:
            lowest = policy.first_unfrozen(done, step)
        depths.append(num_layers if is_federated else num_layers - lowest)
        return depths[-1]

    curve = train_in_turn(
        training, 0, trained, devices=DEVICES, rule=tried.rule, is_federated=is_federated, counted=counted
    )
    seconds = layer_times(constants, tried.scheme, constants.micro_batches)[0]
    passed = list(accumulate(seconds[depth * constants.layers // num_layers] for depth in depths))
    return Learned(curve=curve, times=tuple(passed[end - 1] for end in training.ends), depths=tuple(depths))


class LearningLab(Explorer):
    """Controls for policy, split and scheme; each setting is trained once, and its curves stay (trained here, time
    simulated).

    tried: settings that are trained first.  learned: what has been trained so far.
    """

    def __init__(self, training: Training, tried: Sequence[Tried]) -> None:
        self.training, self.learned = training, dict[Tried, Learned]()
        for number, setting in enumerate(tried, 1):  # the cell's output says how far it is, before the lab is shown
            words = f"Training {number} of {len(tried)}: {setting.name}"
            self.learned[setting] = learn(training, setting, partial(bar, description=words))
        last = tried[-1]
        names = [name for name in get_args(Unfreezing) if name != "gradient_norm"]
        first = {"unfreezing": last.unfreezing, "every": last.every, "rule": last.rule, "scheme": last.scheme}
        controls = lab_controls("learning", {"unfreezing": names}, **first)
        self.unfreezing, self.every, self.rule, self.scheme = controls
        tabs = ("Loss by time", "Loss by mini-batches", "Accuracy")
        super().__init__([widgets.HBox(controls)], controls, self._asked_for, self._answer_to, tabs=tabs)

    def _asked_for(self) -> Tried:
        is_federated = self.scheme.value == FEDERATED  # trains all layers
        tried = Tried(
            unfreezing="all" if is_federated else self.unfreezing.value, rule=self.rule.value, scheme=self.scheme.value
        )
        return replace(tried, every=self.every.value) if tried.unfreezing in BY_NUMBER else tried

    def _answer_to(self, request: Tried) -> None:
        if request not in self.learned:
            self.learned[request] = learn(self.training, request, partial(self._counted, request.name))
        curve, metric = self.learned[request].curve, next(iter(self.learned[request].curve.test))
        words = f"{self.learned[request].times[-1]:.0f} layer times for {self.training.steps} mini-batches (simulated)"
        self.headline.say(
            f"{request.name}: last loss {curve.losses[-1]:.3f}, test {metric} {curve.test[metric]:.1f} %", words
        )
        rows = [
            (
                tried.name,
                f"{learned.depths[-1]}",
                f"{learned.curve.losses[-1]:.3f}",
                f"{learned.curve.test[metric]:.1f}",
                f"{learned.times[-1]:.0f}",
            )
            for tried, learned in self.learned.items()
        ]
        columns = ("setting", "trained layers at the end", "last loss", f"test {metric}, %", "layer times (simulated)")
        self.tabulate(Table(columns, rows, title="Tried so far; one seed, so a point or two means little"))
        self.show(self.by_time, self.by_mini_batches, self.by_score)

    def _counted(self, name: str, steps: range) -> Iterator[int]:
        """Pass on the numbers of the mini-batches of a setting; the headline says how far they are."""
        for step in steps:
            if step % SAID_EVERY == 0:
                words = f"mini-batch {step + 1} of {len(steps)}, in this process"
                self.headline.say(f"Training {name}", words)
            yield step

    def by_time(self) -> go.Figure:
        """Return the losses of all settings so far by simulated time."""
        series = {
            tried.name: [*zip(learned.times, learned.curve.losses, strict=True)]
            for tried, learned in self.learned.items()
        }
        subtitle = "time simulated: 12 blocks on 4 equal devices, 4 micro-batches"
        words = {"title": "Loss by time", "label": "executed", "subtitle": subtitle}
        return lines(series, x_title="layer times", y_title="training loss", **words).update_yaxes(rangemode="normal")

    def by_mini_batches(self) -> go.Figure:
        """Return the losses of all settings so far by mini-batches."""
        return self._by_mini_batches(
            "training loss", {tried: learned.curve.losses for tried, learned in self.learned.items()}
        )

    def by_score(self) -> go.Figure:
        """Return the validation scores of all settings so far by mini-batches."""
        return self._by_mini_batches(
            "validation accuracy, %", {tried: learned.curve.scores for tried, learned in self.learned.items()}
        )

    def _by_mini_batches(self, quantity: str, values: Mapping[Tried, Sequence[float]]) -> go.Figure:
        series = {
            tried.name: [*zip(map(float, self.training.ends), series_values, strict=True)]
            for tried, series_values in values.items()
        }
        title = f"{quantity.partition(',')[0].capitalize()} by mini-batches"
        figure = lines(
            series,
            title=title,
            label="executed",
            x_title="mini-batches",
            y_title=quantity,
            subtitle=self.training.model,
        )
        return figure.update_yaxes(rangemode="normal")
