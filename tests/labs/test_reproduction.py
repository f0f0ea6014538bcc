"""One table of a paper as cells: what the command prints is what a student's function gets."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from workbench.cli.app import add_commands
from workbench.core.errors import ConfigError
from workbench_labs import reproduction
from workbench_labs.course.verdict import usable
from workbench_labs.exercises import clinic
from workbench_labs.reproduction import reproduced


def test_a_students_deviation_equals_the_commands_and_fitted_cells_do_not_count() -> None:
    pytest.importorskip("workbench_studies")
    actual = reproduction.reproduced("p_rge", "table3")
    own = usable(clinic.EXERCISES, "deviation", lambda cells: [0.0, 0.0])  # wrong: the judge's own stands in
    offs = [cell["deviation"] for cell in actual.part("comparisons")]
    for cell, off in zip(actual.cells, offs, strict=True):
        result = own([["predicted", *cell[1:]]])
        assert (result is None) == (off is None) and (off is None or result[0] == pytest.approx(abs(off)))
    assert {row[0] for row in actual.judged(own).rows} == {cell[0] for cell in actual.cells} >= {"fitted", "predicted"}
    assert isinstance(actual.median(own), float) and "All 72 cells" in str(actual.table())
    assert actual.claims().rows[0][1] == "finding" and "fitted" in str(actual.words().data)
    with pytest.raises(ConfigError, match="--list"):
        reproduction.reproduced("p_rge", "table99")


def test_without_the_studies_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Return what the command says where no entry points of the studies are found."""
        monkeypatch.setattr("workbench.cli.app.entry_points", lambda **_: [])
        bare = typer.Typer()
        add_commands(bare)
        done = CliRunner().invoke(bare, command[3:])
        return subprocess.CompletedProcess(command, done.exit_code, stdout=str(done.exception), stderr="")

    monkeypatch.setattr(reproduction.subprocess, "run", run)
    result = reproduced("p_rge", "table3")
    own = usable(clinic.EXERCISES, "deviation", lambda cells: None)
    shown = [result.kinds(), result.table(), result.judged(own), result.claims(), result.words().data]
    assert all("not installed" in str(one) for one in shown) and "unknown" in str(result.median(own))
