"""The adviser's bench: its settings, what it executes, and what it sums up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
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


def point(number: int, predicted_s: float, measured_s: float | None, is_first: bool = False) -> dict[str, Any]:
    point = {"setting": number, "what": f"{predicted_s}", "predicted_s": predicted_s, "measured_s": measured_s}
    return point | {"is_first": is_first, "valid": measured_s is not None, "why_not": ""}


def test_what_did_not_run_is_no_part_of_the_figures() -> None:
    points = [point(0, 1.0, 1.1, True), point(0, 2.0, 1.8), point(0, 3.0, None)]
    result = bench.summed_up([*points, point(1, 1.0, 1.2, True), point(1, 1.1, 1.0), point(2, 1.0, 1.0)])
    assert [setting["first_over_best"] for setting in result["settings"]] == [1.0, 1.2]
    assert result["first_within_5_percent"] == 1 and result["worst_first_over_best"] == 1.2
    assert result["median_deviation"] == pytest.approx(0.1) and result["settings"][0]["executed"] == 2
    assert bench.summed_up([])["median_deviation"] is None


def test_an_interrupted_bench_goes_on_and_repeats_what_a_busy_host_spoilt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    path, ran = tmp_path / "advise.json", list[str]()
    choices = [SimpleNamespace(name=name) for name in ("a", "b", "c")]
    monkeypatch.setattr(bench, "advise", lambda job, cluster: SimpleNamespace(choices=choices))

    def execute(choice: Any, cluster: Any, number: int, is_first: bool, progress: Any) -> dict[str, Any]:
        if choice.name == "c" and len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(choice.name)
        valid = (choice.name, ran.count("b")) != ("b", 1)
        return point(number, 1.0, 1.0, is_first) | {"what": choice.name, "valid": valid}

    monkeypatch.setattr(bench, "_executed", execute)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(str, path=path)
    assert [combination["what"] for combination in json.loads(path.read_text())["combinations"]] == ["a", "b"]
    reference = bench.bench(str, path=path)
    assert ran == ["a", "b", "b", "c"] and all(combination["valid"] for combination in reference["combinations"])
    assert json.loads(path.read_text()) == json.loads(json.dumps(reference))
    assert bench.bench(str, path=path)["combinations"] == reference["combinations"] and len(ran) == 4
    messages: list[str] = []
    assert bench.bench(messages.append, minutes=1e-9, path=tmp_path / "other.json")["combinations"] == []
    assert "goes on" in messages[0]
