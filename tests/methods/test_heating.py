"""Devices that get hot: predicted over a run, planned for, emulated, and noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_job import tiny_job, write_data

from tests.caches import own_cache
from tests.clusters import cluster_of
from workbench import experiment
from workbench.core import Cluster, Job
from workbench.core.heat import Heat, Level, Levels
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.methods.training.faults import predict
from workbench.methods.training.timetable import Timetable
from workbench.methods.training.worker import TrainingWorker
from workbench.runtime.fleet import Fleet
from workbench.runtime.pacing import Pacer


def curve(*levels: tuple[float, float]) -> Levels:
    return tuple(Level(heat_s=heat_s, speed=speed) for heat_s, speed in ((0.0, 1.0), *levels))


def cluster(*curves: Levels, **settings: Any) -> Cluster:
    names = ("alpha", "beta", "gamma")[: len(curves)]
    return cluster_of(names, bytes_per_s=1e8, sustained=list(curves), **settings)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with own_cache(tmp_path_factory):
        options = {"technique": "lora"}
        yield tiny_job(write_data(tmp_path_factory.mktemp("data")), method="fine_tuning", epochs=6, options=options)


def timetable_of(job: Job, devices: Cluster, paradigm: str) -> Timetable:
    """Return a run's steps under a paradigm's plan, at the devices' cold speeds."""
    method: Any = load_method("fine_tuning")
    job = replace(job, options=job.options | {"paradigm": paradigm})
    prepared = method.prepare(job, ignore)
    costs = method.catalogue(prepared, devices)
    return Timetable(method.rank_job(prepared, costs, devices, method.plan(prepared, costs, devices)))


def total_s(steps: Any) -> float:
    return sum(step.predicted_s for step in steps)


def test_the_pacing_of_emulated_devices_takes_the_predicted_seconds(job: Job) -> None:
    """The seconds that a pacer asks for, by a clock that only it moves, over the steps of a run of one device."""
    cold = timetable_of(job, cluster(()), "standalone")
    step_s = cold.seconds(0)
    devices = cluster(curve((4.5 * step_s, 0.8), (11 * step_s, 0.5)))
    hot = timetable_of(job, devices, "standalone")
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    heat = Heat(devices.devices[0].sustained)
    pacer, paced = Pacer(1.0, dilation=2.0, heat=heat, clock=lambda: now_s, sleep=sleep), list[float]()
    pacer.run(lambda: None, 100 * step_s)
    assert Pacer(1.0, heat=heat).factor == 1.0 and heat.speed == 0.5  # the next job's pacer finds the device hot
    pacer.reset()  # after the steps that warm a process up
    for step in range(hot.num_steps):
        program, begin_s = hot._program(step), now_s
        for index in range(len(program.schedule.ops[0])):
            pacer.run(lambda: None, program.seconds(0, index))
        paced.append((now_s - begin_s) / 2.0)
    predicted = [step.predicted_s for step in predict(hot._job).steps]
    assert sum(paced) == pytest.approx(sum(predicted), rel=0.05)
    assert predicted[-1] == pytest.approx(2 * cold.seconds(hot.num_steps - 1))
    assert sum(predicted) > 1.4 * sum(map(cold.seconds, range(cold.num_steps)))


def test_heat_by_steps_is_heat_by_operations(job: Job) -> None:
    """In a pipeline devices also wait within a step."""
    cold = timetable_of(job, cluster((), ()), "pipeline_parallel")
    step_s = cold.seconds(0)
    devices = cluster(curve((2 * step_s, 0.7)), curve((4 * step_s, 0.5)))
    hot = timetable_of(job, devices, "pipeline_parallel")
    heats, now_s = [Heat(device.sustained) for device in devices.devices], 0.0
    for step in range(hot.num_steps):
        present = hot.slowed(tuple(1 / heat.speed for heat in heats))
        phase, planned = present._step_at(step)
        timeline = present._predictors[phase].timeline(planned)
        for span in sorted(timeline.spans, key=lambda span: span.end_s):
            if not span.op.is_communication:
                heats[span.rank].advance(now_s + span.start_s)
                heats[span.rank].advance(now_s + span.end_s, span.end_s - span.start_s)
        now_s += timeline.makespan_s
    predictions = predict(hot._job)
    assert total_s(predictions.steps) == pytest.approx(now_s, rel=0.02)
    assert sum(epoch.seconds for epoch in predictions.epochs) == pytest.approx(total_s(predictions.steps))
    assert now_s > 1.1 * sum(map(cold.seconds, range(cold.num_steps)))


def test_sweeps_and_timelines_are_of_hot_devices(job: Job) -> None:
    """A sweep's steps begin cold; a timeline shows a step at the speed that the device has then."""
    alone = replace(job, options=job.options | {"paradigm": "standalone"})
    cold = timetable_of(alone, cluster(()), "standalone")
    hot = cluster(curve((0.5 * cold.seconds(0), 0.5)))
    plan = experiment.plan(alone, cluster(()))
    [cold_point], [hot_point] = (
        experiment.sweep(alone, devices, {"alone": plan}, "simulate", num_steps=4) for devices in (cluster(()), hot)
    )
    assert hot_point.predicted_s == pytest.approx(2 * cold_point.predicted_s, rel=0.2)  # the median is of a hot step
    report = experiment.run(alone, hot, "simulate", chosen_plan=plan)
    [timeline] = report.timelines.values()
    middle = next(step for step in report.steps if f"Step {step.step + 1} of" in timeline.title and step.epoch == 0)
    assert timeline.makespan_s == pytest.approx(middle.predicted_s)
    assert timeline.makespan_s == pytest.approx(2 * cold.seconds(middle.step))


@pytest.mark.parametrize("generate", [0, 4])
def test_requests_heat_devices_as_steps_do(job: Job, generate: int) -> None:
    """The first request is answered cold, the last one by a hot device, each at its speed when it begins."""
    options = {"system": "local"} | ({"generate": generate} if generate else {})
    galaxy_job = replace(job, method="galaxy_plus", model="tiny-gpt2-2", options=options, micro_batches=1)
    cold = experiment.run(galaxy_job, cluster(()), "simulate")
    first_s = cold.steps[0].predicted_s
    hot = experiment.run(galaxy_job, cluster(curve((0.5 * first_s, 0.5))), "simulate", chosen_plan=cold.plan)
    assert hot.steps[0].predicted_s == first_s
    assert [step.predicted_s for step in hot.steps[1:]] == pytest.approx(
        [2 * step.predicted_s for step in cold.steps[1:]]
    )
    assert {name: timeline.makespan_s for name, timeline in hot.timelines.items()} == pytest.approx(
        {name: 2 * timeline.makespan_s for name, timeline in cold.timelines.items()}
    )


def test_requests_are_planned_for_hot_devices(job: Job) -> None:
    """A device that is soon hot gets fewer columns of each layer."""
    galaxy_job = replace(job, method="galaxy_plus", model="tiny-bert-2", options={"scheme": 1}, micro_batches=1)
    cold, hot = (
        experiment.plan(galaxy_job, cluster((), levels, flops_per_s=1e7)) for levels in ((), curve((1e-6, 0.25)))
    )
    columns = [{share.rank: share.columns for share in plan.stages[0].shares} for plan in (cold, hot)]
    assert columns[1][1] < columns[0][1]
    [messages] = [note for note in hot.notes if "hot" in note]
    assert "the run's requests take" in messages and "the plan is for hot devices" in messages


def test_a_device_that_gets_slower_is_planned_for_before_it_is_throttled(job: Job) -> None:
    """Simulated: the pace of its steps shows the trend; nobody says that it throttles."""
    cold = experiment.run(job, cluster((), ()), "simulate")
    step_s = total_s(cold.steps) / len(cold.steps)
    hot = cluster((), curve((3 * step_s, 0.85), (4 * step_s, 0.6), (40 * step_s, 0.55)))
    plan = experiment.plan(job, cluster((), ()))
    adapted = experiment.run(job, hot, "simulate", chosen_plan=plan)
    text = " ".join(adapted.notes)
    assert "Pace changed, over the profile's seconds: beta 1.7 times" in text and "From step" in text
    assert total_s(cold.steps) < total_s(adapted.steps) < total_s(cold.steps) / 0.6


def test_a_plan_is_the_best_over_the_run(job: Job) -> None:
    """The plan for hot devices, if they soon get hot; not if the run is over before."""
    soon, late = (cluster((), curve((heat_s, 0.4))) for heat_s in (0.1, 1e6))
    cold, hot, in_time = (experiment.plan(job, one) for one in (cluster((), ()), soon, late))
    assert in_time.assignments == cold.assignments and not any("hot" in note for note in in_time.notes)
    assert hot.assignments != cold.assignments
    [messages] = [note for note in hot.notes if "hot" in note]
    assert "Devices get hot: the run's steps take" in messages and "the plan is for hot devices" in messages
    # What planning has simulated serves as the prediction, which is the same as of a plan that is given.
    planned, given = (experiment.run(job, soon, "simulate", chosen_plan=plan) for plan in (None, hot))
    assert planned.steps == given.steps and planned.timelines == given.timelines


@pytest.mark.parametrize("method", ["fine_tuning", "p_rge"])
def test_a_hot_device_leaves_if_it_is_to(method: str, job: Job) -> None:
    if method == "p_rge":
        job = replace(job, method=method, model="tiny-llama", options={"queries": 4}, epochs=20)
    hot = curve((0.3, 0.5))
    devices = cluster((), hot, ())
    leaving = replace(devices.devices[1], leave_if_throttled=True)
    left = replace(devices, devices=(devices.devices[0], leaving, devices.devices[2]))
    plan = experiment.plan(job, cluster((), (), ()))
    stayed, gone = (experiment.run(job, one, "simulate", chosen_plan=plan) for one in (devices, left))
    assert "beta gives notice: heat slows it down" in " ".join(gone.notes)
    assert "gives notice" not in " ".join(stayed.notes)


def test_an_emulated_device_gets_hot(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Executed: the seconds that it paces, over those of the cold device; the report predicts the hot ones.

    A busy host makes the device wait between its steps, so it may be cold again at the end.
    """
    busy = dict[int, list[float]]()
    monkeypatch.setattr(Fleet, "worked", lambda self, rank, busy_s: busy.setdefault(rank, []).append(busy_s))
    job = replace(job, epochs=2, options=job.options | {"paradigm": "standalone"})
    devices = cluster(curve((0.4, 0.5)), host_share=1.0, flops_per_s=4e8)
    cold = timetable_of(job, devices, "standalone")
    report = experiment.run(job, devices, workdir=tmp_path, fidelity="paced", costs=cold._job.profile)
    paced_s = busy[0][-cold.num_steps :]  # after those of the prediction
    ratios = [seconds / cold.busy_s(step, 0) for step, seconds in enumerate(paced_s)]
    assert (ratios[0], max(ratios)) == pytest.approx((1, 2), rel=0.1)
    predicted = [step.predicted_s for step in report.steps]
    assert (predicted[0], predicted[-1]) == pytest.approx((cold.seconds(0), 2 * cold.seconds(cold.num_steps - 1)))


def test_a_hot_device_is_probed_at_its_present_speed() -> None:
    """A busy host's delays do not count."""
    worker = TrainingWorker(lambda session, result: [], 1.0)
    [device] = cluster(curve((10.0, 0.5))).devices
    context: Any = SimpleNamespace(device=device, fidelity="paced")
    heat = worker.heat(context)
    assert heat is not None and worker.relative_s(1.0, lambda: None, 0.02) == pytest.approx(1.0)
    heat.heat_s = 1e6
    assert worker.relative_s(1.0, lambda: None, 0.02) == pytest.approx(2.0)
    assert worker.relative_s(3.0, lambda: None, 0.02) == pytest.approx(6.0)
