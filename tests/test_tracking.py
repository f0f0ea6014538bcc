"""What a tracker shows of a run is what its events and its report say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import made_up_report
import pytest

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.methods.base import DeviceState, Event
from workbench.runs import tracking
from workbench.runs.tracking import PROJECT, Tracking

Values = dict[str, list[tuple[int, float]]]


def from_tensorboard() -> tuple[Values, dict[str, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (tracking.cache_folder() / "tensorboard").iterdir()
    read = EventAccumulator(str(folder))
    read.Reload()
    values = {name: [(scalar.step, scalar.value) for scalar in read.Scalars(name)] for name in read.Tags()["scalars"]}
    texts = {name: read.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in read.Tags()["tensors"]}
    return values, {name.removesuffix("/text_summary"): text for name, text in texts.items()}


def from_trackio() -> tuple[Values, dict[str, str]]:
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs(PROJECT)
    values: Values = {}
    texts = {}
    for record in SQLiteStorage.get_logs(PROJECT, name):
        for key, value in record.items():
            if isinstance(value, dict):
                texts[key] = value["_value"]
            elif key not in ("step", "timestamp"):
                values.setdefault(key, []).append((record["step"], value))
    return values, texts


def run_with(tracker: str, report: Report) -> Tracking:
    """Send the events of a run of three epochs with two steps each, and its report."""
    with Tracking(tracker, Job(), report.cluster) as sent:  # type: ignore[arg-type]
        sent.update(Event("note", message="not a number"))
        sent.update(Event("predicted", predicted=report.steps))
        for record in report.steps:
            state = DeviceState("epoch", step_s=2.0, busy_s=1.5, used_bytes=1000 * (record.epoch + 1), metered_j=None)
            sent.update(Event("device", 1, record.epoch, record.step, 2, device=state))
            sent.update(Event("step", 1, record.epoch, record.step, 2, record.loss))
        sent.update(Event("scores", epoch=1, metrics={"accuracy": 0.75}))
        sent.finish(report)
    return sent


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "cache_folder", lambda: tmp_path)


@pytest.mark.parametrize(("tracker", "read"), [("tensorboard", from_tensorboard), ("trackio", from_trackio)])
def test_a_tracker_gets_predicted_and_measured_numbers(
    tracker: str, read: Callable[[], tuple[Values, dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tracker == "trackio":
        folders = pytest.importorskip("trackio.utils"), pytest.importorskip("trackio.sqlite_storage")
        for module in folders:
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    else:
        pytest.importorskip("tensorboard")
    report = made_up_report.report(valid=False)
    sent = run_with(tracker, report)
    values, texts = read()
    steps = range(1, 7)
    assert sorted(values["loss"]) == [
        (n, pytest.approx(step.loss)) for n, step in zip(steps, report.steps, strict=True)
    ]
    for kind in ("predicted", "measured"):
        expected = [(n, pytest.approx(getattr(step, f"{kind}_s"))) for n, step in zip(steps, report.steps, strict=True)]
        assert sorted(values[f"step_s/{kind}"]) == expected
        assert values[f"peak_memory_bytes/{kind}/slow"] == [(6, 90_000_000)]
    assert [value for _, value in sorted(values["memory_bytes/slow"])] == [1000, 1000, 2000, 2000, 3000, 3000]
    assert values["validation/accuracy"] == [(4, 0.75)] and values["busy_share/slow"][0] == (1, 0.75)
    assert values["test/accuracy"] == [(6, pytest.approx(0.8))]
    assert not [name for name in values if name.startswith("metered_j")]  # no meter, no number
    assert "emulated, kernel links, host too busy" in texts["numbers"] and "(!)" in texts["numbers"]
    assert sent.shown.startswith(tracker)


def test_without_a_tracker_nothing_is_written(tmp_path: Path) -> None:
    assert run_with("none", made_up_report.report()).shown == "" and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("tracker", "words"),
    [("wandb", "It is unknown."), ("trackio", r"not installed\. Install it: pip install '.*\[trackers\]'")],
)
def test_a_tracker_that_cannot_be_used_is_refused_before_the_run(
    tracker: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"The tracker '{tracker}' was asked for\. .*{words}"):
        Tracking(tracker, Job(), made_up_report.cluster())  # type: ignore[arg-type]
