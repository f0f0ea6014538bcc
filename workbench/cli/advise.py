"""`workbench advise`: which method, technique and plan for a job on some devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workbench.cli.job import CLUSTER, ClusterName, takes_job
from workbench.cli.output import Json, print_json, print_table, print_text, say
from workbench.core.catalogue import load_cluster
from workbench.core.job import Job

if TYPE_CHECKING:
    from workbench.runs.advice import Advice, Choice

FIELDS = ("model", "task", "epochs", "batch_size", "micro_batches", "max_length", "train_samples", "data", "columns")


@takes_job(*FIELDS)
def advise(
    job: Job,
    cluster: ClusterName = CLUSTER,
    goal: Annotated[Literal["time", "energy", "memory"], typer.Option("--for", help="What counts.")] = "time",
    score: Annotated[
        float | None, typer.Option(help="Rank by what it takes until the validation metric reaches this, such as .75.")
    ] = None,
    keep_data: Annotated[bool, typer.Option("--keep-data", help="Only methods whose devices keep their data.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Answer requests instead of training.")] = False,
    computed: Annotated[
        bool, typer.Option("--computed", help="Costs from the catalogue: nothing is measured first.")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Write the picture of time, energy and memory (HTML).")] = None,
    as_json: Json = False,
) -> None:
    """Simulate every sensible combination of method, technique and plan for a job on a cluster, and rank them."""
    from workbench.runs.advice import advise as find

    devices = load_cluster(cluster)
    advice = find(
        job,
        devices,
        goal=goal,
        score=score,
        keeps_data=keep_data,
        serves=serve,
        computed=computed,
        progress=lambda event: say(event.message) if event.stage == "profile" and not as_json else None,
    )
    if figure is not None:
        from workbench.plots.choices import choices
        from workbench.plots.export import write_html

        write_html(choices(_points(advice), label=f"simulated, {advice.costs} costs"), figure)
    if as_json:
        print_json([_described(choice, cluster) for choice in advice.choices])
        return
    _print(advice, cluster)
    if figure is not None:
        print_text(f"The picture: {figure}")


def _print(advice: Advice, cluster: str) -> None:
    from workbench.runs.advice import by_reason

    best, title = advice.choices[0], f"Simulated, {advice.costs} costs; {advice.spent_s:.1f} s"
    rows = [
        (
            f"{number}",
            "" if choice.is_dominated else "*",
            choice.name,
            f"{choice.report.plan.partition()} on {choice.report.plan.grouping()}",
            f"{1e3 * choice.step_s:.0f}",
            "unknown" if choice.seconds is None else f"{choice.seconds:.1f}",
            "" if choice.joules is None else f"{choice.joules:.0f}",
            f"{choice.memory_bytes / 1e6:.0f}" if choice.memory_bytes else "",
        )
        for number, choice in enumerate(advice.choices, 1)
    ]
    until = "run, s" if advice.score is None else f"to {advice.score:g}, s"
    print_table(title, ("", "", "what", "layers on devices", "step, ms", until, "J", "MB"), rows, right=(0, 4, 5, 6, 7))
    print_text("* nothing else is as good in time, energy and memory, and better in one of them.")
    for why, names in by_reason(advice.refused).items():
        print_text(f"Not possible: {', '.join(names)}. {why}")
    print_text()
    if best.figure(advice.goal) is None:
        print_text(
            "No measured curve says when one of these reaches the score. The order is that of the whole run's time."
        )
        return
    print_text(f"Best for {advice.goal}: {best.name}. {advice.reason}")
    print_text(f"Next        {_command(best, cluster)}")


def _command(choice: Choice, cluster: str) -> str:
    from workbench.runs.as_text import as_command

    return as_command(choice.job, choice.report.cluster).replace(
        f"--cluster {choice.report.cluster.name}", f"--cluster {cluster}"
    )


def _points(advice: Advice) -> list[tuple[str, float | None, float | None, int, bool]]:
    return [
        (choice.name, choice.seconds, choice.joules, choice.memory_bytes, choice.is_dominated)
        for choice in advice.choices
    ]


def _described(choice: Choice, cluster: str) -> dict[str, object]:
    return {
        "what": choice.name,
        "method": choice.job.method,
        "options": choice.job.options,
        "layers": choice.report.plan.partition(),
        "devices": choice.devices,
        "step_s": choice.step_s,
        "seconds": choice.seconds,
        "joules": choice.joules,
        "memory_bytes": choice.memory_bytes,
        "sent_bytes": choice.sent_bytes,
        "decides": choice.decides,
        "is_dominated": choice.is_dominated,
        "curve": None if choice.curve is None else choice.curve.command,
        "command": _command(choice, cluster),
    }
