from __future__ import annotations

import asyncio
import json
from pathlib import Path

import nbformat
import pytest
from made_up_report import report
from nbformat import v4

from workbench.cli import quickstart
from workbench.runs.notebooks import run_notebook


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    """A notebook of one cell in a project folder of its own; call it with the cell's source."""

    def write(source: str) -> None:
        path = tmp_path / "notebooks" / "00_quickstart.ipynb"
        path.parent.mkdir()
        cell = v4.new_code_cell(source, metadata={"tags": ["parameters"]})
        nbformat.write(
            v4.new_notebook(cells=[cell], metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}),
            path,
        )
        monkeypatch.setattr(quickstart, "ROOT", tmp_path)
        monkeypatch.setattr(quickstart, "NOTEBOOK", path)
        monkeypatch.setattr(quickstart, "FOLDER", tmp_path / "figures")
        monkeypatch.setattr(quickstart, "REPORT", tmp_path / "figures" / "report.json")

    return write


def test_runs_the_notebook_and_sums_up_its_report(notebook, tmp_path, capsys) -> None:
    result = report().write(tmp_path / "made.json")
    notebook(f"import shutil; shutil.copy({str(result)!r}, '../figures/report.json')")
    assert quickstart.main() == 0
    text = capsys.readouterr().out
    assert "fast (0.5 of a core), slow (0.25 of a core)" in text
    assert "accuracy 0.800" in text
    assert str(tmp_path / "figures" / "index.html") in text
    assert (tmp_path / "figures" / "00_quickstart.ipynb").is_file()


def test_the_kernel_opens_no_port_and_nothing_is_said_of_it(notebook, tmp_path, capfd, caplog) -> None:
    """It talks over Unix sockets in a folder that only we can open, and that is gone afterwards."""
    result, seen = report().write(tmp_path / "made.json"), tmp_path / "seen.json"
    notebook(
        "import json, os, pathlib, shutil, ipykernel.connect as connect\n"
        f"shutil.copy({str(result)!r}, '../figures/report.json')\n"
        "path = pathlib.Path(connect.get_connection_file())\n"
        f"pathlib.Path({str(seen)!r}).write_text(json.dumps([json.loads(path.read_text()), "
        "oct(path.parent.stat().st_mode)[-3:]]))"
    )
    assert quickstart.main() == 0
    connection, mode = json.loads(seen.read_text())
    assert connection["transport"] == "ipc" and mode == "700"
    assert not Path(connection["ip"]).parent.exists()
    assert capfd.readouterr().err == "" and [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_last_words_of_a_kernel_are_shown_if_its_notebook_fails(monkeypatch, capsys) -> None:
    def execute_notebook(*_, kernel_manager_class, **settings) -> None:
        class Broken(kernel_manager_class):
            def format_kernel_cmd(self, extra_arguments=None) -> list[str]:
                return ["sh", "-c", "echo the kernel broke >&2"]

        async def start() -> None:
            manager = Broken(kernel_name="python3")
            await manager.start_kernel()
            await manager.provisioner.wait()
            await manager.cleanup_resources()

        asyncio.run(start())
        raise RuntimeError("The kernel died.")

    monkeypatch.setattr("papermill.execute_notebook", execute_notebook)
    with pytest.raises(RuntimeError, match="The kernel died"):
        run_notebook(Path("a.ipynb"), Path("b.ipynb"))
    assert capsys.readouterr().err == "the kernel broke\n"


def test_failing_cell_is_named_and_an_old_report_does_not_pass_for_this_run(notebook, tmp_path, capsys) -> None:
    notebook("raise RuntimeError('too hot')")
    report().write(tmp_path / "figures" / "report.json")
    assert quickstart.main() == 1
    captured = capsys.readouterr()
    assert "Cell 1 of 00_quickstart.ipynb failed: RuntimeError: too hot" in captured.err
    assert "Quickstart," not in captured.out
    assert not (tmp_path / "figures" / "report.json").exists()


def test_notebook_that_leaves_no_report_is_an_error(notebook, capsys) -> None:
    notebook("1 + 1")
    assert quickstart.main() == 1
    assert "report.json" in capsys.readouterr().err
