"""Write the students' version of a lab from its source: `python -m workbench_labs.course.release [--check]`.

Sources are the notebooks in labs/: a code cell may hold a region between the comments `### BEGIN SOLUTION` and
`### END SOLUTION`, as nbgrader has them.  In notebooks/ a region becomes `raise NotImplementedError`, or `None` after
an equals sign.  Cells tagged `teacher` are left out.  labs/ does not travel with the package.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES, RELEASED = ROOT / "labs", ROOT / "notebooks"
_REGION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION\n?", re.MULTILINE | re.DOTALL)


def without_solutions(source: str) -> str:
    """Return a cell's code with each solution replaced by a line that raises NotImplementedError."""
    return _REGION.sub(r"\1raise NotImplementedError\n", source).rstrip("\n")


def released(notebook: dict[str, Any]) -> dict[str, Any]:
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


def main(arguments: list[str]) -> int:
    """Write all students' versions; with --check only say which differ.  Return the exit code."""
    stale = []
    for path in sorted(SOURCES.glob("*.ipynb")):
        text = json.dumps(released(json.loads(path.read_text(encoding="utf-8"))), indent=1, ensure_ascii=False) + "\n"
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
