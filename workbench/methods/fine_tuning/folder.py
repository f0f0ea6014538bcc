"""What a run leaves in its folder after every epoch, stage by stage, and how far an interrupted one has come.

Whose the folder is, the steps, the journals and what was trained: see common.folder.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from workbench.core.errors import MissingDataError
from workbench.core.job import Job
from workbench.methods.common.folder import CHECKPOINTS, holds_run, is_whole, steps_path
from workbench.models.tensor_files import save_tensors
from workbench.runtime.flat_optimizer import FlatAdamW

WEIGHT = "weight/"


def weights_path(folder: Path, epoch: int, stage: int) -> Path:
    """Return where a stage's trained parameters are kept as they were after an epoch."""
    return folder / CHECKPOINTS / f"epoch-{epoch}-stage-{stage}.safetensors"


def moments_path(folder: Path, epoch: int, stage: int) -> Path:
    """Return where a stage's moments are kept until the next epoch is done."""
    return folder / CHECKPOINTS / f"moments-{epoch}-stage-{stage}.safetensors"


def save_stage(folder: Path, epoch: int, stage: int, optimizer: FlatAdamW) -> None:
    """Write a stage's parameters and moments, each file whole or not at all, the parameters last: they make the epoch count."""
    tensors = optimizer.named_tensors()
    save_tensors(moments_path(folder, epoch, stage), {name: tensor for name, tensor in tensors.items() if not name.startswith(WEIGHT)})
    save_tensors(weights_path(folder, epoch, stage), {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHT)})


def restore_stage(folder: Path, epoch: int, stage: int, optimizer: FlatAdamW, num_steps: int) -> None:
    """Set a stage's optimizer to what it was after an epoch."""
    tensors = load_file(weights_path(folder, epoch, stage)) | load_file(moments_path(folder, epoch, stage))
    optimizer.load_named_tensors(tensors, num_steps=num_steps)


def load_weights(folder: Path, epoch: int, num_stages: int) -> dict[str, torch.Tensor]:
    """Return the trained parameters of all stages as they were after an epoch.  Raises MissingDataError if a stage's are not there."""
    found: dict[str, torch.Tensor] = {}
    for stage in range(num_stages):
        path = weights_path(folder, epoch, stage)
        if not path.is_file():
            raise MissingDataError(
                f"Stage {stage} as it was after epoch {epoch + 1} was asked for.",
                f"'{path}' is not there.",
                "Give --workdir a folder that all devices share.",
            )
        found |= {name.removeprefix(WEIGHT): tensor for name, tensor in load_file(path).items()}
    return found


def finished_epochs(folder: Path, identity: str, job: Job, *, world_size: int, num_stages: int) -> int | None:
    """Return how many epochs an interrupted run of the very same job has finished.

    None: there is no run to go on with.  Raises CacheError if the folder holds another job's run.
    """
    if not holds_run(folder, identity, job):
        return None
    count = 0
    while count < job.epochs and _is_finished(folder, count, world_size, num_stages):
        count += 1
    return count


def _is_finished(folder: Path, epoch: int, world_size: int, num_stages: int) -> bool:
    steps = all(steps_path(folder, epoch, rank).is_file() for rank in range(world_size))
    return steps and all(is_whole(weights_path(folder, epoch, stage)) for stage in range(num_stages))
