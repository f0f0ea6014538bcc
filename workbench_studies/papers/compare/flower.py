"""RingAda and federated averaging next to Flower: accuracy over bytes (item `flower`).

Ours is executed on emulated devices.  Flower's clients train the same mini-batches from the same weights, and its
FedAvg averages what they send (see flower_grid).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

from torch import Tensor

from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.serial import text_digest, to_json
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.methods.checked import prepared_job
from workbench.methods.ringada.method import rank_job
from workbench.methods.ringada.prepare import PreparedJob
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.models.techniques import predict
from workbench.simulator.simulate import simulate
from workbench.tasks.metrics import score
from workbench.tasks.tokenize import evaluation_batches
from workbench_studies.papers.compare.clients import Client
from workbench_studies.papers.compare.runs import computed_costs, report_of
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, Settings, spread

CLUSTER = "laptop-equal"
SHAPE = Job(train_samples=320, validation_samples=200, test_samples=16, batch_size=8, epochs=4, method="ringada")
QUICK = replace(SHAPE, model="tiny-bert", train_samples=64, validation_samples=32, epochs=1)
LOCAL = 5
"""Mini-batches of a device between two averages: half of its samples."""
RINGS: dict[str, dict[str, Any]] = {
    "RingAda": {"local_iterations": LOCAL},
    "federated averaging, ours": {"local_iterations": LOCAL, "federated": True},
}
"""Options of the executed runs, by name."""
OURS = "federated averaging, ours"
CLIENTS: dict[str, tuple[bool, bool]] = {
    "Flower, weights and moments": (True, True),
    "Flower, moments stay": (False, True),
    "Flower, new moments": (False, False),
}
"""How Flower's clients treat the optimizer's moments, by name: whether they send them, whether they keep any."""
EQUAL = "Flower, weights and moments"
TARGET = 70.0
"""Validation accuracy, per cent, until which sent bytes are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The result of a training.  losses: means of each round.  scores: validation accuracy after each epoch, per cent.
    sent_bytes: by all devices and a server until then.
    """

    way: str
    seed: int
    losses: tuple[float, ...]
    scores: tuple[float, ...]
    sent_bytes: tuple[int, ...]


def flower(item: Item, settings: Settings) -> Result:
    """Train every way with every seed."""
    shape, curves = QUICK if settings.quick else SHAPE, list[Curve]()
    for seed in settings.seeds:
        for name in (*RINGS, *CLIENTS):
            curves.append(curve(name, replace(shape, seed=seed), settings))
            settings.progress(f"{name}, seed {seed}: {curves[-1].scores[-1]:.1f} %")
    return compared(item, curves, shape)


def curve(name: str, shape: Job, settings: Settings) -> Curve:
    """Return a training, remembered or executed now."""
    job = replace(shape, options=RINGS.get(name, RINGS[OURS]))
    digest = text_digest(name + to_json(job.identity) + to_json(load_cluster(CLUSTER)))
    make = partial(run_emulated if name in RINGS else run_by_flower, name, job)
    return settings.remember(f"flower/{job.seed}-{digest}.json", Curve, make)


def compared(item: Item, curves: Sequence[Curve], shape: Job) -> Result:
    """Return the comparison."""
    by_way: dict[str, list[Curve]] = {}
    for each in curves:
        by_way.setdefault(each.way, []).append(each)
    points = {
        name: [
            (nbytes / 1e6, fmean(scores))
            for nbytes, scores in zip(of[0].sent_bytes, zip(*(each.scores for each in of), strict=True), strict=True)
        ]
        for name, of in by_way.items()
    }
    distances = [
        abs(ours - theirs) / ours
        for mine, other in zip(by_way[OURS], by_way[EQUAL], strict=True)
        for ours, theirs in zip(mine.losses, other.losses, strict=True)
    ]
    ways: list[Row] = []
    for name, of in by_way.items():
        ends = [each.scores[-1] for each in of]
        reached = next((megabytes for megabytes, accuracy in points[name] if accuracy >= TARGET), None)
        ways.append((name, points[name][-1][0], reached, fmean(ends), spread(ends), len(ends)))
    sent_bytes = {name: line[-1][0] for name, line in points.items()}
    return item.result(
        tables={
            "ways": ways,
            "runs": [
                (
                    each.way,
                    each.seed,
                    ", ".join(f"{value:.1f}" for value in each.scores),
                    ", ".join(f"{value:.4f}" for value in each.losses),
                )
                for each in curves
            ],
        },
        holds={"equal": max(distances) < 1e-3},
        series={f"accuracy, {name.replace(',', ':')}": tuple(line) for name, line in points.items()},
        away=max(distances),
        sent=sent_bytes,
        rounds=len(curves[0].losses),
        model=shape.model,
        samples=shape.train_samples,
        batch_size=shape.batch_size,
        local=LOCAL,
        epochs=shape.epochs,
        scored=shape.validation_samples,
        target=TARGET,
    )


def describe(job: Job) -> tuple[PreparedJob, RingRankJob]:
    """Return a job with its data, and what its ranks get under the plan with costs from sizes."""
    method, cluster = load_method(job.method), load_cluster(CLUSTER)
    prepared = prepared_job(method, job, cluster, ignore)
    costs = computed_costs(job, cluster)  # the plan depends on no busy host
    return prepared, rank_job(prepared, costs, cluster, method.plan(prepared, costs, cluster))


def run_emulated(name: str, job: Job) -> Curve:
    """Run a method on emulated devices; its bytes are counted from its rounds."""
    _, run = describe(job)
    report = report_of(job, load_cluster(CLUSTER), "execute", chosen_plan=run.plan)
    sent = [
        sum(simulate(run.program(planned.shape), memory=False).all_sent_bytes for planned in run.planned_epoch(epoch))
        for epoch in range(job.epochs)
    ]
    return Curve(
        way=name,
        seed=job.seed,
        losses=tuple(step.loss or 0.0 for step in report.steps),
        scores=tuple(100 * epoch.metrics["accuracy"] for epoch in report.epochs),
        sent_bytes=tuple(accumulate(sent)),
    )


def accuracy(client: Client, prepared: PreparedJob) -> float:
    """Return the validation accuracy, per cent."""
    batches = evaluation_batches(prepared.validation)
    answered = predict(client.model, batches)
    return 100 * score(prepared.task, prepared.task.validation, prepared.validation, answered)["accuracy"]


def run_by_flower(name: str, job: Job) -> Curve:
    """Train by Flower: its FedAvg, messages and client apps, in this process.

    Raises ConfigError if Flower is not installed.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        from workbench_studies.papers.compare.flower_grid import federated
    except ImportError:
        raise ConfigError(
            "A federated run by Flower was asked for.",
            "Flower is not installed.",
            "Install it in an environment of its own, because it needs older versions of some packages: "
            "pip install flwr, or the studies with their extra 'flower'.",
        ) from None
    prepared, run = describe(job)
    client, scores = Client(run), list[float]()

    def finished(number: int, state: Mapping[str, Tensor]) -> None:
        if number % run.rounds_per_epoch == 0:
            client.load(state, 0)
            scores.append(accuracy(client, prepared))

    losses, sent_bytes = federated(run, *CLIENTS[name], finished)
    totals = list(accumulate(sent_bytes))
    return Curve(
        way=name,
        seed=job.seed,
        losses=tuple(losses),
        scores=tuple(scores),
        sent_bytes=tuple(totals[run.rounds_per_epoch - 1 :: run.rounds_per_epoch]),
    )
