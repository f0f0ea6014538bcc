"""Forward-only estimators next to LoRA with recomputation: accuracy over passes, processor seconds, joules and memory.

A small language model learns the embedded sentences in this process, with one thread.  Recomputation: only the layers'
inputs are kept for the backward pass (see models.recomputation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from workbench import experiment
from workbench.core.catalogue import load_device
from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.serial import text_digest, to_json
from workbench.core.summary import energy_j
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.estimator_table import ESTIMATORS
from workbench.methods.p_rge.zeroth_order import (
    CausalModel,
    FirstOrder,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
)
from workbench.models.recomputation import recomputed
from workbench.plots.style import CYCLE, GREY, SYMBOLS, finish
from workbench.runtime.memory import measured_in_child
from workbench.tasks import load_task
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, evaluate, training_batch
from workbench.tasks.task import Split, Task
from workbench_studies.bench.frame import peak_bytes
from workbench_studies.papers.drawing import pareto
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Settings, spread

MODEL, QUICK_MODEL, TASK, BOARD = "SmolLM2-135M", "tiny-llama-2", "sentiment", "rpi-5"
MAX_LENGTH, SAMPLES, QUERIES = 64, (1000, 200, 200), 4
BACKWARD = 2
"""A backward pass counts as so many forward passes."""
MEMORY_STEPS = 3
AXES = ("passes", "processor seconds", "joules, modelled", "peak MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A training.  estimator: its name, or '' for LoRA with recomputation.  batch_size: E, or the samples of a step."""

    estimator: str = ""
    learning_rate: float
    batch_size: int = 2
    steps: int = 50
    model: str = MODEL

    @property
    def step_passes(self) -> int:
        """Return the forward passes of single samples in a step."""
        if not self.estimator:
            return (1 + 1 + BACKWARD) * self.batch_size  # forward, again, backward
        return ESTIMATORS[self.estimator].num_passes(QUERIES) * self.batch_size


WAYS = {
    "P-RGE, two points": Way(estimator="two_point", learning_rate=8e-3),
    "FZOO, one-sided": Way(estimator="one_sided", learning_rate=2.4e-2),
    "LOZO, low-rank": Way(estimator="low_rank", learning_rate=8e-3),
    "LOZO-M, with momentum": Way(estimator="low_rank_momentum", learning_rate=8e-3),
    "forward gradient, jvp": Way(estimator="jvp", learning_rate=8e-3),
    "LoRA + recomputation": Way(learning_rate=5e-4, batch_size=4, steps=25),
}
"""Each with the middle one of the learning rates that it tries."""
APART, MOST_RATES = 3.0, 5
"""The others are so many times smaller and larger; more than three are tried while the best is the first or last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The result of a training.  scores: (step, accuracy on the test sentences in %).  validation_score: the accuracy
    at the end on other sentences, by which a learning rate is chosen.  seconds: processor time of all steps.
    """

    way: Way
    seed: int
    scores: tuple[tuple[int, float], ...]
    validation_score: float
    seconds: float


def estimators(item: Item, settings: Settings) -> Result:
    """Choose every way's learning rate with the first seed, train it with every seed, measure its memory, and model its
    energy.
    """
    torch.set_num_threads(1)
    middle = {name: replace(way, model=QUICK_MODEL, steps=4) for name, way in WAYS.items()} if settings.quick else WAYS

    def training(way: Way, seed: int) -> Training:
        file = f"estimators/{way.estimator or 'lora'}-{seed}-{text_digest(to_json(way))}.json"
        result = settings.remember(file, Training, partial(trained, way, seed))
        settings.progress(
            f"{way.estimator or 'LoRA'} at {way.learning_rate:g}, seed {seed}: {result.scores[-1][1]:.1f} %, "
            f"validation {result.validation_score:.1f} %"
        )
        return result

    tries = {
        name: bracketed(way, lambda tried: training(tried, settings.seeds[0]), 3 if settings.quick else MOST_RATES)
        for name, way in middle.items()
    }
    ways = {name: max(tried, key=attrgetter("validation_score")).way for name, tried in tries.items()}
    trainings_of = {name: [training(way, seed) for seed in settings.seeds] for name, way in ways.items()}
    peaks = {name: measured_in_child(peak_of, name, way.model) / 1e6 for name, way in ways.items()}
    joules = {name: step_j(way) for name, way in ways.items()}
    rows = [row for name in ways for row in _rows(name, trainings_of[name], joules[name], peaks[name])]
    ends = {row[0]: row for row in rows}  # the last of each way
    forward = sorted((name for name, way in ways.items() if way.estimator), key=lambda name: -ends[name][-1])
    lora = next(name for name, way in ways.items() if not way.estimator)
    seeds = [
        (name, each.seed, ", ".join(f"{score:.1f}" for _, score in each.scores), each.seconds)
        for name, trainings in trainings_of.items()
        for each in trainings
    ]
    lasts = {name: [each.scores[-1][1] for each in trainings] for name, trainings in trainings_of.items()}
    rates = [
        (name, each.way.learning_rate, each.validation_score, "yes" if each.way == ways[name] else "no")
        for name, tried in tries.items()
        for each in tried
    ]
    return item.result(
        tables={"points": rows, "seeds": seeds, "rates": rates},
        ends="; ".join(f"{name} {ends[name][-1]:.1f} ({spread(lasts[name]) or 0.0:.1f})" for name in forward),
        lora_score=ends[lora][-1],
        seconds_ratio=ends["FZOO, one-sided"][3] / ends["P-RGE, two points"][3],
        jvp_ratio=ends["forward gradient, jvp"][3] / ends["P-RGE, two points"][3],
        memory="; ".join(f"{name} {peaks[name]:.0f}" for name in ways),
    )


def bracketed(middle: Way, training: Callable[[Way], Training], most: int) -> list[Training]:
    """Return the trainings of rising learning rates, APART from each other: three, and more at the end at which the
    best one is, until it lies between two others.  most: the number of trainings after which the search ends anyway.
    """

    def at(factor: float, way: Way) -> Training:
        return training(replace(way, learning_rate=way.learning_rate * factor))

    tried = [at(factor, middle) for factor in (1 / APART, 1.0, APART)]
    while len(tried) < most:
        best = max(tried, key=attrgetter("validation_score"))
        if best is tried[0]:
            tried.insert(0, at(1 / APART, best.way))
        elif best is tried[-1]:
            tried.append(at(APART, best.way))
        else:
            break
    return tried


def _rows(name: str, trainings: Sequence[Training], joules: float, peak_mb: float) -> list[tuple[Any, ...]]:
    way = trainings[0].way
    seconds = fmean(each.seconds for each in trainings) / way.steps
    return [
        (
            name,
            step,
            step * way.step_passes,
            step * seconds,
            step * joules,
            peak_mb,
            fmean(each.scores[place][1] for each in trainings),
        )
        for place, (step, _) in enumerate(trainings[0].scores)
    ]


def _data(model: str) -> tuple[Task, EncodedPrompts]:
    counts: Any = dict(zip(("train_samples", "validation_samples", "test_samples"), SAMPLES, strict=True))
    task = load_task(TASK, prompted=True, **counts)
    train = model_encoder(task.template, model, MAX_LENGTH).split(task.train.prompts)
    return task, train.among_label_words()


def loaded(way: Way, seed: int) -> tuple[CausalModel, Prge | FirstOrder]:
    """Return a model and what makes its steps."""
    technique: Any = "lora_fa" if way.estimator else "lora"
    model = load_causal_model(way.model, TrainableConfig(technique=technique, seed=seed))
    if not way.estimator:
        for layer in model.backbone.layers.values():
            layer.forward = recomputed(layer.forward)
        return model, FirstOrder(model, "adam", way.learning_rate)
    config = ZerothOrderConfig(
        queries=QUERIES,
        estimator=way.estimator,  # type: ignore[arg-type]
        learning_rate=way.learning_rate,
        seed=seed,
    )
    return model, Prge(model, config)


def trained(way: Way, seed: int) -> Training:
    """Train, and score the test sentences at half the steps and at the end, the validation sentences at the end."""
    task, train = _data(way.model)
    model, estimator = loaded(way, seed)
    encoder = model_encoder(task.template, way.model, MAX_LENGTH)

    def score(split: Split) -> float:
        return 100 * evaluate(model.logits_at, split.prompts, encoder).value

    scores: list[tuple[int, float]] = []
    seconds = 0.0
    for step in range(way.steps):
        batch, begin = training_batch(train, way.batch_size, seed, step), time.process_time()
        estimator.step(batch, step)
        seconds += time.process_time() - begin
        if step + 1 in (way.steps // 2, way.steps):
            scores.append((step + 1, score(task.test)))
    return Training(way=way, seed=seed, scores=tuple(scores), validation_score=score(task.validation), seconds=seconds)


def step_j(way: Way) -> float:
    """Return a step's joules on a board, simulated with costs from sizes and the catalogue's watts."""
    cluster = Cluster(name=BOARD, devices=(load_device(BOARD),))
    steps = 2
    job = Job(
        model=way.model,
        task=TASK,
        batch_size=way.batch_size,
        micro_batches=1,
        epochs=1,
        max_length=MAX_LENGTH,
        train_samples=steps * way.batch_size,
        validation_samples=1,
        test_samples=1,
        method="fine_tuning",
        options={"technique": "lora", "paradigm": "standalone", "activations": "recompute"},
    )
    if way.estimator:
        options = {"estimator": way.estimator, "queries": QUERIES, "steps": steps, "loss": "label_words"}
        job = replace(job, method="p_rge", options=options)
    return sum(energy_j(experiment.run(job, cluster, "simulate")).values()) / steps


def draw_estimators(result: Result) -> go.Figure:
    """Return a panel for each cost, with accuracy upwards; a grey line joins the points that nothing beats in both."""
    rows = result.tables[0].records
    drawn = make_subplots(rows=2, cols=2, shared_yaxes=True, horizontal_spacing=0.06, vertical_spacing=0.2)
    for number, axis in enumerate(AXES):
        place: Any = {"row": number // 2 + 1, "col": number % 2 + 1}
        front = pareto(rows, itemgetter(axis), itemgetter("accuracy, %"))
        drawn.add_trace(
            go.Scatter(
                x=[row[axis] for row in front],
                y=[row["accuracy, %"] for row in front],
                mode="lines",
                line={"color": GREY, "width": 5},
                opacity=0.5,
                name="Pareto front",
                legendgroup="front",
                showlegend=number == 0,
                hoverinfo="skip",
            ),
            **place,
        )
        for index, name in enumerate(dict.fromkeys(row["way"] for row in rows)):
            way_rows = [row for row in rows if row["way"] == name]
            drawn.add_trace(
                go.Scatter(
                    x=[row[axis] for row in way_rows],
                    y=[row["accuracy, %"] for row in way_rows],
                    mode="lines+markers",
                    line={"color": CYCLE[index], "width": 1.5},
                    marker={"symbol": SYMBOLS[index], "size": 10},
                    name=name,
                    legendgroup=name,
                    showlegend=number == 0,
                    hovertext=[f"{name}, {row['steps']:.0f} steps: {row[axis]:.3g}" for row in way_rows],
                ),
                **place,
            )
        drawn.update_xaxes(title_text=axis, rangemode="tozero", **place)
    drawn.update_yaxes(title_text="accuracy, %", col=1)
    return finish(
        drawn,
        title="What does a point of accuracy cost without a backward pass?",
        label="executed; joules modelled",
        subtitle="Mean of the seeds, at half the steps and at the end. Passes: of single samples.",
        height=640,
        margin={"l": 20, "r": 20, "t": 110, "b": 120},
    )


def peak_of(name: str, model: str) -> int:
    """Return the peak bytes of some steps of a way, the model's weights included."""
    torch.set_num_threads(1)
    way = replace(WAYS[name], model=model)
    _, train = _data(model)
    batches: list[PromptBatch] = [training_batch(train, way.batch_size, 0, step) for step in range(MEMORY_STEPS)]

    def run(trained_model: tuple[CausalModel, Prge | FirstOrder]) -> None:
        for step, batch in enumerate(batches):
            trained_model[1].step(batch, step)

    return peak_bytes(partial(loaded, way, 0), run)
