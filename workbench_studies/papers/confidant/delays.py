"""The cost of stale weights, and known remedies, trained in one process that applies each stage's delay (sections 2.2
and 5.2.1, Table 5).

The pipeline executes the same rules and equals such a process to 1e-5 (tests/methods/test_stashing.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from workbench.core.names import Technique
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueStage
from workbench.tasks.batching import epoch_batches
from workbench.tasks.metrics import LOSS
from workbench.tasks.tokenize import collate
from workbench.trainings.common import (
    Limits,
    StoredTraining,
    TokenizedTask,
    batch_loss,
    limited_task,
    split_metrics,
    technique_stage,
)
from workbench.trainings.stale import StaleWeights
from workbench_studies.papers.confidant.testbed import relative_paces
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, Settings, spread

WARMUP, WEIGHT_DECAY = 0.06, 0.01
ANNEALED = 0.25
"""Fraction of the steps in which learning rates are divided for a delay (PipeMare's Transformers: five times the
warm-up)."""
SYNCHRONOUS, STASHING, SCALED, VERTICAL, TWO = (
    "synchronous",
    "stashing",
    "stashing, rate by delay",
    "vertical sync",
    "2BW",
)
DELAYS: dict[str, Callable[[int], int]] = {
    SYNCHRONOUS: lambda behind: 0,
    STASHING: lambda behind: behind,
    SCALED: lambda behind: behind,
    VERTICAL: lambda behind: -1,
    TWO: lambda behind: 1,
}
"""The number of updates between the weights with which a stage computes a mini-batch and the weights that its gradient
updates.

By the number of stages behind it; -1: of the first stage.
Stashing: PipeDream, as the paper uses it.  Vertical sync: PipeDream's option that all stages use the version of the
first stage.  2BW:
two versions everywhere, with a mini-batch split into as many micro-batches as there are stages (Narayanan et al., ICML
2021).  Rate by delay: stashing, with each stage's learning rate divided by 1 + delay at first (PipeMare, Yang et al.,
MLSys 2021, technique 1).  A stage stores as many versions besides the newest as its delay.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(StoredTraining):
    """cuts: stage i ends before layer cuts[i]."""

    limits: Limits = (1600, None, None)
    max_length: int = 128
    technique: Technique = "lora"
    learning_rate: float = 1e-3
    epochs: int = 1
    batch_size: int = 16
    cuts: tuple[int, ...] = (2, 4, 5, 6)

    def delays(self, rule: str) -> list[int]:
        """Return every stage's delay."""
        last = len(self.cuts) - 1
        return [last if (delay := DELAYS[rule](last - stage)) < 0 else delay for stage in range(last + 1)]

    def chosen(self, settings: Settings) -> Training:
        """Return it, or for quick settings a tiny one that only tests that the code runs."""
        if not settings.quick:
            return self
        tiny = replace(self, model="tiny-bert-6", limits=(48, 48, 48), batch_size=4, epochs=1)
        return (
            replace(tiny, model="tiny-llama-6", max_length=300, cuts=(2, 4, 6))
            if self.task.startswith("instruction")
            else tiny
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """loss: the mean of the last quarter of the mini-batches.  metrics: those of the test split (see split_metrics)."""

    loss: float
    metrics: dict[str, float]


@cache
def loaded(training: Training) -> tuple[LayerStack, TokenizedTask]:
    """Return the backbone and the task."""
    task = limited_task(training.task, training.data, training.limits)
    stack = load_stack(training.model, with_head=task.kind == "text_generation")
    return stack, TokenizedTask.of(task, training.model, training.max_length)


def untrained(training: Training, seed: int) -> TechniqueStage:
    """Return the model before the first step."""
    stack, data = loaded(training)
    return technique_stage(copy.deepcopy(stack), data.task, technique=training.technique, seed=seed)


def trained(training: Training, rule: str, seed: int) -> tuple[TechniqueStage, list[float]]:
    """Train by a rule, and return the model and the loss of every mini-batch."""
    stack, data = loaded(training)
    split, model = data.train, untrained(training, seed)
    groups: list[dict[str, Any]] = []
    for parameter_name, parameter in model.trained().items():
        first = 0 if "embedding" in parameter_name else stack.num_layers - 1  # what has no layer is embedding or head
        layer = next((int(part) for part in parameter_name.split(".") if part.isdigit()), first)
        stage = next(index for index, stop in enumerate(training.cuts) if layer < stop)
        decay, delay = WEIGHT_DECAY if parameter.ndim >= 2 else 0.0, training.delays(rule)[stage]
        groups.append({"params": [parameter], "weight_decay": decay, "delay": delay})
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    batches = [
        indices
        for epoch in range(training.epochs)
        for indices in epoch_batches(split.lengths, training.batch_size, seed, epoch)
    ]
    losses = list[float]()
    stale = [StaleWeights(group["params"], group["delay"]) for group in optimizer.param_groups if group["delay"]]
    for step, indices in enumerate(batches):
        rate = learning_rate_at(step, len(batches), training.learning_rate, WARMUP)
        for weights in stale:
            weights.use_old()
        for group in optimizer.param_groups:
            power = max(0.0, 1 - step / (ANNEALED * len(batches))) if rule == SCALED else 0.0
            group["lr"] = rate / (1 + group["delay"]) ** power
        loss = batch_loss(model, collate(split, indices))
        loss.backward()
        for weights in stale:
            weights.use_newest()
        optimizer.step()
        optimizer.zero_grad()
        for weights in stale:
            weights.keep()
        losses.append(loss.item())
    return model, losses


def train(training: Training, rule: str, seed: int) -> Trained:
    """Train by a rule, and score the test split."""
    model, losses = trained(training, rule, seed)
    return Trained(loss=fmean(losses[-len(losses) // 4 :]), metrics=split_metrics(model, loaded(training)[1], "test"))


def trained_by(rules: Sequence[str], training: Training, settings: Settings, folder: str) -> dict[str, list[Trained]]:
    """Train by every rule with every seed; keep the results in a folder of the settings' work folder."""
    chosen, outcomes = training.chosen(settings), dict[str, list[Trained]]()
    for rule in rules:
        for seed in settings.seeds:
            outcome = chosen.outcome(settings.workdir, folder, rule, seed, Trained, partial(train, chosen, rule, seed))
            outcomes.setdefault(rule, []).append(outcome)
            metrics = ", ".join(f"{name} {value:.2f}" for name, value in outcome.metrics.items())
            settings.progress(f"{training.task}, {rule}, seed {seed}: loss {outcome.loss:.4f}, test {metrics}")
    return outcomes


def delays(item: Item, settings: Settings) -> Result:
    """Train by every rule with every seed."""
    training = Training()
    outcomes, stages = trained_by(tuple(DELAYS), training, settings, "delays"), len(training.cuts)
    paces = relative_paces(stages)
    rows, cells, means = [], [], dict[str, float]()
    for rule, runs in outcomes.items():
        losses, accuracies, each = (
            [outcome.loss for outcome in runs],
            [outcome.metrics["accuracy"] for outcome in runs],
            training.delays(rule),
        )
        means[rule], pace = fmean(accuracies), paces[rule == SYNCHRONOUS]
        rows.append(
            (
                rule,
                ", ".join(map(str, each)),
                sum(each),
                fmean(losses),
                spread(losses),
                means[rule],
                spread(accuracies),
                pace,
            )
        )
        quantities = {"accuracy": means[rule], "last loss": fmean(losses), "versions": float(sum(each)), "time": pace}
        cells += [item.cell((rule, name), None, value) for name, value in quantities.items()]
    best = max((SCALED, VERTICAL, TWO), key=means.__getitem__)
    return item.result(
        cells,
        tables={"rules": rows},
        model=training.chosen(settings).model,
        seeds=len(settings.seeds),
        stashing=means[STASHING],
        synchronous=means[SYNCHRONOUS],
        best=best,
        option=means[best],
        pace=paces[True],
    )


ALPACA = "Phi-2, Alpaca"
WAYS: Mapping[str, str] = {"Traditional": SYNCHRONOUS, "Confidant": STASHING}
THREE = Training(technique="full", learning_rate=2e-4, epochs=3, batch_size=8, cuts=(2, 4, 6))
"""Table 5's three stages and three epochs."""
INSTRUCTED = replace(
    THREE,
    model="SmolLM2-135M",
    task="instructions",
    limits=(96, 16, 64),
    technique="lora",
    learning_rate=1e-3,
    cuts=(10, 20, 30),
)
"""Table 5's text generation; the paper trains Phi-2 by LoRA (Table 8)."""
FOLDERS = "conll2003", "squad", "alpaca"
"""Subfolders of the folder of data, which may also be one of them itself."""


def table5(item: Item, settings: Settings) -> Result:
    """Train a small model on the table's kinds of tasks, by the paper's two ways; values that were not executed stay
    empty.
    """
    tasks = {"GPT2-Medium, SQuAD2.0": replace(THREE, task="questions", limits=(320, 64, 300)), ALPACA: INSTRUCTED}
    data = settings.data or Path()
    for folder in (
        ()
        if settings.data is None
        else [folder_path for name in FOLDERS if (folder_path := data / name).is_dir()] or [data]
    ):
        if folder.name == "alpaca":
            tasks[ALPACA] = replace(INSTRUCTED, task="instruction_tuning", data=folder)
        elif any(folder.glob("*.json")):
            tasks["GPT2-Medium, SQuAD2.0"] = replace(
                THREE, task="question_answering", data=folder, limits=(320, 64, 300)
            )
        else:
            named = replace(THREE, task="token_classification", data=folder, limits=(400, 64, 400))
            tasks = {"BERT-Base, Conll2003": named} | tasks
    outcomes = {
        name: trained_by(tuple(WAYS.values()), task_training, settings, task_training.task)
        for name, task_training in tasks.items()
    }

    def values(task: str, metric: str, way: str) -> list[float]:
        return [outcome.metrics[metric] for outcome in outcomes[task][WAYS[way]]] if task in outcomes else []

    def ours(task: str, metric: str, way: str) -> Number:
        task_values = values(task, metric, way)
        return fmean(task_values) if task_values else None

    paper = item.printed
    rows, losses, others, rise = [], list[float](), list[str](), 0.0
    # A model that learned nothing answers the same whatever its weights: such a task says nothing of the two ways.
    unlearned = [
        task
        for task, runs in outcomes.items()
        if len({tuple(outcome.metrics.values()) for way in runs.values() for outcome in way}) == 1
    ]
    for task, runs in outcomes.items():
        for metric in runs[SYNCHRONOUS][0].metrics:
            values_by_way = [values(task, metric, way) for way in WAYS]
            rows.append(
                (
                    task,
                    metric,
                    *(part for way_values in values_by_way for part in (fmean(way_values), spread(way_values))),
                )
            )
            if metric == LOSS:
                rise = 100 * (fmean(values_by_way[1]) / fmean(values_by_way[0]) - 1)
            elif task not in unlearned:
                loss = fmean(values_by_way[0]) - fmean(values_by_way[1])
                if (task, metric, "Confidant") in paper:
                    losses.append(loss)
                else:
                    others.append(f"{task}: {metric}, which the paper does not print, falls by {loss:.1f} points.")
    differences = [
        abs(paper[task, metric, "Traditional"] - value)
        for (task, metric, way), value in paper.items()
        if way == "Confidant" and metric != LOSS
    ]
    return item.result(
        item.compare(ours),
        tables={"ours": rows},
        holds={"alike": max(losses) <= max(differences)} if losses else {},
        findings=others
        + [f"{task}: all trainings, of both ways, score the same: nothing was learned." for task in unlearned],
        model=tasks["GPT2-Medium, SQuAD2.0"].chosen(settings).model,
        speaker=tasks[ALPACA].chosen(settings).model,
        seeds=len(settings.seeds),
        most=max(losses, default=0.0),
        rise=rise,
    )
