"""Technique x schedule, technique x precision: each gives what one process gives, or is refused in a sentence.

All ranks' operations run in this process, by the handlers that devices use.  Two steps: gradients of the first, losses
of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
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
from tests.weights import same_weights
from workbench.core import Job, Stage
from workbench.core.errors import ConfigError
from workbench.core.names import TrainedKind
from workbench.core.program import Program
from workbench.methods import load_method
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.pac_plus.epochs import build_stage, make_adapter, save_initial
from workbench.methods.pac_plus.handlers import CachedBatches, PacPlusHandlers
from workbench.methods.pac_plus.handlers import StageCompute as SideCompute
from workbench.methods.pac_plus.prepare import whole_taps
from workbench.methods.pac_plus.rank_job import PacPlusRankJob, Programs
from workbench.methods.training.handlers import StepHandlers, share_of
from workbench.methods.training.rank_phases import make_optimizer
from workbench.models.configuration import model_facts
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, set_learning_rate
from workbench.models.optimization import make_optimizer as plain_optimizer
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.side_layers import TOKEN_KINDS
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache, cache_dtype
from workbench.schedules import check
from workbench.schedules.pipeline import OrderName
from workbench.tasks.tokenize import Batch, collate

TECHNIQUES, PARALLEL = ("full", "lora", "adapters"), "parallel adapters"
SCHEDULES: dict[str, tuple[tuple[Stage, ...], OrderName]] = {
    "one device": (PLANS["[6] on [1]"], "1f1b"),
    "1F1B": (PLANS["[2, 2, 1, 1] on [1-1-1-1]"], "1f1b"),
    "GPipe": (PLANS["[2, 2, 1, 1] on [1-1-1-1]"], "gpipe"),
    "data parallel": (PLANS["[6] on [4]"], "1f1b"),
    "hybrid": (PLANS["[3, 3] on [2-2]"], "1f1b"),
    "hybrid by GPipe": (PLANS["[2, 2, 2] on [2-1-1]"], "gpipe"),
    "in another order": ((stage(0, 3, {1: 4}), stage(3, 6, {0: 4})), "1f1b"),
}
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
IN_EVERY_PRECISION = ("one device", "hybrid")
"""A layer computes with its codes whatever the order of the operations, so two schedules stand for all."""
CUTS = ("1F1B", "data parallel", "hybrid by GPipe")
"""Inside either stack of an encoder-decoder, between them, and nowhere."""
OTHER_MODELS = {"tiny-gpt2": CUTS[:1], "tiny-llama": CUTS[2:], "tiny-t5": CUTS, "tiny-bart": CUTS}
SAMPLES, BATCH = 14, 8  # the second mini-batch is smaller
TOLERANCES = 1e-5, 1e-5
"""Of the first step's loss, ten times as much of the second's; and of gradients, as a share of the greatest twice as
much.

AdamW divides by gradients' own size, which carries float noise of tiny ones into the weights.
"""
IN_FEW_BITS = 1e-4, 1e-2
"""Activations in bfloat16 or int8 are multiplied as they are stored, and by one process in float64."""

COMBINATIONS = [
    *(
        (technique, name, storage, "tiny-bert")
        for technique, name, storage in product((*TECHNIQUES, PARALLEL), SCHEDULES, PRECISIONS)
        if storage == "float32" or name in IN_EVERY_PRECISION
    ),
    *(
        (technique, name, "float32", model)
        for technique, (model, cuts) in product((*TECHNIQUES, PARALLEL), OTHER_MODELS.items())
        for name in cuts
    ),
]
INVALID = {("full", storage) for storage in PRECISIONS if storage != "float32"}


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


@pytest.mark.parametrize("technique", (*TECHNIQUES, PARALLEL))
def test_combinations_equal_one_process(technique: str, tmp_path: Path) -> None:
    """Losses and gradients to 1e-5: weights in few bits are the same codes on every device, and computed with in
    float32."""
    for own, name, storage, model in COMBINATIONS:
        if own != technique or (own, storage) in INVALID:
            continue
        what = f"{technique}, {name}, {storage}, {model}"
        if technique == PARALLEL:
            check_parallel_adapters(model, storage, name, tmp_path, what)
        else:
            check_fine_tuning(model, technique, storage, name, what)


@pytest.mark.parametrize(
    ("technique", "name", "model", "storage", "lora_dropout"),
    [
        ("lora", "one device", "tiny-bert", "float32", 0.2),
        ("lora", "1F1B", "tiny-llama", "int4", 0.0),
        ("lora", "GPipe", "tiny-bart", "float32", 0.2),
        ("adapters", "hybrid", "tiny-gpt2", "bfloat16", 0.0),
        ("serial", "hybrid by GPipe", "tiny-bert", "int8", 0.0),
        ("full", "1F1B", "tiny-t5", "float32", 0.0),
        ("full", "data parallel", "tiny-llama", "float32", 0.0),
    ],
)
def test_recomputed_activations_change_nothing(
    technique: str, name: str, model: str, storage: str, lora_dropout: float
) -> None:
    """Both steps' losses and the first one's gradients to 1e-6, whether all stages recompute or every second one, or
    others read their activations from the disk, and whatever dropout draws."""
    rank_job = fine_tuning_job(model, technique, storage, name)
    rank_job = replace(rank_job, config=replace(rank_job.config, lora_dropout=lora_dropout))

    def trained(*activations: str) -> tuple[list[float], dict[str, torch.Tensor], set[str]]:
        stages = [
            replace(own, activations=activations[at % len(activations)]) for at, own in enumerate(rank_job.plan.stages)
        ]
        programs, tables = programs_and_tables(replace(rank_job, plan=plan_of(stages, micro_batches=2)), storage)
        torch.manual_seed(0)
        losses, moments = list[float](), dict[str, torch.Tensor]()
        for program, rank_table in zip(programs, tables, strict=True):
            check(program.schedule)
            values = run_program(program, {rank: one.table() for rank, one in rank_table.items()})  # type: ignore[attr-defined]
            losses += [one.item() for held in values for value, one in held.items() if value.name == "loss"]
            moments = moments or {
                f"{rank} {key}": tensor.clone()
                for rank, one in rank_table.items()
                for key, tensor in one.optimizer.named_tensors().items()
                if key.startswith("exp_avg/")
            }
        return losses, moments, {op.kind for ops in programs[0].schedule.ops for op in ops}

    losses, gradients, kinds = trained("memory")
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    assert "R" not in kinds
    for activations in (("recompute",), ("recompute", "memory"), ("disk", "recompute")):
        again, result, kinds = trained(*activations)
        assert {"recompute": "R", "disk": "READ"}[activations[0]] in kinds
        assert again == pytest.approx(losses, rel=1e-6)
        same_weights(result, gradients, 1e-6, 1e-6 * scale)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("technique", (*TECHNIQUES, PARALLEL))
def test_answers_and_tags_equal_one_process(technique: str, kind: TrainedKind, tmp_path: Path) -> None:
    """Heads that read every token: padding to other lengths, and samples without any target, change nothing."""
    for name, model in (("1F1B", "tiny-bert"), ("hybrid by GPipe", "tiny-gpt2")):
        what = f"{technique}, {name}, {kind}, {model}"
        if technique == PARALLEL:
            check_parallel_adapters(model, "float32", name, tmp_path, what, kind)
        else:
            check_fine_tuning(model, technique, "float32", name, what, kind)


@pytest.mark.parametrize("technique", ("lora", "adapters", "serial", PARALLEL))
def test_generated_text_equals_one_process(technique: str, tmp_path: Path) -> None:
    """The head is the backbone's own, which the last stage alone has and nobody trains."""
    for name, model in (("1F1B", "tiny-llama"), ("hybrid by GPipe", "tiny-gpt2"), ("data parallel", "tiny-opt")):
        what = f"{technique}, {name}, text_generation, {model}"
        if technique == PARALLEL:
            check_parallel_adapters(model, "float32", name, tmp_path, what, "text_generation")
        else:
            check_fine_tuning(model, technique, "float32", name, what, "text_generation")


@pytest.mark.parametrize("cached", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("storage", PRECISIONS)
def test_every_precision_of_backbone_and_cache_equals_one_process(storage: str, cached: str, tmp_path: Path) -> None:
    """Cached epochs: one process reads the same records, so that the cache's own rounding makes no difference."""
    model = "tiny-bert"
    stack, rank_job = backbone(model, storage), pac_plus_job(model, storage, "hybrid", tmp_path, cached)
    split = rank_job.split
    records = ActivationCache.create(
        tmp_path / "cache", rank_job.manifest(0, tuple(range(SAMPLES)), whole_taps(rank_job.adapter))
    )
    for sample in range(SAMPLES):
        batch = collate(split, [sample])
        with torch.no_grad():
            records.write_batch(
                [sample], [tap.to(cache_dtype(cached)) for tap in stack(batch.input_ids, batch.attention_mask)[1]]
            )
    steps = rank_job.phases()[1].steps(1)
    adapter = initial_adapter(stack, split).double()

    def loss(samples: list[int]) -> torch.Tensor:
        batch = collate(split, samples)
        return side_loss(adapter, records.batch(samples, batch.attention_mask.shape[1]), batch)

    wholes = [[one for part in step.samples for one in part] for step in steps]
    reference = train(adapter, [lambda samples=samples: loss(samples) for samples in wholes])
    tables: list[dict[int, StepHandlers]] = [{} for _ in steps]
    for rank in CACHED.ranks:
        side = make_adapter(rank_job, 0, stack.num_layers)
        compute, optimizer = (
            SideCompute(side, None, tap_dtype=cache_dtype(cached)),
            make_optimizer(rank_job, side, len(steps)),
        )
        own = [(step.samples[rank], step.shape.lengths[rank]) for step in steps if step.samples[rank]]
        ahead = CachedBatches(records, own, depth=0, packs=compute.packs)
        for table, step in zip(tables, steps, strict=True):
            table[rank] = PacPlusHandlers(
                rank=rank,
                batches=[collate(split, step.samples[rank])] if step.samples[rank] else [],
                total=step.shape.samples,
                compute=compute,
                optimizer=optimizer,
                cache=ahead,
                epoch=0,
            )
    programs, tolerances = (
        [Programs(rank_job).cached(step.shape) for step in steps],
        TOLERANCES if cached == "float32" else IN_FEW_BITS,
    )
    compare(reference, programs, tables, f"{storage}, cache in {cached}", tolerances)
    records.remove()


REFUSED = [
    *(
        ("fine_tuning", {"technique": "full", "backbone_dtype": storage}, "stay as they are")
        for storage in PRECISIONS[1:]
    ),
    *(
        (method, {"schedule": "gpipe", "paradigm": paradigm}, "needs paradigm = hybrid or pipeline_parallel")
        for method, paradigm in product(("fine_tuning", "pac_plus"), ("standalone", "data_parallel"))
    ),
    (
        "fine_tuning",
        {"schedule": "asynchronous_1f1b", "paradigm": "data_parallel"},
        "needs paradigm = hybrid or pipeline_parallel",
    ),
    ("pac_plus", {"schedule": "asynchronous_1f1b"}, "drained after each mini-batch"),
    ("pac_plus", {"activations": "recompute"}, r"through the side network alone.*that PAC\+ saves"),
    ("fine_tuning", {"technique": "parallel adapters"}, "technique = 'parallel adapters'.*one of full, lora, adapters"),
    ("fine_tuning", {"paradigm": "tensor_parallel"}, "one of hybrid, standalone"),
    ("fine_tuning", {"rank": 8}, "The option 'rank' of fine_tuning.*lora_rank"),
    ("fine_tuning", {"lora_rank": "many"}, "lora_rank = 'many'.*a whole number"),
    ("fine_tuning", {"lora_rank": 0}, "lora_rank = 0.*at least 1"),
    ("fine_tuning", {"technique": "adapters", "bottleneck": 0}, "bottleneck = 0.*at least 1"),
    ("fine_tuning", {"lora_dropout": 1.0}, "lora_dropout = 1.0.*below 1"),
    ("fine_tuning", {"cache_dtype": "int8"}, "Known: "),
    ("pac_plus", {"technique": "lora"}, "Known: "),
    ("pac_plus", {"cache_dtype": "int4"}, "int8"),
    ("p_rge", {"schedule": "gpipe"}, "Known: "),
]


@pytest.mark.parametrize(("method", "options", "said"), REFUSED)
def test_what_cannot_be_combined_is_refused_in_a_sentence(method: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_method(method).require_known(Job(method=method, model="tiny-bert", options=options), four_devices())
    assert refused.value.asked.endswith(".") and refused.value.todo
