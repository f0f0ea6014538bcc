"""What becomes of a run whose devices die, freeze, leave, slow down and come back: thousands of runs, in virtual
time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from virtual_runs import DEVICES, WORK_S, Checked, Job, Trainer, Work, coordinate, faults, members, prepared

from workbench.core.device_faults import Fault, FaultKind
from workbench.core.errors import DeviceLostError
from workbench.core.heat import Level
from workbench.runtime.commands import Abort, Ended, Pause, Pong, Prepare, Slow, Stop, Train
from workbench.runtime.virtual_devices import VirtualDevices
from workbench.runtime.virtual_work import VirtualWorld
from workbench_studies.random_faults import random_faults

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def test_without_faults_it_is_one_generation() -> None:
    outcome = coordinate(Trainer(50))
    assert members(outcome) == [(0, 1, 2, 3)] and outcome.policy.history == list(range(50)) and outcome.said == []
    assert outcome.devices.now_s() == pytest.approx(0.5 + 50 * WORK_S / 4, abs=0.5)
    assert len(outcome.sent(Stop)) == 4


@pytest.mark.parametrize("text", ["", "kill:d1@step12"])
def test_a_run_that_has_converged_ends_on_all_devices_before_its_last_step(text: str) -> None:
    outcome = coordinate(Trainer(50, converges_at=20), *faults(text))
    assert 20 <= max(outcome.policy.history) + 1 <= 22 and outcome.policy.step == 50  # a step may be under way
    assert outcome.sent(Pause)
    assert len(outcome.sent(Stop)) == (3 if text else 4)


def test_a_device_that_is_killed_comes_back_and_the_others_do_not_wait_for_it() -> None:
    outcome = coordinate(Trainer(80), *faults("kill:d1@step12; return:d1@step20"))
    assert members(outcome) == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]
    assert outcome.policy.losses == [(12, 10)]  # two steps since the last backup
    assert outcome.policy.planned_ahead == [(2, (0, 2, 3))]  # while they end their work
    first, second = outcome.coordinator.recoveries
    assert list(first.parts_s) == ["stopping", "planning", "meeting"]
    assert sum(first.parts_s.values()) == pytest.approx(first.planned_s + first.resumed_s)
    assert (first.what, second.what) == ("kill d1", "return d1")
    assert first.seconds < 0.05 + 3 * 0.05 + WORK_S / 3 + 0.1
    assert second.seconds > 2.0  # a process takes that long to start
    assert second.stood_still_s < 0.3  # the others paused for a new group only
    assert "d1 has come back" in " ".join(outcome.said)


class Long(Work):
    """Device 0 has begun an operation of 0.3 s whenever a step is broken off."""

    def until_free_s(self, job: Job, place: int, step: int, done: float, factors: object) -> float:
        return 0.3 if place == 0 and 0 <= done <= 1 else 0.0


def test_the_others_end_the_operation_in_which_they_are() -> None:
    outcome = prepared(Trainer(80), *faults("kill:d1@step12; freeze:d2@step30"))
    outcome.devices._work = Long()
    outcome.coordinator.run()
    assert members(outcome) == [(0, 1, 2, 3), (0, 2, 3), (0, 3)] and outcome.policy.step == 80
    killed, frozen = outcome.coordinator.recoveries
    assert killed.parts_s["stopping"] == pytest.approx(0.3 - 0.05, abs=0.01)
    assert frozen.parts_s["stopping"] < 0.1  # it had ended when the silence was noticed


def test_a_frozen_device_is_found_silent_and_ended() -> None:
    outcome = coordinate(Trainer(60), *faults("freeze:d3@step7"))
    assert members(outcome) == [(0, 1, 2, 3), (0, 1, 2)]
    [recovery] = outcome.coordinator.recoveries
    assert 2.0 < recovery.noticed_s < 2.7
    assert recovery.seconds < 3.0


def test_a_starved_device_is_not_taken_for_a_frozen_one() -> None:
    """Its process computes a little, or the coordinator was kept waiting just as long; a frozen one stands still, and
    is ended."""

    def starved(until_s: float, cpu_share: float, *late: tuple[float, float]) -> list[tuple[int, ...]]:
        outcome = prepared(Trainer(300))
        outcome.devices.starved, outcome.devices.cpu_share, outcome.devices.late = (
            {2: (2.0, until_s)},
            cpu_share,
            [*late],
        )
        outcome.coordinator.run()
        return members(outcome)

    all_devices = [(0, 1, 2, 3)]
    assert starved(9.0, 0.3) == all_devices and starved(9.0, 0.0)[1] == (0, 1, 3)
    assert starved(50.0, 0.3)[1] == (0, 1, 3)  # it computes, but something else is wrong with it
    assert starved(5.0, 0.0, (2.6, 3.4), (3.5, 4.5)) == all_devices and starved(5.0, 0.0)[1] == (0, 1, 3)


def test_one_that_leaves_costs_no_step() -> None:
    outcome = coordinate(Trainer(60), *faults("leave:d0@step8; return:d0@step20"))
    assert members(outcome) == [(0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3)] and outcome.policy.losses == []
    assert outcome.policy.history == list(range(60))
    assert outcome.coordinator.recoveries[0].stood_still_s < 0.3


def test_an_idle_device_makes_ready_while_one_that_leaves_works_on() -> None:
    outcome = coordinate(Trainer(60, idle=(3,)), *faults("leave:d1@step8"))
    assert (
        members(outcome) == [(0, 1, 2), (0, 2, 3)]
        and outcome.policy.history == list(range(60))
        and outcome.policy.losses == []
    )
    [(prepared_s, rank, _)], [(paused_s, *_), *_] = outcome.sent(Prepare), outcome.sent(Pause)
    assert (
        rank == 3 and paused_s - prepared_s >= 0.2 and outcome.policy.generations[1].job.first_step > 8 + 1
    )  # steps were made meanwhile
    assert outcome.coordinator.recoveries[0].stood_still_s < 0.3


@pytest.mark.parametrize(
    ("device", "fault", "reason"),
    [
        (
            {"battery": 0.5, "battery_wh": 0.01, "watts_busy": 5.4, "leave_below": 0.2},
            "",
            "its charge is below 20%",
        ),  # after two seconds
        ({"leave_if_throttled": True}, "slow:d1:2@step8", "heat slows it down"),
        ({"address": "pi@d1", "leave_below": 0.2}, "", "its charge is below 20%"),
        ({"address": "pi@d1", "leave_if_throttled": True}, "", "heat slows it down"),
    ],
)
def test_a_device_leaves_on_notice_by_itself(device: dict[str, Any], fault: str, reason: str) -> None:
    """Its charge falls, by the power model or as it says, or heat slows it down: an idle device takes its place, and no
    step is lost."""
    described = (DEVICES[0], replace(DEVICES[1], **device), *DEVICES[2:])
    outcome = prepared(Trainer(60, idle=(3,)), *faults(fault), described=described)
    outcome.devices.health[1] = lambda now_s: Pong(
        charge=max(0.0, 1 - 0.4 * now_s), is_throttled=now_s > 2.5, meter_j=100 + 5 * now_s
    )
    outcome.coordinator.run()
    assert (
        members(outcome) == [(0, 1, 2), (0, 2, 3)]
        and outcome.policy.history == list(range(60))
        and outcome.policy.losses == []
    )
    assert [line for line in outcome.said if "notice" in line] == [f"d1 gives notice: {reason}"]
    assert [recovery.what for recovery in outcome.coordinator.recoveries if "leave" in recovery.what] == ["leave d1"]
    assert 0 < outcome.coordinator.fleet.metered_j["d1"] < 5 * outcome.devices.now_s() and list(
        outcome.coordinator.fleet.metered_j
    ) == ["d1"]


@pytest.mark.parametrize(("address", "gives_notice"), [(None, True), ("pi@d1", False)])
def test_a_curve_heats_emulated_devices_alone(address: str | None, gives_notice: bool) -> None:
    """A real device reports its own throttling, also after it was lost and came back."""
    curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=0.5, speed=0.5))
    hot = replace(DEVICES[1], address=address, sustained=curve, leave_if_throttled=True)
    outcome = prepared(
        Trainer(60), *faults("kill:d1@step5; return:d1@step8"), described=(DEVICES[0], hot, *DEVICES[2:])
    )
    outcome.coordinator.run()
    assert members(outcome)[:3] == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]
    assert any("heat slows it down" in line for line in outcome.said) is gives_notice


def test_memory_that_other_programs_take_of_a_real_device_is_noticed() -> None:
    """The device says how much the run may use; small changes, and more than is described, are none."""
    described = (DEVICES[0], replace(DEVICES[1], address="pi@d1", memory_bytes=1000), *DEVICES[2:])
    outcome = prepared(Trainer(60), described=described, adapts=True)
    outcome.devices.health[1] = lambda now_s: Pong(memory_bytes=2000 if now_s < 3 else 480 + int(now_s))
    outcome.coordinator.run()
    assert [line for line in outcome.said if "memory" in line] == ["d1 has 48% of its memory for the run"]
    assert outcome.coordinator.pace.factors["d1"] == pytest.approx(0.48, abs=0.02)


def test_a_notice_that_is_followed_by_an_early_death_is_a_loss() -> None:
    outcome = coordinate(Trainer(60, idle=(3,)), *faults("leave:d1@step8; kill:d1@step9"))
    assert members(outcome) == [(0, 1, 2), (0, 2)] and outcome.policy.losses == [(9, 5)]


def test_a_stand_in_that_dies_while_it_makes_ready_is_replaced_or_missed() -> None:
    outcome = coordinate(Trainer(60, idle=(3, 4)), *faults("leave:d1@step8; kill:d3@step9"), world_size=5)
    assert members(outcome) == [(0, 1, 2), (0, 2, 4)] and outcome.policy.losses == []
    outcome = coordinate(Trainer(60, idle=(3,)), *faults("leave:d1@step8; kill:d3@step9"))
    assert members(outcome) == [(0, 1, 2), (0, 2)] and outcome.policy.losses == []


def test_two_losses_at_once_and_a_loss_while_the_others_form_a_group() -> None:
    outcome = coordinate(Trainer(60), *faults("kill:d1@step12; kill:d2@step12"))
    assert members(outcome) == [(0, 1, 2, 3), (0, 3)] and outcome.policy.losses == [(12, 10)]
    one = coordinate(Trainer(60), *faults("kill:d1@step12"))
    formed_s = max(seconds for seconds, *_ in one.sent(Train)) - 0.501  # of the run
    during = Fault(kind="kill", rank=2, start=formed_s)
    outcome = coordinate(Trainer(60), *faults("kill:d1@step12"), during)
    assert members(outcome) == [(0, 1, 2, 3), (0, 2, 3), (0, 3)] and outcome.policy.losses == [(12, 10), (10, 10)]
    assert outcome.policy.history == [*range(12), *range(10, 60)]


def test_a_slow_device_is_planned_for_within_five_steps() -> None:
    outcome = coordinate(Trainer(80), *faults("slow:d2:4@step10-40"), adapts=True)
    shares = [generation.job.shares[2] for generation in outcome.policy.generations]
    assert shares == [pytest.approx(1 / 4), pytest.approx(1 / 13), pytest.approx(1 / 4)]
    starts = [generation.job.first_step for generation in outcome.policy.generations]
    assert 10 < starts[1] <= 10 + 5 + 1 and 40 < starts[2] <= 46  # the step under way is ended
    assert [message.factor for *_, message in outcome.sent(Slow)] == [4.0, 1.0]


def test_one_too_slow_for_any_work_is_probed_until_it_is_fast_again() -> None:
    outcome = coordinate(Trainer(120), *faults("slow:d2:20@step10-40"), adapts=True)
    assert members(outcome) == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 2, 3)]


def test_members_of_a_generation_that_the_policy_wants_make_ready_while_they_work() -> None:
    policy = Trainer(60)

    def turn() -> bool:
        policy.only = (0, 1, 3) if policy.step >= 20 else (0, 1, 2, 3)
        return policy.step < 50

    begun: list[tuple[Fault, bool]] = []
    slow = Fault(kind="slow", rank=1, start=1.0, factor=2.0)
    outcome = coordinate(
        policy, slow, turn=turn, injected=lambda *fault: begun.append(fault), clock=lambda: float(policy.step >= 30)
    )
    assert members(outcome) == [(0, 1, 2, 3), (0, 1, 3)]
    prepared, [(paused_s, *_), *_] = outcome.sent(Prepare), outcome.sent(Pause)
    assert [rank for _, rank, _ in prepared] == [0, 1, 3] and paused_s - prepared[-1][0] >= 0.2
    assert (
        policy.generations[1].job.first_step > 20 and policy.losses == []
    )  # steps were made meanwhile, and none is repeated
    assert begun == [(slow, True)]  # by the given clock
    # The run ended before all was done, and the step under way was given up.
    assert 50 <= policy.step < 60 and isinstance(outcome.devices.commands[-1][2], Stop)
    assert len(outcome.sent(Abort)) == 3


class LateForThePause(Checked):
    """Device 0 has begun the step before which all are to pause, and gives it up; the others wait for it and notice
    nothing."""

    def _take(self, rank: int, message: Any, life: int) -> None:
        train = self._processes[rank].train
        if isinstance(message, Pause) and train is not None:
            group = self._groups[train.generation]
            group.ticket += 1
            if rank == 0:
                self._end_job(rank, train, "lost", group.step)
        else:
            super()._take(rank, message, life)


def test_nobody_waits_for_a_device_that_was_too_late_for_a_pause() -> None:
    outcome = prepared(Trainer(30), *faults("leave:d3@step7"))
    outcome.devices.__class__ = LateForThePause
    outcome.coordinator.run()
    assert outcome.policy.step == 30 and members(outcome) == [(0, 1, 2, 3), (0, 1, 2)]
    assert not [line for line in outcome.said if "is lost" in line]


def test_devices_that_are_needed_are_waited_for_and_their_absence_is_told() -> None:
    outcome = coordinate(Trainer(60, at_least=4), *faults("kill:d1@step12-13"))
    assert members(outcome) == [(0, 1, 2, 3)] * 2
    with pytest.raises(DeviceLostError, match=r"Step 11 was to be done without d1.*3 devices are too few.*--resume"):
        coordinate(Trainer(60, at_least=4), *faults("kill:d1@step12"))
    with pytest.raises(
        DeviceLostError, match=r"No device is left: d0 \(its process ended\).*d3 \(no sign of life for \d s\)"
    ):
        coordinate(Trainer(60), *faults("kill:d0@step5;kill:d1@step5;kill:d2@step5;freeze:d3@step5"))


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_whatever_happens_every_step_is_done_and_nobody_is_told_anything_who_has_gone(start: int) -> None:
    """Random faults of all kinds, by steps and by seconds, some of which never end; messages take random times."""
    for seed in range(start, start + 100):
        happens = [*random_faults(4, 60, every=6.0, seed=seed, unit="step", kinds=KINDS)]
        if seed % 2:
            happens += random_faults(4, 20.0, every=4.0, seed=seed + 1, kinds=KINDS)
        if seed % 5 == 0:
            happens[::3] = [replace(fault, end=None) for fault in happens[::3]]
        policy = Trainer(80, at_least=1 + seed % 3)
        try:
            coordinate(policy, *happens, seed=seed, adapts=seed % 4 < 2)
        except DeviceLostError as error:
            assert seed % 5 == 0, "all come back"
            assert "No device is left" in str(error) or "are too few" in str(error)
            continue
        # A loss goes back to the last backup, and the steps since are done again; all others are done once, and in
        # order.
        expected: list[int] = []
        first = 0
        for done, backup in (*policy.losses, (80, 80)):
            expected += range(first, done)
            first = backup
        assert policy.history == expected, seed


def test_a_device_that_reports_a_step_which_the_run_does_not_have_is_ended_alone() -> None:
    outcome = prepared(Trainer(40))
    done = outcome.devices._work.done
    outcome.devices._work.done = lambda job, place, step, factor: (  # type: ignore[method-assign]
        done(job, place, step, factor)._replace(step=10**6)
        if (place, step) == (1, 7) and len(job.shares) == 4
        else done(job, place, step, factor)
    )
    outcome.coordinator.run()
    assert members(outcome) == [(0, 1, 2, 3), (0, 2, 3)] and outcome.policy.step == 40
    assert any("d1 is lost" in said and "it reports step 1000001 of 40" in said for said in outcome.said)


class Timed(Work):
    """Steps that are due at whole seconds, of which a device reports every part that it has done."""

    def due_s(self, job: Job, step: int) -> float:
        return 1.0 + 2.0 * step

    def begin(self, job: Job, now_s: float) -> tuple[float, tuple[tuple[int, str]]]:
        return 0.5, ((1, "begun"),)

    def reports(
        self, job: Job, place: int, step: int, before: float, after: float, factors: object
    ) -> tuple[tuple[float, float], ...]:
        return ((before, after),) if place == 0 else ()


@pytest.mark.parametrize("pauses", [False, True])
def test_virtual_steps_begin_when_they_are_due_and_report_as_they_go(pauses: bool) -> None:
    """A device that slows down in the middle of a step takes longer for the rest of it; one that waits for a step
    pauses at once."""
    world = VirtualWorld(start_s=0.0, join_s=0.0, message_s=0.0, report_s=0.15)
    devices, job = VirtualDevices(2, Timed(), world), Job((0.5, 0.5), 0, 2)
    for rank in (0, 1):
        devices.start(rank)
    devices.news(1.0)
    for rank in (0, 1):
        devices.command(rank, Train(1, (0, 1), job))
    outcome: list[tuple[float, Any]] = []

    def listen_until(time_s: float) -> None:
        while devices.now_s() < time_s:
            outcome.extend((round(devices.now_s(), 6), news.content) for news in devices.news(time_s - devices.now_s()))

    listen_until(1.0)
    devices.command(1, Slow(3.0))  # the step takes 0.2 s of device 1, now 0.6 s
    listen_until(2.0)
    if pauses:
        devices.command(0, Pause(1, 1))
    listen_until(6.0)
    assert [time_s for time_s, content in outcome if content == "begun"] == [0.5]
    parts = [
        (time_s, pytest.approx(content))
        for time_s, content in outcome
        if isinstance(content, tuple) and len(content) == 2
    ]
    assert parts[:5] == [
        (1.0, (0.0, 0.0)),
        (1.15, (0.0, 0.25)),
        (1.3, (0.25, 0.5)),
        (1.45, (0.5, 0.75)),
        (1.6, (0.75, 1.0)),
    ]
    assert devices.taken_s == pytest.approx({0: 0.6} if pauses else {0: 0.6, 1: 0.6})
    assert [content.end for _, content in outcome if isinstance(content, Ended)] == [
        "paused" if pauses else "finished"
    ] * 2
