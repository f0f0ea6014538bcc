"""Technique x schedule, technique x precision: each gives what one process gives, or is refused in a sentence."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import run_program

from tests.methods.against_one_process import (
    SAMPLES,
    SCHEDULES,
    TOLERANCES,
    backbone,
    check_fine_tuning,
    check_parallel_adapters,
    compare,
    fine_tuning_job,
    pac_plus_job,
    programs_and_tables,
    side_loss,
    train,
)
from tests.methods.builders import CACHED, initial_adapter
from tests.methods.conftest import four_devices
from tests.plans import plan_of
from tests.weights import same_weights
from workbench.core import Job
from workbench.core.errors import ConfigError
from workbench.core.names import TrainedKind
from workbench.methods import load_method
from workbench.methods.pac_plus.epochs import make_adapter
from workbench.methods.pac_plus.handlers import CachedBatches, PacPlusHandlers
from workbench.methods.pac_plus.handlers import StageCompute as SideCompute
from workbench.methods.pac_plus.prepare import whole_taps
from workbench.methods.pac_plus.rank_job import Programs
from workbench.methods.training.handlers import StepHandlers
from workbench.methods.training.rank_phases import make_optimizer
from workbench.models.side_layers import TOKEN_KINDS
from workbench.runtime.activation_cache import ActivationCache, cache_dtype
from workbench.schedules import check
from workbench.tasks.tokenize import collate

TECHNIQUES, PARALLEL = ("full", "lora", "adapters"), "parallel adapters"
PRECISIONS = ("float32", "bfloat16", "int8", "int4")
IN_EVERY_PRECISION = ("one device", "hybrid")
"""A layer computes with its codes whatever the order of the operations, so two schedules stand for all."""
CUTS = ("1F1B", "data parallel", "hybrid by GPipe")
"""Inside either stack of an encoder-decoder, between them, and nowhere."""
OTHER_MODELS = {"tiny-gpt2": CUTS[:1], "tiny-llama": CUTS[2:], "tiny-t5": CUTS, "tiny-bart": CUTS}
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
