from __future__ import annotations

import time

import pytest

from workbench.core.errors import ConfigError
from workbench.core.heat import Heat, Level
from workbench.core.timeline import late_share_of
from workbench.runtime.pacing import Pacer


class FakeTime:
    """A clock that only moves when told to; sleeps overshoot by `overshoot_s`."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.overshoot_s = overshoot_s

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + self.overshoot_s

    def work(self, seconds: float) -> str:
        self.now_s += seconds
        return "done"


def pacer(factor: float, fake: FakeTime, dilation: float = 1.0) -> Pacer:
    return Pacer(factor, dilation=dilation, clock=fake.clock, sleep=fake.sleep)


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.7, 8.0])
def test_operation_takes_its_cost_times_the_factor(factor: float) -> None:
    fake = FakeTime()
    paced = pacer(factor, fake).run(lambda: fake.work(0.01), 0.01)
    assert paced.result == "done"
    assert paced.end_s - paced.start_s == pytest.approx(0.01 * factor)
    assert paced.late_s == 0


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_a_slowed_device_becomes_as_fast_again_as_it_was(own: float) -> None:
    """A real one, with factor 0, runs as fast as it can; an emulated one as fast as its program says."""
    fake, seconds = FakeTime(), list[float]()
    device = pacer(own, fake).for_stream()
    for factor in (1.0, 3.0, 1.0):
        device.slow_down(factor)
        paced = device.run(lambda: fake.work(0.01), 0.02)
        seconds.append(paced.end_s - paced.start_s)
    healthy = 0.02 if own else 0.01
    assert seconds == pytest.approx([healthy, 0.06, healthy])


HOT = (Level(heat_s=0.0, speed=1.0), Level(heat_s=0.95, speed=0.8), Level(heat_s=2.9, speed=0.5))


@pytest.mark.parametrize("dilation", [1.0, 4.0])
def test_a_hot_device_is_slower_and_cools_while_it_waits(dilation: float) -> None:
    """The device's own seconds count, not the dilated ones."""
    fake = FakeTime()
    device = Pacer(1.0, dilation=dilation, heat=Heat(HOT), clock=fake.clock, sleep=fake.sleep)

    def taken_s() -> float:
        paced = device.run(lambda: fake.work(0.001), 0.1)
        return (paced.end_s - paced.start_s) / dilation

    seconds = [taken_s() for _ in range(40)]
    assert seconds == pytest.approx([0.1] * 10 + [0.125] * 16 + [0.2] * 14)
    fake.now_s += 4.5 * dilation
    assert [taken_s() for _ in range(4)] == pytest.approx([0.125, 0.125, 0.125, 0.125])


def test_streams_of_a_device_share_its_heat() -> None:
    fake = FakeTime()
    device = Pacer(1.0, heat=Heat(HOT), clock=fake.clock, sleep=fake.sleep)
    stream = device.for_stream()
    for _ in range(11):
        device.run(lambda: None, 0.1)
    paced = stream.run(lambda: None, 0.1)
    assert paced.end_s - paced.start_s == pytest.approx(0.125)


def test_short_operations_of_a_host_that_lags_heat_as_much() -> None:
    fake, heat = FakeTime(), Heat(HOT)
    device = Pacer(1.0, heat=heat, clock=fake.clock, sleep=fake.sleep)
    for _ in range(100):
        device.run(lambda: fake.work(0.0002), 1e-5)  # the next operation makes up for it
        device.run(lambda: fake.work(0.0002), 0.005)
    assert heat.heat_s == pytest.approx(100 * 0.00501, rel=0.01)


def test_overshoot_of_sleeps_does_not_add_up() -> None:
    fake = FakeTime(overshoot_s=0.001)
    device = pacer(2.0, fake)
    start_s = fake.now_s
    for _ in range(1000):
        device.run(lambda: fake.work(0.002), 0.005)
    assert fake.now_s - start_s == pytest.approx(1000 * 0.01 + 0.001)
    assert device.overrun_share == 0


def test_what_the_next_operations_cannot_make_up_for_is_late() -> None:
    fake = FakeTime()
    device = pacer(2.0, fake)
    paced = device.run(lambda: fake.work(0.03), 0.01)
    assert paced.late_s == pytest.approx(0.006)  # of 10 ms, 4 are made up for
    device.run(lambda: fake.work(0.01), 0.01)
    assert fake.now_s == pytest.approx(100.0 + 0.03 + 0.016)
    assert device.late_s == pytest.approx(0.006)
    assert device.overrun_share == pytest.approx(0.006 / (0.026 + 0.02))


def test_the_pace_of_a_phase_counts_from_the_one_before() -> None:
    """Also after a reset, which ends a warm-up."""
    fake = FakeTime()
    device = pacer(1.0, fake)
    first, second = device, device.for_stream()
    first.run(lambda: fake.work(0.03), 0.01)
    second.run(lambda: None, 0.02)
    assert device.lap() == pytest.approx((0.016, 0.046))
    assert device.lap() == (0.0, 0.0)
    first.wait(0.05, lambda: 0.02)
    assert device.lap() == pytest.approx((0.02, 0.05))
    device.reset()
    first.run(lambda: None, 0.01)
    assert device.lap() == pytest.approx((0.0, 0.01))


def test_short_operations_that_cost_the_host_more_are_made_up_for() -> None:
    fake = FakeTime()
    device = pacer(1.0, fake)
    for _ in range(100):
        device.run(lambda: fake.work(0.002), 0.0001)
        device.run(lambda: fake.work(0.004), 0.01)
    assert fake.now_s - 100.0 == pytest.approx(100 * 0.0101)
    assert device.overrun_share == 0


def test_a_host_that_is_always_a_little_too_slow_is_late() -> None:
    fake = FakeTime()
    device = pacer(1.0, fake)
    for _ in range(100):
        device.run(lambda: fake.work(0.011), 0.01)
    assert device.late_s == pytest.approx(100 * 0.001 - 0.004)


def test_what_all_devices_are_late_counts_by_the_time_of_the_longest() -> None:
    assert late_share_of([(0.02, 1.0), (0.06, 0.5), (0.0, 1.2)]) == pytest.approx(0.08 / 1.2)
    assert late_share_of([]) == late_share_of([(0.0, 0.0)]) == 0


def test_how_late_a_message_was_may_become_known_after_the_wait_for_it() -> None:
    late_s = [0.02]
    device = pacer(1.0, FakeTime())
    device.wait(0.06, lambda: late_s[0])
    assert device.late_s == 0.02
    late_s[0] = 0.01
    assert device.late_s == 0.01
    for _ in range(1000):
        device.wait(0.001, lambda: 0.001)
    late_s[0] = 0.0  # too late
    assert (device.late_s, device.paced_s) == pytest.approx((1.01, 1.06))


@pytest.mark.parametrize("stream", [False, True])
def test_a_wait_is_late_by_no_more_than_itself(stream: bool) -> None:
    fake = FakeTime()
    reference = pacer(1.0, fake)
    device = reference.for_stream() if stream else reference
    device.run(lambda: fake.work(0.01), 0.1)
    device.wait(0.02, lambda: 0.0)
    assert (reference.late_s, reference.paced_s, reference.overrun_share) == (0.0, pytest.approx(0.12), 0.0)
    device.wait(0.06, lambda: 0.015)
    device.wait(0.02, lambda: 0.9)  # of several threads, one after the other
    assert (reference.late_s, reference.paced_s) == pytest.approx((0.015 + 0.02, 0.2))
    assert reference.overrun_share == pytest.approx(0.035 / 0.2)
    reference.reset()
    assert (reference.late_s, reference.paced_s) == (0.0, 0.0)


@pytest.mark.parametrize("stream", [False, True])
def test_dilation_slows_every_operation_down_and_gives_the_host_time(stream: bool) -> None:
    fake = FakeTime()
    reference = pacer(2.0, fake, dilation=3.0)
    device = reference.for_stream() if stream else reference
    for _ in range(100):
        device.run(lambda: fake.work(0.05), 0.01)
    assert fake.now_s - 100.0 == pytest.approx(100 * 2 * 3 * 0.01)
    assert reference.paced_s == pytest.approx(100 * 2 * 3 * 0.01)
    assert reference.overrun_share == 0
    hurried = pacer(2.0, fake)
    for _ in range(100):
        hurried.run(lambda: fake.work(0.05), 0.01)
    assert hurried.overrun_share == pytest.approx(0.6, abs=0.01)


def test_an_operation_that_waits_does_not_make_up_for_the_one_before() -> None:
    """The device was not behind any more when what it waited for came."""
    fake = FakeTime()
    device = pacer(1.0, fake)
    first = device.run(lambda: fake.work(0.012), 0.01)
    assert (first.end_s, first.late_s) == (pytest.approx(100.01), 0.0)
    fake.now_s = 100.02
    waited = device.run(lambda: None, 0.01, 100.02)
    assert (waited.start_s, waited.end_s, fake.now_s) == pytest.approx((100.02, 100.03, 100.03))


def test_late_wake_up_is_an_overrun() -> None:
    fake = FakeTime(overshoot_s=0.5)
    paced = pacer(2.0, fake).run(lambda: None, 0.01)
    assert paced.late_s == pytest.approx(0.496)


def test_time_is_counted_from_when_the_device_could_have_begun() -> None:
    fake = FakeTime()
    paced = pacer(2.0, fake).run(lambda: fake.work(0.001), 0.01, fake.now_s - 0.005)
    assert paced.end_s == pytest.approx(100.0 - 0.005 + 0.02)


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_what_is_no_factor(factor: float) -> None:
    with pytest.raises(ConfigError, match=f"by {factor}"):
        Pacer(factor)


def test_without_pacing_an_operation_takes_what_it_takes() -> None:
    fake = FakeTime()
    device = pacer(0.0, fake)
    paced = device.run(lambda: fake.work(0.1), 5.0)
    assert paced.end_s - paced.start_s == pytest.approx(0.1)
    assert paced.late_s == device.late_s == 0


def test_with_the_real_clock() -> None:
    device = Pacer(4.0)
    start_s = time.monotonic()
    for _ in range(5):
        device.run(lambda: None, 0.005)
    # Never shorter than the deadlines, but for the credit of the last sleep.
    assert time.monotonic() - start_s >= 5 * 0.02 - 0.005
