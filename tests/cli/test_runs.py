"""`workbench runs`: what is listed, tagged, compared, removed and refused; a damaged folder is a line."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import made_up_report
import pytest
from in_process import answer, call

from workbench.core.job import Job
from workbench.core.serial import to_json
from workbench.methods.common.folder import begin_folder
from workbench.runs.history import PastRun, find_runs

REPORT = made_up_report.report()


listed, on_runs = partial(answer, "runs"), partial(call, "runs")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs of this computer: an older one, a newer one of another method, one that was interrupted."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    folder = tmp_path / "runs"
    for age, (name, method) in enumerate((("new", "fine_tuning"), ("old", "pac_plus"))):
        begin_folder(folder / name, "digest", REPORT.job)
        replace(REPORT, job=replace(REPORT.job, method=method)).write(folder / name / "report.json")
        for path in (folder / name).iterdir():
            os.utime(path, (1000 - 100 * age,) * 2)
    begin_folder(folder / "cut", "digest", Job())
    os.utime(folder / "cut" / "fingerprint.txt", (1, 1))
    return folder


def names(found: list[dict[str, Any]]) -> list[str]:
    return [run["name"] for run in found]


def test_runs_are_listed_newest_first_with_their_numbers_and_filtered(runs: Path) -> None:
    assert names(listed()) == ["new", "old", "cut"] == [run.name for run in find_runs([runs])]
    assert [run["state"] for run in listed()] == ["finished", "finished", "can be resumed"]
    shown = on_runs().stdout
    assert "fine_tuning, all-MiniLM-L6-v2" in shown and f"({REPORT.label})" in shown and "accuracy" in shown
    assert "workbench compare old new" in shown
    assert names(listed("--method", "pac_plus")) == ["old", "cut"] and listed("--task", "mrpc") == []
    assert names(listed("list", str(runs / "old"))) == ["old"] and "No such run" in on_runs("--model", "x").stdout


def test_tags_name_runs_in_every_command(runs: Path) -> None:
    assert on_runs("tag", "old", "base", "r8", "base").stdout == "old: base, r8\n"
    assert on_runs("tag", str(runs / "new"), "r8").exit_code == 0
    assert names(listed("--tag", "base")) == ["old"] and names(listed("--tag", "r8")) == ["new", "old"]
    assert {row["method"] for row in answer("compare", "r8")} == {"pac_plus", "fine_tuning"}
    drawn = call("draw", "base", "--png", "no", "--out", runs.parent / "figures")
    assert drawn.exit_code == 0 and (runs.parent / "figures" / "index.html").exists()
    assert "2 runs have that tag" in call("draw", "r8").stderr
    assert on_runs("tag", "base").stdout == "old: no tags\n" and names(listed("--tag", "base")) == []


def test_a_name_comes_before_a_tag_of_the_same_word(runs: Path) -> None:
    assert on_runs("tag", "old", "new").exit_code == 0
    assert on_runs("remove", "new", "--yes").exit_code == 0
    assert names(listed()) == ["old", "cut"]


def test_a_copied_report_makes_no_folder_a_runs(runs: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    (thesis / "devices").mkdir(parents=True)
    (thesis / "report.json").write_text((runs / "new" / "report.json").read_text())
    assert names(listed("list", str(thesis))) == ["thesis"]
    assert on_runs("remove", str(thesis), "--yes").exit_code == 2 and (thesis / "devices").is_dir()


def test_a_run_is_removed_and_other_files_stay(runs: Path) -> None:
    (runs / "old" / "notes.txt").write_text("mine")
    done = on_runs("remove", "old", "new", "--yes")
    assert done.exit_code == 0 and "kept: notes.txt" in done.stderr
    assert [path.name for path in (runs / "old").iterdir()] == ["notes.txt"] and not (runs / "new").exists()
    assert names(listed()) == ["cut"]


def _report(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "report.json").write_text(text)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "not JSON": _report("{"),
    "zeros": _report("\0" * 10),
    "another version": _report(to_json(REPORT).replace('"schema_version": 1', '"schema_version": 9')),
    "an unknown field": _report('{"x": 1,' + to_json(REPORT)[1:]),
    "a folder": lambda folder: ((folder / "report.json").unlink(), (folder / "report.json").mkdir()),
    "tags that are none": lambda folder: (folder / "tags.json").write_text('{"tags": ["two words"]}'),
    "a job that does not read": lambda folder: (
        (folder / "report.json").unlink(),
        (folder / "fingerprint.txt").write_text("digest\n{}x"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_folder_is_one_line_of_the_list(damage: Callable[[Path], object], runs: Path) -> None:
    damage(runs / "old")
    by_name = {run["name"]: run for run in listed()}
    assert by_name["old"]["state"] == "damaged" and by_name["new"]["state"] == "finished"
    assert by_name["old"]["why"] and by_name["old"]["why"][:60] in on_runs().stdout
    assert call("compare", "old", "new").exit_code == 2
    assert on_runs("remove", "old", "--yes").exit_code == 0 and names(listed()) == ["new", "cut"]


REFUSED = {
    ("tag", "nwe", "x"): "Did you mean 'new'?",
    ("tag", "new", "two words"): "the tags",
    ("tag",): "No run is named",
    ("remove",): "No run is named",
    ("remove", "new"): "Repeat with --yes",
    ("remove", "{elsewhere}", "--yes"): "not a folder in which a run has trained",
    ("remove", "{keys}", "--yes"): "not a folder in which a run has trained",
    ("remove", "x" * 5000, "--yes"): "No run of this computer has that name",
    ("tag", "linked", "x"): "is a link",
    ("remove", "{empty}", "--yes"): "holds a run",
    ("list", "{elsewhere}/none"): "no such folder",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_be_meant_is_refused(words: tuple[str, ...], runs: Path, tmp_path: Path) -> None:
    """A folder that only has a file of that name is not a run's: nothing of it is removed."""
    places = {name: tmp_path / name for name in ("elsewhere", "empty", "keys")}
    for folder in places.values():
        folder.mkdir()
    (tmp_path / "elsewhere" / "report.json").write_text("mine")
    (tmp_path / "keys" / "fingerprint.txt").write_text("SHA256:abc")
    (tmp_path / "keys" / "devices").mkdir()
    begin_folder(runs / "linked", "digest", Job())
    (runs / "linked" / "tags.json").symlink_to(tmp_path / "elsewhere" / "report.json")
    done = on_runs(*(word.format(**places) for word in words))
    assert done.exit_code == 2 and REFUSED[words] in done.stderr, done.output
    assert (tmp_path / "elsewhere" / "report.json").read_text() == "mine" and len(listed()) == 4
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["devices", "fingerprint.txt"]


@pytest.fixture
def running(runs: Path) -> Iterator[PastRun]:
    descriptor = os.open(runs / "cut", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield find_runs()[-1]
    os.close(descriptor)


def test_a_run_in_progress_is_listed_and_not_removed(running: PastRun) -> None:
    assert running.state == "running" and running.job == Job().identity
    done = on_runs("remove", "cut", "--yes")
    assert done.exit_code == 2 and "in progress" in done.stderr and Path(running.folder).exists()
