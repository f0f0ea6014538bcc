"""The notebooks as students first open them: nothing is answered, and all that needs an answer runs all the same.

Cells that no answer reaches are those of the lab with its solutions, which runs whole (test_course.py).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from notebook_parts import depending, needed

from tests.labs.solutions import ROOT, run_cells

ELSEWHERE = {"index", "00_quickstart"}
"""What a browser runs whole; and the quickstart runs from a wheel, too (tests/test_packaging.py)."""
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem not in ELSEWHERE)


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Return a notebook's code cells; none where there is no such file."""
    reference = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}
    return [cell for cell in reference["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_students_get_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is not this Python's
    solutions = {cell["id"]: cell["source"] for cell in cells_of(ROOT / "labs" / path.name)}
    cells = cells_of(path)
    asking = {number for number, cell in enumerate(cells) if "lab.exercise(" in "".join(cell["source"])}
    unsolved = {number for number, cell in enumerate(cells) if cell["source"] != solutions.get(cell["id"])}
    parts = sorted(needed(cells, depending(cells, asking | unsolved)))
    with contextlib.chdir(path.parent):
        shown = run_cells([cells[number] for number in parts], {"output": str(tmp_path), "fidelity": "paced"})
    written = capsys.readouterr()
    assert "Traceback" not in written.out + written.err, "no value fails to be shown"
    requests = [cells[number]["id"] for number in asking]
    assert [name for name in requests if "Not answered yet." not in str(shown[name])] == []
