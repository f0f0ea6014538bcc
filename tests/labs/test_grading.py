"""What a teacher gets: hand-ins collected and graded, also hostile ones, whose functions run isolated."""

from __future__ import annotations

import csv
import importlib.util
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from in_process import call

from tests.labs.solutions import ALL, SOLUTIONS, written
from workbench.core.errors import ConfigError
from workbench.core.serial import to_json
from workbench_labs.course import grading, isolation
from workbench_labs.course.isolation import foreign_function, require_isolation
from workbench_labs.course.lab import Answer, HandIn, Lab


def can_isolate() -> bool:
    try:
        require_isolation()
    except ConfigError:
        return False
    return True


needs_isolation = pytest.mark.skipif(not can_isolate(), reason="bubblewrap is missing, or may not make namespaces here")


def hand_in(student: str, answers: dict[str, Answer], **settings: Any) -> HandIn:
    return HandIn(lab="02", student=student, answers=answers, written_at="2026-01-01T00:00:00+00:00", **settings)


RENAMED = SOLUTIONS["event_loop"].replace("micro_batch", "m").replace("has_moved", "go").replace("free_s", "free")
HOSTILE = {
    "empty": "def event_loop(a, b, c):\n    return []",
    "reads": "def event_loop(a, b, c):\n    return open('/etc/passwd').read()",
    "network": "import socket\ndef event_loop(a, b, c):\n    return socket.create_connection(('127.0.0.1', 22))",
    "forged": 'import os\nos.write(1, b\'{"result": [], "passed": true}\\n\')\n' + SOLUTIONS["gpipe"],
    "leaves": "import os\nos._exit(0)",
    "memory": "def event_loop(a, b, c):\n    return bytearray(10**11)",
    "forks": "import os\ndef event_loop(a, b, c):\n    return os.fork()",
    "starts a program": "import subprocess\ndef event_loop(a, b, c):\n    return subprocess.run(['/bin/true'])",
    "asks the workbench": "import workbench.simulator\n" + SOLUTIONS["event_loop"],
    "reads the judge": "import workbench_labs.exercises.pipelines\n" + SOLUTIONS["event_loop"],
    "a long name": "raise Exception('x\\r=1' * 10**6)",
    "long message": "def event_loop(a, b, c):\n    raise Exception('x\\r=1' * 10**6)",
    "deep": "def event_loop(a, b, c):\n    x = []\n    for _ in range(10**5):\n        x = [x]\n    return x",
}


@needs_isolation
def test_a_class_is_collected_and_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hand-ins: right, nearly a copy of it, with edited points, hostile, and none."""
    box = tmp_path / "box"
    box.mkdir()
    loop = {"event_loop": Answer(source=SOLUTIONS["event_loop"], passed=True, points=10.0, attempts=3)}
    works = [
        hand_in("anna", loop, explanations={"why": "=1+1 <b>memory</b>"}),
        hand_in("bert", {"event_loop": Answer(source=RENAMED, attempts=1)}),
        hand_in(
            "carl", {"event_loop": Answer(source="def event_loop(a, b, c):\n    return []", points=99.0, passed=True)}
        ),
        hand_in("dora", {"event_loop": Answer(source=HOSTILE["reads"])}),
    ]
    for work in works:
        (box / f"{work.student}.json").write_text(to_json(work))
    (box / "older.json").write_text(to_json(replace(works[0], written_at="2025-12-01T00:00:00+00:00", answers={})))
    (box / "never.json").write_text(to_json(replace(works[0], written_at="~", answers={})))
    (box / "future.json").write_text(to_json(replace(works[0], written_at="2999-01-01T00:00:00+00:00")))
    (box / "lab.json").write_text(to_json(replace(works[0], lab="99")))
    (box / "junk.json").write_text('{"lab": "02", "student": "../x", "answers": []}')
    monkeypatch.chdir(tmp_path)
    collected = call("labs", "collect", box)
    assert "4 hand-ins in hand-ins" in collected.output
    assert "labs grade 'hand ins'" in call("labs", "collect", box, "--to", "hand ins").output
    for name in ("junk.json", "older.json: a second file of anna", "never.json", "future.json", "lab.json"):
        assert name in collected.output
    graded = call("labs", "grade", "hand-ins", "--secret", "s")
    assert graded.exit_code == 0, graded.output
    rows = list(csv.DictReader((tmp_path / "grades" / "grades.csv").read_text().splitlines()))
    points = {row["student"]: row["points"] for row in rows if row["exercise"] == "event_loop"}
    assert points == {"anna": "10", "bert": "10", "carl": "0", "dora": "0"}
    assert {row["message"] for row in rows if row["exercise"] in ("gpipe", "bubble")} == {"Not answered."}
    alike = {row["student"]: row["alike"] for row in rows if row["exercise"] == "event_loop"}
    assert alike == {"anna": "bert", "bert": "anna", "carl": "", "dora": ""}
    page = (tmp_path / "grades" / "index.html").read_text()
    assert (
        "<b>memory</b>" not in page
        and "like bert" in page
        and "1 attempt, 0 hints" in page
        and "Explained: why" in page
    )


@needs_isolation
@pytest.mark.parametrize("lab", ALL)
def test_what_is_right_in_the_notebook_is_right_for_the_teacher(lab: str, tmp_path: Path) -> None:
    work = Lab(lab, student="anna", folder=tmp_path)
    for name, source in ALL[lab].items():
        assert work.exercise(name, written(source, name)).passed
    for name, right in import_module(f"tests.labs.answers.lab{lab}").RIGHT.items():
        assert work.exercise(name, right(work.numbers(name))).passed
    work.submit()
    place = tmp_path / "drop" / f"{lab}-anna.json"
    for code in (0, 2):  # nothing is written over
        done = call("labs", "submit", tmp_path / f"{lab}-anna.json", "--to", place.parent)
        assert done.exit_code == code
    grades = grading.grade([grading.read_hand_in(place)], secret="s")
    assert {grade.exercise: grade.verdict.passed for grade in grades} == dict.fromkeys(work.exercises, True)


@needs_isolation
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_function_earns_nothing_and_reaches_nothing(what: str) -> None:
    [grade] = [
        one
        for one in grading.grade([hand_in("eve", {"event_loop": Answer(source=HOSTILE[what])})])
        if one.exercise == "event_loop"
    ]
    assert grade.verdict.passed is False and grade.verdict.points == 0
    assert "root:" not in grade.verdict.message
    assert len(grade.verdict.message) <= 2000 and grade.verdict.message.isprintable()


@needs_isolation
def test_a_package_that_knows_the_answers_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is installed among the others, as this one is."""
    source = "def name(): import markupsafe; return markupsafe.Markup.__name__"
    assert importlib.util.find_spec("markupsafe") is not None
    with foreign_function(source, "name") as function:
        assert function() == "Markup"
    monkeypatch.setattr(isolation, "HIDDEN", ("markupsafe",))
    with foreign_function(source, "name") as function, pytest.raises(RuntimeError):
        function()


@needs_isolation
def test_a_function_that_never_ends_is_stopped() -> None:
    endless = "def f():\n    while True: pass"
    with (
        foreign_function(endless, "f", seconds=1.0) as function,
        pytest.raises(TimeoutError, match="more than 1 s"),
    ):
        function()


def test_nothing_foreign_runs_where_it_cannot_be_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    marker = tmp_path / "ran"
    source = f"open({str(marker)!r}, 'w')\ndef gpipe(a, b, c): return []"
    with pytest.raises(ConfigError, match="Install bubblewrap"):
        grading.grade([hand_in("eve", {"gpipe": Answer(source=source)})])
    assert not marker.exists()


def test_a_table_of_grades_holds_no_formula() -> None:
    assert grading._cell("=cmd()") == "'=cmd()" and grading._cell(-1) == "'-1" and grading._cell("a\r\nb") == "a  b"
