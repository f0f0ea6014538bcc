"""Lab 'Kit day': a student's planner plans a real job, which runs next to the workbench's plan, and loses a device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from workbench import experiment, plots
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.job import Fidelity, Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import Report, SweepPoint
from workbench.methods.base import Event
from workbench.planners import fixed_plan, plan_cached
from workbench.widgets.tables import Table
from workbench_labs.course.verdict import usable
from workbench_labs.exercises.cuts import equal_cut
from workbench_labs.exercises.projects import EXERCISES, Case, Planner
from workbench_labs.planning import problem_of


def devices_table(cluster: Cluster) -> Table:
    """Return the devices of a cluster, and where each is."""
    rows = [
        (
            device.name,
            device.address or (f"emulated: {device.host_share:g} of a core" if device.host_share else "simulated"),
            f"{device.flops_per_s / 1e9:.1f}",
            f"{device.memory_bytes / 1e6:.0f}",
            f"{device.link.mbit_per_s:g}",
            f"{1e3 * device.link.latency_s:g}",
        )
        for device in cluster.devices
    ]
    columns = ("device", "where", "GFLOP/s", "memory, MB", "link, Mbit/s", "latency, ms")
    return Table(columns, rows, title=f"Cluster {cluster.name}")


def case_of(job: Job, cluster: Cluster, profile: Profile) -> Case:
    """Return the input of a planner for a real job: measured seconds, bytes of weights and of what training keeps."""
    size, length = job.batch_size // job.micro_batches, job.max_length
    first = profile.layers[0]
    crossing = max(layer.output_bytes(size, length) for layer in first)
    layer_bytes = [
        profile.stored_bytes([layer]) + layer.context_bytes(size, length) * min(job.micro_batches, cluster.world_size)
        for layer in first
    ]
    return Case(
        layer_s=[[layer.forward_s(size, length) for layer in layers] for layers in profile.layers],
        layer_bytes=layer_bytes,
        budgets=[device.memory_bytes for device in cluster.devices],
        send_s=max(device.link.transfer_s(crossing) for device in cluster.devices),
        micro_batches=job.micro_batches,
    )


def plan_of(counts: Sequence[int], job: Job, cluster: Cluster, profile: Profile) -> Plan:
    """Return numbers of layers, by device, as a plan of the workbench; who trains from the cache, it plans itself.

    Raises PlanError if memory does not suffice.
    """
    problem = problem_of(job, cluster, profile)
    ranks = [rank for rank, count in enumerate(counts) if count]
    layers, groups = [counts[rank] for rank in ranks], [(rank,) for rank in ranks]
    return replace(fixed_plan(problem, layers=layers, groups=groups, method="yours"), cached=plan_cached(problem))


def three_plans(planner: Planner, job: Job, cluster: Cluster) -> dict[str, Plan]:
    """Return the plans of the student, of the workbench, and of equal parts where these fit, for the job.

    As long as the student's planner is not right, the best of all simulated plans stands in for it.
    """
    profile = experiment.profile(job, cluster, "execute")
    case = case_of(job, cluster, profile)
    answer = usable(EXERCISES, "planner", planner)(*(getattr(case, field.name) for field in fields(case)))
    plans = {
        "yours": plan_of(answer, job, cluster, profile),
        "the workbench's": experiment.plan(job, cluster, "execute"),
    }
    with contextlib.suppress(PlanError):
        plans["equal parts"] = plan_of(equal_cut(profile.num_layers, cluster.world_size), job, cluster, profile)
    return plans


def step_times(
    plans: Mapping[str, Plan],
    job: Job,
    cluster: Cluster,
    *,
    fidelity: Fidelity,
    steps: int,
    progress: Callable[[Event], None] | None = None,
) -> tuple[SweepPoint, ...]:
    """Return the step time of the job under each plan, simulated and executed."""
    return experiment.sweep(job, cluster, dict(plans), num_steps=steps, fidelity=fidelity, progress=progress)


def equal_over_yours(points: Sequence[SweepPoint]) -> float | None:
    """Return the measured step of equal parts over that of the student's plan; None if equal parts do not fit."""
    measured_s = {point.name: point.measured_s for point in points}
    equal_s, own_s = measured_s.get("equal parts"), measured_s["yours"]
    return equal_s / own_s if equal_s and own_s else None


def recovery_s(report: Report) -> float | None:
    """Return the longest time from a change of the devices to the end of the next step; None without a change."""
    return max((change.seconds for change in report.recoveries), default=None)


def write(report: Report, points: Sequence[SweepPoint], output: Path | str, *, png: bool) -> Report:
    """Write the run with the three plans, and its figures, to a folder; return the report with both."""
    with_plans = replace(report, sweep=tuple(points))
    folder = Path(output)
    with_plans.write(folder / "report.json")
    plots.write_figures(with_plans, folder, png="auto" if png else False)
    return with_plans
