"""Loss by epochs and accuracy by time of the three schemes and of FedAvg, trained at small size (RingAda, section IV, Fig. 3)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import task_loss
from workbench.models.techniques import TechniqueConfig, TechniqueStage, predict
from workbench.reproduce.items import Item
from workbench.reproduce.result import Number, Result, Settings, kept_or_made, printed
from workbench.reproduce.ringada.training import FEDERATED, PAPER, PIPE, RING, SINGLE, depth_of, load_constants, seconds_after
from workbench.tasks import load_task
from workbench.tasks.batching import epoch_batches
from workbench.tasks.device_split import split_samples
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import collate, evaluation_batches, tokenize

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert-2"
BATCH_SIZE, MAX_LENGTH, LEARNING_RATE, WARMUP = 32, 128, 1e-3, 0.06
QUICK_STEPS = 32
POINTS, QUICK_POINTS = 20, 4
"""Points of a curve: the loss is a mean between two points, the accuracy is that of the validation split at the point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training.  losses, scores: at each of the points, per cent for scores.  test: per cent at the end."""

    losses: tuple[float, ...]
    scores: tuple[float, ...]
    test: float


def fig3(item: Item, settings: Settings) -> Result:
    """Train with all adapters, with one more at a time from the top, and by federated averaging of all adapters.

    PipeAdapter without stale weights has Single's losses.
    """
    constants, paper = load_constants(), printed(PAPER, "fig3")
    steps = QUICK_STEPS if settings.quick else round(constants.epochs)
    points = QUICK_POINTS if settings.quick else POINTS
    curves = {scheme: [_kept(settings, scheme, seed, steps, points) for seed in settings.seeds] for scheme in (SINGLE, RING, FEDERATED)}
    curves[PIPE] = curves[SINGLE]
    at = [steps * (point + 1) // points for point in range(points)]
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
        tests = [one.test for one in curves[scheme]]
        spread = stdev(tests) if len(tests) > 1 else None
        rows.append((scheme, loss[scheme][0], loss[scheme][-1], score[scheme][-1], fmean(tests), spread, reached[scheme]))
    gap = [ring - single for ring, single in zip(loss[RING], loss[SINGLE], strict=True)]
    early, late = max(gap[: points // 2]), gap[-1]
    ends = {scheme: fmean(one.test for one in curves[scheme]) for scheme in clock}
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
        model=QUICK_MODEL if settings.quick else MODEL,
        steps=steps,
        local=steps // points // constants.devices,
    )


def _kept(settings: Settings, scheme: str, seed: int, steps: int, points: int) -> Curve:
    """Return the stored training of the same settings, or train now."""
    path: Path | None = None
    if settings.workdir is not None:
        path = settings.workdir / "fig3" / f"{QUICK_MODEL if settings.quick else MODEL}-{scheme}-{steps}-{points}-{seed}.json"
    found = kept_or_made(path, Curve, lambda: _train(settings, scheme, seed, steps, points))
    settings.progress(f"{scheme}, seed {seed}: loss {found.losses[-1]:.3f}, test {found.test:.1f} %")
    return found


def _train(settings: Settings, scheme: str, seed: int, steps: int, points: int) -> Curve:
    """Train; at every step the fraction of trained layers is that of the paper's twelve.

    FedAvg: the devices take turns here, and between two points each does its part of the mini-batches; then all take the average.
    """
    name = QUICK_MODEL if settings.quick else MODEL
    constants = load_constants()
    limits: dict[str, Any] = {f"{part}_samples": 48 for part in ("train", "validation", "test")} if settings.quick else {}
    task, tokenizer, stack = load_task("sentiment", **limits), load_tokenizer(name), load_stack(name)
    train, validation, test = (tokenize(part, tokenizer, max_length=MAX_LENGTH) for part in (task.train, task.validation, task.test))
    config = TechniqueConfig(technique="serial", hidden_size=stack.hidden_size, num_layers=stack.num_layers, seed=seed)
    lengths = train.lengths
    devices = constants.devices if scheme == FEDERATED else 1
    models = [TechniqueStage(copy.deepcopy(stack.stage(0, stack.num_layers)), config) for _ in range(devices)]
    optimizers = [make_optimizer(model, 0.01) for model in models]

    def scored(split: Any) -> float:
        predictions = predict(models[0], evaluation_batches(split))
        models[0].train()
        return 100 * compute(("accuracy",), predictions.answers(config.kind), predictions.references())["accuracy"]

    def mini_batches(own: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        for epoch in count():
            for indices in epoch_batches([lengths[row] for row in own], BATCH_SIZE, seed, epoch):
                yield epoch, [own[index] for index in indices]

    owned = split_samples(task.train, devices, "iid", seed) if devices > 1 else (range(len(lengths)),)
    sources = [mini_batches(own) for own in owned]
    losses, scores, window = list[float](), list[float](), list[float]()
    for step in range(steps):
        place = step // (steps // points // devices) % devices  # one device after the other between two averages
        depth = depth_of(constants, scheme, step * round(constants.epochs) // steps)
        trained = -(-depth * stack.num_layers // constants.layers)
        model = models[place]
        for layer, adapter in model.adapters.items():
            adapter.requires_grad_(int(layer) >= stack.num_layers - trained)
        epoch, indices = next(sources[place])
        batch = collate(train, indices)
        logits = model.logits(model(batch.input_ids, batch.attention_mask)[1], batch.attention_mask, batch.sample_ids, epoch)
        loss = task_loss(logits, batch.labels, config.kind)
        loss.backward()
        set_learning_rate(optimizers[place], learning_rate_at(step, steps, LEARNING_RATE, WARMUP))
        optimizers[place].step()
        optimizers[place].zero_grad()
        window.append(loss.item())
        if step + 1 == steps * (len(scores) + 1) // points:
            _average(models, optimizers)
            losses.append(fmean(window))
            scores.append(scored(validation))
            window = []
    return Curve(losses=tuple(losses), scores=tuple(scores), test=scored(test))


@torch.no_grad()
def _average(models: Sequence[TechniqueStage], optimizers: Sequence[torch.optim.AdamW]) -> None:
    """Give all models the mean of their trained weights and of their moments."""
    for own in zip(*(model.trained().values() for model in models), strict=True) if len(models) > 1 else ():
        states = [optimizer.state[one] for optimizer, one in zip(optimizers, own, strict=True)]
        for tensors in (own, *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))):
            mean = torch.stack(list(tensors)).mean(dim=0)
            for tensor in tensors:
                tensor.copy_(mean)
