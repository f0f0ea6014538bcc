"""The cost of stale weights, and known remedies, trained in one process that applies each stage's delay (section 2.2).

Weight stashing is the pipeline's rule: it equals such a process to 1e-5 (tests/methods/test_stashing.py).  The others are not built.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, stdev
from typing import Any

import torch

from workbench.methods.training.handlers import PAD_TO_MULTIPLE
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.optimization import learning_rate_at
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage, predict
from workbench.reproduce.items import Item
from workbench.reproduce.result import Result, Settings, kept_or_made
from workbench.tasks import load_task
from workbench.tasks.batching import epoch_batches
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import TokenizedSplit, collate, evaluation_batches, tokenize

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert-6"
SAMPLES, BATCH_SIZE, MAX_LENGTH, LEARNING_RATE, WARMUP, WEIGHT_DECAY = 1600, 16, 128, 1e-3, 0.06, 0.01
STAGES, CUTS = 4, (2, 4, 5, 6)
"""Stage i ends before layer CUTS[i]."""
ANNEALED = 0.25
"""Fraction of the steps in which the learning rates are scaled, less and less (PipeMare's Transformers: five times the warm-up)."""

SYNCHRONOUS, STASHING, SCALED, VERTICAL, TWO = "synchronous", "stashing", "stashing, rate by delay", "vertical sync", "2BW"
DELAYS: dict[str, Callable[[int], int]] = {
    SYNCHRONOUS: lambda stage: 0,
    STASHING: lambda stage: STAGES - 1 - stage,
    SCALED: lambda stage: STAGES - 1 - stage,
    VERTICAL: lambda stage: STAGES - 1,
    TWO: lambda stage: 1,
}
"""The number of updates between the weights with which a stage computes a mini-batch and the weights that its gradient updates.

Stashing: PipeDream, as the paper uses it.  Vertical sync: PipeDream's option that all stages use the version of the first stage.  2BW:
two versions everywhere, with a mini-batch split into as many micro-batches as there are stages (Narayanan et al., ICML 2021).  Rate by
delay: stashing, with each stage's learning rate divided by 1 + delay at first (PipeMare, Yang et al., MLSys 2021, technique 1).  A stage
stores as many versions besides the newest as its delay.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """loss: the mean of the last quarter of the mini-batches.  accuracy: per cent of the test split."""

    loss: float
    accuracy: float


@cache
def loaded(quick: bool) -> tuple[LayerStack, TokenizedSplit, TokenizedSplit]:
    """Return the backbone, and the training and test samples."""
    name = QUICK_MODEL if quick else MODEL
    limits: dict[str, Any] = {f"{part}_samples": 48 for part in ("train", "validation", "test")} if quick else {"train_samples": SAMPLES}
    task, tokenizer = load_task("sentiment", **limits), load_tokenizer(name)
    split, test = (tokenize(part, tokenizer, max_length=MAX_LENGTH) for part in (task.train, task.test))
    return load_stack(name), split, test


def train(rule: str, seed: int, *, quick: bool) -> Trained:
    """Train LoRA for one epoch by a rule."""
    stack, split, test = loaded(quick)
    config = TechniqueConfig(technique="lora", hidden_size=stack.hidden_size, num_layers=stack.num_layers, seed=seed)
    model = TechniqueStage(copy.deepcopy(stack).stage(0, stack.num_layers), config)
    groups: list[dict[str, Any]] = []
    for parameter_name, parameter in model.trained().items():
        layer = next((int(part) for part in parameter_name.split(".") if part.isdigit()), stack.num_layers - 1)  # the head is last
        stage = next(index for index, stop in enumerate(CUTS) if layer < stop)
        decay = WEIGHT_DECAY if parameter.ndim >= 2 else 0.0
        history = deque([parameter.detach().clone()], maxlen=DELAYS[rule](stage) + 1)
        groups.append({"params": [parameter], "weight_decay": decay, "delay": DELAYS[rule](stage), "history": history})
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    batches, losses = epoch_batches(split.lengths, 4 if quick else BATCH_SIZE, seed, 0), list[float]()
    for step, indices in enumerate(batches):
        batch, rate = collate(split, indices, PAD_TO_MULTIPLE), learning_rate_at(step, len(batches), LEARNING_RATE, WARMUP)
        for group in optimizer.param_groups:
            group["params"][0].data.copy_(group["history"][0])
            power = max(0.0, 1 - step / (ANNEALED * len(batches))) if rule == SCALED else 0.0
            group["lr"] = rate / (1 + group["delay"]) ** power
        logits = model.logits(model(batch.input_ids, batch.attention_mask)[1], batch.attention_mask, batch.sample_ids, 0)
        loss = task_loss(logits, batch.labels, config.kind)
        loss.backward()
        for group in optimizer.param_groups:
            group["params"][0].data.copy_(group["history"][-1])
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["history"].append(group["params"][0].detach().clone())
        losses.append(loss.item())
    predictions = predict(model, evaluation_batches(test))
    accuracy = compute(("accuracy",), predictions.answers(config.kind), predictions.references())["accuracy"]
    return Trained(loss=fmean(losses[-len(losses) // 4 :]), accuracy=100 * accuracy)


def delays(item: Item, settings: Settings) -> Result:
    """Train by every rule with every seed."""
    found: dict[str, list[Trained]] = {}
    for rule in DELAYS:
        for seed in settings.seeds:
            kept = None if settings.workdir is None else settings.workdir / "delays" / f"{rule}-{seed}-{settings.quick}.json"
            found.setdefault(rule, []).append(kept_or_made(kept, Trained, partial(train, rule, seed, quick=settings.quick)))
            settings.progress(f"{rule}, seed {seed}: loss {found[rule][-1].loss:.4f}, test {found[rule][-1].accuracy:.2f} %")
    rows, means = [], dict[str, tuple[float, float]]()
    for rule, runs in found.items():
        values = [[one.loss for one in runs], [one.accuracy for one in runs]]
        means[rule] = fmean(values[0]), fmean(values[1])
        spread = [stdev(own) if len(own) > 1 else None for own in values]
        each = [DELAYS[rule](stage) for stage in range(STAGES)]
        rows.append((rule, ", ".join(map(str, each)), sum(each), means[rule][0], spread[0], means[rule][1], spread[1]))
    best = max((SCALED, VERTICAL, TWO), key=lambda rule: means[rule][1])
    return item.result(
        [item.cell((rule,), None, accuracy) for rule, (_, accuracy) in means.items()],
        tables={"rules": rows},
        holds={"alike": means[STASHING][1] > means[SYNCHRONOUS][1] - 1, "option": means[best][1] > means[STASHING][1] + 1},
        model=QUICK_MODEL if settings.quick else MODEL,
        seeds=len(settings.seeds),
        stashing=means[STASHING][1],
        synchronous=means[SYNCHRONOUS][1],
        best=best,
        option=means[best][1],
    )
