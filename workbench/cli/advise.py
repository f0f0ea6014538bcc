"""`workbench advise`: which method, technique and plan for a job on some devices."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workbench.cli.job import CLUSTER, ClusterName, takes_job
from workbench.cli.output import Json, print_json, print_table, print_text, say
from workbench.core.catalogue import load_cluster
from workbench.core.job import Job
from workbench.core.methods import declaration_of
from workbench.core.once import shared_results
from workbench.core.serial import to_builtins

if TYPE_CHECKING:
    from workbench.runs.advice import Advice, Choice

FIELDS = ("model", "task", "epochs", "batch_size", "micro_batches", "max_length", "train_samples", "data", "columns")


@takes_job(*FIELDS)
def advise(
    job: Job,
    cluster: ClusterName = CLUSTER,
    goal: Annotated[Literal["time", "energy", "memory"], typer.Option("--for", help="What to rank by.")] = "time",
    score: Annotated[
        float | None, typer.Option(help="Rank by what it takes until the validation metric reaches this, such as .75.")
    ] = None,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Only methods that leave each device's data on the device.")
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Answer requests instead of training.")] = False,
    draft: Annotated[
        str, typer.Option(metavar="MODEL", help="With --serve: another draft to compare, such as a smaller model.")
    ] = "",
    computed: Annotated[
        bool, typer.Option("--computed", help="Compute costs from the catalogue instead of measuring.")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Write the picture of time, energy and memory (HTML).")] = None,
    as_json: Json = False,
) -> None:
    """Simulate every sensible combination of method, technique and plan for a job on a cluster, and rank them."""
    devices = load_cluster(cluster)
    from workbench.runs.advice import advise as find

    advice = find(
        job,
        devices,
        goal=goal,
        score=score,
        keeps_data=keep_data,
        serves=serve,
        draft=draft,
        computed=computed,
        progress=lambda event: say(event.message) if event.stage == "profile" and not as_json else None,
    )
    if figure is not None:
        from workbench.plots.choices import choices
        from workbench.plots.export import write_html
        from workbench.runs.advice_text import points

        write_html(choices(points(advice), label=f"simulated, {advice.costs} costs"), figure)
    if as_json:
        with shared_results():  # what decides is simulated for each
            described = [_described(choice, cluster) for choice in advice.choices]
        print_json({"choices": described} | _drafts(advice, cluster))
        return
    _print(advice, cluster)
    if figure is not None:
        print_text(f"The picture: {figure}")


def _print(advice: Advice, cluster: str) -> None:
    from workbench.models.hub import has_weights
    from workbench.runs import advice_text as text

    print_table(text.title(advice), text.columns(advice), text.rows(advice))
    print_text(text.STAR)
    for line in text.impossible(advice.refused):
        print_text(line)
    print_text()
    print_text(text.conclusion(advice))
    best = advice.choices[0]
    if best.figure(advice.goal) is not None:
        print_text(f"Next        {_command(best, cluster)}")
        if not declaration_of(best.job.method).trains and has_weights(best.job.model):
            print_text(
                f"Then        workbench serve --model {shlex.quote(best.job.model)} --cluster {shlex.quote(cluster)}"
            )
    if (drafts := advice.drafts) is not None:
        print_text()
        if rows := text.draft_rows(drafts):
            print_table(text.draft_title(drafts), text.DRAFT_COLUMNS, rows)
            print_text(text.DRAFT_NOTE)
        for line in text.impossible(drafts.refused):
            print_text(line)
        print_text(text.draft_conclusion(drafts))
        for name, command in zip(("Measure", "Serve"), text.draft_commands(drafts, cluster), strict=False):
            print_text(f"{name:<12}{command}")


def _command(choice: Choice, cluster: str) -> str:
    from workbench.runs.as_text import as_command

    return as_command(choice.job, choice.report.cluster).replace(
        f"--cluster {choice.report.cluster.name}", f"--cluster {cluster}"
    )


def _drafts(advice: Advice, cluster: str) -> dict[str, object]:
    from workbench.runs.advice_text import draft_commands

    drafts = advice.drafts
    if drafts is None:
        return {}
    offers = [
        {
            "draft": offer.name,
            "guesser": offer.guesser,
            "checkers": offer.checkers,
            "system": offer.system,
            "round_s": offer.round_s,
            "break_even": offer.break_even,
            "at_most": offer.at_most,
            "counted": None if offer.acceptance is None else to_builtins(offer.acceptance),
            "expected": offer.expected,
        }
        for offer in drafts.offers
    ]
    return {"token_s": drafts.token_s, "drafts": offers, "draft_commands": draft_commands(drafts, cluster)}


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
