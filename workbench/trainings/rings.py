"""Train in one process on the data of devices that take turns: the losses of a ring, or of federated averaging
(RingAda, section IV).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean

import torch

from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.techniques import TechniqueStage
from workbench.tasks.batching import epoch_batches, split_samples
from workbench.tasks.tokenize import collate
from workbench.trainings.common import (
    StoredTraining,
    TokenizedTask,
    batch_loss,
    limited_task,
    split_metrics,
    technique_stage,
)
from workbench.trainings.stale import StaleWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(StoredTraining):
    """The settings of a training.

    points: number of points of a curve; the loss is a mean between two points, the score is that of the validation
    split at the point.
    """

    steps: int
    points: int = 20
    batch_size: int = 32
    max_length: int = 128
    learning_rate: float = 1e-3
    warmup: float = 0.06
    weight_decay: float = 0.01

    @property
    def ends(self) -> list[int]:
        """Return the number of mini-batches at each point of a curve."""
        return [self.steps * (point + 1) // self.points for point in range(self.points)]

    def quick(self) -> Training:
        """Return a tiny training that only tests that the code runs."""
        return replace(self, model="tiny-bert-2", limits=(48, 48, 48), steps=32, points=4, max_length=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training.  losses, scores: values at each point, scores in per cent.  test: metrics at the end, per cent."""

    losses: tuple[float, ...]
    scores: tuple[float, ...]
    test: dict[str, float]


def train_in_turn(
    training: Training,
    seed: int,
    trained: Callable[[int, int, Sequence[float]], int],
    *,
    devices: int = 1,
    rule: str = "iid",
    is_federated: bool = False,
    delay: Callable[[int], int] | None = None,
    counted: Callable[[range], Iterable[int]] = iter,
) -> Curve:
    """Train in this process on the data of devices that take turns.  The losses are those of a ring, or of federated
    averaging.

    trained: returns the number of trained layers of a step, given the number of layers and the losses so far.
    rule: which device owns which samples.  On a ring each mini-batch is the next device's.
    is_federated: each device trains a copy, with its part of the mini-batches between two points; then all take the
    average.  delay: the updates by which a layer's adapter is stale, as in an asynchronous pipeline that stashes
    weights; not with federated averaging.
    counted: passes the numbers of the mini-batches on and shows how far they
    are.
    """
    steps, points = training.steps, training.points
    task, stack = limited_task(training.task, training.data, training.limits), load_stack(training.model)
    data = TokenizedTask.of(task, training.model, training.max_length)
    lengths = data.train.lengths
    copies, local = (devices, steps // points // devices) if is_federated else (1, 1)
    models = [technique_stage(copy.deepcopy(stack), task, technique="serial", seed=seed) for _ in range(copies)]
    optimizers = [make_optimizer(model, training.weight_decay) for model in models]

    def mini_batches(samples: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for epoch in count():
            for indices in epoch_batches([lengths[row] for row in samples], training.batch_size, seed, epoch):
                yield epoch, [samples[index] for index in indices]

    owned = split_samples(task.train, devices, rule, seed) if devices > 1 else (range(len(lengths)),)
    sources = [mini_batches(samples) for samples in owned]
    stale = [
        StaleWeights(adapter.parameters(), behind)
        for layer, adapter in models[0].adapters.items()
        if delay is not None and (behind := delay(int(layer)))
    ]
    losses, scores, history = list[float](), list[float](), list[float]()
    for step in counted(range(steps)):
        owner = step // local % devices  # one device after the other between two averages
        place, depth = owner % copies, trained(step, stack.num_layers, history)
        model = models[place]
        for layer, adapter in model.adapters.items():
            adapter.requires_grad_(int(layer) >= stack.num_layers - depth)
        epoch, indices = next(sources[owner])
        for weights in stale:
            weights.use_old()
        loss = batch_loss(model, collate(data.train, indices), epoch)
        loss.backward()
        for weights in stale:
            weights.use_newest()
        set_learning_rate(optimizers[place], learning_rate_at(step, steps, training.learning_rate, training.warmup))
        optimizers[place].step()
        optimizers[place].zero_grad()
        for weights in stale:
            weights.keep()
        history.append(loss.item())
        if step + 1 in training.ends:
            _average(models, optimizers)
            losses.append(fmean(history[steps * len(scores) // points :]))
            scores.append(split_metrics(models[0], data, "validation")[task.metrics[0]])
            models[0].train()
    return Curve(losses=tuple(losses), scores=tuple(scores), test=split_metrics(models[0], data, "test"))


@torch.no_grad()
def _average(models: Sequence[TechniqueStage], optimizers: Sequence[torch.optim.AdamW]) -> None:
    """Give all models the mean of their trained weights and of their moments."""
    for copies in zip(*(model.trained().values() for model in models), strict=True) if len(models) > 1 else ():
        states = [optimizer.state[copy] for optimizer, copy in zip(optimizers, copies, strict=True)]
        for tensors in (copies, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))):
            mean = torch.stack(list(tensors)).mean(dim=0)
            for tensor in tensors:
                tensor.copy_(mean)
