"""`workbench bench confidant`: processors that share layers, a pipeline without a drain, the partition; emulated, interleaved.

Each side is a whole run as a user starts it: LoRA on one epoch of mini-batches.  Only the synchronous side drains its pipeline between
mini-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.bench.frame import Progress, ratios, turns
from workbench.bench.ringada import Watch, bounds, cluster_of
from workbench.bench.ringada_tables import measured_s
from workbench.core.cluster import Cluster, Processor
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.experiment import run
from workbench.runtime.run_folder import scratch_folder

ROUNDS, MINI_BATCHES = 3, 16
JOB = Job(
    method="confidant",
    epochs=1,
    batch_size=8,
    micro_batches=4,
    max_length=32,
    train_samples=8 * MINI_BATCHES,
    validation_samples=32,
    test_samples=32,
)
LORA = {"technique": "lora", "drain_every": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """sides: jobs by name; the first is the reference.  keeps_plan: all sides have the stages of the last one.

    bound: of the speedup, the sum of all speeds over the first side's; None: only the compute of the busiest device counts.
    """

    cluster: Cluster
    sides: Mapping[str, Job]
    keeps_plan: bool = False
    bound: float | None = None


def _confidant(**options: Any) -> Job:
    return replace(JOB, options=LORA | options)


def _processors(second: float) -> Point:
    """Return two equal devices, whose second processor has this fraction of the first one's speed."""
    pair = cluster_of("equal,1000").part([0, 1])
    both = (Processor(name="first", flops_per_s=1e10), Processor(name="second", flops_per_s=1e10 * second))
    cluster = replace(pair, devices=tuple(replace(device, host_share=0.25, processors=both) for device in pair.devices))
    sides = {"one processor": "none", "heads": "heads", "heads and columns": "heads_and_columns"}
    jobs = {name: _confidant(split=split, heads="optimal", partition="even") for name, split in sides.items()}
    return Point(cluster=cluster, sides=jobs, bound=1 + second)


def points() -> dict[str, Point]:
    """Return the comparisons by name."""
    tuned, unequal = replace(JOB, method="fine_tuning"), cluster_of("unequal,1000").part([2, 3, 1, 0])  # as pac-env-b: slower first
    shares = unequal.host_shares()
    return {
        "processors 1:1": _processors(1.0),
        "processors 1:0.5": _processors(0.5),
        "schedule": Point(
            cluster=cluster_of("equal,1000"),
            sides={
                "synchronous": replace(tuned, options={"technique": "lora", "paradigm": "pipeline_parallel"}),
                "asynchronous": _confidant(partition="even"),
            },
            keeps_plan=True,
        ),
        "partition": Point(
            cluster=unequal,
            sides={
                "fastest device": replace(tuned, options={"technique": "lora", "paradigm": "standalone"}),
                "even": _confidant(partition="even"),
                "FTPipeHD": _confidant(partition="capacity"),
                "Eq. 3": _confidant(),
                "Eq. 3 in any order": _confidant(partition="any_order"),
            },
            bound=sum(shares) / max(shares),
        ),
    }


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, Any]:
    """Return each side's training seconds and its speedup over the first side of its point: with its spread, simulated, and at most.

    mb, simulated_mb: memory of the largest device in training.  only: first words of points; none is all.  Raises ConfigError for another
    word.
    """
    chosen = {name: point for name, point in points().items() if not only or name.split()[0] in only}
    unknown = sorted(set(only).difference(name.split()[0] for name in points()))
    if unknown:
        known = ", ".join(dict.fromkeys(name.split()[0] for name in points()))
        raise ConfigError(f"Only '{unknown[0]}' of the benchmark was asked for.", f"There are {known}.", "Name one of these.")
    rows = []
    for name, point in chosen.items():
        reports: dict[str, list[Report]] = {side: [] for side in point.sides}
        watched = {side: list[int]() for side in point.sides}
        plan = run(list(point.sides.values())[-1], point.cluster, "simulate").plan if point.keeps_plan else None
        for turn, side in turns(point.sides, range(rounds)):
            watch = Watch()
            report = _run(point.sides[side], point.cluster, plan, watch)
            reports[side].append(report)
            watched[side] += watch.peak_bytes
            progress(f"{name}, round {turn + 1}, {side}: {measured_s(report):.1f} s{'' if report.valid else ' (host too busy)'}")
        simulated = {side: bounds(job, point.cluster, reports[side][0].plan) for side, job in point.sides.items()}
        own = table(name, reports, point.bound, {side: busiest_s for side, (busiest_s, _) in simulated.items()})
        for row in own:
            side = str(row["side"])
            row["mb"] = max(watched[side], default=0) / 1e6
            row["simulated_mb"] = max(whole for whole, _ in simulated[side][1].values()) / 1e6
        rows += own
    return {
        "name": "confidant",
        "label": "emulated; bounds simulated",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size}, training alone; speedups over the first side of each point",
        "model": JOB.model,
        "rounds": rounds,
        "points": rows,
    }


def table(name: str, reports: Mapping[str, list[Report]], bound: float | None, busiest_s: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a point's rows.  bound: of the speedup; None computes it from busiest_s, the compute of each side's busiest device.

    share_of_bound: the measured speedup over the bound.
    """
    seconds = {side: [measured_s(one) for one in of_side] for side, of_side in reports.items()}
    predicted_s = {side: sum(step.predicted_s or 0.0 for step in of_side[0].steps) for side, of_side in reports.items()}
    base, rows = next(iter(reports)), []
    for side, of_side in reports.items():
        ratio = ratios(seconds[base], seconds[side], "speedup")
        most = predicted_s[base] / busiest_s[side] if bound is None else 1.0 if side == base else bound
        rows.append(
            {
                "point": name,
                "side": side,
                "layers": "-".join(str(stage.num_layers) for stage in of_side[0].plan.stages),
                "s": median(seconds[side]),
                "over_simulated": median(seconds[side]) / predicted_s[side],
                "speedup": ratio["speedup"],
                "spread": f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}",
                "simulated": predicted_s[base] / predicted_s[side],
                "bound": most,
                "share_of_bound": ratio["speedup"] / most,
                "valid": all(one.valid for one in of_side),
            }
        )
    return rows


def _run(job: Job, cluster: Cluster, plan: Plan | None, watch: Watch) -> Report:
    """Run a job.  plan: its stages are kept; the job determines how a mini-batch is split."""
    if plan is not None and job.method != "confidant":
        size = job.batch_size // job.micro_batches
        stages = tuple(replace(stage, shares=(replace(stage.shares[0], samples=size),)) for stage in plan.stages)
        plan = replace(plan, method=job.method, stages=stages, micro_batch_size=size, num_micro_batches=job.micro_batches, notes=())
    with scratch_folder() as folder:
        return run(job, cluster, workdir=Path(folder) / "run", chosen_plan=plan, progress=watch)
