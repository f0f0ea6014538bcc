"""`workbench bench ringada`: Single, a synchronous PipeAdapter and RingAda on four equal emulated devices, interleaved.

Whole runs as a user starts them, in the paper's proportions: a layer more whenever a sixth of the first 62 % of the mini-batches is done.
"""

from __future__ import annotations

import tempfile
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
from workbench.core.report import Report
from workbench.experiment import run

MBIT_PER_S, ROUNDS = (1000, 125), 2
SHARE = 0.3
"""Of a core: four devices at once leave the host time for their links."""
JOB = Job(method="ringada", epochs=1, batch_size=16, micro_batches=4, max_length=32, validation_samples=32, test_samples=32)
MINI_BATCHES = 32
"""Of which a layer more is trained every four: all six from the twentieth on, as in the paper 12 from the 440th of 700 on."""
SIDES = {
    "RingAda": replace(JOB, options={"local_iterations": 1, "unfreeze_every": 4, "depth": 1}),
    "PipeAdapter": replace(JOB, options={"local_iterations": 1, "unfreezing": "all"}),
    "Single": replace(JOB, method="fine_tuning", options={"technique": "serial", "paradigm": "standalone"}),
}


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, Any]:
    """Return each side's seconds of training, measured and simulated, and the ratios to RingAda with their spread.

    only: link rates in Mbit/s, none is all.  Raises ConfigError for another rate.
    """
    unknown = [word for word in only if word not in map(str, MBIT_PER_S)]
    if unknown:
        asked = f"Only '{unknown[0]}' of the benchmark was asked for."
        raise ConfigError(asked, f"There are {', '.join(map(str, MBIT_PER_S))} Mbit/s.", "Name one of them.")
    rates = [rate for rate in MBIT_PER_S if str(rate) in only] or list(MBIT_PER_S)
    points = []
    for rate in rates:
        reports: dict[str, list[Report]] = {name: [] for name in SIDES}
        for turn, name in turns(SIDES, range(rounds)):
            report = _run(replace(SIDES[name], train_samples=JOB.batch_size * MINI_BATCHES), _cluster(rate))
            reports[name].append(report)
            progress(f"{rate} Mbit/s, round {turn + 1}, {name}: {measured_s(report):.1f} s{'' if report.valid else ' (host too busy)'}")
        points.append(point(rate, reports))
    return {
        "name": "ringada",
        "label": "emulated",
        "what": "32 mini-batches: all adapters on one device; on a ring, all adapters; on a ring, unfrozen from the top",
        "model": JOB.model,
        "devices": f"4, each {SHARE} of a core",
        "micro_batches": JOB.micro_batches,
        "rounds": rounds,
        "points": points,
    }


def point(rate: int, reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Return one link rate's figures.  over_bound: RingAda's measured time over its simulated one."""
    seconds = {name: [measured_s(one) for one in of_side] for name, of_side in reports.items()}
    found: dict[str, Any] = {"mbit_per_s": rate}
    for name, of_side in seconds.items():
        found |= {f"{name}_s": median(of_side), f"{name}_simulated_s": sum(step.predicted_s or 0.0 for step in reports[name][0].steps)}
    for name in ("Single", "PipeAdapter"):
        ratio = ratios(seconds[name], seconds["RingAda"], name=f"{name}_over_RingAda")
        least, most = ratio.pop("ratio_min"), ratio.pop("ratio_max")
        found |= ratio | {f"{name}_spread": f"{least:.2f}-{most:.2f}"}
    over_bound = found["RingAda_s"] / found["RingAda_simulated_s"]
    return found | {"over_bound": over_bound, "valid": all(one.valid for of_side in reports.values() for one in of_side)}


def measured_s(report: Report) -> float:
    """Return the seconds of a run's steps."""
    return sum(step.measured_s or 0.0 for step in report.steps)


def _cluster(rate: int) -> Cluster:
    cluster = load_cluster("laptop-equal")
    devices = tuple(replace(one, link=Link(bytes_per_s=rate * 125_000, latency_s=0.0), host_share=SHARE) for one in cluster.devices)
    return replace(cluster, name=f"{cluster.name}-{rate}", devices=devices)


def _run(job: Job, cluster: Cluster) -> Report:
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder:
        return run(job, cluster, workdir=Path(folder) / "run")
