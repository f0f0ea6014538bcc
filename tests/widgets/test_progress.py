from __future__ import annotations

import threading

import pytest
from widget_reports import CLUSTER

from workbench.core.job import Job
from workbench.methods.base import Event
from workbench.widgets.live import LiveProgress
from workbench.widgets.progress import RunProgress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_of(*events: tuple[float, Event], epochs: int = 2) -> tuple[RunProgress, Clock]:
    clock = Clock()
    state = RunProgress(job=Job(epochs=epochs), cluster=CLUSTER, clock=clock)
    for seconds, event in events:
        clock.now = seconds
        state.update(event)
    return state, clock


TRAINING = (
    (1.0, Event("phase", message="Training on 4 devices")),
    (4.0, Event("step", epoch=0, step=0, num_steps=5, loss=0.7)),
    (5.0, Event("step", epoch=0, step=1, num_steps=5, loss=0.6)),
    (6.0, Event("step", epoch=0, step=2, num_steps=5, loss=0.5)),
)


def test_an_epoch_shows_steps_loss_rate_and_time_left() -> None:
    state, _ = run_of(*TRAINING)
    # Two steps of 32 samples in 2 s after the first, two steps are left.
    assert state.rows() == [
        ("epoch 1", 0.6, "3 of 5 steps, loss 0.500, 32 samples/s, 2 s left"),
        ("epoch 2 (from the cache)", 0.0, ""),
    ]
    assert state.head() == "Training on 4 devices (6 s)"


def test_steps_that_arrive_out_of_order_do_not_go_back() -> None:
    state, _ = run_of(*TRAINING, (7.0, Event("step", epoch=0, step=1, num_steps=5, loss=0.6)))
    assert state.epochs[0].done == 3


def test_text_and_html_show_the_bars_and_each_device() -> None:
    state, _ = run_of(*TRAINING, (6.5, Event("device", rank=2, message="waits for <beta>")))
    assert "[##############..........] 3 of 5 steps" in state.text()
    assert "aria-valuenow='60'" in state.html() and "gamma" in state.html() and "waits for &lt;beta&gt;" in state.html()


@pytest.mark.parametrize("outcome", ["finished", "stopped", "failed"])
def test_the_clock_stops_with_the_run(outcome: str) -> None:
    state, clock = run_of(*TRAINING)
    clock.now = 10.0
    state.finish(outcome)
    clock.now = 99.0
    assert state.elapsed_s == 10.0
    assert state.head().startswith(outcome.capitalize()) and "10 s" in state.head()
    assert "left" not in state.text()


def test_a_stop_ends_the_run_at_its_next_event_and_is_shown() -> None:
    stop = threading.Event()
    live = LiveProgress(Job(), CLUSTER, stop=stop)
    with pytest.raises(KeyboardInterrupt), live:
        live.update(Event("phase", message="Loading"))
        stop.set()
        live.update(Event("phase", message="Training"))
    assert live.state.outcome == "stopped"
    assert live._repr_mimebundle_()["text/plain"].startswith("Stopped")


def test_a_failure_is_shown_and_passed_on() -> None:
    with pytest.raises(ValueError, match="broken"), LiveProgress(Job(), CLUSTER) as live:
        raise ValueError("broken")
    assert live.state.outcome == "failed"
    assert threading.active_count() == 1 or all(thread.name != "workbench-progress" for thread in threading.enumerate())


def test_a_simulation_has_no_empty_bars_in_the_end() -> None:
    state, _ = run_of((0.5, Event("phase", message="Planning")))
    state.finish("finished")
    assert state.text() == f"Finished in {state.elapsed_s:.0f} s" and "progressbar" not in state.html()
