"""What the devices tell of themselves while they train, and what becomes of it in the parent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.methods.builders import PLANS, make_rank_job
from tests.methods.conftest import four_devices
from workbench.core.job import Job
from workbench.core.schedule import Op
from workbench.core.timeline import Span
from workbench.methods.base import Event
from workbench.methods.common.rank_results import RankResult, StepTrace
from workbench.methods.common.records import overrun_share
from workbench.methods.common.session import DeviceReporter
from workbench.methods.pac_plus.method import PacPlus
from workbench.methods.training.recording_policy import OncePolicy
from workbench.methods.training.timetable import Timetable
from workbench.models.loading import load_stack
from workbench.runs.progress import RunState
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.memory import MemoryBudget, MemoryReading
from workbench.runtime.pacing import Pace


def test_devices_tell_phase_step_computing_and_memory(
    engines: EngineCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_rank_job(
        load_stack("tiny-bert"),
        "tiny-bert",
        PLANS["[2, 2, 2] on [2-1-1]"],
        four_devices(),
        tmp_path,
        samples=22,
        epochs=2,
    )
    events: list[Event] = []
    state = RunState(Job(epochs=2), four_devices())

    def take(event: Event) -> None:
        events.append(event)
        state.update(event)

    policy = OncePolicy(job, job.plan, Timetable(job), take)
    monkeypatch.setattr(engines, "is_watched", True)
    with engines.service(PacPlus.serve_rank) as devices:
        policy.run(devices, job.cluster, job.job)
    results = policy.results
    phases: dict[int, list[str]] = {rank: [] for rank in range(4)}
    for event in events:
        if event.kind == "device" and event.device is not None and event.device.phase not in phases[event.rank][-1:]:
            phases[event.rank].append(event.device.phase)
    assert "waiting for the others" in phases[0]
    worked = [phase for phase in phases[0] if phase != "waiting for the others"]
    assert worked == [
        "loading",
        "first epoch",
        "sharing the activations",
        "sharing the adapter",
        "cached epoch",
        "done",
    ]
    assert phases[2][-2:] == ["idle", "done"]  # no share in the cached epochs
    [began] = [event for event in events if event.kind == "plan"]
    simulated = Timetable(job).timelines(0)
    assert began.plan == job.plan and simulated.keys() == {"first epoch", "cached epoch"}
    for event in (event for event in events if event.kind == "spans"):
        predicted = simulated["cached epoch" if event.epoch else "first epoch"]
        assert sorted(span.op.label for span in event.spans) == sorted(span.op.label for span in predicted.spans)
        assert min(span.start_s for span in event.spans) >= 0
    assert any(event.kind == "spans" for event in events)
    step_events = [event for event in events if event.kind == "step"]
    assert [(event.epoch, event.step) for event in step_events] == [
        (epoch, step) for epoch in (0, 1) for step in range(3)
    ]
    assert all(sorted(event.samples for event in step_events if event.epoch == epoch) == [6, 8, 8] for epoch in (0, 1))
    at_steps = [event.device for event in events if event.kind == "device" and event.step >= 0]
    assert len(at_steps) == 4 * 3 + 3 * 3
    for device in at_steps:
        assert device is not None and device.step_s is not None and device.busy_s is not None
        assert 0 < device.busy_s <= device.step_s * 1.001
        assert device.used_bytes is None or device.used_bytes < 2_000_000_000
    # A small stage may take less than what was in use before it, so not each of them is above 0.
    known = [device.used_bytes for device in at_steps if device is not None and device.used_bytes is not None]
    assert not known or max(known) > 0
    rows = state.snapshot().devices
    assert [row.phase for row in rows] == ["done"] * 4
    assert sum(trace.busy_s for trace in results[0].steps) > 0


def test_a_lost_devices_step_stays_known_between_phases() -> None:
    messages: list[dict] = []

    class Context(RankContext):
        def publish(self, event: dict) -> None:
            messages.append(event)

    where: dict[str, Any] = {"device": four_devices().devices[0], "cluster": four_devices()}
    context = Context(rank=0, world_size=1, fidelity="paced", is_watched=True, **where)
    budget = MemoryBudget("a", 100, reading=lambda: MemoryReading(rss_bytes=0, peak_rss_bytes=0, data_bytes=0))
    reporter = DeviceReporter(context, budget)
    reporter.phase("loading")
    reporter.phase("first epoch", 0)
    trace = StepTrace(epoch=0, step=3, samples=8, start_s=1.0, end_s=2.0, loss=0.5, busy_s=0.5)
    own = [Span(0, Op("F", 0, 0), 1.0, 1.5)]
    reporter.step(trace, 10, own, cached=False)
    reporter.step(trace._replace(step=4, start_s=2.5, end_s=4.0), 10, own * 999, cached=False, trains=False)
    reporter.phase("sharing the adapter")
    assert "epoch" not in messages[0] and messages[1]["epoch"] == 0
    assert messages[2]["step_s"] == pytest.approx(1.0)
    assert messages[3]["step_s"] == pytest.approx(2.0)  # waiting included
    assert "loss" in messages[2] and "loss" not in messages[3]
    assert (messages[4]["epoch"], messages[4]["step"], messages[4]["phase"]) == (0, 4, "sharing the adapter")
    assert messages[4]["used_bytes"] is None  # this system does not tell
    assert messages[2]["spans"] == tuple(own) and "spans" not in messages[3]  # too many to be shown
    for start_s, is_sent in ((2.7, False), (3.0, True), (3.4, False)):  # of one step in each half second
        reporter.step(trace._replace(start_s=start_s), 10, own, cached=False)
        assert ("spans" in messages[-1]) is is_sent
    reporter = DeviceReporter(replace(context, is_watched=False), budget)
    reporter.step(trace, 10, own, cached=False)
    assert "spans" not in messages[-1] and "loss" in messages[-1]


def test_a_run_is_as_late_as_its_latest_phase() -> None:
    """What its devices were late in a phase adds up.  One lost early has fewer phases."""
    paces = [[Pace(0.5, 50.0), Pace(0.2, 1.5)], [Pace(1.0, 100.0), Pace(0.1, 2.0)], [Pace(0.0, 4.0)]]
    results = [RankResult(rank=rank, paces=of_rank) for rank, of_rank in enumerate(paces)]
    assert overrun_share(results) == pytest.approx(0.3 / 2.0)
    assert overrun_share([]) == overrun_share(results, is_real=True) == overrun_share([RankResult(rank=0)]) == 0
