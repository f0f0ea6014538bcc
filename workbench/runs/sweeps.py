"""Run the points of a grid, each a job on a cluster, and keep the results in a folder from which an interrupted sweep
continues.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from workbench import experiment
from workbench.core.errors import ConfigError, WorkbenchError, did_you_mean
from workbench.core.files import make_folder
from workbench.core.processes import ProcessId, note_process
from workbench.core.report import Report
from workbench.core.run_folder import scratch_folder, uninterrupted
from workbench.core.serial import from_json, shown, to_json, write_json, write_text
from workbench.core.waiting import as_finished
from workbench.methods.base import Notify
from workbench.runs.comparison import reports_frame
from workbench.runs.grids import Point
from workbench.runs.notebooks import run_notebook

TABLE, FAILED, RUNS = "points.csv", "failed", "runs"
"""In a sweep's folder: the table of all points, the errors of those that failed, and the folders of executed runs."""


class FinishedPoint(NamedTuple):
    """A finished point.  report: None if it failed; error then gives the reason.  is_stored: it was run by an earlier
    call.
    """

    point: Point
    report: Report | None
    error: Exception | None = None
    is_stored: bool = False


def run_points(
    points: Sequence[Point],
    folder: Path,
    *,
    at_once: int = 1,
    cluster_profile: str | None = None,
    progress: Callable[[Point], AbstractContextManager[Notify]] | None = None,
) -> Iterator[FinishedPoint]:
    """Run the points that have no Report in the folder yet; yield each point when it finishes, points of earlier calls
    first.

    at_once: how many simulated points run in parallel, in separate processes.  With a cluster_profile (of ipyparallel),
    it is the number of engines, which the profile's launchers start (Slurm, PBS, ...).  A failed point leaves its error
    in the folder; the next call tries it again.  progress: a context for each point run in this process; it receives
    the point's events.
    Raises ConfigError, before anything runs, for executed points at once and for a profile that is not there.
    """
    if at_once > 1 and cluster_profile is None and any(point.mode == "execute" for point in points):
        raise ConfigError(
            f"{at_once} executed points at a time were asked for.",
            "They would share this machine's cores and spoil each other's times.",
            "Leave out --at-once, add --simulate, or name a --cluster-profile.",
        )
    profile = None if cluster_profile is None else _profile_folder(cluster_profile)
    return _run_points(points, folder, at_once, profile, progress)


def _run_points(
    points: Sequence[Point],
    folder: Path,
    at_once: int,
    profile: Path | None,
    progress: Callable[[Point], AbstractContextManager[Notify]] | None,
) -> Iterator[FinishedPoint]:
    make_folder(folder / FAILED)
    waiting = []
    for point in points:
        if (path := folder / f"{point.name}.json").exists():
            yield FinishedPoint(point, Report.read(path), is_stored=True)
        else:
            waiting.append(point)
    local_points, worker_points = waiting, list[Point]()
    if profile is not None:
        local_points, worker_points = [], waiting
    elif at_once > 1:
        # The first point of each kind may have to measure this machine, so nothing else may run meanwhile.
        firsts = {_measured_by(point): point for point in reversed(waiting)}
        local_points = [point for point in waiting if firsts[_measured_by(point)] is point]
        worker_points = [point for point in waiting if firsts[_measured_by(point)] is not point]
    for point in local_points:
        with progress(point) if progress else nullcontext() as notify:
            try:
                result: Report | Exception = run_point(point, folder / RUNS / point.name, notify)
            except Exception as error:
                result = error
        yield _record(point, result, folder)
    if worker_points:
        count = min(at_once, len(worker_points))
        with _processes(count) if profile is None else _engines(count, profile) as workers:
            under_way: dict[Future[str], Point] = {
                workers.submit(_run_elsewhere, point): point for point in worker_points
            }
            for future in as_finished(under_way):
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


def _measured_by(point: Point) -> str:
    """Return the settings that determine which profile of this machine a point needs."""
    job = point.job
    return to_json((job.method, job.model, job.task, job.data, job.columns, job.max_length, job.options))


def _record(point: Point, result: Report | Exception, folder: Path) -> FinishedPoint:
    """Write a point's Report, or its error, and return the finished point."""
    failed = folder / FAILED / f"{point.name}.json"
    if isinstance(result, Report):
        result.write(folder / f"{point.name}.json")
        failed.unlink(missing_ok=True)
        return FinishedPoint(point, result)
    parts = (
        {name: getattr(result, name) for name in ("asked", "found", "todo")}
        if isinstance(result, WorkbenchError)
        else {}
    )
    failure = {
        "point": point.settings,
        "error": type(result).__name__,
        "message": str(result).strip(),
        **parts,
        "job": point.job,
    }
    write_json(failed, failure)
    return FinishedPoint(point, None, result)


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

    profiles = sorted(list_profiles_in(get_ipython_dir()))
    if name not in profiles:
        problem = (
            f"The profiles are {', '.join(profiles)}." if profiles else f"There is no profile in '{get_ipython_dir()}'."
        )
        raise ConfigError(
            f"Engines of the profile '{shown(name)}' were asked for.",
            problem,
            did_you_mean(
                name, profiles, "Make it: ipython profile create --parallel NAME, and name its launchers in it."
            ),
        )
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
            for process in (launcher, *getattr(launcher, "launchers", {}).values()):
                if isinstance(pid := getattr(process, "pid", None), int):
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
