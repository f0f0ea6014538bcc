"""`workbench sweep` and `workbench compare`: the points of a grid run one after the other, and reports side by side."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.job import ALL_FIELDS, OPTIONS, key_and_value, parsed, task_of, with_options
from workbench.cli.output import INTERRUPTED, Json, RunProgress, print_json, print_table, print_text, say
from workbench.core.errors import ConfigError
from workbench.core.files import make_folder, require_writable
from workbench.core.job import Fidelity
from workbench.core.units import counted

if TYPE_CHECKING:
    from workbench.methods.base import Notify
    from workbench.runs.grids import Point
    from workbench.runs.sweeps import FinishedPoint

WHOLE = ("options", "faults", "columns", "data")
"""Settings whose values may hold commas: several values of these are given in a grid's file."""
MOST_METRICS = 3
"""Shown in the terminal's table."""


def _takes_lists(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes a grid an option for each field of a job, which takes several values."""

    def filled(grid: Path | None, cluster: str | None, bandwidth: str | None, **settings: Any) -> None:
        named = {name: settings.pop(name) for name in (*ALL_FIELDS, "eval_samples")} | {
            "cluster": cluster,
            "bandwidth": bandwidth,
        }
        command(grid, _listed(named), **settings)

    form = "A TOML file: name = \\[values], \\[options], \\[METHOD]."
    kinds: dict[str, Any] = {"grid": Annotated[Path | None, typer.Argument(help=form)]}
    for name in ALL_FIELDS:
        described = OPTIONS[name].__metadata__[0]
        help_text = described.help if name in WHOLE else f"{described.help} Several: A,B,C."
        switches = described.param_decls or ()
        kinds[name] = (
            OPTIONS[name]
            if name in ("options", "faults")
            else Annotated[str | None, typer.Option(*switches, help=help_text)]
        )
    kinds["eval_samples"] = Annotated[
        str | None, typer.Option(help="Samples of the validation and of the test split. Several: A,B,C.")
    ]
    kinds["cluster"] = Annotated[str | None, typer.Option(help="Cluster by name or .toml file. Several: A,B,C.")]
    kinds["bandwidth"] = Annotated[str | None, typer.Option(help="Mbit/s of every link. Several: A,B,C.")]
    return with_options(command, filled, kinds, dict.fromkeys(kinds), "grid", "given")


@_takes_lists
def sweep(
    grid: Path | None,
    given: dict[str, list[Any]],
    repeats: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Run every point this many times.", show_default="1")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run the points in virtual time.")] = False,
    fidelity: Fidelity = "auto",
    at_once: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Number of simulated points, or of a batch system's engines, at a time."),
    ] = 1,
    cluster_profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Run the points on engines that this profile of ipyparallel starts (Slurm, PBS, ...)."
        ),
    ] = None,
    notebook: Annotated[
        Path | None,
        typer.Option(help="Run this notebook with each point's parameters, such as notebooks/00_quickstart.ipynb."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for points.csv and each point's report. Finished points are not run again.")
    ] = Path("sweep"),
    as_json: Json = False,
) -> None:
    """Run a job for every combination of option values; the same command continues an interrupted sweep."""
    from workbench.runs.grids import SweepSettings, make_notebook_points, make_points, read_grid
    from workbench.runs.sweeps import run_points, write_table

    values, by_method, settings = read_grid(grid) if grid is not None else ({}, {}, SweepSettings())
    values = values | given
    if "data" in values and "task" not in values:
        values["task"] = [task_of(None, values["data"][0])]
    simulate = simulate or settings.simulate
    times = repeats or settings.repeats
    if notebook is None:
        points = make_points(
            values, by_method, mode="simulate" if simulate else "execute", fidelity=fidelity, repeats=times
        )
    elif simulate or by_method or cluster_profile is not None:
        raise ConfigError(
            f"A sweep of '{notebook}' was asked for.",
            "A notebook runs on this machine and simulates or executes as its cells say.",
            "Leave out --simulate, --cluster-profile and tables of methods.",
        )
    else:
        points = make_notebook_points(notebook, values, repeats=times)
    running = run_points(points, out, at_once=at_once, cluster_profile=cluster_profile, progress=_progress)
    require_writable(make_folder(out) / "points.csv")
    say(f"{counted(len(points), 'point')}, {'simulated' if simulate else 'executed'}, in {out}")
    began = time.monotonic()
    ended: list[FinishedPoint] = []
    try:
        for done in running:
            ended.append(done)
            say(_progress_line(done, len(ended), len(points), time.monotonic() - began))
    except KeyboardInterrupt:
        write_table(points, out)
        say(
            f"Interrupted: {sum(done.error is None for done in ended)} of {len(points)} points are done. The "
            "same command goes on."
        )
        raise typer.Exit(INTERRUPTED) from None
    written = write_table(points, out)
    failed = [done for done in ended if done.error is not None]
    succeeded = [done for done in ended if done.error is None]
    if as_json:
        errors = [
            {"point": done.point.settings, "error": type(done.error).__name__, "message": str(done.error)}
            for done in failed
        ]
        reports = [str(out / f"{done.point.name}.json") for done in succeeded]
        print_json({"table": str(written), "done": reports, "failed": errors})
    elif succeeded:
        _show([out / f"{done.point.name}.json" for done in succeeded])
    say(f"{len(succeeded)} of {len(points)} points done in {time.monotonic() - began:.0f} s. Table: {written}")
    if succeeded:
        folder, page = shlex.quote(str(out)), shlex.quote(str(out / "comparison.html"))
        say(f"Next: workbench compare {folder} --out {page}")
    if failed:
        say(f"{len(failed)} failed; why is in {out / 'failed'}. The same command tries them again.")
        raise typer.Exit(1)


def compare(
    reports: Annotated[
        list[str],
        typer.Argument(help="Runs by name or tag (`workbench runs`), reports, or folders of them, such as a sweep's."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write a page with the table and figures (HTML) here.")] = None,
    as_json: Json = False,
) -> None:
    """Compare reports: a row for runs with the same settings, with mean and standard deviation over seeds and
    repeats.
    """
    require_writable(out)
    from workbench.runs.comparison import reports_frame, sides
    from workbench.runs.comparison_page import write_page
    from workbench.runs.history import reports_of

    files = reports_of(reports)
    frame = reports_frame(files)
    page = None if out is None else write_page(sides(frame), out)
    if as_json:
        print_json(json.loads(frame.to_json(orient="records")))
        return
    _show(files)
    if page is not None:
        print_text(f"Page        {page}")


def _show(reports: Sequence[Path]) -> None:
    from workbench.runs.comparison import reports_frame, sides, table

    compared = sides(reports_frame(reports))
    heads, rows = table(compared, most_metrics=MOST_METRICS)
    labels = ", ".join(dict.fromkeys(side.label for side in compared))
    several = any(len(side.files) > 1 for side in compared)
    text = f"{sum(len(side.files) for side in compared)} runs ({labels})" + (
        "; mean ± standard deviation" if several else ""
    )
    print_table(text, heads, rows, keys=heads.index("runs"))
    if len(heads) < len(table(compared)[0]):
        print_text("Further metrics are in the page (--out) and in points.csv.")


def _listed(named: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of the options that were given, by their names in a grid."""
    grid: dict[str, list[Any]] = {}
    for name, value in named.items():
        if value is None:
            continue
        if name == "options":
            for key, text in (key_and_value(word, "rank=4,8") for word in value):
                grid[f"option.{key}"] = [parsed(part) for part in _values(text)]
        else:
            grid[name] = ["; ".join(value)] if name == "faults" else [value] if name in WHOLE else _values(value)
            if "" in grid[name] and name not in WHOLE:
                raise ConfigError(
                    f"The values '{value}' of {name} were given.",
                    "One of them is empty.",
                    "Write values with a comma between two.",
                )
    return grid


def _values(text: str) -> list[Any]:
    """Return a list's values; a JSON list or table is one value."""
    return [text] if text[:1] in ("[", "{", '"') else [part.strip() for part in text.split(",")]


@contextmanager
def _progress(point: Point) -> Iterator[Notify]:
    if point.notebook is not None:
        say(f"{point.words}:")
        yield lambda event: None
        return
    if point.mode == "simulate":  # a moment each, unless this machine is still to be measured
        yield lambda event: say(event.message) if event.kind == "phase" and "Profiling" in event.message else None
        return
    say(f"{point.words}:")
    with RunProgress(point.job, point.cluster) as progress:
        yield progress.update


def _progress_line(done: FinishedPoint, number: int, count: int, seconds: float) -> str:
    """Return a line on a point that has ended."""
    if done.report is None:
        outcome = f"failed: {type(done.error).__name__}: {str(done.error).strip().splitlines()[-1]}"
    elif done.is_stored:
        outcome = "done before"
    else:
        from workbench.runs.comparison import results_in_words, results_of

        outcome = results_in_words(results_of(done.report)) + done.report.mark
    return f"[{number}/{count}, {seconds:.0f} s] {done.point.words}: {outcome}"
