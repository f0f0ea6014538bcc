"""Each lab that students build says how long it takes, and what was measured is of labs that there are."""

from __future__ import annotations

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
    assert taken is None or 0 < taken.cells_s < 60 * work or taken.is_upper_bound


def test_what_was_measured_is_shown_beside_the_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "lab-minutes.json"
    monkeypatch.setattr(minutes, "measured_file", lambda: place)
    assert minutes.measured() == {}
    for load, shown in ((2.4, "1.5"), (7.0, "at most 1.5")):
        taken = minutes.Measured(cells_s=90.0, cores=2, load=load, date="2026-11-28", commit="0123456")
        minutes.keep("02", taken)
        assert minutes.measured() == {"02": taken}
        [row] = [row for row in progress.labs(ROOT / "notebooks").rows if row[0].startswith("02")]
        assert row[1:3] == ("90", shown)
