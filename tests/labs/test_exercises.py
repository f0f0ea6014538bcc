from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from widget_reports import CLUSTER

from workbench_labs import progress
from workbench_labs.course.verdict import Verdict
from workbench_labs.planning import with_bandwidth, with_memory


def test_right_answers_are_counted_by_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever below the figures' folder a lab keeps them; another student's older file, or a file of something else,
    counts for nothing.
    """
    monkeypatch.setattr(progress, "output_folder", lambda name: tmp_path / name)
    notebooks = Path(__file__).parents[2] / "notebooks"
    assert progress.built(notebooks, "00") == set()
    kept = tmp_path / "quickstart" / "00-anna.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"answers": {"waits": {"passed": True}, "training": {"passed": False}}}))
    (kept.parent / "00-broken.json").write_text("{broken")
    older = kept.parent / "00-bert.json"
    older.write_text(json.dumps({"answers": {"training": {"passed": True}}}))
    os.utime(older, (1, 1))
    assert progress.built(notebooks, "00") == {"waits"}
    [row] = [row for row in progress.labs(notebooks).rows if row[0] == "00_quickstart"]
    assert "1 of 2" in row


def test_a_verdict_reads_well_with_and_without_html() -> None:
    assert str(Verdict(False, "Try <again>.")) == "Not yet. Try <again>."
    assert "Try &lt;again&gt;." in Verdict(False, "Try <again>.")._repr_html_()


def test_variations_change_every_device() -> None:
    slow = with_bandwidth(CLUSTER, 20)
    assert {device.link.bytes_per_s for device in slow.devices} == {2.5e6} and slow.link(0, 3).bytes_per_s == 2.5e6
    assert {device.memory_bytes for device in with_memory(CLUSTER, 5).devices} == {5}
