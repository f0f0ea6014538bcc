"""Write the students' version of each lab from its source: `python -m workbench_labs.course.release`.

Sources are the notebooks in labs/: a code cell may hold a region between the comments `### BEGIN SOLUTION` and
`### END SOLUTION`, as nbgrader has them.  In notebooks/ a region becomes `raise NotImplementedError`.  Cells tagged
`teacher` are left out.  labs/ does not travel with the package.

--check only says which notebooks differ from their sources.  --nbgrader FOLDER writes the sources of an nbgrader
course: each check is a locked cell with its points, which fails unless the answer is right.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from workbench_labs.course.lab import exercises_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES, RELEASED = ROOT / "labs", ROOT / "notebooks"
Node = dict[str, Any]
"""A notebook, or a cell of one."""
_REGION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION\n?", re.MULTILINE | re.DOTALL)


def without_solutions(source: str) -> str:
    """Return a cell's code with each solution replaced by a line that raises NotImplementedError."""
    return _REGION.sub(r"\1raise NotImplementedError\n", source).rstrip("\n")


def released(notebook: Node) -> Node:
    """Return the students' version of a notebook."""
    cells = []
    for cell in notebook["cells"]:
        if "teacher" in cell["metadata"].get("tags", []):
            continue
        if cell["cell_type"] == "code":
            source = without_solutions("".join(cell["source"]))
            cell = cell | {"source": source.splitlines(keepends=True), "outputs": [], "execution_count": None}
        cells.append(cell)
    return notebook | {"cells": cells}


_CHECK = re.compile(r"^lab\.exercise\(\"(\w+)\".*\)$", re.MULTILINE)


def for_nbgrader(notebook: Node, lab: str) -> Node:
    """Return a source as nbgrader has it: answers are solution cells, checks are locked cells with points.

    What stands above a check in one cell becomes a separate answer.
    """
    points = {name: exercise.points for name, exercise in exercises_of(lab).items()}
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        check = _CHECK.search(source) if cell["cell_type"] == "code" else None
        if "exercise" in cell["metadata"].get("tags", []):
            cells.append(_nbgrader_cell(cell, source, f"answer-{cell['id']}", solution=True))
        elif check is not None:
            name, above = check[1], source[: check.start()].strip()
            if above:
                answer = cell | {"id": f"{cell['id']}-answer"}
                cells.append(_nbgrader_cell(answer, above, f"answer-{name}", solution=True))
            checked = source[check.start() :] + ".require()"
            cells.append(_nbgrader_cell(cell, checked, f"check-{name}", grade=True, locked=True, points=points[name]))
        else:
            cells.append(cell)
    return notebook | {"cells": cells}


def _nbgrader_cell(cell: Node, source: str, grade_id: str, **settings: Any) -> Node:
    usual = {"schema_version": 3, "grade": False, "locked": False, "solution": False, "task": False}
    metadata = cell["metadata"] | {"nbgrader": usual | {"grade_id": grade_id} | settings}
    return cell | {"source": source.splitlines(keepends=True), "metadata": metadata}


NBGRADER_CONFIG = """# A cell may train on four emulated devices; nbgrader itself waits for 30 s, and 4 s for an output.
c = get_config()
c.ExecutePreprocessor.timeout = 900
c.ExecutePreprocessor.iopub_timeout = 120
"""


def write_nbgrader_course(folder: Path) -> list[Path]:
    """Write an nbgrader assignment of each lab, FOLDER/source/labNN/NAME.ipynb, and the time that a cell may take,
    FOLDER/nbgrader_config.py, unless there is one.  Return the files.
    """
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nbgrader_config.py"
    if not config.exists():
        config.write_text(NBGRADER_CONFIG, encoding="utf-8")
        written.append(config)
    for path in sorted(SOURCES.glob("*.ipynb")):
        lab = path.stem[:2]
        place = folder / "source" / f"lab{lab}" / path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            json.dumps(for_nbgrader(_read_notebook(path), lab), indent=1, ensure_ascii=False), encoding="utf-8"
        )
        written.append(place)
    return written


def _read_notebook(path: Path) -> Node:
    return json.loads(path.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Do what the arguments say (see the module).  Return the exit code."""
    if arguments[:1] == ["--nbgrader"]:
        for place in write_nbgrader_course(Path(arguments[1])):
            sys.stdout.write(f"{place}\n")
        return 0
    stale = []
    for path in sorted(SOURCES.glob("*.ipynb")):
        text = json.dumps(released(_read_notebook(path)), indent=1, ensure_ascii=False) + "\n"
        place = RELEASED / path.name
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if "--check" not in arguments:
                place.write_text(text, encoding="utf-8")
    verb = "differ from their sources; run `make labs`" if "--check" in arguments else "written"
    sys.stdout.write(f"{', '.join(stale) or 'No notebooks'} {verb}\n")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
