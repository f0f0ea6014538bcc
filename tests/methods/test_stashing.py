"""Asynchronous 1F1B with stashed weights gives what one process gives that applies each stage's gradient with the
stage's delay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import run_program, run_schedule
from stopped_run import stop_in_the_second_epoch, train_rank
from torch import Tensor

from tests.methods.builders import LEARNING_RATE, free_profile, losses_of, made_up_split
from tests.methods.conftest import four_devices, needs_jax
from tests.models.helpers import technique_config, technique_part
from tests.plans import staged_plan
from tests.weights import same_weights
from workbench.core import Job
from workbench.core.schedule import Value
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.divided import divided_or_whole
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.fine_tuning.jax_stage import JaxStageCompute
from workbench.methods.fine_tuning.phases import FineTuningRankJob, TechniquePhase
from workbench.methods.fine_tuning.stashing import StashingHandlers, WindowOptimizer, all_parts
from workbench.methods.training.handlers import share_of
from workbench.methods.training.interrupted import begin, take_up
from workbench.methods.training.rank_phases import make_optimizer
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, set_learning_rate
from workbench.models.optimization import make_optimizer as plain_optimizer
from workbench.models.parallel_adapter import task_loss
from workbench.runtime.engines import EngineCluster
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules import check
from workbench.schedules.division import Division
from workbench.tasks.tokenize import collate

BATCH, SAMPLES, EPOCHS = 4, 30, 2  # eight mini-batches an epoch, the last one smaller
EVEN, THREE = ((0, 2), (1, 2), (2, 1), (3, 1)), ((2, 3), (0, 1), (1, 2))  # (device, layers) of each stage
HEADS = Division(heads=(3, 1), columns=(), slower=(1.0, 2.0), names=("cpu", "gpu"))
BOTH = Division(heads=(1, 1), columns=(20, 12), slower=(1.0, 2.0), names=("cpu", "gpu"))  # of two groups, for Llama


def asynchronous_job(
    model: str,
    technique: str,
    blocks: tuple[tuple[int, int], ...],
    folder: Path,
    drain_every: int,
    window: int = 0,
    versions: VersionRule = "stashing",
) -> FineTuningRankJob:
    """Return a job.  blocks: (rank, layers) of each stage."""
    return FineTuningRankJob(
        job=Job(model=model, epochs=EPOCHS, batch_size=BATCH, learning_rate=LEARNING_RATE),
        cluster=four_devices(),
        plan=staged_plan(*((layers, {rank: BATCH}) for rank, layers in blocks)),
        profile=free_profile(6, 4),
        is_paced=False,
        config=technique_config(load_stack(model), technique),
        facts=model_facts(model),
        split=made_up_split(SAMPLES),
        folder=folder,
        schedule="asynchronous_1f1b",
        drain_every=drain_every,
        window=window,
        versions=versions,
    )


def stage_of_parameter(job: FineTuningRankJob) -> dict[str, int]:
    """Return the stage that trains each parameter."""
    stack, results = load_stack(job.job.model), {}
    for number, stage in enumerate(job.plan.stages):
        part = technique_part(stack, job.config, stage.start, stage.stop)
        results |= dict.fromkeys(part.trained(), number)
    return results


def by_sgd(optimizer: FlatAdamW) -> FlatAdamW:
    """Let an optimizer's steps be those of plain SGD: AdamW blows up noise, and hides a gradient's size."""
    optimizer._optimizer = torch.optim.SGD(optimizer._leaves)  # type: ignore[assignment]
    return optimizer


def with_delays(job: FineTuningRankJob, rule: str = "adamw") -> tuple[list[float], Mapping[str, Tensor]]:
    """Return every mini-batch's loss and the final weights of a plain loop over the whole model.

    Of mini-batch m since the last drain stage i of N computes with its weights after mini-batch m - (N - i) since then,
    or with the first ones since then; each gradient is taken at these weights and applied to the newest.  The other
    rules have another delay.
    """
    stack, stages = load_stack(job.job.model), len(job.plan.stages)
    model = technique_part(stack, job.config).train()
    owner = stage_of_parameter(job)
    weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer: torch.optim.Optimizer = (
        plain_optimizer(model, 0.01) if rule == "adamw" else torch.optim.SGD(weights.values())
    )
    assert set(weights) == set(owner)
    planned = [(epoch, window) for epoch in range(EPOCHS) for window in job.planned_windows(epoch)]
    parts, losses, history = job.per_update, list[float](), list[dict[str, Tensor]]()
    num_batches = sum(len(window.samples) for _, window in planned) // parts
    for epoch, window in planned:
        if window.shape.continues is None:
            history = [
                {name: weight.detach().clone() for name, weight in weights.items()}
            ]  # after 0, 1, 2, ... mini-batches since the drain
        for samples in (sum(window.samples[at : at + parts], ()) for at in range(0, len(window.samples), parts)):
            number = len(history) - 1
            batch = collate(job.split, samples)
            for name, weight in weights.items():
                delay = delay_of(job.versions, stages - owner[name] - 1, stages)
                weight.data.copy_(history[max(0, number - delay)][name])
            _, last_hidden = model(batch.input_ids, batch.attention_mask)
            logits = model.logits(last_hidden, batch.attention_mask, batch.sample_ids, epoch)
            loss = task_loss(logits, batch.labels, model.config.kind)
            loss.backward()
            for name, weight in weights.items():
                weight.data.copy_(history[-1][name])
            set_learning_rate(optimizer, learning_rate_at(len(losses), num_batches, job.job.learning_rate, 0.06))
            optimizer.step()
            optimizer.zero_grad()
            history.append({name: weight.detach().clone() for name, weight in weights.items()})
            losses.append(loss.item())
    return losses, model.trained()


@pytest.mark.parametrize(
    ("model", "technique", "blocks", "drain_every", "rule", "divisions", "window", "versions"),
    [
        ("tiny-bert", "full", EVEN, 0, "adamw", {1: HEADS}, 5, "stashing"),
        ("tiny-gpt2", "lora", THREE, 0, "sgd", {}, 3, "stashing"),
        ("tiny-llama", "full", ((1, 1), (0, 5)), 0, "adamw", {0: BOTH, 1: BOTH}, 2, "stashing"),
        ("tiny-bert", "serial", ((0, 1), (1, 5)), 0, "sgd", {}, 7, "stashing"),
        ("tiny-bert", "full", EVEN, 0, "sgd", {1: HEADS}, 4, "vertical_sync"),
        ("tiny-gpt2", "lora", THREE, 3, "adamw", {}, 0, "vertical_sync"),
        ("tiny-bert", "full", ((0, 3), (1, 3)), 0, "sgd", {}, 3, "two"),
        ("tiny-gpt2", "lora", ((2, 3), (0, 3)), 0, "adamw", {0: HEADS}, 2, "two"),
        ("tiny-gpt2", "serial", THREE, 0, "adamw", {0: HEADS, 2: HEADS}, 0, "stashing"),
        ("tiny-llama", "full", ((1, 1), (0, 4), (3, 1)), 3, "adamw", {0: BOTH, 1: BOTH, 3: BOTH}, 0, "stashing"),
        ("tiny-t5", "serial", EVEN, 0, "adamw", {}, 0, "stashing"),
        ("tiny-gpt2", "parallel", THREE, 0, "sgd", {}, 3, "stashing"),
        ("tiny-t5", "parallel", EVEN, 0, "sgd", {}, 0, "stashing"),
        ("tiny-bart", "lora", ((0, 1), (1, 1), (2, 2), (3, 2)), 5, "sgd", {}, 0, "stashing"),
        ("tiny-gpt2", "full", ((1, 1), (0, 5)), 0, "sgd", {0: HEADS, 1: HEADS}, 0, "stashing"),
        ("tiny-gpt2", "lora recomputing", THREE, 0, "sgd", {}, 3, "stashing"),
        ("tiny-bert", "full recomputing", ((0, 3), (1, 3)), 0, "sgd", {}, 3, "two"),
        ("tiny-bart", "lora recomputing", ((0, 1), (1, 1), (2, 2), (3, 2)), 5, "sgd", {}, 0, "stashing"),
    ],
)
def test_a_stashing_pipeline_trains_as_one_process_with_delayed_gradients(
    model: str,
    technique: str,
    blocks: tuple[tuple[int, int], ...],
    drain_every: int,
    rule: str,
    divisions: dict[int, Division],
    window: int,
    versions: VersionRule,
    tmp_path: Path,
    jax: Sequence[int] = (),
) -> None:
    """Each loss and each weight, to 1e-5; on some devices two processors share each layer.  jax: ranks that compute
    with JAX, of samples of one length, as it compiles for each.

    With a window the pipeline never drains, also not between the epochs.
    """
    technique, _, recomputing = technique.partition(" ")
    job = replace(
        asynchronous_job(model, technique, blocks, tmp_path, drain_every, window, versions), divisions=divisions
    )
    if recomputing:
        stages = tuple(
            replace(stage, activations="disk" if number % 2 else "recompute")
            for number, stage in enumerate(job.plan.stages)
        )
        job = replace(job, plan=replace(job.plan, stages=stages))
    if jax:
        job = replace(job, split=replace(job.split, ids=tuple(sample[:3] for sample in job.split.ids)))
    if rule == "sgd":
        job = replace(job, job=replace(job.job, learning_rate=0.1))
    expected, weights = with_delays(job, rule)
    (phase,), losses, trained, optimizers = job.phases(), [], {}, {}
    num_batches = -(-SAMPLES // BATCH)
    for stage in job.plan.stages:
        part = technique_part(load_stack(model), job.config, stage.start, stage.stop)
        inner = make_optimizer(job, part, num_batches)
        inner = inner if rule == "adamw" else by_sgd(inner)
        optimizers[stage.ranks[0]] = part, WindowOptimizer(inner, num_batches, drain_every or window)
        trained |= part.trained()
    computes = {
        rank: JaxStageCompute(part, activation="gelu", heads=4) if rank in jax else StageCompute(part)
        for rank, (part, _) in optimizers.items()
    }
    for stage in job.plan.stages:
        computes[stage.ranks[0]].folder = tmp_path if stage.activations == "disk" else None
    done, carried = 0, [dict[Value, Any]() for _ in range(job.cluster.world_size)]
    for epoch in range(EPOCHS):
        for planned in phase.steps(epoch):
            tables = {}
            for rank, (_, optimizer) in optimizers.items():
                share = share_of(rank, job.plan, all_parts(planned), job.split) | {"total": planned.shape.samples}
                each = divided_or_whole(
                    divisions.get(rank), compute=computes[rank], optimizer=optimizer.inner, epoch=epoch, **share
                )
                kept = 0 if versions == "stashing" else delay_of(versions, 0, len(blocks))
                begins = planned.shape.continues is None
                tables[rank] = StashingHandlers(
                    each=each, begins=begins, num_versions=kept, per_update=job.per_update
                ).table()
            program = phase.program(planned.shape)
            assert (planned.shape.continues is not None) == (window > 0 and done > 0), "it never drains"
            schedule = check(program.schedule)
            tensors = [dict.fromkeys(values) | own for values, own in zip(schedule.inputs, carried, strict=True)]
            assert all(set(own) <= set(values) for values, own in zip(schedule.inputs, carried, strict=True))
            values = run_schedule(schedule, tables, tensors, program.costs.spec)
            carried = [
                {given_as: rank_values[output] for output, given_as in pairs}
                for rank_values, pairs in zip(values, schedule.carried, strict=True)
            ]
            results = {
                value.microbatch: one.item() for held in values for value, one in held.items() if value.name == "loss"
            }
            for at in range(0, len(planned.samples), job.per_update):
                parts = range(at, at + job.per_update)
                share = planned.shape.samples / sum(planned.shape.sizes[part] for part in parts)
                losses.append(share * sum(results[part] for part in parts))
            done += 1
            assert {optimizer.num_steps for _, optimizer in optimizers.values()} == {done}
    assert losses == pytest.approx(expected, rel=1e-5)
    same_weights(trained, weights)


@needs_jax
def test_a_stage_by_jax_stashes_alike(tmp_path: Path) -> None:
    """LoRA in the first stage, whose embedding is torch's, and in one whose versions change while mini-batches are in
    flight."""
    test_a_stashing_pipeline_trains_as_one_process_with_delayed_gradients(
        "tiny-distilbert", "lora", ((0, 2), (1, 2), (2, 2)), 0, "adamw", {}, 0, "stashing", tmp_path, jax=(0, 1)
    )


def test_a_stage_holds_a_version_for_each_mini_batch_in_flight(tmp_path: Path) -> None:
    """N - i - 1 versions besides the newest, as separate memory, and one version again when the pipeline is drained."""
    job = asynchronous_job("tiny-bert", "full", EVEN, tmp_path, 0)
    (phase,), values = job.phases(), {}
    planned, tables, most = phase.steps(0)[0], {}, dict.fromkeys(range(4), 0)
    for rank, stage in enumerate(job.plan.stages):
        part = technique_part(load_stack("tiny-bert"), job.config, stage.start, stage.stop)
        share = share_of(rank, job.plan, planned, job.split)
        optimizer = make_optimizer(job, part, 8)
        each = BackpropagationHandlers(shared=(), compute=StageCompute(part), optimizer=optimizer, epoch=0, **share)
        inner, in_flight = StashingHandlers(each=each).table(), values.setdefault(rank, {})

        def forward(op, reads, *, rank=rank, inner=inner, optimizer=optimizer, in_flight=in_flight):
            in_flight[op.microbatch] = optimizer.parameters.data_ptr(), optimizer.parameters.clone()
            most[rank] = max(most[rank], len({at for at, _ in in_flight.values()} | {optimizer.parameters.data_ptr()}))
            return inner["F"](op, reads)

        def backward(op, reads, *, rank=rank, inner=inner, optimizer=optimizer, in_flight=in_flight, part=part):
            _, version = in_flight.pop(op.microbatch)
            result = inner["B"](op, reads)
            name, (at, shape) = next(iter(optimizer._slots.items()))
            used = dict(part.named_parameters())[name].detach()
            assert torch.equal(used, version[at : at + shape.numel()].view(shape)), (
                "the version used forward is the one used backward"
            )
            most[rank] = max(most[rank], len({at for at, _ in in_flight.values()} | {optimizer.parameters.data_ptr()}))
            return result

        tables[rank] = inner | {"F": forward, "B": backward}
    run_program(phase.program(planned.shape), tables)
    assert list(most.values()) == [4, 3, 2, 1]


def of_windows(expected: Sequence[float], job: FineTuningRankJob) -> list[float]:
    """Return the windows' losses, given those of all mini-batches."""
    means, left = [], iter(expected)
    for step in (step for epoch in range(EPOCHS) for step in job.planned_windows(epoch)):
        means.append(sum(next(left) * size for size in step.shape.sizes) / step.shape.samples)
    return means


def test_devices_stash_as_one_process_and_go_on_after_a_window(engines: EngineCluster, tmp_path: Path) -> None:
    """Executed on four devices in windows of three mini-batches: losses, weights; stopped in the second epoch, and gone
    on."""
    job = asynchronous_job("tiny-bert", "serial", EVEN, tmp_path, 3)
    expected, weights = with_delays(job)
    losses = losses_of(engines.run(train_rank, [job.on_rank(rank) for rank in range(4)]))
    assert [loss for _, loss in sorted(losses.items())] == pytest.approx(of_windows(expected, job), rel=1e-5)
    stopped = replace(job, folder=tmp_path / "stopped")
    begin(stopped)
    engines.run(stop_in_the_second_epoch, [stopped] * 4)
    former = take_up(stopped)
    assert (former.epochs, former.step) == (1, 2)
    results = engines.run(train_rank, [replace(stopped, start_epoch=1, start_step=2, state=former.state)] * 4)
    assert losses_of([*former.results, *results]) == pytest.approx(losses, rel=1e-6)
    same_weights(stopped.trained(EPOCHS - 1), job.trained(EPOCHS - 1), 1e-6, 1e-6)
    same_weights(job.trained(EPOCHS - 1), weights)


def test_devices_never_drain(engines: EngineCluster, tmp_path: Path) -> None:
    """Executed in windows of four mini-batches, each of which begins the next one's."""
    job = asynchronous_job("tiny-bert", "serial", EVEN, tmp_path, 0, 4)
    expected, weights = with_delays(job)
    losses = losses_of(engines.run(train_rank, [job.on_rank(rank) for rank in range(4)]))
    assert [loss for _, loss in sorted(losses.items())] == pytest.approx(of_windows(expected, job), rel=1e-5)
    same_weights(job.trained(EPOCHS - 1), weights)


def test_a_window_that_does_not_follow_the_last_one_begins_with_an_empty_pipeline(tmp_path: Path) -> None:
    """Such as those of a sweep, which are done twice, and the first after a pause."""
    job = asynchronous_job("tiny-bert", "serial", EVEN, tmp_path, 0, 4)
    (first, second), phase = job.planned_windows(0), object.__new__(TechniquePhase)
    phase.rank_job = job
    assert phase.shape(second).continues is None
    for done, following, continues in (
        (first, second, True),
        (first, first, False),
        (second, second, False),
        (second, first, False),
    ):
        phase._begun = done.ahead  # type: ignore[attr-defined]
        assert (phase.shape(following).continues is not None) == continues
    phase.rank_job = asynchronous_job("tiny-bert", "serial", EVEN, tmp_path, 0, 5)
    phase._begun, (five, three) = (), phase.rank_job.planned_windows(0)  # type: ignore[attr-defined]
    assert len(phase.shape(five).ahead.sizes) == 3  # type: ignore[attr-defined]
    assert not phase.shape(three).ahead.sizes and phase.rank_job.phases()[0].program(phase.shape(three))  # type: ignore[attr-defined]
