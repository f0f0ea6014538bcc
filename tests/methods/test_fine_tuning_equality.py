"""Fine-tuning on devices gives what one plain process gives: losses, weights, and again after it was stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stopped_run import stop_in_the_second_epoch, train_rank

from tests.methods.builders import LEARNING_RATE, PLANS, free_profile, losses_of, made_up_split
from tests.methods.conftest import four_devices, needs_jax
from tests.models.helpers import technique_config, technique_part
from tests.plans import plan_of
from tests.weights import same_weights
from workbench.core import Job
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.training.interrupted import begin, take_up
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import task_loss
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.engines import EngineCluster
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import Batch, TokenizedSplit, collate

SAMPLES, EPOCHS = 22, 2  # not a multiple of the mini-batch: the last one is smaller and cannot be cut as planned


def mean_loss(model: TechniqueStage, batch: Batch, epoch: int = 0) -> torch.Tensor:
    _, last_hidden = model(batch.input_ids, batch.attention_mask)
    return task_loss(
        model.logits(last_hidden, batch.attention_mask, batch.sample_ids, epoch), batch.labels, model.config.kind
    )


def train_plainly(
    stack: LayerStack, config: TechniqueConfig, split: TokenizedSplit
) -> tuple[dict[tuple[int, int], float], Mapping[str, torch.Tensor]]:
    """Return losses and final weights of a plain loop on whole mini-batches."""
    model = technique_part(stack, config)
    optimizer, losses, step = make_optimizer(model, 0.01), {}, 0
    for epoch in range(EPOCHS):
        batches = epoch_batches(split.lengths, 8, 0, epoch)
        for number, batch in enumerate(batches):
            loss = mean_loss(model, collate(split, batch), epoch)
            loss.backward()
            set_learning_rate(optimizer, learning_rate_at(step, EPOCHS * len(batches), LEARNING_RATE, 0.06))
            optimizer.step()
            optimizer.zero_grad()
            losses[epoch, number] = loss.item()
            step += 1
    return losses, model.trained()


def rank_job(model: str, technique: str, plan: str, folder: Path) -> FineTuningRankJob:
    return FineTuningRankJob(
        job=Job(model=model, epochs=EPOCHS, batch_size=8, micro_batches=2, learning_rate=LEARNING_RATE),
        cluster=four_devices(),
        plan=plan_of(PLANS[plan], micro_batches=2),
        profile=free_profile(6, 4),
        is_paced=False,
        config=technique_config(load_stack(model), technique),
        facts=model_facts(model),
        split=made_up_split(SAMPLES),
        folder=folder,
    )


def test_a_device_is_sent_what_its_stage_reads_alone(tmp_path: Path) -> None:
    """Tokens in the first stage, labels in the last; of the rest the lengths."""
    job = rank_job("tiny-bert", "lora", "[2, 2, 2] on [2-1-1]", tmp_path)
    split = job.split
    seen = [job.on_rank(rank).split for rank in range(4)]
    assert {split.lengths} == {one.lengths for one in seen} and any(split.labels)
    assert [one.ids == split.ids for one in seen] == [True, True, False, False]
    assert [one.labels == split.labels for one in seen] == [False, False, False, True]
    assert {token for one in seen[2:] for sample in one.ids for token in sample} == {split.pad_id}
    assert not any(label for one in seen[:3] for label in one.labels)
    alone = replace(job, plan=plan_of(PLANS["[6] on [4]"], micro_batches=2))
    both = replace(job, split=replace(split, start_id=0))  # a decoder reads labels
    assert alone.on_rank(3).split == split and both.on_rank(2).split == both.split


@pytest.mark.parametrize(
    ("model", "technique", "plan"),
    [
        ("tiny-t5", "full", "[2, 2, 1, 1] on [1-1-1-1]"),
        ("tiny-bert", "lora", "[3, 3] on [2-2]"),
        ("tiny-bert", "lora, recomputing and on the disk", "[3, 3] on [2-2]"),
        ("tiny-llama", "adapters", "[6] on [4]"),
        ("tiny-gpt2", "full", "[2, 2, 2] on [2-1-1]"),
    ],
)
def test_devices_train_as_one_process(
    model: str, technique: str, plan: str, engines: EngineCluster, tmp_path: Path, jax: Sequence[int] = ()
) -> None:
    """Two epochs on four devices: every loss and every weight.  jax: ranks that compute with JAX, of samples of one
    length, as it compiles for each."""
    stack = load_stack(model)
    technique, _, recomputing = technique.partition(", ")
    config = technique_config(stack, technique)
    job = rank_job(model, technique, plan, tmp_path)
    if jax:
        job = replace(job, split=replace(job.split, ids=tuple(sample[:3] for sample in job.split.ids)))
    expected, weights = train_plainly(stack, config, job.split)
    if recomputing:
        first, second = job.plan.stages
        stages = replace(first, activations="recompute"), replace(second, activations="disk")
        job = replace(job, plan=plan_of(stages, micro_batches=2))
    devices = (
        replace(device, framework="jax" if rank in jax else "torch") for rank, device in enumerate(job.cluster.devices)
    )
    job = replace(job, cluster=replace(job.cluster, devices=tuple(devices)))
    losses = losses_of(engines.run(train_rank, [job.on_rank(rank) for rank in range(4)]))
    assert set(losses) == set(expected)
    for step, loss in expected.items():
        # AdamW divides by gradients' own size, which carries float noise of tiny gradients into later steps.
        assert losses[step] == pytest.approx(loss, rel=1e-5 if step == (0, 0) else 1e-4), step
    same_weights(job.trained(EPOCHS - 1), weights, 1e-3, 2e-4, noise="c_attn.bias")


@needs_jax
def test_devices_of_two_frameworks_train_as_one_process(engines: EngineCluster, tmp_path: Path) -> None:
    """JAX computes a stage between two of torch, and the last one, whose head is torch's."""
    test_devices_train_as_one_process("tiny-bert", "full", "[2, 2, 1, 1] on [1-1-1-1]", engines, tmp_path, jax=(1, 3))


def test_a_stopped_run_goes_on_with_the_next_step(engines: EngineCluster, tmp_path: Path) -> None:
    """Two of three steps of the second epoch are done: the third gives the loss of an unbroken run, and so do the
    weights."""
    reference = rank_job("tiny-bert", "lora", "[3, 3] on [2-2]", tmp_path / "whole")
    expected = losses_of(engines.run(train_rank, [reference] * 4))
    stopped = replace(reference, folder=tmp_path / "stopped")
    begin(stopped)
    engines.run(stop_in_the_second_epoch, [stopped] * 4)
    former = take_up(stopped)
    assert (former.epochs, former.step) == (1, 2)
    results = engines.run(train_rank, [replace(stopped, start_epoch=1, start_step=2, state=former.state)] * 4)
    assert losses_of([*former.results, *results]) == pytest.approx(expected, rel=1e-6)
    same_weights(stopped.trained(1), reference.trained(1), 1e-6, 1e-7)


def test_what_stops_before_its_last_snapshot_does_its_last_step_again(engines: EngineCluster, tmp_path: Path) -> None:
    stopped = replace(rank_job("tiny-bert", "lora", "[3, 3] on [2-2]", tmp_path), split=made_up_split(16))
    begin(stopped)
    engines.run(stop_in_the_second_epoch, [stopped] * 4)
    assert not list((tmp_path / "snapshots").glob("*-epoch-2-*"))
    former = take_up(stopped)
    assert (former.epochs, former.step) == (1, 1)
    results = engines.run(train_rank, [replace(stopped, **former.begins)] * 4)
    assert sorted(losses_of([*former.results, *results])) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert stopped.trained(EPOCHS - 1)
