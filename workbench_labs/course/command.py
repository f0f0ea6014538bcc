"""`workbench labs`: hand a lab in, collect what was handed in, and grade it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from workbench.cli.output import Json, print_json, print_table, print_text, say
from workbench.core.errors import ConfigError
from workbench.core.files import make_folder
from workbench.core.serial import write_json
from workbench.core.units import counted


def labs(
    action: Annotated[
        Literal["submit", "collect", "grade"],
        typer.Argument(
            help="submit: copy one file into --to; collect: copy the newest file of each student below a folder into "
            "--to; grade: judge all files below a folder again."
        ),
    ],
    path: Annotated[
        Path, typer.Argument(help="For submit: the file of lab.submit(). Otherwise: a folder with such files.")
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", help="Folder for the files, or for the page and the table.", show_default="hand-ins; grade: grades"
        ),
    ] = None,
    secret: Annotated[str, typer.Option(help="For grade: any text. Functions are then tested on other cases.")] = "",
    as_json: Json = False,
) -> None:
    """Hand a lab in, collect hand-ins, or grade them.  bubblewrap isolates students' functions; install it first."""
    from workbench_labs.course import grading

    if to is None:
        to = Path("grades" if action == "grade" else "hand-ins")
    if action == "submit":
        work = grading.read_hand_in(path)
        make_folder(to)
        place = to / f"{work.lab}-{work.student}.json"
        if place.is_symlink() or place.exists():
            raise ConfigError(
                f"'{path}' was to be handed in.",
                f"'{place}' is there already.",
                "Remove it first, if it is an older one of yours.",
            )
        write_json(place, work)
        solved = sum(bool(answer.passed) for answer in work.answers.values())
        print_text(f"Handed in: lab {work.lab}, {work.student}, {counted(solved, 'exercise')} solved; {place}")
        return
    works, refused = grading.collect(path)
    for line in refused:
        say(f"Left out: {line}")
    if action == "collect":
        make_folder(to)
        for work in works:
            write_json(to / f"{work.lab}-{work.student}.json", work)
        following = f" Next: workbench labs grade {shlex.quote(str(to))}" if works else ""
        print_text(f"{counted(len(works), 'hand-in')} in {to}; {counted(len(refused), 'file')} left out.{following}")
        return
    grades = grading.grade(works, secret=secret, say=say)
    files = grading.write_grades(grades, works, to)
    if as_json:
        print_json(
            [(grade.lab, grade.student, grade.exercise, grade.verdict.passed, grade.verdict.points) for grade in grades]
        )
        return
    points = {
        (work.lab, work.student): sum(
            grade.verdict.points for grade in grades if (grade.lab, grade.student) == (work.lab, work.student)
        )
        for work in works
    }
    rows = [(lab, student, f"{earned:g}") for (lab, student), earned in points.items()]
    print_table("Points", ("lab", "student", "points"), rows)
    for exercise, student, other in grading.pairs_alike(grades):
        print_text(f"Nearly the same function: {exercise} of {student} and {other}.")
    print_text(f"The page: {files[0]}; the table: {files[1]}")
