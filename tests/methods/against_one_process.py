"""Two steps of a technique on all ranks against plain training of the whole model in one process.

All ranks' operations run in this process, by the handlers that devices use.  Gradients of the first step are compared,
and losses of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import pytest
import torch
from one_process import run_program

from tests.methods.builders import (
    CACHED,
    FLOAT32,
    LEARNING_RATE,
    PLANS,
    adapter_config,
    free_profile,
    initial_adapter,
    made_up_split,
    split_for,
)
from tests.methods.conftest import four_devices
from tests.models.helpers import technique_config, technique_part
from tests.plans import plan_of, stage
from workbench.core import Job, Stage
from workbench.core.names import TrainedKind
from workbench.core.program import Program
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.pac_plus.epochs import build_stage, save_initial
from workbench.methods.pac_plus.handlers import PacPlusHandlers
from workbench.methods.pac_plus.rank_job import PacPlusRankJob, Programs
from workbench.methods.training.handlers import StepHandlers, share_of
from workbench.methods.training.rank_phases import make_optimizer
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, set_learning_rate
from workbench.models.optimization import make_optimizer as plain_optimizer
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.schedules.pipeline import OrderName
from workbench.tasks.tokenize import Batch, collate

SCHEDULES: dict[str, tuple[tuple[Stage, ...], OrderName]] = {
    "one device": (PLANS["[6] on [1]"], "1f1b"),
    "1F1B": (PLANS["[2, 2, 1, 1] on [1-1-1-1]"], "1f1b"),
    "GPipe": (PLANS["[2, 2, 1, 1] on [1-1-1-1]"], "gpipe"),
    "data parallel": (PLANS["[6] on [4]"], "1f1b"),
    "hybrid": (PLANS["[3, 3] on [2-2]"], "1f1b"),
    "hybrid by GPipe": (PLANS["[2, 2, 2] on [2-1-1]"], "gpipe"),
    "in another order": ((stage(0, 3, {1: 4}), stage(3, 6, {0: 4})), "1f1b"),
}
SAMPLES, BATCH = 14, 8  # the second mini-batch is smaller
TOLERANCES = 1e-5, 1e-5
"""Relative tolerance of the first step's loss, and of each gradient.

The second step's loss may differ ten times as much: AdamW divides by gradients' own size, which carries float noise of
tiny ones into the weights.  A gradient may also differ by twice its tolerance times the greatest gradient.
"""


class Reference(NamedTuple):
    """What one process gives: the loss of both steps, and the first step's gradients."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def quantization(storage: str) -> QuantizationConfig:
    return QuantizationConfig(storage=storage) if storage != "float32" else FLOAT32  # type: ignore[arg-type]


@cache
def backbone(model: str, storage: str) -> LayerStack:
    return quantize(load_stack(model, with_head=True), quantization(storage))


def job(model: str) -> Job:
    return Job(model=model, epochs=1, batch_size=BATCH, micro_batches=2, learning_rate=LEARNING_RATE)


def train(module: torch.nn.Module, losses: Sequence[Any]) -> Reference:
    """Do the steps whose losses are given as functions, plainly."""
    optimizer, results, gradients = plain_optimizer(module.train(), 0.01), [], {}
    for step, loss in enumerate(losses):
        value = loss()
        value.backward()
        if step == 0:
            gradients = {name: one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}
        set_learning_rate(optimizer, learning_rate_at(step, len(losses), LEARNING_RATE, 0.06))
        optimizer.step()
        optimizer.zero_grad()
        results.append(value.item())
    return Reference(results, gradients)


def compare(
    reference: Reference,
    programs: Sequence[Program],
    tables: Sequence[Mapping[int, StepHandlers]],
    what: str,
    tolerances: tuple[float, float] = TOLERANCES,
) -> None:
    """Run the steps on all ranks.  AdamW's first moment after one step is a tenth of the gradient."""
    of_loss, of_gradient = tolerances
    scale = max(gradient.abs().max().item() for gradient in reference.gradients.values())
    for step, (program, rank_table) in enumerate(zip(programs, tables, strict=True)):
        values = run_program(program, {rank: one.table() for rank, one in rank_table.items()})  # type: ignore[attr-defined]
        parts = [content.item() for held in values for value, content in held.items() if value.name == "loss"]
        assert sum(parts) == pytest.approx(reference.losses[step], rel=10 * of_loss if step else of_loss), (
            f"{what}, step {step + 1}"
        )
        moments: dict[str, torch.Tensor] = {}
        for one in rank_table.values() if step == 0 else ():
            for name, tensor in one.optimizer.named_tensors().items():
                assert torch.equal(moments.setdefault(name, tensor), tensor), f"{what}: ranks differ in {name}"
        results = {
            name.removeprefix("exp_avg/"): 10 * tensor
            for name, tensor in moments.items()
            if name.startswith("exp_avg/")
        }
        assert step or set(results) == set(reference.gradients), what
        for name, tensor in results.items():
            limits = {"rtol": of_gradient, "atol": 2 * of_gradient * scale}
            torch.testing.assert_close(
                tensor, reference.gradients[name].float(), msg=partial("{}: {}\n{}".format, what, name), **limits
            )


@cache
def fine_tuned_plainly(model: str, technique: str, storage: str, kind: TrainedKind) -> Reference:
    stack = backbone(model, storage)
    reference = technique_part(stack, technique_config(stack, technique, kind=kind))

    def loss(batch: Batch) -> torch.Tensor:
        _, last_hidden = reference(batch.input_ids, batch.attention_mask)
        return task_loss(reference.logits(last_hidden, batch.attention_mask, batch.sample_ids, 0), batch.labels, kind)

    planned = fine_tuning_job(model, technique, storage, "one device", kind)
    return train(reference, [lambda batch=batch: loss(batch) for batch in batches(planned)])


def fine_tuning_job(
    model: str, technique: str, storage: str, name: str, kind: TrainedKind = "classification"
) -> FineTuningRankJob:
    stages, order = SCHEDULES[name]
    return FineTuningRankJob(
        job=job(model),
        cluster=four_devices(),
        plan=plan_of(stages, micro_batches=2),
        profile=free_profile(6, 4),
        config=technique_config(backbone(model, storage), technique, kind=kind),
        facts=model_facts(model),
        split=made_up_split(SAMPLES, kind=kind),
        quantization=quantization(storage),
        schedule=order,
    )


def batches(rank_job: Any) -> list[Batch]:
    """Return the mini-batches of the first epoch, whole."""
    return [
        collate(rank_job.split, [one for part in step.samples for one in part]) for step in rank_job.planned_epoch(0)
    ]


def check_fine_tuning(
    model: str, technique: str, storage: str, name: str, what: str, kind: TrainedKind = "classification"
) -> None:
    rank_job = fine_tuning_job(model, technique, storage, name, kind)
    compare(fine_tuned_plainly(model, technique, storage, kind), *programs_and_tables(rank_job, storage), what)


def programs_and_tables(
    rank_job: FineTuningRankJob, storage: str = "float32"
) -> tuple[list[Program], list[dict[int, StepHandlers]]]:
    """Return each step's program, and its handlers by rank."""
    (phase,), steps, model = rank_job.phases(), rank_job.planned_epoch(0), rank_job.job.model
    tables: list[dict[int, StepHandlers]] = [{} for _ in steps]
    for own in rank_job.plan.stages:
        for rank in own.ranks:
            part = technique_part(backbone(model, storage), rank_job.config, own.start, own.stop)
            compute, optimizer = StageCompute(part), make_optimizer(rank_job, part, len(steps))
            compute.folder = Path(gettempdir()) if own.activations == "disk" else None
            for table, step in zip(tables, steps, strict=True):
                share = share_of(rank, rank_job.plan, step, rank_job.split)
                table[rank] = BackpropagationHandlers(
                    shared=rank_job.shared, compute=compute, optimizer=optimizer, epoch=0, **share
                )
    return [phase.program(step.shape) for step in steps], tables


def pac_plus_job(
    model: str, storage: str, name: str, folder: Path, cached: str = "float32", kind: TrainedKind = "classification"
) -> PacPlusRankJob:
    stages, order = SCHEDULES[name]
    stack = backbone(model, storage)
    split = split_for(stack, SAMPLES, kind)
    save_initial(initial_adapter(stack, split, kind), folder, "test")
    return PacPlusRankJob(
        job=replace(job(model), epochs=2),
        cluster=four_devices(),
        plan=plan_of(stages, micro_batches=2, cached=CACHED),
        profile=free_profile(stack.num_layers, 4),
        adapter=adapter_config(stack, kind),
        split=split,
        folder=folder,
        fingerprint="test",
        quantization=quantization(storage),
        schedule=order,
        cache_dtype=cached,
    )


@cache
def side_trained_plainly(model: str, storage: str, kind: TrainedKind) -> Reference:
    stack = backbone(model, storage)
    split = split_for(stack, SAMPLES, kind)
    adapter = initial_adapter(stack, split, kind).double()  # in float32 it would be the less exact of the two
    planned = fine_tuning_job(model, "lora", storage, "one device").planned_epoch(0)
    wholes = [collate(split, [one for part in step.samples for one in part]) for step in planned]

    def loss(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)[1]
        return side_loss(adapter, taps, batch)

    return train(adapter, [lambda batch=batch: loss(batch) for batch in wholes])


def side_loss(adapter: ParallelAdapter, taps: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    logits = adapter.predict([tap.double() for tap in taps], batch.attention_mask, batch.sample_ids, 0)
    return task_loss(logits, batch.labels, adapter.config.kind)


def check_parallel_adapters(
    model: str, storage: str, name: str, folder: Path, what: str, kind: TrainedKind = "classification"
) -> None:
    rank_job = pac_plus_job(model, storage, name, folder, kind=kind)
    steps = rank_job.planned_epoch(0)
    tables: list[dict[int, StepHandlers]] = [{} for _ in steps]
    for index, own in enumerate(rank_job.plan.stages):
        for rank in own.ranks:
            compute, optimizer = build_stage(rank_job, index, len(steps))
            for table, step in zip(tables, steps, strict=True):
                share = share_of(rank, rank_job.plan, step, rank_job.split)
                table[rank] = PacPlusHandlers(compute=compute, optimizer=optimizer, epoch=0, **share)
    programs = [Programs(rank_job).hybrid(step.shape) for step in steps]
    compare(side_trained_plainly(model, storage, kind), programs, tables, what)
