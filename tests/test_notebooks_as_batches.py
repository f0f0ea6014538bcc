"""Notebooks as papermill batches: another model, one epoch, and two devices with names of their own, to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.core.report import Report
from workbench.notebooks import run_notebook

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PAIR = """
name = "pair"
description = "Two unequal devices"
[defaults]
model = "laptop-core"
bandwidth_mbit_per_s = 500
latency_ms = 0.3
memory_mb = 900
[[device]]
name = "oak"
host_share = 0.6
[[device]]
name = "birch"
host_share = 0.3
"""
BRIEF: dict[str, dict[str, Any]] = {
    "00_quickstart": {"epochs": 1, "train_samples": 64},
    "02_pac_plus": {"epochs": 1},
    "05_galaxy_plus": {"stream_requests": 20},
}


@pytest.mark.parametrize("name", BRIEF)
def test_a_notebook_takes_another_model_and_other_devices(name: str, tmp_path: Path) -> None:
    cluster, output = tmp_path / "pair.toml", tmp_path / "output"
    cluster.write_text(PAIR)
    parameters = {"cluster_name": str(cluster), "model": "tiny-gpt2", "output": str(output)}
    run_notebook(NOTEBOOKS / f"{name}.ipynb", tmp_path / "done.ipynb", BRIEF[name] | parameters)
    [path] = output.rglob("report.json")
    report = Report.read(path)
    assert (report.job.model, [device.name for device in report.cluster.devices]) == ("tiny-gpt2", ["oak", "birch"])
    assert list(output.rglob("*.html"))
