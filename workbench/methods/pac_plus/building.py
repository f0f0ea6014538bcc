"""Build what a rank trains: a stage's quantized backbone and adapters as the job began with them, and their optimizer."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from workbench.methods.common.folder import INITIAL
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.training.phases import make_optimizer
from workbench.models.loading import load_language_model_head
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage
from workbench.models.tensor_files import save_tensors
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.flat_optimizer import FlatAdamW


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
    """Return the adapters of layers [start, stop) as the job began with them, ready to train."""
    adapter = ParallelAdapterStage(rank_job.adapter, start, stop)
    load_initial(adapter, rank_job.folder)
    if rank_job.adapter.kind == "sequence_to_sequence" and stop == rank_job.adapter.num_layers:
        adapter.attach(load_language_model_head(rank_job.job.model))
    return adapter.train()


def save_initial(adapter: ParallelAdapter, folder: Path) -> None:
    """Write the adapter with which every rank begins."""
    save_tensors(folder / INITIAL, adapter.state_dict())


def load_initial(adapter: ParallelAdapterStage, folder: Path) -> None:
    """Take over the initial weights and the calibration constants that the job began with."""
    tensors = load_file(folder / INITIAL)
    adapter.load_state_dict({name: tensors[name] for name in adapter.state_dict()})
