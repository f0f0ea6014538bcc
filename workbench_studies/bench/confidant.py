"""`workbench bench confidant`: processors that share layers, a pipeline without a drain, the partition; emulated,
interleaved.

Each side is a whole run as a user starts it: LoRA on one epoch of mini-batches.  Only the synchronous side drains its
pipeline between mini-batches.  The frameworks compare PyTorch with JAX on one core at full speed, because emulated
devices take the planned time with both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.core.cluster import Cluster, Processor
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.experiment import run
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.jax_stage import JaxStageCompute, activation_of
from workbench.methods.training.handlers import StageContext
from workbench.models.loading import load_stack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.profiler.processors import Place, pinned, places
from workbench.profiler.timing import Call, time_calls
from workbench_studies.bench.frame import Figures, Progress, jobs_of, ratios, require_words
from workbench_studies.bench.ringada import Side, cluster_of, measure

ROUNDS = 3
JOBS = jobs_of("confidant")
JOB = next(iter(JOBS.values()))
MINI_BATCHES = (JOB.train_samples or 0) // JOB.batch_size
FRAMEWORKS, STAGE_SIZES = "frameworks", ((8, 32), (32, 64))
"""STAGE_SIZES: samples and tokens of the mini-batches with which PyTorch and JAX are compared."""
WORDS = (*dict.fromkeys(side.partition(":")[0] for side in JOBS), FRAMEWORKS)
PHONES = (0.2, 0.08, 0.18, 0.16)
"""Shares of a core in the proportions of the paper's four phones (Table 4); each of our devices has two such
processors."""


@dataclass(frozen=True, slots=True)
class Point:
    """sides: jobs by name; the first is the reference.  keeps_plan: all sides have the stages of the last one.

    bound: the largest possible speedup, the sum of all speeds over the first side's; None: only the compute of the
    busiest device counts.
    """

    cluster: Cluster
    sides: Mapping[str, Job]
    keeps_plan: bool = False
    bound: float | None = None


def _sides(name: str) -> dict[str, Job]:
    """Return the sides of a point."""
    return {side.removeprefix(f"{name}: "): job for side, job in JOBS.items() if side.startswith(f"{name}: ")}


def _with_two(cluster: Cluster, shares: Sequence[float], second: float = 1.0) -> Cluster:
    """Return devices with these shares, whose second processor has a fraction of the first one's speed."""
    both = (Processor(name="first", flops_per_s=1e10), Processor(name="second", flops_per_s=1e10 * second))
    devices = (
        replace(device, host_share=share, processors=both)
        for device, share in zip(cluster.devices, shares, strict=True)
    )
    return replace(cluster, devices=tuple(devices))


def points() -> dict[str, Point]:
    """Return the comparisons by name."""
    equal, unequal = (
        cluster_of("equal,1000"),
        cluster_of("unequal,1000").part([2, 3, 1, 0]),
    )  # as pac-env-b: slower first
    shares, phones = unequal.host_shares(), _with_two(equal, PHONES)
    two = {speed: _with_two(equal.part([0, 1]), (0.25, 0.25), speed) for speed in (1.0, 0.5)}
    points_of_sizes = {
        f"processors 1:{speed:g}": Point(cluster, _sides("processors"), bound=1 + speed)
        for speed, cluster in two.items()
    }
    return points_of_sizes | {
        "schedule": Point(equal, _sides("schedule"), keeps_plan=True),
        "partition": Point(unequal, _sides("partition"), bound=sum(shares) / max(shares)),
        "phones": Point(phones, _sides("phones"), bound=2 * sum(PHONES) / max(PHONES)),
    }


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS) -> Figures:
    """Return each side's training seconds and its speedup over the first side of its point: with its spread, simulated,
    and at most.

    mb, simulated_mb: memory of the largest device in training.  only: first words of points; none is all.  Raises
    ConfigError for another word.
    """
    require_words(only, WORDS)
    chosen = {name: point for name, point in points().items() if not only or name.split()[0] in only}
    rows = []
    for name, point in chosen.items():
        rows += table(name, measure(name, point.sides, point.cluster, rounds, progress, kept_plans(point)), point.bound)
    return {
        "label": "emulated; bounds simulated",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size}, training alone; speedups over the first side of "
        "each "
        "point",
        "model": JOB.model,
        "rounds": rounds,
        "points": rows,
        FRAMEWORKS: frameworks() if not only or FRAMEWORKS in only else [],
    }


def frameworks() -> list[Figures]:
    """Return the milliseconds of two layers with LoRA on one core, forward and back, by PyTorch and by JAX, timed in
    turn.
    """
    core = next(iter(places().values())).cores[0]
    with pinned(Place(torch.device("cpu"), (core,))):
        stack = load_stack(JOB.model)
        config = TechniqueConfig(
            technique="lora", hidden_size=stack.hidden_size, num_layers=stack.num_layers, lora_dropout=0.0
        )
        model = TechniqueStage(stack.stage(1, 3), config)
        heads = model.backbone.config.num_attention_heads
        sides = {
            "PyTorch": StageCompute(model),
            "JAX": JaxStageCompute(model, activation=activation_of(JOB.model), heads=heads, sizes=STAGE_SIZES),
        }
        calls: dict[tuple[str, str, tuple[int, int]], Call] = {}
        for (side, compute), size in product(sides.items(), STAGE_SIZES):
            hidden, mask = torch.randn(*size, stack.hidden_size), torch.ones(size, dtype=torch.int64)

            def forward(compute: StageCompute = compute, hidden: Tensor = hidden, mask: Tensor = mask) -> StageContext:
                return compute.forward(hidden.clone().requires_grad_(), mask, None)

            calls[side, "forward", size] = forward
            calls[side, "back", size] = (
                forward,
                partial(
                    lambda compute, ones, context: compute.backward(context, ones), compute, torch.ones_like(hidden)
                ),
            )
        milliseconds = {key: 1e3 * seconds for key, seconds in time_calls(calls).items()}
    return [
        {"samples": size[0], "tokens": size[1], "pass": way}
        | {f"{side}_ms": milliseconds[side, way, size] for side in sides}
        | {"JAX_over_PyTorch": milliseconds["JAX", way, size] / milliseconds["PyTorch", way, size]}
        for size, way in product(STAGE_SIZES, ("forward", "back"))
    ]


def table(name: str, sides: Mapping[str, Side], bound: float | None) -> list[Figures]:
    """Return a point's rows.  bound: the largest possible speedup; None: computed from each side's busiest device.

    share_of_bound: the measured speedup over the bound.
    """
    predicted_s = {side: measured.reports[0].predicted_s for side, measured in sides.items()}
    base, rows = next(iter(sides)), []
    for side, measured in sides.items():
        ratio = ratios(sides[base].seconds, measured.seconds, "speedup")
        most = predicted_s[base] / measured.busiest_s if bound is None else 1.0 if side == base else bound
        rows.append(
            {
                "point": name,
                "side": side,
                "layers": "-".join(str(stage.num_layers) for stage in measured.reports[0].plan.stages),
                "s": median(measured.seconds),
                "over_simulated": median(measured.seconds) / predicted_s[side],
                "speedup": ratio["speedup"],
                "spread": f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}",
                "simulated": predicted_s[base] / predicted_s[side],
                "bound": most,
                "share_of_bound": ratio["speedup"] / most,
                "valid": all(report.valid for report in measured.reports),
                "mb": measured.peak_bytes / 1e6,
                "simulated_mb": max(peak for peak, _ in measured.peaks.values()) / 1e6,
            }
        )
    return rows


def kept_plans(point: Point) -> dict[str, Plan]:
    """Return the last side's stages as plans of all sides, if the point keeps them; the job determines how a mini-batch
    is split.
    """
    if not point.keeps_plan:
        return {}
    plan, plans = run(list(point.sides.values())[-1], point.cluster, "simulate").plan, dict[str, Plan]()
    for side, job in point.sides.items():
        size = job.batch_size // job.micro_batches
        stages = tuple(replace(stage, shares=(replace(stage.shares[0], samples=size),)) for stage in plan.stages)
        sizes: dict[str, Any] = {"micro_batch_size": size, "num_micro_batches": job.micro_batches}
        plans[side] = (
            plan if job.method == plan.method else replace(plan, method=job.method, stages=stages, notes=(), **sizes)
        )
    return plans
