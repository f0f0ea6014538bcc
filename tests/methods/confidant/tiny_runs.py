"""Runs of a tiny job on two to four emulated devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_job import two_devices

from tests.clusters import cluster_of
from workbench import experiment
from workbench.core import Cluster, Job, Report


def run(job: Job, folder: Path, **settings: object) -> Report:
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced", **settings)  # type: ignore[arg-type]


def losses(report: Report) -> list[float]:
    return [step.loss for step in report.steps if step.loss is not None]


def devices(count: int, **settings: Any) -> Cluster:
    names = ("alpha", "beta", "gamma", "delta")[:count]
    return cluster_of(names, **{"flops_per_s": 3e10, "memory_bytes": 600_000_000, "host_share": 1.0} | settings)
