"""Watch what a ring learns: policies of unfreezing by loss and time, splits of the data by accuracy (RingAda, section IV)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import get_args

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.methods.ringada.rounds import Policy, Unfreezing
from workbench.models.loading import model_facts
from workbench.reproduce.ringada.executed import Curve, Training, train_in_turn
from workbench.reproduce.ringada.training import FEDERATED, RING, layer_times, load_constants
from workbench.widgets.controls import BIG_FIRST, Html, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.tables import Table, lines

RULES = ("iid", "dirichlet:0.5", "dirichlet:0.1", "sizes:8,2,1,1")
DEVICES = 4
BY_NUMBER = ("steps", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A setting: when one more adapter is unfrozen, which device owns which sentences, and ring or federated averaging."""

    unfreezing: Unfreezing = "steps"
    every: int = 8
    rule: str = "iid"
    scheme: str = RING

    @property
    def name(self) -> str:
        """Describe it in a legend."""
        often = f" every {self.every}" if self.unfreezing in BY_NUMBER else ""
        return f"{self.rule}, {FEDERATED if self.scheme == FEDERATED else f'{self.unfreezing}{often}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """curve: trained here.  times: layer times after each of its points (simulated).  depths: trained layers by mini-batch."""

    curve: Curve
    times: tuple[float, ...]
    depths: tuple[int, ...]


def learn(training: Training, tried: Tried, seed: int = 0) -> Learned:
    """Train in this process, and simulate the time as that of twelve blocks on four equal devices."""
    num_layers, constants, depths = model_facts(training.model).num_layers, load_constants(), list[int]()
    policy, is_federated = Policy(num_layers=num_layers, unfreezing=tried.unfreezing, every=tried.every), tried.scheme == FEDERATED

    def trained(step: int, num_layers: int, history: Sequence[float]) -> int:
        done = step // DEVICES  # rounds of one mini-batch on each device
        if policy.is_adaptive:
            lowest = policy.adapted([fmean(history[DEVICES * number : DEVICES * (number + 1)]) for number in range(done)])[-1]
        else:
            lowest = policy.first_unfrozen(done, step)
        depths.append(num_layers if is_federated else num_layers - lowest)
        return depths[-1]

    curve = train_in_turn(training, seed, trained, devices=DEVICES, rule=tried.rule, is_federated=is_federated)
    seconds = layer_times(constants, tried.scheme, constants.micro_batches)[0]
    passed = list(accumulate(seconds[depth * constants.layers // num_layers] for depth in depths))
    return Learned(curve=curve, times=tuple(passed[at - 1] for at in points_of(training)), depths=tuple(depths))


def points_of(training: Training) -> list[int]:
    """Return the number of mini-batches at each point of a curve."""
    return [training.steps * (point + 1) // training.points for point in range(training.points)]


class LearningLab(Explorer):
    """Controls for policy, split and scheme; each setting is trained once, and its curves stay (trained here, time simulated).

    tried: settings that are trained first.  learned: what has been trained so far.
    """

    def __init__(self, training: Training, tried: Sequence[Tried]) -> None:
        self.training, self.learned, self._first = training, dict[Tried, Learned](), tuple(tried)
        last = tried[-1]
        names = [name for name in get_args(Unfreezing) if name != "gradient_norm"]
        told = "When one more adapter is trained; plateau: when the loss has not fallen for two rounds"
        self.unfreezing = described(widgets.Dropdown, "Unfreezing", told, options=names, value=last.unfreezing)
        self.every = described(widgets.IntSlider, "Every", "So many mini-batches (steps) or rounds", value=last.every, min=1, max=40)
        self.rule = described(widgets.Dropdown, "Data", "Which device owns which sentences", options=RULES, value=last.rule)
        self.scheme = described(widgets.Dropdown, "Scheme", "A ring, or copies that are averaged", options=(RING, FEDERATED))
        self.scheme.value = last.scheme
        self.every.continuous_update = False  # each value is a training
        self.table = Html()
        controls = [self.unfreezing, self.every, self.rule, self.scheme]
        tabs = ("Loss by time", "Loss by mini-batches", "Accuracy")
        super().__init__([widgets.HBox(controls)], controls, self._asked_for, self._answer_to, tabs=tabs, below=[self.table])

    def _asked_for(self) -> Tried:
        is_federated = self.scheme.value == FEDERATED  # trains all layers
        asked = Tried(unfreezing="all" if is_federated else self.unfreezing.value, rule=self.rule.value, scheme=self.scheme.value)
        return replace(asked, every=self.every.value) if asked.unfreezing in BY_NUMBER else asked

    def _answer_to(self, asked: Tried) -> None:
        for one in (*self._first, asked):
            if one not in self.learned:
                self.headline.value = BIG_FIRST.format(f"Training {one.name}", f"{self.training.steps} mini-batches, in this process")
                self.learned[one] = learn(self.training, one)
        own, metric = self.learned[asked].curve, next(iter(self.learned[asked].curve.test))
        words = f"{self.learned[asked].times[-1]:.0f} layer times for {self.training.steps} mini-batches (simulated)"
        self.headline.value = BIG_FIRST.format(
            f"{asked.name}: last loss {own.losses[-1]:.3f}, test {metric} {own.test[metric]:.1f} %", words
        )
        rows = [
            (one.name, f"{found.depths[-1]}", f"{found.curve.losses[-1]:.3f}", f"{found.curve.test[metric]:.1f}", f"{found.times[-1]:.0f}")
            for one, found in self.learned.items()
        ]
        columns = ("setting", "trained layers at the end", "last loss", f"test {metric}, %", "layer times (simulated)")
        self.table.value = Table(columns, rows, title="Tried so far; one seed, so a point or two means little")._repr_html_()
        self.show(self.by_time, self.by_mini_batches, self.by_score)

    def by_time(self) -> go.Figure:
        """Return the losses of all settings so far by simulated time."""
        series = {one.name: [*zip(found.times, found.curve.losses, strict=True)] for one, found in self.learned.items()}
        subtitle = "time simulated: 12 blocks on 4 equal devices, 4 micro-batches"
        return lines(series, title="Loss by time", label="executed", x_title="layer times", y_title="training loss", subtitle=subtitle)

    def by_mini_batches(self) -> go.Figure:
        """Return the losses of all settings so far by mini-batches."""
        return self._by_mini_batches("training loss", {one: found.curve.losses for one, found in self.learned.items()})

    def by_score(self) -> go.Figure:
        """Return the validation scores of all settings so far by mini-batches."""
        return self._by_mini_batches("validation accuracy, %", {one: found.curve.scores for one, found in self.learned.items()})

    def _by_mini_batches(self, what: str, values: Mapping[Tried, Sequence[float]]) -> go.Figure:
        series = {one.name: [*zip(map(float, points_of(self.training)), own, strict=True)] for one, own in values.items()}
        title = f"{what.partition(',')[0].capitalize()} by mini-batches"
        figure = lines(series, title=title, label="executed", x_title="mini-batches", y_title=what, subtitle=self.training.model)
        return figure.update_yaxes(rangemode="normal")
