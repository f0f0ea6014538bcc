from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError
from workbench.core.heat import Level
from workbench.core.spread import percentile
from workbench.methods.galaxy_plus.serving.records import (
    ReschedulingSettings,
    ServedRequest,
    ServingReport,
    StreamSettings,
)
from workbench.runtime.watch import PING_EVERY_S

SLOW = Fault(kind="slow", rank=1, start=2.0, end=8.0, factor=4.0)


def switches(report: ServingReport) -> list[int]:
    """The plans in the order in which they served."""
    return [event.plan_after for event in report.events_of("switched")]


def served_ranks(report: ServingReport) -> list[tuple[int, ...]]:
    return [report.plans[index].ranks for index in switches(report)]


def test_poisson_arrivals_have_the_rate_and_repeat_with_the_seed() -> None:
    settings = StreamSettings(num_requests=4000, rate_per_s=20.0, seed=3)
    times = settings.arrival_times()
    gaps = [later - earlier for earlier, later in zip((0.0, *times), times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(
        mean**2, rel=0.15
    )  # exponential: deviation = mean
    assert times == settings.arrival_times()
    assert times != dataclasses.replace(settings, seed=4).arrival_times()


def test_latency_is_queueing_and_service(make_world: Callable) -> None:
    world = make_world()
    service_s = world.times(world.plan((0, 1, 2, 3)), {}).seconds
    report = world.serve(400, rate_per_s=0.8 / service_s, seed=1)
    assert [request.number for request in report.requests] == list(range(400))
    end_s = 0.0
    for request, arrival_s in zip(report.requests, report.stream.arrival_times(), strict=True):
        assert request.arrival_s == arrival_s
        assert request.start_s == pytest.approx(max(arrival_s, end_s))  # Lindley's recursion
        assert request.service_s == pytest.approx(service_s)
        end_s = request.end_s
    # An M/D/1 queue at load 0.8 waits 0.8 / (2 * 0.2) = 2 service times on average.
    mean_s = sum(request.queueing_s for request in report.requests) / 400
    assert 0.8 < mean_s / service_s < 4.5
    assert report.percentile_s(0.5, "queueing") <= report.percentile_s(0.95, "queueing") <= report.percentile_s(0.99)
    assert report.num_lost == 0 and switches(report) == [0]


def test_straggler_is_left_out_served_on_and_taken_back(make_world: Callable) -> None:
    world = make_world()
    report = world.serve(600, SLOW, probe_every_s=0.4)
    kinds = [event.kind for event in report.events if event.kind != "probed"]
    assert kinds == [
        "loaded", "switched", "slowed", "straggler", "excluded", "planned", "loaded", "switched",
        "restored", "recovered", "planned", "readmitted", "loaded", "switched",
    ]  # fmt: skip
    assert served_ranks(report) == [(0, 1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]
    straggler = report.events_of("straggler")[0]
    assert straggler.rank == 1 and straggler.value == pytest.approx(4.0)
    # Requests are served while the weights are read: under the old plan, up to the switch.
    excluded, loaded = report.events_of("excluded")[0].time_s, report.events_of("loaded")[1].time_s
    switched = report.events_of("switched")[1].time_s
    meanwhile = [request for request in report.requests if excluded < request.end_s <= loaded]
    assert len(meanwhile) >= 2 and {request.plan for request in meanwhile} == {0}
    assert all(request.plan == 1 for request in report.requests if switched < request.start_s < 8.0)
    # The bytes: each of the three reads what its larger share needs and no more (2 layers, 30 kB a unit and column).
    old, new = report.plans[0], report.plans[1]
    gained = sum(max(0, new.units[new.ranks.index(rank)] - old.units[rank]) for rank in new.ranks)
    assert report.events_of("loaded")[1].detail == f"{gained * 2 * 30_000} bytes"
    # Every probe while it is slow says so; it is back only after it is well.
    assert all(event.value == pytest.approx(4.0) for event in report.events_of("probed") if event.time_s < 8.0)
    assert report.events_of("readmitted")[0].time_s > 8.0
    assert report.num_lost == 0 and len(report.requests) == 600


def test_throughput_falls_without_rescheduling_and_is_restored_with_it(make_world: Callable) -> None:
    world = make_world()
    slow = dataclasses.replace(SLOW, end=None)
    best_per_s = 1 / world.plan((0, 2, 3)).predicted_s
    without = world.serve(150, slow, reaction="none")
    with_it = world.serve(300, slow)
    assert without.throughput_per_s(4.0, 6.0) < 0.6 * best_per_s
    assert without.restored_after_s(slow.start, 0.9 * best_per_s) is None
    restored_s = with_it.restored_after_s(slow.start, 0.9 * best_per_s)
    assert restored_s is not None and restored_s < 2.0
    assert with_it.throughput_per_s(5.0, 7.0) == pytest.approx(best_per_s, rel=0.01)
    # The others starve beside the straggler, and work again without it (Fig. 16 b and c).
    rank = 0
    starved = dict(without.utilisation(rank, 1.0))[4.5]
    assert starved < 0.6 * dict(with_it.utilisation(rank, 1.0))[5.5]
    assert dict(without.utilisation(1, 1.0))[4.5] > 0.7  # its other load included


def test_a_device_that_gets_hot_is_a_straggler(make_world: Callable) -> None:
    """By its curve of speed, without an injected fault."""
    curve = (Level(heat_s=0.0, speed=1.0), Level(heat_s=1.0, speed=0.25))
    world = make_world(curves={1: curve})
    service_s = world.plan((0, 1, 2, 3)).predicted_s
    stays, leaves = (world.serve(200, reaction=reaction) for reaction in ("none", "exclude"))
    assert stays.requests[0].service_s == pytest.approx(service_s)
    assert stays.requests[-1].service_s > 2 * service_s
    assert not leaves.events_of("slowed")
    assert leaves.events_of("excluded")[0].rank == 1 and leaves.end_s < stays.end_s


@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_noise_alone_moves_nobody(make_world: Callable, noise: float) -> None:
    report = make_world().serve(3000, noise=noise, draws=5)
    assert switches(report) == [0]
    assert not report.events_of("straggler", "excluded")


def test_a_device_that_comes_and_goes_is_tried_ever_more_rarely(make_world: Callable) -> None:
    """No flapping: a device that is slow in every other second would change the plan 60 times in a minute."""
    bursts = [Fault(kind="slow", rank=2, start=start, end=start + 1.0, factor=5.0) for start in range(1, 60, 2)]
    settings = {"probe_every_s": 0.2, "good_probes": 2, "calm_s": 20.0}
    report = make_world().serve(2000, *bursts, noise=0.1, draws=2, **settings)
    assert report.end_s > 50
    excluded = [event.time_s for event in report.events_of("excluded", rank=2)]
    assert 2 <= len(excluded) <= 6
    # Each time it waits twice as long for its first probe: the gaps follow the bursts, which begin every other second.
    probed = [event.time_s for event in report.events_of("probed", rank=2)]
    waits = [min(time_s for time_s in probed if time_s > begin_s) - begin_s for begin_s in excluded]
    assert all(wait_s >= 0.2 * 2**times for times, wait_s in enumerate(waits))
    without = make_world().serve(2000, *bursts, noise=0.1, draws=2, back_off=1.0, **settings)
    assert len(without.events_of("excluded")) >= 2 * len(excluded)


def test_hysteresis_keeps_a_half_recovered_device_out(make_world: Callable) -> None:
    """At 1.35 a device is not slow enough to be left out, nor well enough to be taken back."""
    worse = Fault(kind="slow", rank=1, start=1.0, end=3.0, factor=3.0)
    half = Fault(kind="slow", rank=1, start=3.0, factor=1.35)
    assert switches(make_world().serve(200, half)) == [0]
    report = make_world().serve(300, worse, half)
    assert served_ranks(report)[-1] == (0, 2, 3)
    assert len(report.events_of("probed")) > 5 and not report.events_of("readmitted")


def test_straggler_that_the_others_cannot_do_without_is_kept(make_world: Callable) -> None:
    report = make_world(most_units=10).serve(200, dataclasses.replace(SLOW, end=None))
    assert not report.events_of("excluded") and report.num_lost == 0
    assert len(report.events_of("kept")) == 1


def test_killed_device_loses_no_request(make_world: Callable) -> None:
    kill = Fault(kind="kill", rank=0, start=2.005, end=4.0)
    report = make_world().serve(400, kill)
    assert sorted(request.number for request in report.requests) == list(range(400)) and report.num_lost == 0
    repeated = [request for request in report.requests if request.attempts > 1]
    assert [request.number for request in repeated] == [report.events_of("repeated")[0].value]
    assert report.plans[repeated[0].plan].ranks == (1, 2, 3)
    assert served_ranks(report) == [(0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert report.events_of("readmitted")[0].time_s > 4.0 + 2.0  # restarted first, then probed


def test_frozen_device_is_found_silent(make_world: Callable) -> None:
    report = make_world().serve(400, Fault(kind="freeze", rank=3, start=1.0, end=5.0), silence_s=2.0)
    assert 3.0 <= report.events_of("lost")[0].time_s < 3.0 + PING_EVERY_S + 0.05
    assert served_ranks(report)[1:] == [(0, 1, 2), (0, 1, 2, 3)] and report.num_lost == 0


def test_requests_wait_while_no_plan_fits(make_world: Callable) -> None:
    world = make_world(most_units=10)
    back = world.serve(60, Fault(kind="kill", rank=0, start=0.5, end=3.0))
    assert back.num_lost == 0 and len(back.events_of("waiting")) == 1
    assert max(request.latency_s for request in back.requests) > 3.0
    never = world.serve(60, Fault(kind="kill", rank=0, start=0.5))
    assert never.num_lost == 60 - len(never.requests) > 0


def test_everybody_killed_one_after_another_and_back(make_world: Callable) -> None:
    faults = [Fault(kind="kill", rank=rank, start=1.0 + rank, end=8.0 + rank) for rank in range(4)]
    report = make_world().serve(500, *faults, rate_per_s=20.0, seed=9)
    assert sorted(request.number for request in report.requests) == list(range(500))
    assert [len(ranks) for ranks in served_ranks(report)][:4] == [4, 3, 2, 1]
    assert len(served_ranks(report)[-1]) == 4


def test_a_fault_after_the_last_answer_is_noted(make_world: Callable) -> None:
    report = make_world().serve(20, dataclasses.replace(SLOW, start=1000.0, end=None))
    assert not report.valid
    assert "at 1000 s never began: the stream ended after" in report.notes[0]
    assert make_world().serve(20).valid


def test_report_is_written_and_read(make_world: Callable, tmp_path: Path) -> None:
    report = make_world().serve(50, SLOW, Fault(kind="kill", rank=2, start=1.0))
    assert ServingReport.read(report.write(tmp_path / "serving.json")) == report
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        ServingReport.read(tmp_path / "nothing.json")


def test_throughput_counts_the_parts_inside() -> None:
    requests = tuple(ServedRequest(number=i, arrival_s=i, start_s=i, end_s=i + 1.0, tokens=1, plan=0) for i in range(4))
    report = dataclasses.replace(_EMPTY, requests=requests)
    assert report.throughput_per_s(0.5, 2.5) == pytest.approx(1.0)
    assert report.throughput(0.5) == [(0.25 + 0.5 * i, pytest.approx(1.0)) for i in range(8)]
    assert report.restored_after_s(1.0, 0.99) == pytest.approx(1.0)
    assert report.restored_after_s(1.0, 1.5) is None


def test_percentile_is_by_nearest_rank() -> None:
    assert [percentile([3, 1, 2, 4], share) for share in (0.0, 0.25, 0.5, 0.75, 0.76, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert percentile([], 0.5) == 0.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StreamSettings(num_requests=0), "num_requests = 0"),
        (lambda: StreamSettings(rate_per_s=-1.0), "rate_per_s = -1"),
        (lambda: ReschedulingSettings(slow_factor=1.2, recovered_factor=1.3), "goes in and out"),
        (lambda: ReschedulingSettings(repeats=6, window=5), "repeats 6"),
        (lambda: ReschedulingSettings(reaction="panic"), "panic"),  # type: ignore[arg-type]
        (lambda: ReschedulingSettings(probe_every_s=0.0), "at least 0.001"),
        (lambda: Fault(kind="slow", rank=0, start=1.0, end=1.0, factor=2.0), "end after it begins"),
        (lambda: Fault(kind="slow", rank=0, start=1.0, factor=math.inf), "factor = inf"),
        (lambda: Fault(kind="hide", rank=0, start=1.0), "slow, memory, kill, freeze"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


_EMPTY = ServingReport(
    source="simulated",
    model="none",
    cluster=load_cluster("laptop"),
    stream=StreamSettings(),
    rescheduling=ReschedulingSettings(),
    plans=(),
)
