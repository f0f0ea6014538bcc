"""A rank's initial state: a stage of the adapter, initialized and then calibrated on training samples (PAC+, section IV-C)."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from workbench.core.errors import ConfigError
from workbench.fetch import cache_folder
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.common.folder import INITIAL, weights_digest
from workbench.methods.pac_plus.handlers import StageCompute
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.training.phases import make_optimizer
from workbench.models.distillation import Distillation, distill, distillation_fingerprint, distilled, load_distilled
from workbench.models.evaluation import calibrate, set_statistics
from workbench.models.initialization import initialize
from workbench.models.loading import load_language_model_head, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage
from workbench.models.partial_loading import save_tensors
from workbench.models.quantization import quantize
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.tasks.embedded import load_unlabelled
from workbench.tasks.tokenize import collate, text_batches


def build_stage(rank_job: PacPlusRankJob, index: int, steps_per_epoch: int, *, is_fast: bool = True) -> tuple[StageCompute, FlatAdamW]:
    """Return a stage's layers and their optimizer.  is_fast: see StageCompute."""
    stage = rank_job.plan.stages[index]
    adapter = make_adapter(rank_job, stage.start, stage.stop)
    backbone = rank_job.load_backbone(stage.start, stage.stop)
    optimizer = make_optimizer(rank_job, adapter, steps_per_epoch)
    compute = StageCompute(
        adapter, backbone, tap_dtype=cache_dtype(rank_job.cache_dtype), hidden_dtype=rank_job.quantization.compute_dtype, is_fast=is_fast
    )
    return compute, optimizer


def make_adapter(rank_job: PacPlusRankJob, start: int, stop: int) -> ParallelAdapterStage:
    """Return the initial adapters of layers [start, stop), ready to train."""
    adapter = ParallelAdapterStage(rank_job.adapter, start, stop)
    tensors = load_file(rank_job.folder / INITIAL)
    adapter.load_state_dict({name: tensors[name] for name in adapter.state_dict()})
    if rank_job.adapter.kind == "sequence_to_sequence" and stop == rank_job.adapter.num_layers:
        adapter.attach(load_language_model_head(rank_job.job.model))
    return adapter.train()


def save_initial(adapter: ParallelAdapter, folder: Path) -> None:
    """Write the initial adapter of every rank."""
    save_tensors(folder / INITIAL, adapter.state_dict())


CALIBRATION_SAMPLES = 256
DISTILLATION_BATCH = 32


def begin(prepared: PreparedJob, stack: LayerStack, folder: Path, is_new: bool, notify: Notify) -> None:
    """Quantize the backbone, and write the initial adapter of a new run into its folder."""
    if is_new:
        save_initial(initial_adapter(prepared, stack, notify), folder)
    else:
        quantize(stack, prepared.options.quantization)


def initial_adapter(prepared: PreparedJob, stack: LayerStack, notify: Notify = ignore) -> ParallelAdapter:
    """Return the initial adapter, and quantize the backbone after the initialization has read its original weights.

    Raises ConfigError if this backbone does not support the initialization.
    """
    adapter = ParallelAdapter(prepared.adapter)
    how = prepared.options.initialization
    if how == "distilled":
        load_distilled(adapter, _distilled_state(prepared, stack, notify))
    elif how == "torch_pruned":
        from workbench.models.torch_pruning import copy_torch_pruned  # imported only on use: the package is optional

        copy_torch_pruned(adapter, stack)
    else:
        initialize(adapter, how, stack=stack)
    quantize(stack, prepared.options.quantization)
    train = prepared.train
    chosen = list(range(min(CALIBRATION_SAMPLES, len(train))))
    batches = [collate(train, chosen[at : at + 32]) for at in range(0, len(chosen), 32)]
    set_statistics(adapter, calibrate(stack, batches))
    return adapter


def _distilled_state(prepared: PreparedJob, stack: LayerStack, notify: Notify) -> dict:
    """Return the distilled weights, stored by an earlier run or trained now, which takes minutes."""
    if stack.family.reads_images:
        raise ConfigError(
            f"Distilled initial weights for '{prepared.job.model}' were asked for.",
            "It reads images, and the unlabelled data is text.",
            "Choose another initialization.",
        )
    texts, settings = load_unlabelled(), Distillation()
    fingerprint = distillation_fingerprint(prepared.job.model, weights_digest(stack), prepared.adapter, settings, texts)
    max_length = min(prepared.job.max_length, prepared.facts.max_length)

    def make() -> dict:
        notify(Event("phase", message=f"Distilling the initial weights on {len(texts)} texts (once)"))
        epochs = text_batches(texts, load_tokenizer(prepared.job.model), max_length, DISTILLATION_BATCH, prepared.adapter.seed)
        return distill(stack, prepared.adapter, epochs, settings, lambda line: notify(Event("note", message=line)))

    return distilled(cache_folder() / "distilled", fingerprint, make)
