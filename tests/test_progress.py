from __future__ import annotations

import pytest

from tests.clock import Clock
from tests.clusters import cluster_of
from workbench.core.job import Job
from workbench.core.report import StepRecord
from workbench.methods.base import SCORED, DeviceState, Event, counting
from workbench.runs.progress import RunState


def step(epoch: int, number: int, loss: float = 0.5, samples: int = 32, num_steps: int = 4) -> Event:
    return Event("step", 1, epoch, number, num_steps, loss, samples=samples)


def predicted(seconds: float, cached_s: float, epochs: int = 3, num_steps: int = 4) -> Event:
    records = tuple(
        StepRecord(epoch=epoch, step=number, samples=32, cached=epoch > 0, predicted_s=cached_s if epoch else seconds)
        for epoch in range(epochs)
        for number in range(num_steps)
    )
    return Event("predicted", predicted=records)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def state(clock: Clock) -> RunState:
    return RunState(Job(epochs=3), cluster_of(("fast", "slow"), memory_bytes=100_000_000, bytes_per_s=1e6), clock=clock)


def test_before_anything_all_is_unknown(state: RunState) -> None:
    now = state.snapshot()
    assert (now.phase, now.outcome) == ("Starting", "")
    assert now.smoothed_loss is now.samples_per_s is now.remaining_s is None
    assert [row.name for row in now.devices] == ["fast", "slow"]
    assert [row.epoch for row in now.epochs] == [0, 1, 2]


def test_a_phase_after_the_steps_has_its_own_bar_and_no_rate(state: RunState, clock: Clock) -> None:
    state.update(predicted(1.0, 0.5))
    for epoch in range(3):
        for number in range(4):
            clock.now_s += 1
            state.update(step(epoch, number))
    now = state.snapshot()
    assert now.samples_per_s is not None and now.remaining_s is None and "left" not in now.headline
    state.update(Event("phase", message="Scoring every epoch", stage="evaluate"))
    text = counting(state.update, SCORED, before=1, rounds=3)
    text(50, 100)
    now = state.snapshot()
    assert now.samples_per_s is now.remaining_s is None and "samples/s" not in now.headline
    [*_, bar] = now.bars
    assert (bar.name, bar.share, bar.words) == (SCORED, 0.5, "150 of 300")
    assert "150 of 300" in str(now)
    state.finish()
    assert len(state.snapshot().bars) == 3


def test_a_sweep_counts_plans_and_has_no_epochs(state: RunState) -> None:
    state.update(Event("phase", message="Measuring 6 plans", stage="sweep"))
    state.update(Event("count", message="plans; now '[3, 3]'", step=1, num_steps=6))
    [bar] = state.snapshot().bars
    assert (bar.name, bar.words) == ("plans; now '[3, 3]'", "1 of 6")


def test_phases_notes_and_how_it_ended(state: RunState, clock: Clock) -> None:
    state.update(Event("phase", message="Planning"))
    clock.now_s += 2
    state.update(Event("phase", message="Training"))
    state.update(Event("note", message="Profile measured 3 days ago"))
    state.update(Event("something new", message="passed over"))
    clock.now_s += 3
    state.finish(KeyboardInterrupt)
    clock.now_s += 50
    now = state.snapshot()
    assert now.phases == (("Planning", 0.0), ("Training", 2.0))
    assert now.notes == ("Profile measured 3 days ago",)
    assert (now.phase, now.elapsed_s, now.outcome) == ("Training", 5.0, "stopped")


def test_a_devices_row_follows_its_events(state: RunState) -> None:
    state.update(Event("device", 1, message="loading", device=DeviceState("loading", used_bytes=10_000_000)))
    row = state.snapshot().devices[1]
    assert (row.doing, row.used_bytes, row.budget_bytes, row.busy_share) == ("loading", 10_000_000, 100_000_000, None)
    state.update(
        Event("device", 1, 0, 2, 4, device=DeviceState("first epoch", step_s=2.0, busy_s=0.5, used_bytes=40_000_000))
    )
    row = state.snapshot().devices[1]
    assert (row.doing, row.busy_share, row.used_bytes) == ("first epoch, step 3 of 4", 0.25, 40_000_000)
    state.update(Event("device", 1, 0, device=DeviceState("waiting for the others")))
    row = state.snapshot().devices[1]
    assert (row.doing, row.busy_share, row.used_bytes) == ("waiting for the others", 0.25, 40_000_000)
    assert state.snapshot().devices[0].phase == ""
    state.update(Event("device", 7, message="no such device"))


def test_a_message_is_enough_for_a_device(state: RunState) -> None:
    state.update(Event("device", 0, message="1F0"))
    assert state.snapshot().devices[0].doing == "1F0"


def test_loss_is_smoothed(state: RunState) -> None:
    state.update(step(0, 0, loss=1.0))
    assert state.snapshot().smoothed_loss == pytest.approx(1.0)  # not drawn towards 0 at the beginning
    state.update(step(0, 1, loss=0.0))
    now = state.snapshot()
    assert now.smoothed_loss == pytest.approx(0.09 / 0.19)
    assert now.epochs[0].loss == pytest.approx(0.5)


def test_samples_per_second_leave_out_the_wait_for_the_first_step(state: RunState, clock: Clock) -> None:
    clock.now_s += 60
    state.update(step(0, 0))
    assert state.snapshot().samples_per_s is None
    for number in (1, 2):
        clock.now_s += 2
        state.update(step(0, number, samples=32 if number == 1 else 8))
    assert state.snapshot().samples_per_s == pytest.approx(40 / 4)


def test_an_epoch_counts_from_its_first_devices_begin(state: RunState, clock: Clock) -> None:
    clock.now_s += 10
    state.update(Event("device", 0, 0, device=DeviceState("first epoch")))
    clock.now_s += 1
    state.update(Event("device", 1, 0, device=DeviceState("first epoch")))
    for number in range(4):
        clock.now_s += 1
        state.update(step(0, number))
    row = state.snapshot().epochs[0]
    assert (row.done, row.num_steps, row.seconds, row.is_finished) == (4, 4, 5.0, True)
    assert not state.snapshot().epochs[1].is_finished


def test_time_left_is_the_prediction_corrected_by_what_was_measured(state: RunState, clock: Clock) -> None:
    state.update(predicted(1.0, 0.1))
    assert state.snapshot().remaining_s is None
    assert [row.num_steps for row in state.snapshot().epochs] == [4, 4, 4]
    state.update(step(0, 0))
    assert state.snapshot().remaining_s == pytest.approx(3 + 0.8)  # nothing measured yet
    clock.now_s += 2
    state.update(step(0, 1))
    assert state.snapshot().remaining_s == pytest.approx(2 * (2 + 0.8))  # twice as slow as predicted
    clock.now_s += 4
    for number in (2, 3):
        state.update(step(0, number))
    state.update(step(1, 0))
    clock.now_s += 0.3
    state.update(step(1, 1))
    assert state.snapshot().remaining_s == pytest.approx(3 * 0.6)  # cached steps have a ratio of their own
    state.finish()
    assert state.snapshot().remaining_s is None


def test_a_resumed_run_counts_only_what_is_left(state: RunState, clock: Clock) -> None:
    state.update(predicted(1.0, 0.1))
    state.update(step(2, 0))
    assert state.snapshot().remaining_s == pytest.approx(0.3)


def test_an_epoch_beyond_the_jobs_is_shown(state: RunState) -> None:
    state.update(step(4, 0))
    assert len(state.snapshot().epochs) == 5
