"""Collect and grade what students handed in: points by exercise, guesses, explanations, and hand-ins that are alike.

Functions run again, isolated, on new cases; other answers are judged again.  So a file whose points were edited gains
nothing.
"""

from __future__ import annotations

import ast
import csv
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

from markupsafe import Markup

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.files import make_folder
from workbench.core.serial import write_json, write_text
from workbench.core.units import counted
from workbench_labs.course.isolation import foreign_function, require_isolation
from workbench_labs.course.lab import Answer, Guess, HandIn, exercises_of
from workbench_labs.course.verdict import Exercise, Verdict, in_short

MOST_FILES = 2000
ALIKE = 0.9
"""Functions whose syntax trees, without names, agree to this share are flagged."""
SHORTEST_NODES = 60
"""Shorter functions are alike by nature, such as two lines of list comprehensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """One exercise of one student, judged again.  alike: students whose function is nearly the same."""

    lab: str
    student: str
    exercise: str
    verdict: Verdict
    answer: Answer
    alike: tuple[str, ...] = ()


def collect(folder: Path) -> tuple[list[HandIn], list[str]]:
    """Return the newest hand-in of each student and lab below a folder, and a line for each file that is none.

    Raises ConfigError if there is no such folder, or if it holds no file, or too many.
    """
    if not os.path.isdir(folder):
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ConfigError(
            f"The hand-ins in '{folder}' were asked for.",
            "There is no such folder.",
            did_you_mean(folder.name, siblings, "Name the folder into which the students' files were put."),
        )
    files = sorted(path for path in folder.rglob("*.json") if path.is_file() and not path.is_symlink())
    if not files or len(files) > MOST_FILES:
        raise ConfigError(
            f"The hand-ins in '{folder}' were asked for.",
            f"It holds {len(files)} JSON files; 1 to {MOST_FILES} can be read.",
            "Name the folder into which the students' files were put.",
        )
    newest: dict[tuple[str, str], HandIn] = {}
    refused: list[str] = []
    for path in files:
        try:
            work = read_hand_in(path)
        except ConfigError as error:
            refused.append(f"{path.relative_to(folder)}: {error}")
            continue
        key = work.lab, work.student.lower()
        if key in newest:
            older, work = sorted((newest[key], work), key=_written)
            refused.append(f"{path.relative_to(folder)}: a second file of {older.student}; the newer one counts.")
        newest[key] = work
    return [newest[key] for key in sorted(newest)], refused


def read_hand_in(path: Path) -> HandIn:
    """Read a file that was handed in.  Raises ConfigError if its lab is unknown, or its time cannot be."""
    work = HandIn.read(path)
    exercises_of(work.lab)
    request, todo = f"The hand-in '{path}' was read.", "Ask the student for the file that lab.submit() names."
    try:
        is_later = _written(work) > datetime.now(UTC) + timedelta(days=1)
    except (ValueError, TypeError) as error:
        raise ConfigError(request, f"It was never submitted: written_at = '{work.written_at:.40}'.", todo) from error
    if is_later:
        raise ConfigError(request, f"It was written in the future: {work.written_at:.40}.", todo)
    return work


def _written(work: HandIn) -> datetime:
    return datetime.fromisoformat(work.written_at).astimezone(UTC)


def grade(works: Sequence[HandIn], *, secret: str = "", say: Callable[[str], None] = lambda line: None) -> list[Grade]:
    """Judge every answer again.  secret: changes the cases of functions, so that nobody can prepare for them.

    Raises ConfigError for a lab that this version does not know, and where foreign code cannot be isolated.
    """
    if any(answer.source for work in works for answer in work.answers.values()):
        require_isolation()
    grades = []
    for work in works:
        say(f"Lab {work.lab}, {work.student}")
        for name, exercise in exercises_of(work.lab).items():
            answer = work.answers.get(name, Answer())
            alike = _alike(name, work, works) if exercise.is_code else ()
            verdict = _judged(exercise, answer, work, secret)
            grades.append(
                Grade(lab=work.lab, student=work.student, exercise=name, verdict=verdict, answer=answer, alike=alike)
            )
    return grades


def _judged(exercise: Exercise, answer: Answer, work: HandIn, secret: str) -> Verdict:
    """Return the verdict of one answer; code runs isolated, on other cases."""
    seed = f"{work.lab}/{work.student}"
    if not (answer.source if exercise.is_code else answer.value is not None):
        return Verdict(None, "Not answered.")
    if not exercise.is_code:
        return exercise.check(answer.value, seed)
    try:
        with foreign_function(answer.source, exercise.name) as function:
            return exercise.check(function, f"{seed}/{secret}" if secret else seed)
    except (RuntimeError, TimeoutError, ValueError, NotImplementedError) as error:
        return Verdict(False, in_short(f"It cannot be loaded: {error}"))


def shape_of(source: str) -> list[str]:
    """Return a function's syntax without names, texts and numbers; empty if it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [type(node).__name__ for node in ast.walk(tree)]


def _alike(name: str, work: HandIn, works: Sequence[HandIn]) -> tuple[str, ...]:
    def shape(other: HandIn) -> list[str]:
        return shape_of(other.answers[name].source) if name in other.answers else []

    nodes = shape(work)
    if len(nodes) < SHORTEST_NODES:
        return ()
    others = [other for other in works if other.lab == work.lab and other.student != work.student]
    return tuple(other.student for other in others if SequenceMatcher(None, nodes, shape(other)).ratio() >= ALIKE)


COLUMNS = ("lab", "student", "exercise", "passed", "points", "most", "attempts", "hints", "alike", "message")


def csv_of(grades: Iterable[Grade]) -> str:
    """Return the grades as a CSV table, a row for each exercise."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for grade in grades:
        most = exercises_of(grade.lab)[grade.exercise].points
        passed = {None: "", True: "yes", False: "no"}[grade.verdict.passed]
        row = [
            grade.lab,
            grade.student,
            grade.exercise,
            passed,
            f"{grade.verdict.points:g}",
            most,
            grade.answer.attempts,
        ]
        table.writerow(map(_cell, [*row, grade.answer.hints, " ".join(grade.alike), grade.verdict.message]))
    return text.getvalue()


def _cell(value: object) -> str:
    """Return a cell that no spreadsheet takes for a formula."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def write_grades(grades: Sequence[Grade], works: Sequence[HandIn], folder: Path) -> list[Path]:
    """Write grades.csv, grades.json and index.html; return the files, the page first."""
    from workbench.plots.export import page  # imports plotly

    make_folder(folder)
    index, table, data = (folder / name for name in ("index.html", "grades.csv", "grades.json"))
    write_text(table, csv_of(grades))
    write_json(data, [(grade.lab, grade.student, grade.exercise, grade.verdict.points) for grade in grades])
    sections = [_points(grades), _guesses(works), _explanations(works)]
    write_text(index, page("What was handed in", Markup("\n").join(filter(None, sections))))
    return [index, table, data]


def _points(grades: Sequence[Grade]) -> Markup:
    """Return a table of each lab: a row for each student, a column for each exercise."""
    from workbench.plots.export import html_table

    parts = []
    for lab in sorted({grade.lab for grade in grades}):
        exercises = exercises_of(lab)
        rows = []
        for student in sorted({grade.student for grade in grades if grade.lab == lab}):
            graded = {grade.exercise: grade for grade in grades if (grade.lab, grade.student) == (lab, student)}
            points = sum(grade.verdict.points for grade in graded.values())
            rows.append([student, *(_graded(graded[name]) for name in exercises), f"{points:g}"])
        heads = ["student", *(f"{name} ({exercise.points})" for name, exercise in exercises.items()), "in all"]
        parts.append(Markup("<h2>Lab {}: points</h2>{}").format(lab, html_table(heads, rows)))
    return Markup("").join(parts)


def _graded(one: Grade) -> Markup:
    sign = {None: "–", True: "✓", False: "✗"}[one.verdict.passed]
    tries = ", ".join(counted(*each) for each in ((one.answer.attempts, "attempt"), (one.answer.hints, "hint")))
    alike = Markup("<br><span class='warning'>like {}</span>").format(", ".join(one.alike)) if one.alike else ""
    why = Markup("<details><summary>{}</summary>{}</details>").format(tries, one.verdict.message)
    return Markup("{} {:g}{}{}").format(sign, one.verdict.points, alike, why)


def _guesses(works: Sequence[HandIn]) -> Markup:
    """Return what was guessed, next to what came out."""
    from workbench.plots.export import html_table

    rows = [
        [name, work.student, guess.value, "not looked at" if guess.outcome is None else guess.outcome]
        for name, work, guess in sorted(_all_guesses(works), key=lambda row: (row[0], row[1].student))
    ]
    columns = ("guess", "student", "expected", "came out")
    return Markup("<h2>Guesses</h2>{}").format(html_table(columns, rows)) if rows else Markup("")


def _all_guesses(works: Sequence[HandIn]) -> list[tuple[str, HandIn, Guess]]:
    return [(name, work, guess) for work in works for name, guess in work.guesses.items()]


def _explanations(works: Sequence[HandIn]) -> Markup:
    """Return the explanations of one question side by side."""
    names = sorted({name for work in works for name in work.explanations})
    parts = []
    for name in names:
        texts = Markup("").join(
            Markup("<dt><b>{}</b></dt><dd>{}</dd>").format(work.student, work.explanations[name])
            for work in works
            if name in work.explanations
        )
        parts.append(Markup("<h2>Explained: {}</h2><dl>{}</dl>").format(name, texts))
    return Markup("").join(parts)


def pairs_alike(grades: Sequence[Grade]) -> list[tuple[str, str, str]]:
    """Return (exercise, student, other student) of functions that are nearly the same."""
    pairs = [
        (first.exercise, first.student, other.student)
        for first, other in combinations(grades, 2)
        if first.exercise == other.exercise and other.student in first.alike
    ]
    return sorted(pairs)
