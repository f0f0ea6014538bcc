"""The notebooks as students first open them: nothing is answered, and every cell runs all the same."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.labs.solutions import ROOT, run_cells

ELSEWHERE = {"index", "00_quickstart"}
"""What a browser runs whole; and the quickstart runs from a wheel, too (tests/test_packaging.py)."""
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").glob("*.ipynb") if path.stem not in ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_students_get_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is not this Python's
    with contextlib.chdir(path.parent):
        shown = run_cells(path, {"output": str(tmp_path), "fidelity": "paced"})
    written = capsys.readouterr()
    assert "Traceback" not in written.out + written.err, "no value fails to be shown"
    cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    asked = [name for name, source in cells.items() if "lab.exercise(" in source]
    assert [name for name in asked if "Not answered yet." not in str(shown[name])] == []
