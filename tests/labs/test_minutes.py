"""Each lab that students build says how long it takes, and what was measured is of labs that there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench_labs import progress
from workbench_labs.course import minutes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("source", sorted((ROOT / "labs").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_lab_to_build_states_its_minutes(source: Path) -> None:
    work = minutes.minutes_of_work(source)
    assert work is not None and 5 <= work <= 180
    taken = minutes.measured().get(source.stem[:2])
    assert taken is None or 0 < taken.cells_s < 60 * work


def test_what_was_measured_is_shown_beside_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "lab-minutes.json"
    monkeypatch.setattr(minutes, "measured_file", lambda: place)
    assert minutes.measured() == {}
    place.write_text(json.dumps({"02": {"cells_s": 90.0, "cores": 2}}))
    [row] = [row for row in progress.labs(ROOT / "notebooks").rows if row[0].startswith("02")]
    assert row[1:3] == ("90", "1.5")
