from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from widget_reports import CLUSTER, PREDICTED

from tests.clock import Clock
from workbench.core.job import Job
from workbench.methods.base import DeviceState, Event
from workbench.runs.course import Course
from workbench.runs.progress import RunState, Snapshot
from workbench.widgets.live import parts_of
from workbench.widgets.run_panel import LiveProgress

TRAINING = (
    (0.2, Event("predicted", predicted=PREDICTED)),
    (0.5, Event("phase", message="Planning for 4 devices")),
    (1.0, Event("phase", message="Training on <4> devices")),
    (2.0, Event("device", 2, 0, 2, 5, message="", device=DeviceState("first epoch", 2.0, 1.0, 150_000_000))),
    (4.0, Event("step", epoch=0, step=0, num_steps=5, loss=0.7, samples=32)),
    (5.0, Event("step", epoch=0, step=1, num_steps=5, loss=0.6, samples=32)),
    (6.0, Event("step", epoch=0, step=2, num_steps=5, loss=0.5, samples=32)),
)


def snapshot_of(
    *events: tuple[float, Event], ended: bool = False, error: type[BaseException] | None = None
) -> Snapshot:
    clock = Clock()
    state = RunState(Job(epochs=2), CLUSTER, clock=clock)
    for seconds, event in events:
        clock.now_s = seconds
        state.update(event)
    if ended:
        state.finish(error)
    return state.snapshot()


def as_html(now: Snapshot) -> str:
    parts = parts_of(now, Course(), CLUSTER)
    return parts["head"] + parts["notes"]


def test_while_it_runs_phase_loss_rate_and_time_left_are_told() -> None:
    line = snapshot_of(*TRAINING).headline
    assert line.startswith("Training on <4> devices (6 s), loss 0.")
    assert "32 samples/s" in line and line.endswith(
        "7 s left"
    )  # two steps here and five in the next epoch, a second each


def test_bars_show_every_epoch() -> None:
    now = snapshot_of(*TRAINING)
    text = str(now)
    assert "epoch 1                  [##############..........] 3 of 5 steps, 4.0 s, mean loss 0.600" in text
    assert "epoch 2 (from the cache) [........................]" in text
    assert "Training on &lt;4&gt; devices" in as_html(now)
    assert all(f'aria-valuenow="{value}"' in as_html(now) for value in (60, 0))


def test_epochs_of_a_method_without_a_cache_are_not_from_the_cache() -> None:
    records = tuple(replace(record, cached=False) for record in PREDICTED)
    assert "cache" not in str(snapshot_of((0.1, Event("predicted", predicted=records)), *TRAINING[1:]))


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "finished"), (KeyboardInterrupt, "stopped"), (ValueError, "failed")]
)
def test_the_end_says_how_and_shows_what_was_trained(error, outcome: str) -> None:
    now = snapshot_of(*TRAINING, ended=True, error=error)
    assert now.outcome == outcome and now.headline.startswith(outcome.capitalize()) and "6 s" in now.headline
    assert "epoch 1" in str(now) and "epoch 2" not in str(now)
    assert "Planning for 4 devices 0.5 s" in as_html(now) and "step 3 of 5" not in as_html(now)


def test_a_simulation_has_no_empty_bars_in_the_end_but_its_notes() -> None:
    now = snapshot_of(
        (0.5, Event("phase", message="Planning")), (0.6, Event("note", message="Profile measured now.")), ended=True
    )
    assert str(now) == "Finished in 1 s\nProfile measured now."
    assert "progressbar" not in as_html(now) and "Profile measured now." in as_html(now)


def test_a_stop_ends_the_run_at_its_next_event_and_is_shown() -> None:
    stop = threading.Event()
    live = LiveProgress(Job(), CLUSTER, stop=stop)
    with pytest.raises(KeyboardInterrupt), live:
        live.update(Event("phase", message="Loading"))
        stop.set()
        live.update(Event("phase", message="Training"))
    assert live._repr_mimebundle_()["text/plain"].startswith("Stopped")


def test_a_failure_is_shown_and_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    watched: list[bool] = []
    with pytest.raises(ValueError, match="broken"), LiveProgress(Job(), CLUSTER) as live:
        live.update(Event("phase", message="Training"))
        live.update(Event("watch", watch=lambda: watched.append(True)))
        raise ValueError("broken")
    assert capsys.readouterr().out == "Training\nFailed after 0 s: Training\n"  # here is no notebook
    assert watched == [True]
    assert "Failed after" in live._repr_mimebundle_()["text/html"]
    assert all(thread.name != "workbench-progress" for thread in threading.enumerate())
