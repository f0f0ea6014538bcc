"""A notebook as a papermill batch: another model, one epoch, and two devices with names of their own, to the end."""

from __future__ import annotations

from pathlib import Path

from workbench.core.report import Report
from workbench.runs.notebooks import run_notebook

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def test_a_notebook_takes_another_model_and_other_devices(tmp_path: Path) -> None:
    parameters = {
        "cluster_name": "pair",
        "model": "tiny-gpt2",
        "epochs": 1,
        "train_samples": 64,
        "output": str(tmp_path / "output"),
    }
    run_notebook(NOTEBOOKS / "00_quickstart.ipynb", tmp_path / "done.ipynb", parameters)
    [path] = (tmp_path / "output").rglob("report.json")
    report = Report.read(path)
    assert (report.job.model, report.job.epochs, [device.name for device in report.cluster.devices]) == (
        "tiny-gpt2",
        1,
        ["oak", "birch"],
    )
    assert list((tmp_path / "output").rglob("*.html"))
