"""The adviser's bench: its settings, what it executes, and what it sums up."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.runs.advice import advise
from workbench_studies.bench import advise as bench


def test_settings_differ_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_TINY", raising=False)
    drawn = [bench.setting(number) for number in range(20)]
    assert drawn == [bench.setting(number) for number in range(20)]
    assert {cluster.world_size for _, cluster in drawn} == {2, 3, 4, 5, 6}
    assert len({str(cluster.devices) for _, cluster in drawn}) == 20
    assert all((job.train_samples or 0) == bench.STEPS * job.batch_size for job, _ in drawn)


def test_the_first_and_some_of_the_rest_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    job, cluster = bench.setting(0)
    choices = advise(job, cluster, computed=True, keeps_data=True).choices
    taken = bench.chosen(choices, 0)
    assert taken[:2] == list(choices[:2]) and len(taken) == len({one.name for one in taken}) == min(3, len(choices))


def test_what_did_not_run_is_no_part_of_the_figures() -> None:
    def point(predicted_s: float, measured_s: float | None) -> dict[str, Any]:
        return {"predicted_s": predicted_s, "measured_s": measured_s}

    found = bench.summed_up(
        [{"first_over_best": 1.0}, {"first_over_best": 1.2}], [point(1.0, 1.1), point(2.0, 1.8), point(1.0, None)]
    )
    assert found["first_within_5_percent"] == 1 and found["worst_first_over_best"] == 1.2
    assert found["median_deviation"] == pytest.approx(0.1) and found["settings_executed"] == 2
    assert bench.summed_up([], [])["median_deviation"] is None
