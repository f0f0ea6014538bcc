"""`workbench bench ringada`: RingAda, with and without its cache, and its baselines, on four emulated devices, interleaved.

Whole runs as a user starts them, in the paper's proportions: one more layer after each sixth of the first 62 % of the mini-batches.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.bench.frame import Progress, ratios, turns
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.experiment import run
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.simulator import simulate

POINTS = ("equal,1000", "equal,125", "unequal,1000")
"""Devices and Mbit/s of their links."""
SHARES = {"equal": (0.3, 0.3, 0.3, 0.3), "unequal": (0.3, 0.3, 0.16, 0.08)}
"""Fractions of a core: four devices at once leave the host time for their links.  The unequal ones have the ratios of cluster 'laptop'."""
ROUNDS, MINI_BATCHES, EPOCHS, BATCH_SIZE = 2, 32, 4, 32
"""One more layer is trained every four mini-batches: all six from the twentieth on, as in the paper 12 from the 440th of 700 on."""
JOB = Job(
    method="ringada",
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    micro_batches=8,
    max_length=32,
    train_samples=BATCH_SIZE * MINI_BATCHES // EPOCHS,
    validation_samples=32,
    test_samples=32,
)
RING = {"local_iterations": 1, "unfreeze_every": 4, "depth": 1}
SIDES = {
    "RingAda": replace(JOB, options=RING),
    "RingAda cached": replace(JOB, options=RING | {"cache": True}),
    "Parallel Adapters": replace(JOB, options=RING | {"technique": "parallel"}),
    "FedAvg": replace(JOB, options={"local_iterations": 1, "federated": True}),
    "PipeAdapter": replace(JOB, options={"local_iterations": 1, "unfreezing": "all"}),
    "PipeAdapter stashing": replace(
        JOB, method="fine_tuning", micro_batches=1, options={"technique": "serial", "schedule": "asynchronous_1f1b"}
    ),
    "Single": replace(JOB, method="fine_tuning", options={"technique": "serial", "paradigm": "standalone"}),
    "Parallel Adapters cached, one device": replace(JOB, method="pac_plus", options={"paradigm": "standalone"}),
}
"""Both PipeAdapters train all adapters: one without stale weights, one with weight stashing that drains after each epoch.
Parallel Adapters (PAC+) need no backward pass through the model, and after the first epoch no forward pass either."""


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, Any]:
    """Return each side's seconds of training, measured and simulated, their bound and memory, and the ratios to RingAda with their spread.

    only: of POINTS, as DEVICES,RATE or one of both words; none is all.  Raises ConfigError for another word.
    """
    known = {word for point in POINTS for word in point.split(",")}
    unknown = [word for word in only if word not in known]
    if unknown:
        asked = f"Only '{unknown[0]}' of the benchmark was asked for."
        raise ConfigError(asked, f"There are {'; '.join(POINTS)} (Mbit/s).", "Name one of these words, or two.")
    points = []
    for name in [name for name in POINTS if set(only) <= set(name.split(","))]:
        reports: dict[str, list[Report]] = {side: [] for side in SIDES}
        cluster = cluster_of(name)
        for turn, side in turns(SIDES, range(rounds)):
            report = _run(SIDES[side], cluster)
            reports[side].append(report)
            progress(f"{name} Mbit/s, round {turn + 1}, {side}: {measured_s(report):.1f} s{'' if report.valid else ' (host too busy)'}")
        points.append(point(name, reports, {side: bounds(SIDES[side], cluster, of_side[0].plan) for side, of_side in reports.items()}))
    return {
        "name": "ringada",
        "label": "emulated; bound and memory simulated",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size}, training alone",
        "model": JOB.model,
        "micro_batches": JOB.micro_batches,
        "rounds": rounds,
        "points": points,
    }


def point(name: str, reports: dict[str, list[Report]], bound: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """Return a point's figures.  bound: of each side, the seconds of its busiest device and the maximum bytes on one device.

    over_predicted, over_bound: measured seconds over simulated ones, and over the busiest device's compute.  The former also as the median
    of RingAda's rounds by the number of trained layers, and as the largest deviation from 1 of 95 % of them.
    """
    seconds = {side: [measured_s(one) for one in of_side] for side, of_side in reports.items()}
    found: dict[str, Any] = {"point": name}
    for side, of_side in seconds.items():
        predicted_s, (bound_s, nbytes) = sum(step.predicted_s or 0.0 for step in reports[side][0].steps), bound[side]
        found |= {f"{side}_s": median(of_side), f"{side}_over_predicted": median(of_side) / predicted_s}
        found |= {f"{side}_over_bound": median(of_side) / bound_s, f"{side}_memory_over_Single": nbytes / bound["Single"][1]}
    for side in seconds:
        if side != "RingAda":
            ratio = ratios(seconds[side], seconds["RingAda"], name=f"{side}_over_RingAda")
            least, most = ratio.pop("ratio_min"), ratio.pop("ratio_max")
            found |= ratio | {f"{side}_spread": f"{least:.2f}-{most:.2f}"}
    by_depth: dict[int, list[float]] = {}
    for report in reports["RingAda"]:
        for step in report.steps:
            depth = report.plan.num_layers - (step.lowest_trained or 0)
            by_depth.setdefault(depth, []).append((step.measured_s or 0.0) / (step.predicted_s or math.inf))
    found["RingAda_over_predicted_by_trained_layers"] = ", ".join(f"{depth}: {median(own):.3f}" for depth, own in sorted(by_depth.items()))
    off = sorted(abs(one - 1) for own in by_depth.values() for one in own)
    found["RingAda_round_off_p95"] = off[round(0.95 * (len(off) - 1))]
    return found | {"valid": all(one.valid for of_side in reports.values() for one in of_side)}


def bounds(job: Job, cluster: Cluster, plan: Plan) -> tuple[float, int]:
    """Return the compute seconds of the busiest device in a run, and the maximum bytes on one device, both simulated."""
    method: Any = load_method(job.method)
    prepared = method.prepare(job, ignore)
    phases = method.rank_job(prepared, method.profile(prepared, cluster, ignore), cluster, plan).phases()
    shapes = [(phase, Counter(planned.shape for epoch in phase.epochs for planned in phase.steps(epoch))) for phase in phases]
    found = [(simulate(phase.program(shape)), count) for phase, counts in shapes for shape, count in counts.items()]
    ranks = range(cluster.world_size)
    busiest_s = max(sum(count * timeline.busy_s(rank) for timeline, count in found) for rank in ranks)
    return busiest_s, max(timeline.peak_bytes(rank) for timeline, _ in found for rank in ranks)


def measured_s(report: Report) -> float:
    """Return the seconds of a run's steps."""
    return sum(step.measured_s or 0.0 for step in report.steps)


def cluster_of(name: str) -> Cluster:
    """Return the devices of a point."""
    kind, rate = name.split(",")
    link = Link(bytes_per_s=int(rate) * 125_000, latency_s=0.0)
    cluster = load_cluster("laptop-equal")
    devices = tuple(replace(one, link=link, host_share=share) for one, share in zip(cluster.devices, SHARES[kind], strict=True))
    return replace(cluster, name=f"{kind}-{rate}", devices=devices)


def _run(job: Job, cluster: Cluster) -> Report:
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder:
        return run(job, cluster, workdir=Path(folder) / "run")
