"""What lab 10, Never drain, shows: a student's functions on devices, the scenarios of leaving, and its cells' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

from workbench import experiment, plots
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S
from workbench.core.job import Fidelity, Job
from workbench.core.plan import Plan, one_device_stages
from workbench.core.report import Report, busy_note
from workbench.runtime.context import RankContext
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import default_pool
from workbench.schedules.hetpipe import asynchronous_1f1b
from workbench.schedules.lowering import insert_transfers
from workbench.widgets.tables import Table
from workbench_labs.exercises.cuts import cut_of, equal_cut, stage_seconds
from workbench_labs.exercises.never_drain import (
    PAPER_CLUSTER,
    PAPER_MODEL,
    PAPER_TOKENS,
    delayed_weights,
    operations_of,
    plain_descend,
)
from workbench_labs.exercises.pipelines import BACKWARD, CROSSING, Both, both_table, both_ways, program_on
from workbench_labs.heads_by_hand import HeadsLab, head_profile
from workbench_labs.partition_by_hand import PartitionLab
from workbench_labs.planning import on_this_computer
from workbench_labs.weight_versions import StaleLab, stashed, version_table, version_words
from workbench_labs.written import write_run

share_module(__name__)  # its functions run on devices

__all__ = [
    "HeadsLab",
    "StaleLab",
    "both_table",
    "busy_note",
    "cut_by",
    "cut_to_run",
    "descend_table",
    "equal_cut",
    "head_profile",
    "partition_lab",
    "plots",
    "recovery_table",
    "run_partition",
    "scenarios",
    "simulate_all",
    "stashed",
    "stood_still",
    "version_table",
    "version_words",
    "write_run",
]

RATE, STEPS, WIDTH = 0.1, 12, 3
"""The descents on devices: learning rate, mini-batches, weights."""


def partition_lab(batch_size: int) -> PartitionLab:
    """Return an explorer of cuts of the paper's model over four Jetsons, as the catalogue describes them."""
    return PartitionLab(PAPER_MODEL, load_cluster(PAPER_CLUSTER), batch_size=batch_size, tokens=PAPER_TOKENS)


SLOWNESS = (1, 1, 2, 3)
"""Slowness of each device in the emulated cluster."""


def cut_to_run(cluster_name: str, layer_ms: float) -> tuple[Any, ...]:
    """Return the arguments of a student's partition for an emulated cluster, whose first device has little memory."""
    cluster = load_cluster(cluster_name)
    size = cluster.world_size
    lengths = [2, 1, 3, 2, 1, 2, 3, 2]
    layer_s = [[factor * length * layer_ms / 1e3 for length in lengths] for factor in SLOWNESS[:size]]
    link_s = [cluster.link(0, 1).transfer_s(CROSSING.nbytes) + MESSAGE_S] * len(lengths)
    budgets = [8 + 4 * size, *[400] * (size - 1)]
    return layer_s, link_s, [4] * len(lengths), 1, budgets


def cut_by(partition: Callable[..., Any], case: Sequence[Any]) -> list[int]:
    """Return the cut of a right function for such arguments, as numbers of layers."""
    layer_s, _, layer_mb, *_ = case
    return list(cut_of(partition(*case), len(layer_mb), len(layer_s)))


def run_partition(
    counts: Sequence[int],
    layer_s: Sequence[Sequence[float]],
    *,
    cluster_name: str,
    num_mini_batches: int = 10,
    fidelity: Fidelity = "auto",
) -> Both:
    """Return mini-batches through a cut that never drains between them: simulated, and executed by emulated devices.

    layer_s: forward and backward pass of each layer on each device, seconds.
    """
    cluster, seconds = on_this_computer(load_cluster(cluster_name)), stage_seconds(counts, layer_s)
    stages = one_device_stages(range(len(counts)), tuple(accumulate(counts, initial=0)), 1)
    plan = Plan(method="confidant", stages=stages, micro_batch_size=1, num_micro_batches=1)
    schedule = insert_transfers(asynchronous_1f1b(plan, num_mini_batches, world_size=cluster.world_size))
    forward_s, backward_s = ([part / (1 + BACKWARD) * layer_s for layer_s in seconds] for part in (1, BACKWARD))
    return both_ways(program_on(cluster, schedule, forward_s, backward_s), cluster, fidelity)


def _descend_rank(context: RankContext, payload: tuple[Any, tuple[Any, ...]]) -> list[float]:
    descend, arguments = payload
    return [float(weight) for weight in descend(*arguments)]


def descend_table(descend: Callable[..., Any], *, cluster_name: str, fidelity: Fidelity = "auto") -> Table:
    """Return what a function computes on each emulated device, as that stage, next to the weights as they should be."""
    whose = "the workbench's" if descend is plain_descend else "yours"
    cluster, draws = on_this_computer(load_cluster(cluster_name)), Random(0)
    size = cluster.world_size
    start = [draws.uniform(-1, 1) for _ in range(WIDTH)]
    inputs = [[draws.uniform(-1, 1) for _ in range(WIDTH)] for _ in range(STEPS)]
    targets = [draws.uniform(-1, 1) for _ in range(STEPS)]
    tasks = [(descend, (operations_of(size, rank, STEPS)[0], start, inputs, targets, RATE)) for rank in range(size)]
    engines = default_pool().acquire(cluster, fidelity)
    rows = []
    for rank, computed in enumerate(engines.run(_descend_rank, tasks)):
        delay = size - rank - 1
        true = delayed_weights(start, inputs, targets, RATE, delay)
        off = max(abs(weight - other) for weight, other in zip(computed, true, strict=True))
        shown = [", ".join(f"{weight:.5f}" for weight in weights) for weights in (computed, true)]
        rows.append((cluster.devices[rank].name, delay, *shown, f"{off:.0e}"))
    columns = ("device", "delay", f"weights ({whose})", "descent with old gradients", "largest difference")
    return Table(columns, rows, title=f"{STEPS} mini-batches (emulated, {engines.fidelity} links)")


def scenarios(job: Job, fault_step: int) -> dict[str, Job]:
    """Return a job whose second device leaves or dies after some windows, in four ways."""
    everyone = {**job.options, "devices": 0}
    leave, kill = f"leave:1@step{fault_step}", f"kill:1@step{fault_step}"
    return {
        "on notice, an idle device stands in": replace(job, faults=leave),
        "on notice, no idle device": replace(job, faults=leave, options=everyone),
        "killed": replace(job, faults=kill, options=everyone),
        "killed, and comes back": replace(job, faults=f"{kill}; return:1@step{2 * fault_step}", options=everyone),
    }


def simulate_all(jobs: Mapping[str, Job], cluster: Cluster, fidelity: Fidelity) -> dict[str, Report]:
    """Return the report of each job in virtual time."""
    return {name: experiment.run(job, cluster, "simulate", fidelity=fidelity) for name, job in jobs.items()}


def recovery_table(reports: Mapping[str, Report]) -> Table:
    """Return the cost of each change of the devices, of several runs by name."""
    rows = []
    for name, report in reports.items():
        for recovery in report.recoveries:
            parts = (recovery.noticed_s, recovery.planned_s, recovery.resumed_s, recovery.stood_still_s)
            of_simulation, of_run = (
                (recovery.seconds, None) if report.mode == "simulate" else (recovery.predicted_s, recovery.seconds)
            )
            totals = ("" if seconds is None else f"{seconds:.2f}" for seconds in (of_simulation, of_run))
            rows.append(
                (
                    name,
                    recovery.what,
                    *(f"{seconds:.2f}" for seconds in parts),
                    f"{recovery.repeated}",
                    *totals,
                    report.mark,
                )
            )
        if not report.recoveries:
            reason = "no step followed the change" if report.job.faults else "nothing changed"
            rows.append((name, reason, *["–"] * 7, ""))
    columns = (
        "run",
        "what",
        "noticed",
        "planned",
        "loaded and done",
        "stood still",
        "steps again",
        "simulated",
        "measured",
        "",
    )
    return Table(columns, rows, title="Seconds from a change of the devices to the end of the next step")


def stood_still(report: Report) -> float:
    """Return the seconds that the others stood still at the first change of the devices; 0 without a change."""
    return round(next((recovery.stood_still_s for recovery in report.recoveries), 0.0), 2)
