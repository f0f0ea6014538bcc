"""Loss by epochs and accuracy by time of the three schemes and of FedAvg, trained at small size (RingAda, section IV, Fig. 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean

import torch

from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.techniques import TechniqueStage
from workbench.reproduce.items import Item
from workbench.reproduce.result import Number, Result, Settings, printed, read_kept, spread
from workbench.reproduce.ringada.training import FEDERATED, PAPER, PIPE, RING, SINGLE, depth_of, load_constants, seconds_after
from workbench.reproduce.training import KeptTraining, TokenizedTask, batch_loss, limited_task, split_metrics, technique_stage
from workbench.tasks.batching import epoch_batches, split_samples
from workbench.tasks.tokenize import collate


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(KeptTraining):
    """points: of a curve; the loss is a mean between two points, the score is that of the validation split at the point."""

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
        """Return a tiny one that only tests that the code runs."""
        return replace(self, model="tiny-bert-2", limits=(48, 48, 48), steps=32, points=4, max_length=128)

    def curve(self, settings: Settings, item: str, scheme: str, seed: int) -> Curve:
        """Return the stored training of the same settings, or train now."""
        found = self.kept(settings, item, scheme, seed, Curve, lambda: _train(self, scheme, seed))
        test = ", ".join(f"{name} {value:.1f} %" for name, value in found.test.items())
        settings.progress(f"{scheme}, seed {seed}: loss {found.losses[-1]:.3f}, test {test}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training.  losses, scores: at each of the points, per cent for scores.  test: metrics at the end, per cent."""

    losses: tuple[float, ...]
    scores: tuple[float, ...]
    test: dict[str, float]


def kept_curves(folder: Path, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, list[Curve]]:
    """Return the trainings of fig3 that a folder keeps, by scheme; those of which a seed is missing are left out."""
    training, found = Training(steps=round(load_constants().epochs)), dict[str, list[Curve]]()
    for scheme in (SINGLE, RING, FEDERATED):
        curves = [read_kept(training.place(folder, "fig3", scheme, seed), Curve) for seed in seeds]
        found |= {scheme: own} if len(own := [curve for curve in curves if curve]) == len(seeds) else {}
    return found | ({PIPE: found[SINGLE]} if SINGLE in found else {})


def fig3(item: Item, settings: Settings) -> Result:
    """Train with all adapters, with one more at a time from the top, and by federated averaging of all adapters.

    PipeAdapter without stale weights has Single's losses.
    """
    constants, paper = load_constants(), printed(PAPER, "fig3")
    training = Training(steps=round(constants.epochs))
    training = training.quick() if settings.quick else training
    steps, points, at = training.steps, training.points, training.ends
    trained = (SINGLE, RING, FEDERATED)
    curves = {scheme: [training.curve(settings, "fig3", scheme, seed) for seed in settings.seeds] for scheme in trained}
    curves[PIPE] = curves[SINGLE]
    clock = {scheme: seconds_after(constants, scheme) for scheme in (SINGLE, PIPE, RING, FEDERATED)}
    series: dict[str, tuple[tuple[float, float], ...]] = {}
    loss, score = dict[str, list[float]](), dict[str, list[float]]()
    for scheme in clock:
        loss[scheme] = [fmean(values) for values in zip(*(one.losses for one in curves[scheme]), strict=True)]
        score[scheme] = [fmean(values) for values in zip(*(one.scores for one in curves[scheme]), strict=True)]
        series[f"loss, {scheme}"] = tuple(zip(map(float, at), loss[scheme], strict=True))
        series[f"accuracy, {scheme}"] = tuple((clock[scheme][step - 1], value) for step, value in zip(at, score[scheme], strict=True))
    target = score[RING][-1]
    reached = {scheme: next((time for time, value in series[f"accuracy, {scheme}"] if value >= target), None) for scheme in clock}
    rows: list[tuple[Number, ...]] = []
    for scheme in clock:
        tests = [one.test["accuracy"] for one in curves[scheme]]
        rows.append((scheme, loss[scheme][0], loss[scheme][-1], score[scheme][-1], fmean(tests), spread(tests), reached[scheme]))
    gap = [ring - single for ring, single in zip(loss[RING], loss[SINGLE], strict=True)]
    early, late = max(gap[: points // 2]), gap[-1]
    ends = {scheme: fmean(one.test["accuracy"] for one in curves[scheme]) for scheme in clock}
    soonest = min((time, scheme) for scheme, time in reached.items() if time is not None and scheme != FEDERATED)
    return item.result(
        [item.cell(labels, value, clock[labels[0]][-1], "s") for labels, value in paper.items()],
        tables={"ends": rows},
        holds={"slower": early > 0, "narrows": late < early, "below": ends[RING] < ends[SINGLE], "sooner": soonest[1] == RING},
        series=series,
        early=early,
        late=late,
        single=ends[SINGLE],
        ring=ends[RING],
        target=target,
        soonest=soonest[1],
        reached=", ".join(f"{scheme} {'never' if time is None else f'{time:.0f} s'}" for scheme, time in reached.items()),
        seeds=len(settings.seeds),
        model=training.model,
        steps=steps,
        local=steps // points // constants.devices,
    )


def question_scores(settings: Settings) -> tuple[list[tuple[Number, ...]], dict[tuple[str, str], float]]:
    """Train on questions: the embedded ones, or SQuAD's files in the settings' data folder.

    Returns a row for each scheme, and each scheme's means by F1 and EM, per cent.  PipeAdapter without stale weights has Single's.
    """
    training = Training(task="questions", limits=(None, 100, 400), steps=120, points=1, batch_size=16)
    if settings.data is not None and any(settings.data.glob("*.json")):
        training = replace(training, task="question_answering", data=settings.data.resolve(), limits=(2000, 100, 400), max_length=192)
    training = training.quick() if settings.quick else training
    rows, means = list[tuple[Number, ...]](), dict[tuple[str, str], float]()
    for scheme in (SINGLE, RING):
        curves, row = [training.curve(settings, "table1", scheme, seed) for seed in settings.seeds], list[Number]()
        for name, metric in (("F1", "answer_f1"), ("EM", "exact_match")):
            values = [curve.test[metric] for curve in curves]
            row += [fmean(values), spread(values)]
            for label in (scheme, PIPE) if scheme == SINGLE else (scheme,):
                means[label, name] = fmean(values)
        rows.append((scheme, training.task, training.steps, len(curves), fmean(curve.losses[-1] for curve in curves), *row))
    return rows, means


def _train(training: Training, scheme: str, seed: int) -> Curve:
    """Train; at every step the fraction of trained layers is that of the paper's twelve."""
    constants, steps, is_federated = load_constants(), training.steps, scheme == FEDERATED

    def trained(step: int, num_layers: int, history: Sequence[float]) -> int:
        return -(-depth_of(constants, scheme, step * round(constants.epochs) // steps) * num_layers // constants.layers)

    return train_in_turn(training, seed, trained, devices=constants.devices if is_federated else 1, is_federated=is_federated)


def train_in_turn(
    training: Training,
    seed: int,
    trained: Callable[[int, int, Sequence[float]], int],
    *,
    devices: int = 1,
    rule: str = "iid",
    is_federated: bool = False,
) -> Curve:
    """Train in this process on the data of devices that take turns.  It has the losses of a ring, or of federated averaging.

    trained: returns the number of trained layers of a step, given the number of layers and the losses so far.
    rule: which device owns which samples.  On a ring each mini-batch is the next device's.
    is_federated: each device trains a copy, with its part of the mini-batches between two points; then all take the average.
    """
    steps, points = training.steps, training.points
    task, stack = limited_task(training.task, training.data, training.limits), load_stack(training.model)
    data = TokenizedTask.of(task, training.model, training.max_length)
    lengths = data.train.lengths
    copies, local = (devices, steps // points // devices) if is_federated else (1, 1)
    models = [technique_stage(copy.deepcopy(stack), task, technique="serial", seed=seed) for _ in range(copies)]
    optimizers = [make_optimizer(model, training.weight_decay) for model in models]

    def mini_batches(own: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for epoch in count():
            for indices in epoch_batches([lengths[row] for row in own], training.batch_size, seed, epoch):
                yield epoch, [own[index] for index in indices]

    owned = split_samples(task.train, devices, rule, seed) if devices > 1 else (range(len(lengths)),)
    sources = [mini_batches(own) for own in owned]
    losses, scores, history = list[float](), list[float](), list[float]()
    for step in range(steps):
        owner = step // local % devices  # one device after the other between two averages
        place, depth = owner % copies, trained(step, stack.num_layers, history)
        model = models[place]
        for layer, adapter in model.adapters.items():
            adapter.requires_grad_(int(layer) >= stack.num_layers - depth)
        epoch, indices = next(sources[owner])
        loss = batch_loss(model, collate(data.train, indices), epoch)
        loss.backward()
        set_learning_rate(optimizers[place], learning_rate_at(step, steps, training.learning_rate, training.warmup))
        optimizers[place].step()
        optimizers[place].zero_grad()
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
    for own in zip(*(model.trained().values() for model in models), strict=True) if len(models) > 1 else ():
        states = [optimizer.state[one] for optimizer, one in zip(optimizers, own, strict=True)]
        for tensors in (own, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))):
            mean = torch.stack(list(tensors)).mean(dim=0)
            for tensor in tensors:
                tensor.copy_(mean)
