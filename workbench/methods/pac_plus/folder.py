"""How far an interrupted PAC+ run has come: the adapter as it was after each epoch."""

from __future__ import annotations

from pathlib import Path

from workbench.core.job import Job
from workbench.methods.common.folder import CHECKPOINTS, INITIAL, holds_run, is_whole, steps_path


def checkpoint_path(folder: Path, epoch: int) -> Path:
    """Return where the adapter and its moments are kept as they were after an epoch."""
    return folder / CHECKPOINTS / f"epoch-{epoch}.safetensors"


def finished_epochs(folder: Path, identity: str, job: Job, world_size: int) -> int | None:
    """Return how many epochs an interrupted run of the very same job has finished: those whose files are whole.

    None: there is no run to go on with.  Raises CacheError if the folder holds another job's run.
    """
    if not (holds_run(folder, identity, job) and is_whole(folder / INITIAL)):
        return None
    count = 0
    while count < job.epochs and _epoch_is_whole(folder, count, world_size):
        count += 1
    return count


def _epoch_is_whole(folder: Path, epoch: int, world_size: int) -> bool:
    steps = all(steps_path(folder, epoch, rank).is_file() for rank in range(world_size))
    return steps and is_whole(checkpoint_path(folder, epoch))
