"""What the lab 'Forward only on a language model' shows: figures, panels, and trainings with the same q x E (P-RGE,
published as MobiZO, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench import plots
from workbench.core.job import Fidelity, Job
from workbench.core.report import Report, busy_note, median_s
from workbench.core.timeline import INVALID_MARK
from workbench.methods.p_rge.zeroth_order import StepLog, read_log
from workbench.planners import TrainingProblem
from workbench.trainings.queries import QueryTraining, Trial
from workbench.widgets import ClusterForm, JobForm, RunPanel, lines, report_table
from workbench.widgets.tables import Table
from workbench_labs.plots.zeroth_order import roofline, traffic
from workbench_labs.query_division import division_plan
from workbench_labs.rooflines import (
    Choice,
    HostRoofline,
    RooflineExplorer,
    measure_roofline,
    one_by_one,
    paper_machines,
)
from workbench_labs.training_panel import frozen_and_trained

TOKENS = 64


FIELDS = ("model", "task", "seed", "loss", "queries", "batch_size", "epsilon", "learning_rate", "score_every")


def settings(parameters: Mapping[str, Any]) -> Trial:
    """Return a training's settings, from the lab's parameters among other names."""
    train, validation = parameters["train_samples"], parameters["validation_samples"]
    settings = {name: parameters[name] for name in FIELDS}
    return Trial(method="P-RGE", samples=(train, validation, validation), max_length=TOKENS, **settings)


def folder(output: str) -> Path:
    """Return the folder of the training's log."""
    return Path(output) / "training"


def passes_figure(host: HostRoofline, training: QueryTraining) -> go.Figure:
    """Return the measured passes under this machine's roof."""
    return roofline(
        {"one sentence, and copies of it": host.passes},
        flops_per_s=host.flops_per_s,
        bytes_per_s=host.bytes_per_s,
        label="measured, one thread",
        title="Forward passes under this machine's roof",
        subtitle=training.settings.model,
    )


def copies_figure(host: HostRoofline, training: QueryTraining) -> go.Figure:
    """Return the time of copies in one pass, and one after the other."""
    return lines(
        one_by_one(host.passes),
        title="What further copies cost",
        label="measured, one thread",
        x_title="copies",
        y_title="ms",
        subtitle=f"{training.settings.model}, one sentence in each copy",
        logarithmic="x",
    )


def measured(training: QueryTraining, parts: Sequence[int], seconds: float) -> HostRoofline:
    """Return this machine's roofline with copies of one sentence.  seconds: time for each rate."""
    sentence = training.batch(0, samples=1)
    return measure_roofline(training.model, sentence, parts, seconds=seconds, pass_budget_s=20 * seconds)


def cheap_copies(host: HostRoofline) -> int:
    """Return the largest measured number of copies that costs less than half of as many single passes; 0 if none."""
    [first, *_] = host.passes
    cheap = [each.parts for each in host.passes if each.seconds * first.parts < 0.5 * first.seconds * each.parts]
    return max(cheap, default=0)


def machines(host: HostRoofline, training: QueryTraining) -> RooflineExplorer:
    """Return the explorer of rooflines, with this machine among those of the paper."""
    this_machine = Choice(host.machine(training.model.backbone.num_layers), 4.0)
    return RooflineExplorer(paper_machines() | {"this machine, one thread, fp32": this_machine})


def same_passes(trial: Trial, queries: Sequence[int], *, steps: int) -> Table:
    """Train with each number of queries and the same q x E; return scores and times, the untrained model's first."""
    product, rows = trial.queries * trial.batch_size, list[tuple[str, ...]]()
    for count in queries:
        training = QueryTraining(replace(trial, queries=count, batch_size=product // count))
        if not rows:
            rows.append(("untrained", "", "", f"{training.score():.3f}", ""))
        for _ in range(steps):
            training.step()
        curve = training.curve
        last = [loss for _, loss in curve.losses[-5:]]
        words = f"{sum(last) / len(last):.3f}", f"{training.score():.3f}", f"{1e3 * curve.step_s:.0f}"
        rows.append((str(count), str(product // count), *words))
    title = f"{steps} steps with q x E = {product}: as many passes of samples (measured)"
    return Table(("q", "E", "loss, last 5 steps", "validation accuracy", "step (ms)"), rows, title=title)


def last_step(path: Path) -> StepLog:
    """Return the last step of a log."""
    return read_log(path)[1][-1]


def traffic_figure(step: StepLog, training: QueryTraining) -> go.Figure:
    """Return the bytes that a step sends, and those of gradients."""
    frozen, trained = frozen_and_trained(training.model)
    sizes: dict[str, float] = {
        "P-RGE: seeds and scalars": step.nbytes,
        "first-order, LoRA-FA": 4 * trained,
        "first-order, full": 4 * (frozen + trained),
    }
    return traffic(sizes, subtitle=f"{training.settings.model}, q = {len(step.seeds)}, float32")


def shared(trial: Trial, *, queries: int, steps: int) -> Job:
    """Return the job of a training over several devices."""
    train, validation, test = trial.samples
    return Job(
        method="p_rge",
        model=trial.model,
        task=trial.task,
        seed=trial.seed,
        batch_size=trial.batch_size,
        micro_batches=1,
        learning_rate=trial.learning_rate,
        train_samples=train,
        validation_samples=validation,
        test_samples=test,
        options={"queries": queries, "steps": steps, "epsilon": trial.epsilon, "loss": trial.loss},
    )


def run_panel(
    job: Job, problem: TrainingProblem, counts: Sequence[int] | None, fidelity: Fidelity, faults: str = ""
) -> RunPanel:
    """Return the panel of a run.  counts: each device's queries; None: the planner's."""
    forms = JobForm(replace(job, faults=faults)), ClusterForm(problem.cluster, choice=False)
    plan = None if counts is None else division_plan(problem, counts)
    return RunPanel(*forms, fidelity=fidelity, chosen_plan=None if plan is None else lambda: plan)


def gantt(report: Report) -> go.Figure:
    """Return the last measured step of a run."""
    return plots.gantt(report.timelines[list(report.timelines)[-1]], note=busy_note(report))


def step_ratio(report: Report, other: Report) -> float | str:
    """Return the median measured time of a step of one run over that of another; as a marked text if the host was too
    busy in one of them.
    """
    first_s, second_s = (median_s(each.steps, "measured_s") or 0.0 for each in (report, other))
    note = busy_note(report) or busy_note(other)
    ratio = first_s / second_s
    return f"{ratio:.2f} {INVALID_MARK} (the host was too busy, so this says little)" if note else ratio


def outcome(panel: RunPanel) -> Table:
    """Execute what a panel describes, and return the report as a table."""
    return report_table(panel.report("execute"))
