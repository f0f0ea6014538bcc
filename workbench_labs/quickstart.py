"""What lab 00 runs and shows next to its own run: other plans, the memory of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from workbench import experiment
from workbench.core.job import Fidelity
from workbench.core.plan import Plan
from workbench.core.proportions import proportional_parts
from workbench.core.report import Report
from workbench.planners import fixed_plan
from workbench.widgets import LiveProgress, Table
from workbench_labs.planning import problem_of


def times_shorter(report: Report) -> float | str:
    """Return the seconds of the first epoch over those of one from the cache; words if no epoch came from it."""
    cached = [epoch.seconds for epoch in report.epochs if epoch.cached]
    return report.epochs[0].seconds / mean(cached) if cached else "no epoch from the cache"


def other_plans(report: Report) -> dict[str, Plan]:
    """Return the run's plan and simpler ones for the same devices: one device, stages, groups, data parallelism."""
    job, cluster = report.job, report.cluster
    profile = experiment.profile(job, cluster)
    problem = problem_of(job, cluster, profile)

    def plan(weights: tuple[int, ...], groups: Sequence[Sequence[int]]) -> Plan:
        layers = proportional_parts(profile.num_layers, weights)
        return fixed_plan(problem, layers=layers, groups=groups)

    ranks = tuple(range(cluster.world_size))
    front, back = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    plans = {"planner's choice": report.plan, "one device": plan((1,), [(0,)])}
    if front and profile.num_layers >= len(ranks):
        plans |= {
            "two stages": plan((1, 1), [(0,), (1,)]),
            "a stage for each": plan((2,) * len(front) + (1,) * len(back), [(rank,) for rank in ranks]),
            "two groups": plan((2, 1), [front, back]),
            "data parallel": plan((1,), [ranks]),
        }
    return plans


def with_other_plans(report: Report, *, num_steps: int, fidelity: Fidelity) -> Report:
    """Return the report with the same steps under each of the other plans, simulated and measured."""
    job, cluster, plans = report.job, report.cluster, other_plans(report)
    with LiveProgress(job, cluster) as live:
        swept = experiment.sweep(
            job, cluster, plans, "execute", num_steps=num_steps, fidelity=fidelity, progress=live.update
        )
    return replace(report, sweep=swept)


def memory_table(report: Report) -> Table:
    """Return the largest values of each device in a step, in the first epoch and from the cache."""
    shown = {name: report.timelines.get(f"{name} epoch, measured") for name in ("first", "cached")}

    def most(name: str, rank: int) -> str:
        timeline = shown[name]
        return f"{timeline.peak_bytes(rank) / 1e6:.1f}" if timeline is not None and timeline.busy_s(rank) else "-"

    rows = [
        (device.name, f"{device.memory_bytes / 1e6:.0f}", most("first", rank), most("cached", rank))
        for rank, device in enumerate(report.cluster.devices)
    ]
    columns = ("device", "budget, MB", "first epoch, MB", "from the cache, MB")
    note = "-: it takes no part. Weights, activations, gradients; the libraries' own memory comes on top."
    return Table(columns, rows, title=f"The most that a step's values need ({report.label})", note=note)
