"""Grade a right and a wrong hand-in of some labs with nbgrader: `nbgrader_trial.py COURSE LAB...`."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook
from nbgrader.apps import NbGraderAPI
from traitlets.config import PyFileConfigLoader


def points_of_code(source: Path) -> float:
    """Return the points of the checks whose answers are functions with a solution in the source."""
    cells = nbformat.read(source, as_version=4).cells
    solved = {cell.source.split("(")[0].removeprefix("def ") for cell in cells if "### BEGIN SOLUTION" in cell.source}
    described = [cell.metadata["nbgrader"] for cell in cells if "nbgrader" in cell.metadata]
    return sum(one["points"] for one in described if one["grade_id"].removeprefix("check-") in solved)


def main(course: Path, labs: list[str]) -> int:
    """Grade the labs of a course that `course.release --nbgrader` wrote; return how many are graded wrongly."""
    config = PyFileConfigLoader("nbgrader_config.py", path=str(course)).load_config()
    config.CourseDirectory.root = str(course)
    api = NbGraderAPI(config=config)
    failed = 0
    for lab in labs:
        name = f"lab{lab}"
        [source] = (course / "source" / name).glob("*.ipynb")
        require(api.generate_assignment(name))
        stubs = (course / "release" / name / source.name).read_text(encoding="utf-8")
        right = source.read_text(encoding="utf-8")
        wrong = stubs.replace("raise NotImplementedError()", "return []")
        for student, text in {"right": right, "wrong": wrong}.items():
            place = course / "submitted" / student / name / source.name
            place.parent.mkdir(parents=True)
            place.write_text(text, encoding="utf-8")
            require(api.autograde(name, student))
        with Gradebook(f"sqlite:///{course}/gradebook.db") as book:
            earned = {student: book.find_submission(name, student).score for student in ("right", "wrong")}
        expected = {"right": points_of_code(source), "wrong": 0.0}
        sys.stdout.write(f"{name}: nbgrader gives {earned}; expected are {expected}\n")
        failed += earned != expected
    return failed


def require(result: dict[str, object]) -> None:
    """End with nbgrader's log if a step of it failed."""
    if not result["success"]:
        sys.exit(f"nbgrader failed:\n{result['log']}\n{result['error']}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
