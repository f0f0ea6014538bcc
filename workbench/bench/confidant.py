"""`workbench bench confidant`: processors that share layers, a pipeline without a drain, the partition, JAX; emulated, interleaved.

Each side is a whole run as a user starts it: LoRA on one epoch of mini-batches.  Only the synchronous side drains its pipeline between
mini-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from workbench.bench.frame import Progress, ratios
from workbench.bench.ringada import cluster_of, measure
from workbench.bench.ringada_tables import Side
from workbench.core.cluster import Cluster, Processor
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.experiment import run

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
    jax: the side of which every second device computes with JAX.
    """

    cluster: Cluster
    sides: Mapping[str, Job]
    keeps_plan: bool = False
    bound: float | None = None
    jax: str = ""

    def placed(self) -> dict[str, tuple[Job, Cluster]]:
        """Return each side's job and devices."""
        mixed = [replace(device, framework="jax") if rank % 2 else device for rank, device in enumerate(self.cluster.devices)]
        return {
            side: (job, replace(self.cluster, devices=tuple(mixed)) if side == self.jax else self.cluster)
            for side, job in self.sides.items()
        }


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
        "frameworks": Point(
            cluster=cluster_of("equal,1000"),
            sides={side: _confidant(partition="even") for side in ("PyTorch", "JAX on two devices")},
            jax="JAX on two devices",
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
        rows += table(name, measure(name, point.placed(), rounds, progress, kept_plans(point)), point.bound)
    return {
        "name": "confidant",
        "label": "emulated; bounds simulated",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size}, training alone; speedups over the first side of each point",
        "model": JOB.model,
        "rounds": rounds,
        "points": rows,
    }


def table(name: str, sides: Mapping[str, Side], bound: float | None) -> list[dict[str, Any]]:
    """Return a point's rows.  bound: of the speedup; None computes it from the compute of each side's busiest device.

    share_of_bound: the measured speedup over the bound.
    """
    predicted_s = {side: sum(step.predicted_s or 0.0 for step in own.reports[0].steps) for side, own in sides.items()}
    base, rows = next(iter(sides)), []
    for side, own in sides.items():
        ratio = ratios(sides[base].seconds, own.seconds, "speedup")
        most = predicted_s[base] / own.busiest_s if bound is None else 1.0 if side == base else bound
        rows.append(
            {
                "point": name,
                "side": side,
                "layers": "-".join(str(stage.num_layers) for stage in own.reports[0].plan.stages),
                "s": median(own.seconds),
                "over_simulated": median(own.seconds) / predicted_s[side],
                "speedup": ratio["speedup"],
                "spread": f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}",
                "simulated": predicted_s[base] / predicted_s[side],
                "bound": most,
                "share_of_bound": ratio["speedup"] / most,
                "valid": all(one.valid for one in own.reports),
                "mb": own.peak_bytes / 1e6,
                "simulated_mb": max(whole for whole, _ in own.peaks.values()) / 1e6,
            }
        )
    return rows


def kept_plans(point: Point) -> dict[str, Plan]:
    """Return the last side's stages as plans of all sides, if the point keeps them; the job determines how a mini-batch is split."""
    if not point.keeps_plan:
        return {}
    plan, found = run(list(point.sides.values())[-1], point.cluster, "simulate").plan, dict[str, Plan]()
    for side, job in point.sides.items():
        size = job.batch_size // job.micro_batches
        stages = tuple(replace(stage, shares=(replace(stage.shares[0], samples=size),)) for stage in plan.stages)
        sizes: dict[str, Any] = {"micro_batch_size": size, "num_micro_batches": job.micro_batches}
        found[side] = plan if job.method == plan.method else replace(plan, method=job.method, stages=stages, notes=(), **sizes)
    return found
