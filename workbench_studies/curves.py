"""Measure learning curves for the adviser: `python -m workbench_studies.curves` writes data/curves.json.

Each technique trains on one emulated device, which learns the same as any number of devices.  The metric on the
validation split is stored after each epoch.  Methods whose learning depends on the devices (stale gradients, rings,
samples seen by a device) have no curve.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer

from workbench import experiment
from workbench.core.catalogue import data_folder, load_cluster
from workbench.core.job import Job
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import write_json
from workbench.runs.advice import combinations
from workbench.runs.curves import DIVIDING, Curve, curves_in
from workbench.tasks import load_task

METHODS = ("pac_plus", "fine_tuning")
JOB = Job(train_samples=1000, validation_samples=500, test_samples=16, epochs=3)


def curve(job: Job, seeds: tuple[int, ...], command: str) -> Curve:
    """Return the mean curve of a job over some seeds, trained on one emulated device."""
    device = replace(load_cluster("laptop").devices[0], host_share=1.0)
    cluster = replace(load_cluster("laptop"), name="one", devices=(device,))
    reports = []
    for seed in seeds:
        with scratch_folder() as folder:
            reports.append(experiment.run(replace(job, seed=seed), cluster, workdir=folder / "run"))
    metric = next(iter(reports[0].epochs[0].metrics))
    scores = [[epoch.metrics[metric] for epoch in report.epochs] for report in reports]
    return Curve(
        model=job.model,
        task=job.task,
        method=job.method,
        options=job.options,
        batch_size=job.batch_size,
        train_samples=job.train_samples or 0,
        metric=metric,
        scores=tuple(round(score, 4) for score in (_untrained(job), *map(mean, zip(*scores, strict=True)))),
        seeds=seeds,
        command=command,
    )


def _untrained(job: Job) -> float:
    """Return the metric of a model that always answers with the most frequent label."""
    labels = load_task(job.task, data=job.data, validation_samples=job.validation_samples).validation.labels
    return max(Counter(labels).values()) / len(labels)


def main(
    seeds: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "0",
    out: Annotated[Path | None, typer.Option(help="Default: data/curves.json.")] = None,
) -> None:
    """Train every technique of some methods and write their curves; those that the file has remain."""
    chosen, path = tuple(int(seed) for seed in seeds.split(",")), out or data_folder() / "curves.json"
    curves = list(curves_in(path))
    # The number format of a backbone changes little in what a model learns: such combinations come last.
    jobs = sorted(combinations(JOB), key=lambda combination: "backbone_dtype" in combination[1].options)
    for name, job in jobs:
        is_measured = any((curve.method, curve.options) == (job.method, job.options) for curve in curves)
        if job.method in METHODS and not is_measured and not set(job.options) & set(DIVIDING):
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
            curves.append(curve(job, chosen, f"python -m workbench_studies.curves --seeds {seeds}"))
            write_json(path, curves)


if __name__ == "__main__":
    typer.run(main)
