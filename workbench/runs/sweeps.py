"""Run the points of a grid, each a job on a cluster, and keep the results in a folder from which an interrupted sweep
continues.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from workbench import experiment
from workbench.core.catalogue import DEFAULT_CLUSTER, load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError, WorkbenchError, did_you_mean
from workbench.core.files import make_folder
from workbench.core.job import Fidelity, Job, Mode
from workbench.core.ranges import range_of, require_range
from workbench.core.report import Report
from workbench.core.run_folder import ProcessId, note_process, scratch_folder, uninterrupted
from workbench.core.serial import from_builtins, from_json, read_toml, shown, to_json, write_text
from workbench.methods import load_method
from workbench.methods.base import Notify
from workbench.methods.checked import require_possible
from workbench.methods.devices import over_ssh, require_emulated
from workbench.runs.comparison import reports_frame, words_of
from workbench.runs.notebooks import require_parameters, run_notebook

TABLE, FAILED, RUNS = "points.csv", "failed", "runs"
"""In a sweep's folder: the table of all points, the errors of those that failed, and the folders of executed runs."""
OPTION = "option."
_JOB = {name: kind for name, kind in get_type_hints(Job, include_extras=True).items() if name != "options"}
_EVALUATED = ("validation_samples", "test_samples")
_OTHERS = ("cluster", "bandwidth", "eval_samples")

Grid = Mapping[str, Sequence[Any]]
"""Values by name: a field of Job, 'option.NAME', 'cluster' (name or file), 'bandwidth' (Mbit/s of every link), or
'eval_samples'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What a grid's file says of the sweep itself.  repeats: runs of each point.  simulate: run the points in virtual
    time.
    """

    repeats: Annotated[int, Meta(ge=1, le=1000)] = 1
    simulate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep.  settings: those that differ between points.  repeat: from 1.

    notebook: run this notebook with `parameters` instead of the job; it writes report.json into the folder named by its
    parameter `output`.
    """

    job: Job
    cluster: Cluster
    mode: Mode = "execute"
    fidelity: Fidelity = "auto"
    repeat: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    notebook: Path | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of its files.  It depends only on job, cluster, mode, fidelity and repeat (or on notebook and
        parameters).
        """
        whole = [to_json(self.job), to_json(self.cluster), self.mode, self.fidelity, str(self.repeat)]
        if self.notebook is not None:
            whole += [self.notebook.read_text(encoding="utf-8"), to_json(self.parameters)]
        kind = self.job.method if self.notebook is None else self.notebook.stem
        return f"{kind}-{hashlib.sha256(chr(0).join(whole).encode()).hexdigest()[:12]}"

    @property
    def words(self) -> str:
        """Return its settings as text."""
        return words_of(self.settings) or "the only point"


class Done(NamedTuple):
    """A finished point.  report: None if it failed; error then gives the reason.  kept: it was run by an earlier
    call.
    """

    point: Point
    report: Report | None
    error: Exception | None = None
    kept: bool = False


def read_grid(path: Path) -> tuple[dict[str, list[Any]], dict[str, dict[str, list[Any]]], SweepSettings]:
    """Read a TOML file: return its grid, the grids of single methods, and the settings of the sweep itself.

    [options] holds options of the method; [METHOD] and [METHOD.options] apply to that method's points only.
    """
    tables = read_toml(path, "the grid")
    given = {field.name: tables.pop(field.name) for field in fields(SweepSettings) if field.name in tables}
    sweep = from_builtins(given, SweepSettings, source=f"the grid '{path}'")
    by_method = {
        name: _flat(table) for name, table in list(tables.items()) if isinstance(table, dict) and name != "options"
    }
    return _flat({name: value for name, value in tables.items() if name not in by_method}), by_method, sweep


def make_points(
    grid: Grid,
    by_method: Mapping[str, Grid] | None = None,
    *,
    mode: Mode = "execute",
    fidelity: Fidelity = "auto",
    repeats: int = 1,
) -> list[Point]:
    """Return every combination of the grid's values, each once, in the order of the names.

    by_method: grids that replace the values of the same names for one method.  Raises ConfigError for impossible
    combinations.
    """
    methods = [_value("method", value) for value in grid.get("method", [Job().method])]
    for name in by_method or {}:
        if name not in methods:
            found = f"The methods of the sweep are {', '.join(methods)}."
            raise ConfigError(
                f"Settings of '{shown(name)}' were given.",
                found,
                did_you_mean(name, methods, "Add it, or leave them out."),
            )
    if repeats > 1 and mode == "simulate":
        raise ConfigError(
            f"{repeats} repeats of simulated points were asked for.", "All would be the same.", "Vary the seed instead."
        )
    combined = []
    for method in methods:
        own = {**grid, **(by_method or {}).get(method, {}), "method": [method]}
        names = ["method", *(name for name in own if name != "method")]
        choices = [[_value(name, value) for value in _some(name, own[name])] for name in names]
        combined += [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*choices)]
    differing = [
        name
        for name in dict.fromkeys(itertools.chain.from_iterable(combined))
        if len({str(one.get(name)) for one in combined}) > 1
    ]
    points: dict[str, Point] = {}
    for chosen, repeat in itertools.product(combined, range(1, repeats + 1)):
        settings = {name: chosen[name] for name in differing if name in chosen} | (
            {"repeat": repeat} if repeats > 1 else {}
        )
        point = replace(_point(chosen), mode=mode, fidelity=fidelity, repeat=repeat, settings=settings)
        if mode == "execute" and point.cluster.is_real and "bandwidth" in chosen:
            found = "They are real: their links are as fast as they are."
            raise ConfigError(
                f"Another bandwidth of '{point.cluster.name}' was asked for.", found, "Leave it out, or simulate."
            )
        points.setdefault(point.name, point)
    for point in points.values():
        require_possible(load_method(point.job.method), point.job, point.cluster)
        if mode == "execute" and point.cluster.is_real:
            over_ssh(point.cluster)
        elif mode == "execute":
            require_emulated(point.cluster)
    return list(points.values())


def make_notebook_points(notebook: Path, grid: Grid, *, repeats: int = 1) -> list[Point]:
    """Return every combination of values of a notebook's parameters; 'cluster' sets its parameter cluster_name."""
    named = {"cluster_name" if name == "cluster" else name: values for name, values in grid.items()}
    require_parameters(notebook, named | {"output": []})
    choices = [
        [_value(name, value) if name in _JOB else value for value in _some(name, values)]
        for name, values in named.items()
    ]
    points = []
    for values, repeat in itertools.product(itertools.product(*choices), range(1, repeats + 1)):
        chosen = dict(zip(named, values, strict=True))
        settings = {name: chosen[name] for name in named if len(named[name]) > 1} | (
            {"repeat": repeat} if repeats > 1 else {}
        )
        points.append(replace(_point({}), repeat=repeat, settings=settings, notebook=notebook, parameters=chosen))
    return points


def run_points(
    points: Sequence[Point],
    folder: Path,
    *,
    at_once: int = 1,
    cluster_profile: str | None = None,
    progress: Callable[[Point], AbstractContextManager[Notify]] | None = None,
) -> Iterator[Done]:
    """Run the points that have no Report in the folder yet; yield each point when it finishes, points of earlier calls
    first.

    at_once: how many simulated points run in parallel, in separate processes.  With a cluster_profile (of ipyparallel),
    it is the number of engines, which the profile's launchers start (Slurm, PBS, ...).  A failed point leaves its error
    in the folder; the next call tries it again.  progress: a context for each point run in this process; it receives
    the point's events.
    Raises ConfigError, before anything runs, for executed points at once and for a profile that is not there.
    """
    if at_once > 1 and cluster_profile is None and any(point.mode == "execute" for point in points):
        asked, found = (
            f"{at_once} executed points at a time were asked for.",
            "They would share this machine's cores and spoil each other's times.",
        )
        raise ConfigError(asked, found, "Leave out --at-once, add --simulate, or name a --cluster-profile.")
    profile = None if cluster_profile is None else _profile_folder(cluster_profile)
    return _run_points(points, folder, at_once, profile, progress)


def _run_points(
    points: Sequence[Point],
    folder: Path,
    at_once: int,
    profile: Path | None,
    progress: Callable[[Point], AbstractContextManager[Notify]] | None,
) -> Iterator[Done]:
    make_folder(folder / FAILED)
    waiting = []
    for point in points:
        if (path := folder / f"{point.name}.json").exists():
            yield Done(point, Report.read(path), kept=True)
        else:
            waiting.append(point)
    here, there = waiting, list[Point]()
    if profile is not None:
        here, there = [], waiting
    elif at_once > 1:
        # The first point of each kind may have to measure this machine, so nothing else may run meanwhile.
        firsts = {_measured_by(point): point for point in reversed(waiting)}
        here = [point for point in waiting if firsts[_measured_by(point)] is point]
        there = [point for point in waiting if firsts[_measured_by(point)] is not point]
    for point in here:
        with progress(point) if progress else nullcontext() as notify:
            try:
                result: Report | Exception = run_point(point, folder / RUNS / point.name, notify)
            except Exception as error:
                result = error
        yield _record(point, result, folder)
    if there:
        count = min(at_once, len(there))
        with _processes(count) if profile is None else _engines(count, profile) as workers:
            under_way: dict[Future[str], Point] = {workers.submit(_run_elsewhere, point): point for point in there}
            for future in as_completed(under_way):
                try:
                    result = from_json(future.result(), Report, source="a worker's report")
                except Exception as error:
                    result = error
                yield _record(under_way[future], result, folder)


def run_point(point: Point, workdir: Path | None = None, notify: Notify | None = None) -> Report:
    """Run one point (see experiment.run, notebooks.run_notebook)."""
    if point.notebook is not None and workdir is not None:
        make_folder(workdir)
        run_notebook(
            point.notebook, workdir / point.notebook.name, point.parameters | {"output": str(workdir.resolve())}
        )
        return Report.read(workdir / "report.json")
    return experiment.run(
        point.job, point.cluster, point.mode, progress=notify, workdir=workdir, fidelity=point.fidelity
    )


def write_table(points: Sequence[Point], folder: Path) -> Path:
    """Write points.csv: each point's settings, its state (done, failed, waiting), its error, and its Report's row."""
    import pandas

    rows = []
    for point in points:
        failed, path = folder / FAILED / f"{point.name}.json", folder / f"{point.name}.json"
        state = "done" if path.exists() else "failed" if failed.exists() else "waiting"
        error = json.loads(failed.read_text(encoding="utf-8"))["message"] if state == "failed" else ""
        rows.append({"point": point.name, **point.settings, "state": state, "error": error, "file": str(path)})
    frame = pandas.DataFrame(rows)
    if done := [row["file"] for row in rows if row["state"] == "done"]:
        reports = reports_frame(done)
        reports = reports[["file", *(name for name in reports if name not in frame)]]
        frame = frame.merge(reports, on="file", how="left")
    write_text(folder / TABLE, frame.to_csv(index=False))
    return folder / TABLE


def _flat(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    options = table.get("options", {})
    if not isinstance(options, dict):
        raise ConfigError(
            f"The options {shown(repr(options))} were given.",
            "They are no table.",
            "Write [options] and a line for each.",
        )
    named = {name: value for name, value in table.items() if name != "options"} | {
        f"{OPTION}{name}": options[name] for name in options
    }
    return {name: value if isinstance(value, list) else [value] for name, value in named.items()}


def _some(name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Return a setting's values.  Raises ConfigError if there are none, which would leave no point."""
    if not values:
        raise ConfigError(
            f"The setting '{name}' was to be varied.", "It has no values.", "Give one, or leave the setting out."
        )
    return values


def _value(name: str, value: Any) -> Any:
    """Convert one value of a grid to its setting's type."""
    if name.startswith(OPTION):
        return value
    if name == "bandwidth":
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise ConfigError(
                f"The bandwidth '{shown(value)}' was asked for.", "It is no number.", "Give it in Mbit/s."
            ) from None
        require_range(value, range_of(Link, "bytes_per_s"), "The sweep", "bandwidth", unit=125_000)
        return value
    if name == "cluster":
        return str(value)
    kind = _JOB.get("test_samples" if name == "eval_samples" else name)
    if kind is None:
        known = (*_JOB, *_OTHERS)
        raise ConfigError(
            f"The setting '{shown(name)}' was to be varied.",
            f"There are {', '.join(known)}.",
            did_you_mean(name, known),
        )
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The value '{shown(value)}' of {name} was asked for.", f"{error}.", "Change it.") from None


def _point(chosen: Mapping[str, Any]) -> Point:
    cluster = load_cluster(chosen.get("cluster", DEFAULT_CLUSTER))
    if "bandwidth" in chosen:
        cluster = cluster.with_bandwidth(chosen["bandwidth"])
    options = {name.removeprefix(OPTION): value for name, value in chosen.items() if name.startswith(OPTION)}
    named = dict.fromkeys(_EVALUATED, chosen["eval_samples"]) if "eval_samples" in chosen else {}
    named |= {name: value for name, value in chosen.items() if name in _JOB}
    return Point(job=Job(**named, options=options), cluster=cluster)


def _measured_by(point: Point) -> str:
    """Return the settings that determine which profile of this machine a point needs."""
    job = point.job
    return to_json((job.method, job.model, job.task, job.data, job.columns, job.max_length, job.options))


def _record(point: Point, result: Report | Exception, folder: Path) -> Done:
    """Write a point's Report, or its error, and return the finished point."""
    failed = folder / FAILED / f"{point.name}.json"
    if isinstance(result, Report):
        result.write(folder / f"{point.name}.json")
        failed.unlink(missing_ok=True)
        return Done(point, result)
    parts = (
        {name: getattr(result, name) for name in ("asked", "found", "todo")}
        if isinstance(result, WorkbenchError)
        else {}
    )
    said = {
        "point": point.settings,
        "error": type(result).__name__,
        "message": str(result).strip(),
        **parts,
        "job": point.job,
    }
    write_text(failed, to_json(said) + "\n")
    return Done(point, None, result)


def _run_elsewhere(point: Point) -> str:
    """Run a point in a separate process, possibly on another machine, and return its Report as text."""
    return to_json(run_point(point))


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    # Only the parent handles Ctrl-C: running points end, and the others never begin.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(
        count, mp_context=get_context("spawn"), initializer=signal.signal, initargs=ignore
    ) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _profile_folder(name: str) -> Path:
    """Return the folder of one of ipyparallel's profiles.  Raises ConfigError if it is not there: ipyparallel would
    make it.
    """
    from IPython.core.profileapp import list_profiles_in
    from IPython.paths import get_ipython_dir

    known = sorted(list_profiles_in(get_ipython_dir()))
    if name not in known:
        found = f"The profiles are {', '.join(known)}." if known else f"There is no profile in '{get_ipython_dir()}'."
        todo = did_you_mean(
            name, known, "Make it: ipython profile create --parallel NAME, and name its launchers in it."
        )
        raise ConfigError(f"Engines of the profile '{shown(name)}' were asked for.", found, todo)
    return Path(get_ipython_dir()) / f"profile_{name}"


@contextmanager
def _engines(count: int, profile: Path) -> Iterator[Executor]:
    """Start a controller here and engines by a profile's launchers.  However this process ends, nothing of them stays
    on this machine.
    """
    import ipyparallel

    with scratch_folder() as folder, ExitStack() as stack:
        cluster = ipyparallel.Cluster(profile_dir=str(profile), n=count, shutdown_atexit=False)

        def note(launcher: Any) -> None:
            for one in (launcher, *getattr(launcher, "launchers", {}).values()):
                if isinstance(pid := getattr(one, "pid", None), int):
                    note_process(folder, ProcessId.of(pid))

        def stop() -> None:
            with uninterrupted():
                cluster.stop_cluster_sync()

        stack.callback(stop)
        with uninterrupted():  # until it is known what has to be ended
            cluster.start_controller_sync()
            note(cluster.controller)
            cluster.start_engines_sync(count)
            for launcher in cluster.engines.values():
                note(launcher)
        client = cluster.connect_client_sync()
        stack.callback(client.close)
        client.wait_for_engines(count, timeout=cluster.engine_timeout)
        yield client.load_balanced_view().executor
