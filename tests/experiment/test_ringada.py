"""A ring as a whole run: simulated, executed, resumed, with lost devices, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_job import two_devices

from tests.clusters import with_devices
from tests.experiment.running import at, interrupt, losses, run
from tests.plans import plan_of, stage, staged_plan, stages
from workbench import experiment
from workbench.core import Cluster, Job, Plan, Report
from workbench.core.errors import ConfigError, PlanError
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS
from workbench.core.summary import summary_rows
from workbench.methods.ringada import method
from workbench.methods.ringada.method import rank_job, with_in_flight
from workbench.methods.ringada.prepare import prepare
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.methods.training.phases import Predictor
from workbench.models.loading import load_stack
from workbench.models.saving import load_adapter, load_trained
from workbench.models.techniques import TechniqueStage


@pytest.fixture(scope="module")
def job(job: Job) -> Job:
    """Three epochs of two rounds of two mini-batches; a layer more every three."""
    options = {"local_iterations": 1, "unfreeze_every": 3, "bottleneck": 8, "replan": False}
    return replace(job, method="ringada", options=options, train_samples=56)


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(job, tmp_path_factory.mktemp("whole"))


def test_simulated(job: Job) -> None:
    report = experiment.run(job, two_devices(), "simulate")
    assert len(report.steps) == 6 and all(step.predicted_s for step in report.steps)
    model = TechniqueStage(load_stack(job.model).stage(0, 6), prepare(job).config)
    count = sum(parameter.numel() for parameter in model.trained().values())
    trained, weights = report.bytes[TRAINED_WEIGHTS], report.bytes[ALL_WEIGHTS]
    assert trained == 4 * count
    # Of the backbone, small parts are not counted.
    assert weights == pytest.approx(4 * sum(parameter.numel() for parameter in model.parameters()), rel=0.01)
    assert ("Weights", f"{trained / weights:.1%} are trained at most: {count:,} numbers") in summary_rows(report)
    assert (
        report.plan.num_layers == 6
        and experiment.plan(job, two_devices()).stages == report.plan.stages
        and sorted(stage.ranks for stage in report.plan.stages) == [(0,), (1,)]
    )


def test_layers_are_computed_again_where_their_activations_do_not_fit(job: Job) -> None:
    """A ring of one device, whose memory is between the needs of both."""
    job = replace(job, epochs=1, options=job.options | {"unfreezing": "all"})
    prepared, [alone] = prepare(job), two_devices().devices[:1]
    cluster = Cluster(name="alone", devices=(alone,))
    profile = method.RingAda().catalogue(prepared, cluster)
    kept = method.plan_job(prepared, profile, cluster)
    again = replace(kept, stages=tuple(replace(stage, activations="recompute") for stage in kept.stages))
    prices = method.prices_of(prepared, profile, cluster)
    [kept_need], [again_need] = (method.demands(prices, plan) for plan in (kept, again))
    between = (kept_need.nbytes + again_need.nbytes) // 2
    small = with_devices(cluster, memory_bytes=between)
    chosen = method.plan_job(prepared, profile, small)
    assert not kept.recomputes and chosen.recomputes and "the backward pass computes them again" in chosen.notes[-1]
    with pytest.raises(PlanError, match="are missing"):
        method.plan_job(prepare(replace(job, options=job.options | {"activations": "memory"})), profile, small)
    phase = rank_job(prepared, profile, small, chosen).phases()[0]
    assert Predictor(phase).timeline(phase.steps(0)[0]).peak_bytes(0) <= between


def test_so_many_mini_batches_are_in_flight_as_pay_and_fit(job: Job) -> None:
    prepared = prepare(replace(job, epochs=1, options=job.options | {"local_iterations": 4, "unfreeze_every": 1000}))
    cluster, profile = two_devices(), method.RingAda().catalogue(prepared, two_devices())

    def run_with(plan: Plan, memory_bytes: int = 10**9) -> RingRankJob:
        return rank_job(prepared, profile, with_devices(cluster, memory_bytes=memory_bytes), plan)

    def peak_bytes(plan: Plan) -> int:
        phase = run_with(plan).phases()[0]
        return max(Predictor(phase).timeline(step).peak_bytes(rank) for step in phase.steps(0) for rank in (0, 1))

    ample, one = with_in_flight(run_with(moving((3, 3)))), replace(moving((3, 3)), in_flight=1)
    assert ample.in_flight > 1 and peak_bytes(one) < peak_bytes(ample)
    assert with_in_flight(run_with(one, peak_bytes(ample) - 1)).in_flight < ample.in_flight
    for local_iterations, in_flight in ((4, 3), (1, 2)):  # a round of two devices ends with an empty ring
        chosen = replace(job, options=job.options | {"in_flight": 3, "local_iterations": local_iterations})
        assert experiment.run(chosen, cluster, "simulate").plan.in_flight == in_flight


def test_executed_it_is_saved_for_later(whole: Report) -> None:
    assert len(losses(whole)) == 6 and all(loss is not None and 0 < loss < 2 for *_, loss in losses(whole))
    assert [step.lowest_trained for step in whole.steps] == [
        5,
        4,
        4,
        3,
        2,
        2,
    ]  # one more every three mini-batches, two in a round
    model, about = load_trained(whole.artifacts["adapter"])
    assert about.config.technique == "serial" and set(model.adapters) == {str(layer) for layer in range(6)}


def test_it_ends_when_the_losses_that_come_to_the_coordinator_have_converged_and_a_resume_keeps_the_end(
    job: Job, tmp_path: Path
) -> None:
    idle = replace(job, epochs=6, learning_rate=1e-9, converged_after=1)
    report = run(idle, tmp_path)
    means = [epoch.loss for epoch in report.epochs]
    assert (
        1 < len(means) < 6 and means[-1] > 0.99 * min(means[:-1]) and all(b < 0.99 * a for a, b in pairwise(means[:-1]))
    )
    text = f"The training has converged after {len(means)} of 6 epochs"
    assert [note.startswith(text) for note in report.notes if "converged" in note] == [True] and len(
        losses(report)
    ) == 2 * len(means)
    resumed = run(idle, tmp_path, resume=True)
    assert losses(resumed) == losses(report) and any(note.startswith(text) for note in resumed.notes)
    assert resumed.metrics == report.metrics
    longer = run(replace(idle, converged_after=0), tmp_path, resume=True)
    assert len(longer.epochs) == 6 and losses(longer)[: 2 * len(means)] == losses(report)
    assert "does all 6 epochs" in experiment.run(idle, two_devices(), "simulate").notes[0]


def test_a_cache_of_frozen_layers_changes_no_loss_and_is_filled_again_after_a_resume_or_a_loss(
    job: Job, whole: Report, tmp_path: Path
) -> None:
    cached = replace(job, options=job.options | {"cache": True})
    loss_of = [loss for *_, loss in losses(whole)]
    report = run(cached, tmp_path / "cached")
    assert [loss for *_, loss in losses(report)] == pytest.approx(loss_of, rel=1e-5)
    assert any("activation cache" in name and nbytes > 0 for name, nbytes in report.bytes.items())
    assert not list((tmp_path / "cached").rglob("taps.bin"))
    with pytest.raises(KeyboardInterrupt):
        run(cached, tmp_path / "resumed", progress=at(2, interrupt))
    assert [loss for *_, loss in losses(run(cached, tmp_path / "resumed", resume=True))] == pytest.approx(
        loss_of, rel=1e-5
    )
    without, lost = alpha_lost_after_step_3(job, tmp_path), alpha_lost_after_step_3(cached, tmp_path)
    assert [loss for *_, loss in losses(lost)] == pytest.approx([loss for *_, loss in losses(without)], rel=1e-5)


def alpha_lost_after_step_3(job: Job, folder: Path) -> Report:
    """Run the job without alpha, and without its samples, from step 4 on.

    On a busy host alpha may be killed before its snapshot of step 3 has reached beta.  Then step 3 is repeated without
    alpha's samples, with another loss: the run is tried again.
    """
    lost = replace(job, faults="kill:alpha@step3", snapshot_every=1, snapshot_to="neighbour")
    for attempt in range(5):
        report = run(lost, folder / f"lost, cache {job.options.get('cache', False)}, {attempt}")
        assert "alpha is lost" in " ".join(report.notes)
        if any(note.startswith("From step 4 on") for note in report.notes):
            return report
    pytest.fail("The snapshot of step 3 never reached beta.")


def test_parallel_adapters_survive_a_lost_device_and_are_saved(job: Job, tmp_path: Path) -> None:
    """The lost one has the first block, begins each round and keeps the head."""
    options = job.options | {"technique": "parallel", "reduction": 4, "cache": True}
    report = run(
        replace(job, options=options, faults="kill:alpha@step3", snapshot_every=1, snapshot_to="neighbour"), tmp_path
    )
    assert "alpha is lost" in " ".join(report.notes) and len(losses(report)) == 6
    assert all(loss is not None and 0 < loss < 2 for *_, loss in losses(report))
    adapter, about = load_adapter(report.artifacts["adapter"])
    assert (about.config.reduction, len(adapter.layers)) == (4, 6)


def moving(first: tuple[int, ...], *others: tuple[int, tuple[int, ...]]) -> Plan:
    """Return a plan of two devices.  others: the round from which on they have so many layers each."""

    def parts(counts: tuple[int, ...]) -> list[tuple[int, dict[int, int]]]:
        return [(count, {rank: 8}) for rank, count in enumerate(counts)]

    later = tuple((at, stages(*parts(counts))) for at, counts in others)
    return staged_plan(*parts(first), method="ringada", micro_batches=2, later=later)


def test_layers_are_moved_between_rounds_with_their_state_and_their_caches(
    job: Job, whole: Report, tmp_path: Path
) -> None:
    """Before round 4 layers 3 and 4, which is still frozen, go to alpha; before round 5, an epoch's first, layer 2 goes
    to beta."""
    plan = moving((2, 4), (3, (4, 2)), (4, (2, 4)))
    cached = replace(job, options=job.options | {"cache": True}, snapshot_every=2, snapshot_to="neighbour")
    report = run(cached, tmp_path, chosen_plan=plan)
    assert [loss[:2] for loss in losses(report)] == [loss[:2] for loss in losses(whole)]
    assert [loss for *_, loss in losses(report)] == pytest.approx([loss for *_, loss in losses(whole)], rel=1e-5)
    assert "From step 4 on: layers 0-3 on alpha (8 samples); layers 4-5 on beta" in " ".join(report.notes)
    assert report.phases_s["moving the cache"] > 0 and report.phases_s["moving the state"] > 0
    simulated = experiment.run(cached, two_devices(), "simulate", chosen_plan=plan)
    assert simulated.phases_s["changes of the plan"] > 0 and len({step.predicted_s for step in simulated.steps}) > 2


def test_a_run_whose_layers_were_moved_is_resumed(job: Job, whole: Report, tmp_path: Path) -> None:
    plan = moving((2, 4), (2, (4, 2)))
    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, progress=at(1, interrupt), chosen_plan=plan)
    resumed = run(job, tmp_path, resume=True, chosen_plan=plan)
    assert [loss for *_, loss in losses(resumed)] == pytest.approx([loss for *_, loss in losses(whole)], rel=1e-5)
    assert "Resumed" in " ".join(resumed.notes)


def test_federated_averaging_is_resumed_and_goes_on_without_a_lost_device(job: Job, tmp_path: Path) -> None:
    federated = replace(job, options=job.options | {"federated": True})
    with pytest.raises(ConfigError, match=r"cache = True .*no effect with federated = True.*Leave it out"):
        run(replace(federated, options=federated.options | {"cache": True}), tmp_path / "cached")
    reference = run(federated, tmp_path / "whole")
    assert reference.plan.stages[0].ranks == (0, 1) and reference.plan.stages[0].num_layers == 6
    predicted = reference.timelines["first epoch, predicted"].spans
    assert {"MEAN", "ALLREDUCE"} <= {span.op.kind for span in predicted}
    assert all(span.end_s > span.start_s for span in predicted)
    with pytest.raises(KeyboardInterrupt):
        run(federated, tmp_path / "resumed", progress=at(1, interrupt))
    assert losses(run(federated, tmp_path / "resumed", resume=True)) == losses(reference)
    report = run(
        replace(federated, faults="kill:alpha@step3", snapshot_every=1, snapshot_to="neighbour"), tmp_path / "lost"
    )
    assert (
        "alpha is lost" in " ".join(report.notes)
        and losses(report)[:2] == losses(reference)[:2]
        and len(losses(report)) == 6
    )


def test_a_policy_that_goes_by_the_run_is_resumed_and_survives_a_lost_device(job: Job, tmp_path: Path) -> None:
    adaptive = replace(job, options=job.options | {"unfreezing": "gradient_norm", "patience": 1, "threshold": 0.9})
    reference = run(adaptive, tmp_path / "whole")
    assert "The policy 'gradient_norm' goes by what the run brings" in " ".join(reference.notes)
    simulated = experiment.run(adaptive, two_devices(), "simulate")
    assert "goes by what the run brings" in " ".join(simulated.notes)  # an assumption stays one
    assert [step.lowest_trained for step in reference.steps] == [5, 5, 4, 4, 3, 3]  # known only afterwards
    with pytest.raises(KeyboardInterrupt):
        run(adaptive, tmp_path / "resumed", progress=at(1, interrupt))
    assert losses(run(adaptive, tmp_path / "resumed", resume=True)) == losses(reference)
    report = run(
        replace(adaptive, faults="kill:alpha@step3", snapshot_every=1, snapshot_to="neighbour"), tmp_path / "lost"
    )
    assert (
        "alpha is lost" in " ".join(report.notes)
        and losses(report)[:2] == losses(reference)[:2]
        and len(losses(report)) == 6
    )


@pytest.mark.parametrize(("lost", "to"), [("alpha", "disk"), ("beta", "neighbour")])
def test_the_other_goes_on_without_the_lost_device_s_data(
    lost: str, to: Any, job: Job, whole: Report, tmp_path: Path
) -> None:
    """One of the two begins each round, holds the head when it is lost, and keeps it between rounds."""
    report = run(replace(job, faults=f"kill:{lost}@step3", snapshot_to=to), tmp_path)
    text = " ".join(report.notes)
    assert f"{lost} is lost" in text and f"28 training samples of {lost}" in text
    assert [loss[:2] for loss in losses(report)] == [loss[:2] for loss in losses(whole)]
    assert losses(report)[:2] == losses(whole)[:2]
    assert all(loss is not None and 0 < loss < 2 for *_, loss in losses(report))


def test_faults_are_simulated_whatever_rule_has_split_the_data(job: Job) -> None:
    """This rule suits two devices alone."""
    job = replace(job, faults="kill:alpha@step3", options=job.options | {"data": "sizes:3,1"})
    report = experiment.run(job, two_devices(), "simulate")
    assert all(
        words in " ".join(report.notes)
        for words in ("alpha is lost", "layers 0-5 on beta", "42 training samples of alpha")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"unfreeze_every": 0}}, r"unfreeze_every"),
        ({"options": {"bottleneck": 0}}, r"bottleneck"),
        ({"options": {"depth": 7}}, r"The option depth = 7 of ringada was asked for. 'tiny-bert' has 6 layers"),
        ({"options": {"unfreezing": "sometimes"}}, r"one of steps, rounds, all, plateau, gradient_norm"),
        ({"options": {"data": "sizes:1,2,3"}}, r"takes 2 numbers here, not 3"),
        ({"train_samples": 1}, r"no data"),
        (
            {"model": "tiny-t5", "options": {"technique": "parallel", "cache": True}},
            r"option cache .* technique = 'parallel'.*Leave one out",
        ),
        ({"faults": "kill:beta@step6"}, r"The run has 6 steps"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str, job: Job) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment.run(replace(job, **changes), two_devices(), "simulate")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [(0, 2, (0,)), (3, 6, (1,))],
            r"A stage that begins at layer 3 was asked for. Layer 2 comes next. Close the gap",
        ),
        ([(0, 2, (0,)), (2, 5, (1,))], r"It has 5 layers; 'tiny-bert' has 6"),
        ([(0, 2, (0,)), (2, 6, (0,))], r"Use each device once"),
        ([(0, 6, (0, 1))], r"A ring has one device at each stage"),
    ],
)
def test_assignments_that_are_no_ring_are_refused(parts: list, message: str, job: Job) -> None:
    def given() -> Plan:
        cut = tuple(stage(start, stop, dict.fromkeys(ranks, 2 // len(ranks))) for start, stop, ranks in parts)
        return plan_of(cut, method="ringada", micro_batches=job.batch_size // 2)

    with pytest.raises(ConfigError, match=message):
        experiment.run(job, two_devices(), "simulate", chosen_plan=given())


def test_of_more_devices_than_blocks_one_stays_out_and_its_samples_too(job: Job, tmp_path: Path) -> None:
    report = run(replace(job, model="tiny-bert-1", epochs=1), tmp_path)
    [[used]] = [stage.ranks for stage in report.plan.stages]
    names = "alpha", "beta"
    assert "The ring has 1 of 2 devices" in report.plan.notes[0]
    assert report.plan.notes[-1] == f"Not used by this plan: {names[1 - used]}."
    assert report.steps and all(loss is not None and 0 < loss < 2 for *_, loss in losses(report))
