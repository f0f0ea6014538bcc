"""What the labs' cells tagged `deterministic` show at the smallest settings: schedules, formulas, simulated tables.

`python -m tests.labs.outputs LAB...` runs labs and writes labs/outputs.json, after a change that is meant.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from tests.labs.solutions import ROOT, run_cells, source_path

KEPT = ROOT / "labs" / "outputs.json"
OTHERS: dict[str, dict[str, Any]] = {
    "00": {"cluster_name": "pair", "model": "tiny-gpt2", "epochs": 1, "train_samples": 64}
}
"""Parameters other than the lab's own."""


def run(lab: str, folder: Path) -> dict[str, list[str]]:
    """Run a lab's source, which writes into a folder; return what its deterministic cells show: lines by the cell's
    id."""
    cells = json.loads(source_path(lab).read_text(encoding="utf-8"))["cells"]
    compared = {cell["id"] for cell in cells if "deterministic" in cell["metadata"].get("tags", ())}
    with contextlib.chdir(source_path(lab).parent):
        parameters = {"student": "anna", "output": str(folder), "fidelity": "paced"} | OTHERS.get(lab, {})
        shown = run_cells(cells, parameters)
    return {name: _lines(value) for name, value in shown.items() if name in compared}


def kept() -> dict[str, dict[str, list[str]]]:
    """Return what is expected of each lab."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def _lines(value: Any) -> list[str]:
    """Return a text's lines; of a figure its title, and each trace's points: how many, the ends and the sum of each
    axis."""
    if not isinstance(value, go.Figure):
        return [line.rstrip() for line in repr(value).splitlines()]
    lines = [value.layout.title.text]
    for trace in value.data:
        axes = [
            f"{axis} {_in_short(trace[axis])}"
            for axis in ("base", "x", "y")
            if axis in trace and trace[axis] is not None
        ]
        lines.append(", ".join([f"{trace.type} '{trace.name or ''}'", *axes]))
    return lines


def _in_short(values: Any) -> str:
    numbers = [float(value) for value in values if not isinstance(value, str) and value is not None]
    if len(numbers) < len(values) or not numbers:
        return f"{len(values)}"
    return f"{len(numbers)} from {numbers[0]:.4g} to {numbers[-1]:.4g}, {sum(numbers):.4g} in all"


def main(labs: list[str]) -> None:
    """Write what some labs show now."""
    os.environ |= {"WORKBENCH_TINY": "1", "WORKBENCH_DILATION": "1"}
    for lab in labs:
        with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
            known = kept() | {lab: run(lab, Path(folder))}
        KEPT.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
