"""The commands, in groups, and those of a few lines: a job planned, in virtual time or executed; figures, the
doctor.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from workbench import __version__
from workbench.cli.advise import advise
from workbench.cli.chat import chat, generate
from workbench.cli.devices import devices
from workbench.cli.engine import export, train
from workbench.cli.job import (
    ALL_FIELDS,
    CLUSTER,
    PLANNED_FIELDS,
    SIMULATED_FIELDS,
    ClusterName,
    Command,
    JobCommand,
    ReportFile,
    WorkFolder,
    takes_job,
)
from workbench.cli.kit import kit
from workbench.cli.output import (
    Commands,
    Json,
    Png,
    RunProgress,
    print_entry,
    print_json,
    print_text,
    say,
    show_plan,
)
from workbench.cli.predict import evaluate, predict, push
from workbench.cli.report import report
from workbench.cli.run import run_and_show
from workbench.cli.runs import runs
from workbench.cli.schedule import schedule
from workbench.cli.serve import ServeCommand, serve
from workbench.cli.sweep import compare, sweep
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.files import require_writable
from workbench.core.job import Fidelity, Job, Mode, Tracker
from workbench.core.report import Report

app = typer.Typer(
    cls=Commands,
    pretty_exceptions_enable=False,
)


def doctor(as_json: Json = False) -> None:
    """Report what this machine can do, which features are limited, and how to fix them."""
    from workbench.cli.doctor import STATE_COLOURS, examine, verdict

    checks = examine()
    if as_json:
        print_json([check._asdict() for check in checks])
    else:
        for check in checks:
            head, state = f"{check.state:<9} {check.name:<17}", len(check.state)
            print_entry(head, check.found, colour=STATE_COLOURS[check.state], coloured=state)
            if check.todo:
                print_entry(" " * len(head), f"-> {check.todo}")
        print_text(f"\n{verdict(checks)}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


def fetch(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names to fetch (default: all without special terms). random:llama-1b: random weights of this shape."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not list files that are already present.")] = False,
    accept_terms: Annotated[
        bool, typer.Option("--accept-terms", help="You have read the terms of these weights, and agree.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Download the embedded weights and data into a cache, and check their hashes."""
    from workbench.assets.fetch import ASSETS
    from workbench.assets.fetch import fetch as fetch_assets

    def progress(line: str) -> None:
        if not (quiet and ": present" in line):
            say(line)

    random = [name for name in names or () if name.startswith("random:")]
    others = [name for name in names or () if name not in random]
    paths = fetch_assets(others if names else None, progress, accept_terms=accept_terms)
    for name in (name for name in paths if ASSETS[name].joined):
        from workbench.models.hub import locate

        progress(f"{name}: ready in {locate(name)}")
    for name in random:
        from workbench.models.random_weights import write_random

        paths[name] = write_random(name, progress)
    if as_json:
        print_json({name: str(path) for name, path in paths.items()})


def draw(
    report: Annotated[
        str, typer.Argument(help="A run by name or tag (`workbench runs`), or a Report that `run` or a notebook wrote.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures/drawn"),
    png: Png = "auto",
    trace: Annotated[
        Path | None, typer.Option(help="Write the timelines to this file, too: a Chrome trace for ui.perfetto.dev.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw a Report's figures: HTML that opens offline, PNG if Chromium is installed."""
    require_writable(trace)
    from workbench.plots import write_figures
    from workbench.plots.trace import write_trace
    from workbench.runs.history import one_report

    contents = Report.read(one_report(report))

    traces = [write_trace(contents, trace)] if trace else []
    files = write_figures(contents, out, png=png if png == "auto" else png == "yes")
    if as_json:
        print_json([str(file) for file in (*files, *traces)])
    else:
        print_text(f"{len(files)} files; open {files[0]}")
        for file in traces:
            print_text(f"{file}: open it at https://ui.perfetto.dev, which reads it in the browser")


@takes_job(*PLANNED_FIELDS)
def plan(job: Job, cluster: ClusterName = CLUSTER, as_json: Json = False) -> None:
    """Plan a job: which layers and samples each device gets."""
    described = load_cluster(cluster)
    from workbench.experiment import plan as make_plan

    with RunProgress(job, described) as progress:
        planned = make_plan(job, described, progress=progress.update)
    if as_json:
        print_json(planned)
    else:
        from workbench.models.hub import has_weights

        show_plan(planned, described)
        run = ", workbench run (execute it)" if has_weights(job.model) else ""
        print_text(f"Next        workbench simulate (simulate the plan){run}, with the same options")


@takes_job(*SIMULATED_FIELDS)
def simulate(job: Job, cluster: ClusterName = CLUSTER, report: ReportFile = None, as_json: Json = False) -> None:
    """Simulate a job in virtual time: what would it take on these devices?"""
    run_and_show(job, load_cluster(cluster), "simulate", report, as_json)


@takes_job(*ALL_FIELDS)
def run(
    job: Job,
    cluster: ClusterName = CLUSTER,
    mode: Annotated[Mode, typer.Option(help="Replay in virtual time, or run with real tensors.")] = "execute",
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = "auto",
    workdir: WorkFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same job.")] = False,
    track: Annotated[Tracker, typer.Option(help="Send losses, times, memory and metrics to this tracker.")] = "none",
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on a cluster, simulated or executed, and write the Report."""
    described = load_cluster(cluster)
    run_and_show(job, described, mode, report, as_json, track, workdir=workdir, resume=resume, fidelity=fidelity)


GROUPS = {
    "Start here": (doctor, fetch, devices, kit),
    "Run": (advise, plan, simulate, run, sweep),
    "Use a trained model": (predict, evaluate, chat, generate, push),
    "Show and compare": (runs, draw, compare, schedule, report),
    "Commands of single methods": (serve, export, train),
}
COMMAND_CLASSES = dict.fromkeys((devices, plan, simulate, run, sweep), JobCommand) | {serve: ServeCommand}
FIRST_STEPS = """\
Edge LLM Workbench: learn, try out and compare how language models are
fine-tuned and served on small devices.

First steps:
  workbench doctor                               check what this machine can do
  workbench fetch                                download the embedded models and data, once
  workbench advise                               find a method and a plan for four small devices
  workbench simulate                             simulate a fine-tuning on them
  workbench run --report run.json                execute it on four devices emulated here
  workbench runs                                 list the runs on this computer
  workbench predict FOLDER "A fine film."        use the trained model in FOLDER
  workbench draw run.json                        draw the run's figures

All commands: workbench --help.  All options of one: workbench run --help.
The notebooks: make lab."""


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print_text(f"workbench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def first_steps(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Learn, try out and compare how language models are fine-tuned and served on small devices."""
    if context.invoked_subcommand is None:
        print_text(FIRST_STEPS)


for group, commands in GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group, cls=COMMAND_CLASSES.get(command, Command))(command)

COMMANDS = "workbench.commands"
"""The entry-point group in which a distribution names its commands: functions as Typer takes them."""
STUDIES, ADDED = ("reproduce", "bench"), "Further commands"


def _unusable(asked: str, found: str, todo: str) -> Callable[[typer.Context], None]:
    """Return a command that says why it cannot be called, whatever its options."""

    def command(context: typer.Context) -> None:
        context.find_root().meta["json"] = "--json" in context.args
        raise ConfigError(asked, found, todo)

    return command


def add_commands(app: typer.Typer) -> None:
    """Add what other distributions name in the group COMMANDS, the studies' first.  Our own commands' names are
    taken.
    """
    named = {command.name: command for command in entry_points(group=COMMANDS)}
    own_names = {command.__name__ for commands in GROUPS.values() for command in commands}
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    for name in sorted(
        {*STUDIES, *named} - own_names, key=lambda name: (name not in STUDIES, name != STUDIES[0], name)
    ):
        request, todo = f"The command `workbench {name}` was called.", "Install it again, or remove it."
        if name not in named:
            problem = "It belongs to the studies, which are not installed."
            unusable = _unusable(
                request, problem, "In the project's folder: pip install --no-deps ./workbench_studies."
            )
        else:
            try:
                app.command(name, rich_help_panel=ADDED)(named[name].load())
                continue
            except Exception as error:  # somebody else's code must not take our commands with it
                unusable = _unusable(
                    request, f"It is '{named[name].value}', which fails: {type(error).__name__}: {error}.", todo
                )
        app.command(name, hidden=True, add_help_option=False, context_settings=anything)(unusable)


add_commands(app)
