"""`workbench runs`: the runs that this computer keeps, newest first; give them tags, remove them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from workbench.cli.output import Json, print_entry, print_json, print_text, say
from workbench.core.errors import ConfigError
from workbench.core.units import counted

if TYPE_CHECKING:
    from workbench.runs.history import PastRun

Action = Literal["list", "tag", "remove"]
STATE_COLOURS = {"finished": "green", "running": "blue", "can be resumed": "yellow", "damaged": "red"}


def runs(
    action: Annotated[
        Action,
        typer.Argument(
            help="list \\[FOLDER...]: list this computer's runs, or those in folders; tag RUN WORD...: set a run's "
            "tags (without a word: remove them); remove RUN...: delete the files of runs."
        ),
    ] = "list",
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Runs by name, tag or folder; for list: folders that contain runs."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="List runs of this method only.")] = None,
    model: Annotated[str | None, typer.Option(help="List runs with this model only.")] = None,
    task: Annotated[str | None, typer.Option(help="List runs of this task only.")] = None,
    tag: Annotated[str | None, typer.Option(help="List runs with this tag only.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs on this computer, newest first; tag or remove them."""
    from workbench.runs import history

    words = list(names or ())
    if action == "list":
        past_runs = [
            run
            for run in history.find_runs(words)
            if (tag is None or tag in run.tags)
            and all(
                value is None or (run.job is not None and getattr(run.job, field) == value)
                for field, value in (("method", method), ("model", model), ("task", task))
            )
        ]
        if as_json:
            print_json(past_runs)
        else:
            _show(past_runs, words, is_filtered=bool(words or method or model or task or tag))
        return
    if not words:
        raise ConfigError(f"`workbench runs {action}` was called.", "No run is named.", "`workbench runs` lists them.")
    chosen = history.named_runs(words[:1] if action == "tag" else words)
    if action == "tag":
        if len(chosen) > 1:
            raise ConfigError(
                f"Tags for the run '{words[0]}' were given.", f"{len(chosen)} runs have that tag.", "Name one by name."
            )
        tagged = history.tag(chosen[0], words[1:])
        if as_json:
            print_json(tagged)
        else:
            print_text(f"{tagged.name}: {', '.join(tagged.tags) or 'no tags'}")
        return
    removed = _remove(chosen, asks=not yes)
    if as_json:
        print_json(removed)


def _show(past_runs: list[PastRun], places: list[str], *, is_filtered: bool) -> None:
    from workbench.runs.history import ago, runs_folder

    where = ", ".join(places) or str(runs_folder())
    if not past_runs:
        print_text(f"No such run in {where}." if is_filtered else f"No runs yet in {where}.")
        print_text("Next        workbench run, which keeps a run there")
        return
    print_text(f"{counted(len(past_runs), 'run')} in {where}\n")
    for run in past_runs:
        head = f"{run.state:<15}{ago(run.changed_s):>8}  "
        tags = f" [{', '.join(run.tags)}]" if run.tags else ""
        print_entry(head, f"{run.name}{tags}", colour=STATE_COLOURS[run.state], coloured=len(run.state))
        print_entry(" " * len(head), run.words)
    finished = [run.name for run in past_runs if run.state == "finished"]
    if len(finished) > 1 and not places:
        print_text(f"\nNext        workbench compare {finished[1]} {finished[0]}")


def _remove(chosen: list[PastRun], *, asks: bool) -> list[str]:
    """Remove runs after the question, and return their folders."""
    from workbench.runs import history

    if asks:
        if not sys.stdin.isatty():
            raise ConfigError(
                "Runs were to be removed.", "Nobody can be asked: this is no terminal.", "Repeat with --yes."
            )
        for run in chosen:
            say(f"{run.name}: {run.words}")
        if not typer.confirm(f"Remove {counted(len(chosen), 'run')} for good?", err=True):
            say("Nothing was removed.")
            return []
    for run in chosen:
        stays = ", ".join(history.remove(run)[:5])
        say(f"Removed {run.name}.{f' Not of the run, and kept: {stays}.' if stays else ''}")
    return [run.folder for run in chosen]
