"""What lab 04 shows and runs: the planner's table, cuts on emulated devices, and the samples of a group (PAC+, section
V-A).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity, Job
from workbench.core.plan import Plan, Share
from workbench.core.report import SweepPoint
from workbench.core.timeline import Timeline
from workbench.planners import TrainingProblem, candidates
from workbench.schedules.pipeline import one_f_one_b_order
from workbench.simulator.steps import step_s
from workbench.widgets import LiveProgress
from workbench.widgets.tables import Table
from workbench_labs import planning
from workbench_labs.course.verdict import usable
from workbench_labs.exercises.cuts import Seconds, cut_of, every_cut, stage_seconds
from workbench_labs.exercises.cuts import equal_cut as equal_cut  # the lab calls these
from workbench_labs.exercises.cuts import makespan_s as makespan_s
from workbench_labs.exercises.cuts import pipeline as pipeline
from workbench_labs.exercises.groups import DIVIDE
from workbench_labs.exercises.pipelines import BACKWARD, Both, both_ways, named, program_on, schedule_of
from workbench_labs.planning import by_hand, paper_problem, refusals

Divide = Callable[[int, Sequence[float]], Sequence[int]]


def trace_table(layer_s: Seconds) -> Table:
    """Return the table that a dynamic programme fills: the slowest stage of the best cut of the first n layers over the
    first d devices, and k, the layers of the devices before.
    """
    rows = []
    for size in range(1, len(layer_s) + 1):
        cells = []
        for length in range(1, len(layer_s[0]) + 1):
            beginning = [device_s[:length] for device_s in layer_s[:size]]
            cuts = list(every_cut(length, size)) if length >= size else []
            best = min(cuts, key=lambda cut: max(stage_seconds(cut, beginning)), default=None)
            slowest = max(stage_seconds(best, beginning)) if best else 0
            cells.append(f"{slowest:g} (k = {length - best[-1]})" if best else "")
        rows.append((f"d = {size}", *cells))
    columns = ("", *(f"n = {length}" for length in range(1, len(layer_s[0]) + 1)))
    seconds = "; ".join(
        f"device {device}: {' '.join(f'{each_s:g}' for each_s in device_s)}" for device, device_s in enumerate(layer_s)
    )
    return Table(columns, rows, title="best[d][n], in seconds", note=f"Seconds of each layer: {seconds}.")


def run_cut(
    counts: Sequence[int],
    layer_s: Seconds,
    *,
    cluster_name: str = "laptop-equal",
    fidelity: Fidelity = "auto",
    num_micro_batches: int = 4,
) -> Both:
    """Return a cut's mini-batch in 1F1B, simulated with the cluster's links, and executed by emulated devices.

    layer_s: the layers' seconds on as many devices as the cluster has.
    """
    seconds = stage_seconds(counts, layer_s)
    cluster = load_cluster(cluster_name)
    schedule = schedule_of(named(one_f_one_b_order), cluster.world_size, num_micro_batches)
    return both_ways(
        program_on(cluster, schedule, seconds, [BACKWARD * stage_s for stage_s in seconds]), cluster, fidelity
    )


def cut_by(cut: Callable[[Seconds], Sequence[int]], layer_s: Seconds) -> list[int]:
    """Return the cut of a right function, as numbers of layers."""
    return list(cut_of(cut(layer_s), len(layer_s[0]), len(layer_s)))


def cut_table(runs: Mapping[str, tuple[Sequence[int], Timeline, Timeline]]) -> Table:
    """Return the mini-batch of each cut, simulated and executed."""
    rows = [
        (name, " ".join(map(str, counts)), f"{1e3 * expected.makespan_s:.0f}", f"{1e3 * executed.makespan_s:.0f}")
        for name, (counts, expected, executed) in runs.items()
    ]
    _, one_expected, one_executed = next(iter(runs.values()))
    title = f"A mini-batch in milliseconds ({one_expected.label}; {one_executed.label})"
    return Table(("cut", "layers", "simulated", "executed"), rows, title=title)


def at_paper_scale(model: str, cluster_name: str) -> TrainingProblem:
    """Return a planning problem of a published model on devices of the catalogue: times come from FLOPs."""
    return paper_problem(model, load_cluster(cluster_name))


def best_by_stages(problem: TrainingProblem) -> tuple[list[Plan], list[float]]:
    """Return Algorithm 1's best plan for each number of stages, and the simulated seconds of each."""
    plans = sorted(candidates(problem), key=lambda plan: len(plan.stages))
    return plans, [step_s(problem, plan) for plan in plans]


def problem_of(job: Job, cluster_name: str) -> TrainingProblem:
    """Return the planning problem of a job on emulated devices, with layer times that this machine has measured."""
    cluster = load_cluster(cluster_name)
    return planning.problem_of(job, cluster, experiment.profile(job, cluster, "execute"))


def divided(problem: TrainingProblem, divide: Divide) -> Plan:
    """Return data parallelism on all devices, the samples of a micro-batch divided by a student's function.

    Until it is right the best of all divisions stands in.
    """
    ranks = range(problem.cluster.world_size)
    layers = [problem.profile.num_layers]
    sample_s = [step_s(problem, by_hand(problem, layers, [[rank]])) / problem.batch_size for rank in ranks]
    size = problem.micro_batch_size
    counts = [int(count) for count in usable([DIVIDE], DIVIDE.name, divide)(size, sample_s)]
    plan = by_hand(problem, layers, [list(ranks)], dispatch="equal")
    [stage] = plan.stages
    shares = tuple(Share(rank=rank, samples=counts[rank]) for rank in ranks)
    return replace(plan, stages=(replace(stage, shares=shares),))


def divisions_table(problem: TrainingProblem, divide: Divide, micro_batches: Sequence[int]) -> Table:
    """Return the simulated steps of data parallelism, by how a group's samples are divided and a mini-batch is cut."""
    rows, layers = [], [problem.profile.num_layers]
    ranks = list(range(problem.cluster.world_size))
    for number in micro_batches:
        problem_here = replace(problem, micro_batches=number)
        plans = {
            "one device, the first": by_hand(problem_here, layers, [[0]]),
            "all, equally": by_hand(problem_here, layers, [ranks], dispatch="equal"),
            "all, by speed, one at least": by_hand(problem_here, layers, [ranks]),
            "all, by your function": divided(problem_here, divide),
        }
        for name, plan in plans.items():
            counts = {share.rank: share.samples for share in plan.stages[0].shares}
            samples = " - ".join(str(counts.get(rank, 0)) for rank in ranks)
            fits = "" if not refusals(problem_here, plan) else "too large"
            rows.append(
                (
                    f"{number} of {problem_here.micro_batch_size}",
                    name,
                    samples,
                    f"{1e3 * step_s(problem_here, plan):.0f}",
                    fits,
                )
            )
    columns = ("micro-batches", "devices", "samples of a micro-batch", "step, ms", "")
    return Table(columns, rows, title="Data parallelism on unequal devices (simulated, measured layer times)")


def swept(job: Job, cluster_name: str, plans: dict[str, Plan], **settings: Any) -> tuple[SweepPoint, ...]:
    """Return the same steps under each plan, simulated and on emulated devices.  settings: experiment.sweep's."""
    cluster = load_cluster(cluster_name)
    with LiveProgress(job, cluster) as live:
        return experiment.sweep(job, cluster, plans, "execute", progress=live.update, **settings)
