"""The runs on this computer: find, describe, tag and remove the folders in which runs keep their state and report."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workbench.assets.fetch import cache_folder
from workbench.core.errors import ConfigError, WorkbenchError, did_you_mean
from workbench.core.files import try_lock
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.core.run_files import IDENTITY, PLAN, REPORT, TAGS, remove_run_files
from workbench.core.sealed import read_lines
from workbench.core.serial import from_json, read_json, read_text, shown, to_json, write_text
from workbench.core.summary import main_metric
from workbench.core.units import counted, duration_words
from workbench.runs.comparison import results_in_words, results_of
from workbench.runtime.work_folder import own_folder

State = Literal["finished", "running", "can be resumed", "damaged"]
LARGEST_REPORT, LARGEST_OTHER = 256 << 20, 4 << 20
"""Bytes of a file that is read to describe a run."""
MOST_TAGS = 20
Tag = Annotated[str, Meta(pattern=r"^\S{1,40}\Z")]
"""A word that a person gives a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The content of a run's tags.json."""

    tags: Annotated[tuple[Tag, ...], Meta(max_length=MOST_TAGS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """The part of plan.json that is read: the names of the devices."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run's folder.  job: None if it cannot be read, for the reason `why`.

    changed_s: when it last wrote, in seconds since 1970.  label: where its numbers come from, '' before there are any.
    metric: the name of the result that its headline names.  results: as runs.comparison.results_of.
    """

    name: str
    folder: str
    state: State
    changed_s: float
    tags: tuple[str, ...] = ()
    job: Job | None = None
    cluster: str = ""
    devices: tuple[str, ...] = ()
    label: str = ""
    valid: bool = True
    metric: str = ""
    results: dict[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def report(self) -> Path:
        """Return the path of its report, which a finished run has."""
        return Path(self.folder) / REPORT

    @property
    def data(self) -> str:
        """Return the training data's name: the task, or a user's own file."""
        return "" if self.job is None else self.job.task if self.job.data is None else Path(self.job.data).name

    @property
    def figures(self) -> str:
        """Return its headline numbers as text: 'accuracy 0.8, step 471 ms (emulated, kernel links)'; '' without any."""
        names = [name for name in (self.metric, "step_s", "cached_step_s") if name in self.results]
        return f"{results_in_words({name: self.results[name] for name in names})} ({self.label})" if names else ""

    @property
    def did(self) -> str:
        """Return method, model, data and devices as text, or why they are not known."""
        if self.job is None:
            return self.why or "It has not begun to train."
        devices = counted(len(self.devices), "device") if self.devices else ""
        where = " of ".join(filter(None, (devices, self.cluster)))
        return ", ".join(filter(None, (self.job.method, self.job.model, self.data, where)))

    @property
    def words(self) -> str:
        """Return its work and its result in one line."""
        return f"{self.did}: {self.figures}" if self.figures else self.did

    def matches(self, words: str) -> bool:
        """Return whether every word occurs in its name, tags, method, model, data, devices or state."""
        facts = [self.name, *self.tags, self.data, self.cluster, *self.devices, self.state, self.label]
        facts += [] if self.job is None else [self.job.method, self.job.model]
        text = " ".join(facts).lower()
        return all(word in text for word in words.lower().split())


def runs_folder() -> Path:
    """Return the folder in which runs without a workdir keep theirs."""
    return cache_folder() / "runs"


def find_runs(folders: Sequence[Path | str] = ()) -> list[PastRun]:
    """Return the runs in some folders, newest first: each is a run's folder, or holds some.  Without any: this
    computer's.

    Raises ConfigError for a folder that does not exist.
    """
    places = [runs_folder()] if not folders else [_existing(folder) for folder in folders]
    folders_of_runs = {run: None for place in places for run in ([place] if _is_run(place) else _inside(place))}
    return sorted((describe(folder) for folder in folders_of_runs), key=lambda run: -run.changed_s)


def named_runs(names: Iterable[str], every: Sequence[PastRun] | None = None) -> list[PastRun]:
    """Return runs by name, else by tag (all that have it), else by folder, each once.

    every: this computer's runs, if they have been read.  Raises ConfigError for another name.
    """
    every = find_runs() if every is None else every
    runs_by_folder: dict[str, PastRun] = {}
    for name in names:
        chosen = [run for run in every if run.name == name] or [run for run in every if name in run.tags]
        if not chosen and _is_run(Path(name)):
            chosen = [describe(Path(name))]
        if not chosen:
            todo = "`workbench runs` lists them."
            known_names = [*(run.name for run in every), *(tag for run in every for tag in run.tags)]
            raise ConfigError(
                f"The run '{shown(name)}' was asked for.",
                "No run of this computer has that name or tag, and no folder of that name holds a run.",
                did_you_mean(name, known_names, todo),
            )
        runs_by_folder.update((run.folder, run) for run in chosen)
    return list(runs_by_folder.values())


def reports_of(names: Iterable[str]) -> list[Path]:
    """Return the reports, or folders of them, that names stand for: a path as it is, or a run by name or tag.

    Raises ConfigError for another name, and for a run without a report.
    """
    paths: list[Path] = []
    every: list[PastRun] | None = None
    for name in names:
        if _exists(path := Path(name)):
            paths.append(path)
            continue
        every = find_runs() if every is None else every
        for run in named_runs([name], every):
            if run.state != "finished":
                raise ConfigError(
                    f"The report of the run '{run.name}' was asked for.",
                    f"It is {run.state}. {run.why}".strip(),
                    "Name finished runs.",
                )
            paths.append(run.report)
    return paths


def one_report(name: str) -> Path:
    """Return the report that a name stands for (see reports_of).  Raises ConfigError if it stands for several."""
    reports = reports_of([name])
    if len(reports) > 1:
        raise ConfigError(f"The report of '{name}' was asked for.", f"{len(reports)} runs have that tag.", "Name one.")
    if _is_run(reports[0]):
        return reports[0] / REPORT
    if reports[0].is_dir():
        raise ConfigError(
            f"The report of '{name}' was asked for.",
            f"It is a folder without {REPORT}, so no run.",
            "Name a run (`workbench runs` lists them) or a report.",
        )
    return reports[0]


def describe(folder: Path) -> PastRun:
    """Return a run's description; what cannot be read makes it 'damaged'."""
    folder = folder.absolute()
    run = PastRun(name=folder.name, folder=str(folder), state="damaged", changed_s=_changed_s(folder))
    try:
        run = replace(run, tags=_tags(folder))
        if (is_running := _is_locked(folder)) or not (folder / REPORT).exists():
            state: State = "running" if is_running else "can be resumed"
            return replace(run, state=state, job=_job(folder), devices=_devices(folder))
        report = Report.read(folder / REPORT, most_bytes=LARGEST_REPORT)
    except (WorkbenchError, OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        why = f"{error.asked} {error.found}" if isinstance(error, WorkbenchError) else str(error)
        return replace(run, why=shown(why, 300))
    return replace(
        run,
        state="finished",
        job=report.job,
        cluster=report.cluster.name,
        devices=report.cluster.names,
        label=report.label,
        valid=report.valid,
        metric=main_metric(report),
        results=results_of(report),
    )


def tag(run: PastRun, words: Sequence[str]) -> PastRun:
    """Give a run these tags instead of those it has, and return it.  Raises ConfigError for a word that is no tag."""
    text = to_json({"tags": list(dict.fromkeys(words))})
    from_json(text, Tags, source="the tags")
    path = Path(run.folder) / TAGS
    if path.is_symlink():
        raise ConfigError(f"The run '{run.name}' was to be tagged.", f"'{path}' is a link.", "Remove it.")
    write_text(path, text + "\n")
    return describe(Path(run.folder))


def remove(run: PastRun) -> list[str]:
    """Remove a run's files, and its folder if nothing else is in it; return the names of what stays.

    Raises ConfigError if the run is in progress or the folder holds no run.
    """
    folder = Path(run.folder)
    request = f"The run in '{folder}' was to be removed."
    is_ours = _has_identity(folder) or folder.resolve().parent == runs_folder().resolve()
    if folder.is_symlink() or not is_ours:
        raise ConfigError(
            request,
            "It is not a folder in which a run has trained: other files may have the names of a run's.",
            "Remove it yourself if you do not need it.",
        )
    if run.state == "running":
        raise ConfigError(request, "It is in progress.", "Stop it first, or wait for its end.")
    with own_folder(folder):
        remove_run_files(folder)
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        folder.rmdir()
    return names


def ago(changed_s: float) -> str:
    """Return how long ago a moment was, in words."""
    return duration_words(max(0.0, time.time() - changed_s))


def _existing(folder: Path | str) -> Path:
    if not (path := Path(folder)).is_dir():
        raise ConfigError(
            f"The runs in '{shown(str(folder), 200)}' were asked for.",
            "There is no such folder.",
            "Name the folder of a run, or one that holds some; none for this computer's runs.",
        )
    return path


def _inside(place: Path) -> list[Path]:
    try:
        return [path for path in sorted(place.iterdir()) if _is_run(path)]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    """Return whether a folder has a run's files; False for one that cannot be read."""
    return any(_exists(folder / name) for name in (IDENTITY, REPORT))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that is closed to us
        return False


def _has_identity(folder: Path) -> bool:
    """Return whether a run has written the folder's identity: a digest and the job in full."""
    try:
        return _job(folder) is not None
    except (WorkbenchError, OSError, ValueError, RecursionError):
        return False


def _changed_s(folder: Path) -> float:
    times = []
    for name in (REPORT, PLAN, IDENTITY):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times, default=0.0)


def _job(folder: Path) -> Job | None:
    """Return the job of a run that has no report yet."""
    if not (folder / IDENTITY).exists():  # it is running, and has not begun to train
        return None
    _, _, text = read_text(folder / IDENTITY, "the run's job", most_bytes=LARGEST_OTHER).partition("\n")
    return from_json(text, Job, source=IDENTITY)


def _devices(folder: Path) -> tuple[str, ...]:
    path = folder / PLAN
    if not path.is_file() or path.stat().st_size > LARGEST_OTHER:
        return ()
    contents = read_lines(path).contents
    return msgspec.json.decode(contents[0], type=_Devices).devices if contents else ()


def _tags(folder: Path) -> tuple[str, ...]:
    if not (path := folder / TAGS).exists():
        return ()
    return read_json(path, Tags, "the run's tags", most_bytes=LARGEST_OTHER).tags


def _is_locked(folder: Path) -> bool:
    """Return whether a run uses the folder (see runtime.work_folder.own_folder)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return not try_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)
