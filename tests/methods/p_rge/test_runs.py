"""Queries spread over engines make the very updates that one process makes, also when devices die, come back, change
pace, or all stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.p_rge.worlds import (
    STEPS,
    E,
    Q,
    chain,
    in_one_process,
    one_pace,
    prepared_job,
    run,
    shared,
    theta,
    trained_by,
    with_options,
)
from workbench.core import Plan
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.errors import CacheError, ConfigError
from workbench.methods.base import SCORED, Event, Outcome, Planned, ignore
from workbench.methods.p_rge import method as p_rge
from workbench.methods.p_rge import policy
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.worker import load_model
from workbench.methods.p_rge.zeroth_order import Prge, StepLog, gradients_of, read_log, smallest_epsilon
from workbench.models.quantization import held_bytes
from workbench.runtime.engines import EngineCluster
from workbench.tasks.prompts import training_batch


@pytest.fixture(scope="module", autouse=True)
def _pace() -> Iterator[None]:
    with one_pace():
        yield


def audited_losses(prepared: PreparedJob, records: tuple[StepLog, ...]) -> list[float]:
    """Return each step's mean loss over its queries, by one process that makes the log's steps.

    Every scalar of the log is computed again at the weights that the steps before it make: devices with other weights
    would have found others.
    """
    model = load_model(prepared)
    estimator, results = Prge(model, prepared.zeroth_order(prepared.setting)), []
    for record in records:
        queries = [query for query in range(Q) if query_seed(prepared.job.seed, record.step, query) in record.seeds]
        assert record.seeds == tuple(query_seed(prepared.job.seed, record.step, query) for query in queries)
        batch = training_batch(prepared.train, E, prepared.job.seed, record.step)
        losses = estimator.losses(batch, record.step, queries)
        assert record.gradients == pytest.approx(gradients_of(losses, prepared.options.epsilon), abs=2e-3)
        results.append(float(losses.mean()))
        model.trainables.apply(record)
    return results


@pytest.mark.parametrize(
    ("model", "plan", "options"),
    [
        ("tiny-llama", shared(2, 0, 1, 1), {}),
        ("tiny-gpt2", chain(2, 5, 6, ranks=(3, 0, 1)), {}),
        ("tiny-t5", chain(4, 6, ranks=(1, 2)), {}),  # cut within the decoder
        ("tiny-bert", shared(1, 3), {}),  # with a trained head
        # q + 1 passes: one device computes the loss in the middle, for all.
        ("tiny-llama", shared(2, 0, 2, 1), {"estimator": "one_sided", "learning_rate": 1e-3}),
        ("tiny-llama", chain(2, 6, ranks=(2, 0), queries=Q + 1), {"estimator": "one_sided", "learning_rate": 1e-3}),
        ("tiny-llama", shared(1, 3), {"estimator": "low_rank", "subspace_steps": 3}),
        ("tiny-llama", chain(2, 6, ranks=(0, 1)), {"estimator": "low_rank", "subspace_steps": 3}),
        ("tiny-llama", chain(2, 6, ranks=(0, 1)), {"estimator": "low_rank_momentum", "subspace_steps": 3}),
        ("tiny-llama", shared(2, 1, 1), {"estimator": "jvp"}),
    ],
    ids=[
        "queries divided",
        "chain",
        "chain of an encoder-decoder",
        "encoder",
        "one-sided",
        "chain, one-sided",
        "low-rank",
        "chain, low-rank",
        "chain, low-rank with momentum",
        "jvp",
    ],
)
def test_equals_one_process(
    model: str, plan: Plan, options: dict[str, Any], engines: EngineCluster, tmp_path: Path
) -> None:
    """The same scalars, and the same weights to float tolerance; between devices travel seeds and losses alone."""
    prepared = prepared_job(model, **options)
    expected, logs, _ = in_one_process(prepared)
    events: list[Event] = []
    outcome = run(prepared, engines, plan, tmp_path, events=events)
    trained, records = trained_by(outcome, prepared)
    assert [record.seeds for record in records] == [log.seeds for log in logs]
    torch.testing.assert_close(theta(trained), theta(expected), atol=2e-5, rtol=1e-4)
    assert theta(trained).abs().max() > 1e-3
    losses = [event.loss for event in events if event.kind == "step"]
    counts = [(event.message, event.step, event.num_steps) for event in events if event.kind == "count"]
    num_test, num_validation = len(prepared.task.test), len(prepared.task.validation)
    assert (SCORED, num_validation, num_validation) in counts and counts[-1] == (SCORED, num_test, num_test)
    assert losses == pytest.approx([step.loss for step in outcome.steps])
    assert [step.samples for step in outcome.steps] == [E] * STEPS
    assert {"first epoch, predicted", "first epoch, measured"} == set(outcome.timelines)
    if len(plan.stages) == 1:
        parts = {share.rank: prepared.rule.query_parts * share.queries + 1 for share in plan.stages[0].shares}
        assert outcome.bytes["sent in a step, measured"] == 4 * sum(parts.values()) * (len(parts) - 1)


@pytest.mark.parametrize(("precision", "compute"), [("float16", "float32"), ("nf4", None), ("bfloat16", None)])
def test_weights_of_a_precision(precision: str, compute: str | None, engines: EngineCluster, tmp_path: Path) -> None:
    """Stored in few bits on devices and in one process, and computed in float32 or in what was asked for, the updates
    are the same."""
    prepared = prepared_job(precision=precision, compute_dtype=compute, steps=3)
    model = load_model(prepared)
    assert model.dtype is (torch.bfloat16 if precision == "bfloat16" else torch.float32)
    reference = load_model(prepared_job())
    assert held_bytes(model.backbone) < 0.6 * held_bytes(reference.backbone)
    _, logs, _ = in_one_process(prepared)
    outcome = run(prepared, engines, shared(2, 1, 1), tmp_path)
    trained, records = trained_by(outcome, prepared)
    assert [record.seeds for record in records] == [log.seeds for log in logs]
    tolerance = 0.5 if model.dtype is torch.bfloat16 else 1e-2  # a slope's rounding
    for record, log in zip(records, logs, strict=True):
        assert record.gradients == pytest.approx(log.gradients, abs=tolerance)
    assert theta(trained).abs().max() > 1e-3
    rounded = any("is too small for" in note for note in outcome.notes)
    assert rounded == (model.dtype is torch.bfloat16 and smallest_epsilon(model) > prepared.options.epsilon)


def slow_until_back(step: int) -> Callable[[Event], None]:
    """Return a progress function that makes device-0 slow from a step on until another device is up again, however long
    that takes on a busy host: so that steps are left for it."""
    schedules: list[FaultSchedule] = []

    def progress(event: Event) -> None:
        if event.faults is not None and any(fault.kind != "slow" and fault.end for fault in event.faults.faults):
            event.faults.add(Fault(kind="slow", rank=0, start=step, factor=30.0, unit="step"))
            schedules.append(event.faults)
        if event.device is not None and event.device.phase == "back":
            for schedule in schedules:
                schedule.end(0, 0.0)

    return progress


@pytest.mark.parametrize(
    ("plan", "faults", "steps", "row_s"),
    [
        (shared(2, 1, 1), "slow:device-0:2@step1; kill:device-1@step2-4", 30, 1e-3),
        (shared(2, 2), "freeze:device-0@step3", 14, 4e-4),
        (chain(3, 6, ranks=(0, 1)), "kill:device-1@step3", 14, 4e-4),  # the only one that computes the loss
    ],
    ids=["killed and back", "frozen", "last of a chain"],
)
def test_weights_and_losses_after_a_fault_are_those_of_one_process(
    plan: Plan, faults: str, steps: int, row_s: float, engines: EngineCluster, tmp_path: Path
) -> None:
    """Whoever is lost, in whichever plan: nobody's weights differ, and the report's losses are whole.

    One that comes back makes all steps again from the log; its loss has cost its share of one step.
    """
    prepared = prepared_job(faults=faults, steps=steps)
    with one_pace(row_s):
        outcome = run(prepared, engines, plan, tmp_path, row_s=row_s, on_event=slow_until_back(5))
    _, records = trained_by(outcome, prepared)
    expected = audited_losses(prepared, records)
    assert [(step.epoch, step.step) for step in outcome.steps] == [
        divmod(step, prepared.steps_per_epoch) for step in range(steps)
    ]
    assert [step.loss for step in outcome.steps] == pytest.approx(expected, rel=1e-4)
    if "@step2-4" in faults:
        queries = [len(record.seeds) for record in records]
        assert sorted(queries) in ([Q] * 30, [Q - 1] + [Q] * 29)  # all were told already if it died at a step's end
        assert queries.index(min(queries)) >= 2 or min(queries) == Q
        assert "device-1 is lost" in " ".join(outcome.notes)
        assert "device-1 has come back" in " ".join(outcome.notes)
        assert outcome.bytes["device-1: sent"] > 0


def test_a_slow_device_gets_fewer_queries_in_mid_run(
    engines: EngineCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the updates are does not change: only who computes them."""
    monkeypatch.setattr(policy, "TOLERATED", 1e3)
    prepared = prepared_job(faults="slow:device-0:8@step2", steps=24, adapt=True)
    expected, _, _ = in_one_process(prepared)
    with one_pace(1e-3):
        outcome = run(prepared, engines, shared(1, 1, 1, 1), tmp_path, row_s=1e-3)
    trained, records = trained_by(outcome, prepared)
    torch.testing.assert_close(theta(trained), theta(expected), atol=1e-4, rtol=1e-3)
    assert len(records) == 24
    assert any("profile's seconds: " in note and "device-0" in note for note in outcome.notes), outcome.notes
    sent = [outcome.bytes[f"device-{rank}: sent"] for rank in range(4)]
    assert sent[0] < max(sent[1:])


def test_a_run_that_was_stopped_goes_on_from_its_log(engines: EngineCluster, tmp_path: Path) -> None:
    """To the very same steps and report; on other devices to the same weights, and never with other settings."""
    prepared = prepared_job()

    def stop(event: Event) -> None:
        if event.kind == "step" and (event.epoch, event.step) == (0, 3):
            raise InterruptedError

    reference = run(prepared, engines, shared(3, 1), tmp_path / "whole")
    with pytest.raises(InterruptedError):
        run(prepared, engines, shared(3, 1), tmp_path / "stopped", on_event=stop)
    log = tmp_path / "stopped" / "steps" / "log.jsonl"
    kept = log.read_bytes()
    log.write_bytes(kept + b"[4,0.005,[12")  # torn by the crash
    again = run(prepared, engines, shared(3, 1), tmp_path / "stopped", resume=True)
    assert read_log(log) == read_log(Path(reference.artifacts["log"]))
    assert log.read_bytes().startswith(kept)
    assert again.metrics == reference.metrics
    assert again.notes[0].startswith("Resumed after ")
    assert_same_report(again, reference)
    log.write_bytes(kept)
    elsewhere = run(prepared, engines, chain(3, 6, ranks=(2, 0)), tmp_path / "stopped", resume=True)
    torch.testing.assert_close(
        theta(trained_by(elsewhere, prepared)[0]), theta(trained_by(reference, prepared)[0]), atol=2e-5, rtol=1e-4
    )
    finished = run(prepared, engines, shared(3, 1), tmp_path / "stopped", resume=True)
    assert_same_report(finished, elsewhere)
    assert finished.metrics == elsewhere.metrics
    with pytest.raises(CacheError, match=r"option epsilon = 0\.01 instead of 0\.02"):
        run(prepared_job(epsilon=2e-2), engines, shared(3, 1), tmp_path / "stopped", resume=True)


def assert_same_report(found: Outcome, expected: Outcome) -> None:
    """All steps and the very same losses; the times of what was not done again are those of the first time."""
    assert [step.loss for step in found.steps] == [step.loss for step in expected.steps]
    assert len(found.steps) == STEPS and all(step.measured_s for step in found.steps)
    assert [epoch.loss for epoch in found.epochs] == [epoch.loss for epoch in expected.epochs]


def test_as_one_job_of_all_devices(engines: EngineCluster, tmp_path: Path) -> None:
    """A sweep's steps under plans of other shares, measured; an idle device only waits."""
    prepared, cluster = prepared_job(), engines.cluster
    method = p_rge.PRGE()
    profile = method.profile(prepared, cluster, lambda event: None)
    plans = {"all": shared(1, 1, 1, 1), "one": shared(0, 4)}
    points = [
        method.sweep_point(Planned(prepared, profile, cluster, plan), name, engines, num_steps=2, folder=tmp_path)
        for name, plan in plans.items()
    ]
    assert [point.name for point in points] == ["all", "one"]
    assert all(point.measured_s and point.predicted_s for point in points)
    assert [point.num_steps for point in points] == [2, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": 0}, "queries = 0"),
        ({"epsilon": 0.0}, "epsilon = 0"),
        ({"steps": 0}, "steps = 0"),
        ({"compute_dtype": "float8"}, "one of float32, float16, bfloat16, or left out"),
        ({"precision": "int5"}, "one of float32, bfloat16, float16, int8, nf4"),
        ({"batch_size": 0}, "batch_size"),
        ({"execution": "sideways"}, "one of auto"),
        ({"perturbation": 3}, "perturbation"),
        ({"rank": 0}, "rank = 0"),
        ({"estimator": "one_side"}, "one of two_point, one_sided, low_rank, low_rank_momentum, jvp"),
        ({"estimator": "one_sided", "queries": 1}, "needs at least 2"),
        ({"estimator": "one_sided", "execution": "inner"}, "It has: auto, both, sequential"),
        ({"estimator": "jvp", "execution": "outer"}, "It has: auto, both, inner"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared_job(**options)


def test_plans_that_cannot_be(engines: EngineCluster, tmp_path: Path) -> None:
    prepared, cluster = prepared_job(), engines.cluster
    method = p_rge.PRGE()
    profile = method.profile(prepared, cluster, ignore)
    for plan, message in (
        (shared(1, 1), r"\[2\] queries"),
        (shared(2, 2, layers=5), "5 layers"),
        (shared(2, 2, batch_size=3), "3 samples"),
        (chain(3, 6, ranks=(0, 0)), "each device once"),
        (chain(3, 6, ranks=(0, 7)), "has 4 devices"),
    ):
        with pytest.raises(ConfigError, match=message):
            method.check(prepared, profile, cluster, plan, folder=tmp_path)
    derivatives = with_options(prepared, estimator="jvp")
    with pytest.raises(ConfigError, match="derivatives are not sent from stage to stage"):
        method.check(derivatives, profile, cluster, chain(3, 6, ranks=(0, 1)), folder=tmp_path)
