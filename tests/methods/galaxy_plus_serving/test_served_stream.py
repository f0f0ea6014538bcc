"""A stream on emulated devices: real tensors, real processes, which are slowed down, killed, frozen and come back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clusters import with_devices
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.errors import ConfigError, PlanError
from workbench.methods.common.services import ServiceInterrupted
from workbench.methods.galaxy_plus.profiles import made_up_host
from workbench.methods.galaxy_plus.serving.records import (
    ServedRequest,
    ServingEvent,
    StreamSettings,
)
from workbench.methods.galaxy_plus.serving.serve import serve
from workbench.runtime.engines import EngineCluster
from workbench_studies.bench.serving import (
    SETTINGS,
    SOAK_FLOPS_PER_S,
    SOAK_LENGTH,
    SOAK_MODEL,
    serve_randomly,
    soak_cluster,
)

MOST_REQUESTS, MOST_S = 20_000, 240.0


class Story:
    """Each step waits for what the one before brings about, however long a busy machine takes for it.

    A step is the events, (kind, rank), that must all have come, in any order, and what is done then.
    """

    def __init__(self, *steps: tuple[set[tuple[str, int]], Callable[[float], None]]) -> None:
        self.faults = FaultSchedule()
        self.steps = list(steps)
        self.seen: list[ServingEvent] = []
        self.num_seen = self.num_after = 0

    def request(self, _: ServedRequest) -> None:
        self.num_after += not self.steps

    def is_over(self, now_s: float) -> bool:
        while self.num_seen < len(self.seen) and self.steps:
            event = self.seen[self.num_seen]
            self.num_seen += 1
            awaited, then = self.steps[0]
            awaited.discard((event.kind, event.rank))
            if not awaited:
                self.steps.pop(0)
                then(now_s)
        return self.num_after >= 30 or now_s > MOST_S


@pytest.mark.slow
def test_no_answer_is_wrong_or_lost_whatever_happens_to_the_devices() -> None:
    def nothing(_: float) -> None:
        pass

    def kill(now_s: float) -> None:
        story.faults.add(Fault(kind="kill", rank=2, start=now_s, end=now_s + 0.2))

    def freeze(now_s: float) -> None:
        story.faults.add(Fault(kind="freeze", rank=3, start=now_s))

    story = Story(
        ({("excluded", 1)}, nothing),
        ({("probed", 1)}, lambda now_s: story.faults.end(1, now_s)),
        ({("readmitted", 1)}, kill),
        ({("lost", 2)}, freeze),
        ({("lost", 3), ("readmitted", 2)}, nothing),  # whichever is first
        ({("switched", -1)}, nothing),
    )
    story.faults.add(Fault(kind="slow", rank=1, start=0.5, factor=6.0))
    result = serve_randomly(
        MOST_REQUESTS,
        rate_per_s=12.0,
        faults=story.faults,
        fidelity="paced",
        rescheduling=dataclasses.replace(SETTINGS, reaction="exclude"),
        on_event=story.seen.append,
        on_request=story.request,
        is_over=story.is_over,
    )
    report = result.report
    assert not story.steps, " ".join(f"{event.time_s:.2f}:{event.kind}:{event.rank}" for event in story.seen)
    assert sorted(request.number for request in report.requests) == list(range(len(report.requests)))
    assert all(request.is_right is True for request in report.requests)
    assert result.left_behind == ()

    # Each of the devices served when it was well, and none when it was out.
    assert set(report.plans[0].ranks) == {0, 1, 2, 3}
    for rank, out, back in ((1, "excluded", "readmitted"), (2, "lost", "readmitted")):
        since = next(event.time_s for event in report.events if (event.kind, event.rank) == (out, rank))
        readmitted = report.events_of(back, rank=rank)
        assert readmitted and rank in report.plans[readmitted[0].plan_after].ranks
        # While it is away another device may freeze, and no plan be switched to before it is back.
        meanwhile = [event for event in report.events_of("switched") if since < event.time_s < readmitted[0].time_s]
        assert all(rank not in report.plans[event.plan_after].ranks for event in meanwhile)
    assert report.events_of("straggler", rank=1)[0].value > report.rescheduling.slow_factor
    assert report.events_of("probed", rank=1)[0].value > report.rescheduling.recovered_factor  # it was still slow
    assert 3 not in report.plans[report.requests[-1].plan].ranks
    # What is loaded is what is missing: less than a whole copy, which is what the first plan read.
    loads = [int(event.detail.split()[0]) for event in report.events_of("loaded")]
    assert min(loads[1:]) < loads[0] / 2
    # While weights were read for the plan without the straggler, requests were served under the old one.
    excluded = report.events_of("excluded", rank=1)[0]
    switched = next(event for event in report.events_of("switched") if event.time_s > excluded.time_s)
    ended = sorted(
        (request for request in report.requests if excluded.time_s < request.end_s < switched.time_s),
        key=lambda one: one.end_s,
    )
    plans = [
        request.plan for request in ended
    ]  # on a busy host the first under the new plan end before the portal hears of it
    assert plans == sorted(plans, key=[excluded.plan_before, switched.plan_after].index)
    # What the devices did is there to be drawn.
    assert {sample.rank for sample in report.samples if sample.busy_s > 0} == {0, 1, 2, 3}
    assert max(sample.load for sample in report.samples if sample.rank == 1) == pytest.approx(5 / 6)
    assert len(report.memory) > 2 and len(report.memory[0][1]) == 5


def test_where_two_plans_do_not_fit_side_by_side_requests_wait_for_the_exchange() -> None:
    cluster, host = soak_cluster(), made_up_host(SOAK_MODEL, SOAK_FLOPS_PER_S)
    # The first device holds 243 KB of weights by the plan for all, 259 KB without the second device, and 293 KB while
    # it holds both.
    room = 280_000
    first, *others = cluster.devices
    story = Story(({("paused", -1)}, lambda now_s: None), ({("switched", -1)}, lambda now_s: None))
    story.faults.add(Fault(kind="slow", rank=1, start=0.3, factor=6.0))
    with EngineCluster.start(cluster, fidelity="paced") as engines:
        report = serve(
            SOAK_MODEL,
            dataclasses.replace(cluster, devices=(dataclasses.replace(first, memory_bytes=room), *others)),
            engines,
            host,
            stream=StreamSettings(num_requests=MOST_REQUESTS, rate_per_s=12.0, length=SOAK_LENGTH),
            rescheduling=dataclasses.replace(SETTINGS, reaction="exclude"),
            faults=story.faults,
            on_event=story.seen.append,
            on_request=story.request,
            is_over=story.is_over,
        )
    assert not story.steps, " ".join(f"{event.time_s:.2f}:{event.kind}:{event.rank}" for event in story.seen)
    assert all(request.is_right is True for request in report.requests)
    assert sorted(request.number for request in report.requests) == list(range(len(report.requests)))
    paused = report.events_of("paused")[0].time_s
    # A busy host may look like another slow device, and bring a third plan.
    switched, until, *_ = [*(event.time_s for event in report.events_of("switched") if event.time_s > paused), math.inf]
    assert not [request for request in report.requests if paused < request.end_s < switched]
    assert {request.plan for request in report.requests if switched < request.start_s < until} == {
        report.events_of("paused")[0].plan_after
    }


def test_the_only_serving_device_is_killed_and_then_the_user_ends_the_service() -> None:
    """The request in service is repeated, the recovery is no queueing, and the report is of what was answered."""
    cluster, host, faults = soak_cluster(), made_up_host(SOAK_MODEL, SOAK_FLOPS_PER_S), FaultSchedule()
    answered: list[ServedRequest] = []
    seen: list[ServingEvent] = []

    def is_repeated() -> bool:
        return any(event.kind == "repeated" for event in seen)

    def answer(request: ServedRequest) -> None:
        answered.append(request)
        if is_repeated() and request.number > 40:
            raise KeyboardInterrupt

    def is_over(now_s: float) -> bool:
        # A kill may come between two requests, of which none has to be repeated: then there is another one.
        if not is_repeated() and len(answered) > 10 * (1 + len(faults.faults)):
            faults.add(Fault(kind="kill", rank=0, start=now_s, end=now_s + 0.1))
        return now_s > MOST_S

    with EngineCluster.start(cluster, fidelity="paced") as engines, pytest.raises(ServiceInterrupted) as ended:
        serve(
            SOAK_MODEL,
            cluster,
            engines,
            host,
            stream=StreamSettings(num_requests=MOST_REQUESTS, length=SOAK_LENGTH),
            rescheduling=SETTINGS,
            faults=faults,
            left_out=(1, 2, 3),
            is_over=is_over,
            on_event=seen.append,
            on_request=answer,
        )
    report = ended.value.report
    assert list(report.requests) == answered and all(request.is_right for request in answered)
    [repeated] = [
        request for request in report.requests if request.attempts > 1
    ]  # it serves one after the other, without a pause
    assert report.num_repeated == 1 and repeated.attempts == 2
    *_, lost = (event for event in seen if event.kind == "lost")
    assert repeated.start_s < lost.time_s < repeated.end_s
    assert report.notes[0] == f"The service was interrupted: {len(answered)} of {MOST_REQUESTS} requests were answered."
    assert report.num_lost == 0 and len(report.events_of("repeated")) == 1


def test_what_cannot_be_served() -> None:
    cluster, host = soak_cluster(), made_up_host(SOAK_MODEL, SOAK_FLOPS_PER_S)
    stream = StreamSettings(num_requests=1, length=SOAK_LENGTH)
    engines: Any = SimpleNamespace(fidelity="paced")  # what is wrong is said before any is needed
    with pytest.raises(ConfigError, match="4 devices"):
        serve(SOAK_MODEL, cluster, engines, host, stream=stream, faults=[Fault(kind="kill", rank=4, start=0.0)])
    with pytest.raises(ConfigError, match="reads 1 to"):
        serve(SOAK_MODEL, cluster, engines, host, stream=dataclasses.replace(stream, length=100_000))
    small = with_devices(cluster, memory_bytes=1000)
    with pytest.raises(PlanError, match="device-"):
        serve(SOAK_MODEL, small, engines, host, stream=stream)
