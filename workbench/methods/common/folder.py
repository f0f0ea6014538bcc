"""The folder of a run: its contents, checkpoints and owner, and digests that identify a model."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import CacheError, ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.core.serial import from_json, shown, to_builtins, to_json, write_text
from workbench.runtime.context import DEVICES
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.state import State


def weights_digest(module: nn.Module) -> str:
    """Return a digest of a module's parameters and buffers: names, types and bytes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


IDENTITY, INITIAL = "fingerprint.txt", "initial.safetensors"
CHECKPOINTS, STEPS, JOURNALS, ADAPTER, PLAN = "checkpoints", "steps", "journals", "adapter", "plan.json"


def steps_log_path(folder: Path, epoch: int, begin: int, rank: int) -> Path:
    """Return the path of the log in which a rank records the steps of an epoch from `begin` on, line by line."""
    return folder / STEPS / f"epoch-{epoch}-from-{begin}-rank-{rank}.jsonl"


def journal_path(folder: Path, epoch: int, layers: tuple[int, int]) -> Path:
    """Return the path where the trainable parameters of layers [start, stop) are saved after every step of an epoch."""
    return folder / JOURNALS / f"epoch-{epoch}-layers-{layers[0]}-{layers[1]}.bin"


def checkpoint_path(folder: Path, kind: str, epoch: int, layers: tuple[int, int]) -> Path:
    """Return the path of the checkpoint of layers [start, stop) after an epoch.

    kind: 'epoch', or 'moments' for the optimizer's, which are kept only until the run ends.
    """
    return folder / CHECKPOINTS / f"{kind}-{epoch}-layers-{layers[0]}-{layers[1]}.safetensors"


def middle_path(folder: Path, epoch: int, step: int) -> Path:
    """Return the path of a checkpoint in the middle of an epoch, for a run that is resumed."""
    return folder / CHECKPOINTS / f"epoch-{epoch}-step-{step}.safetensors"


def unneeded_at_the_end(folder: Path) -> list[Path]:
    """Return the checkpoints that are needed only to continue the run."""
    return [path for kind in ("moments-*", "epoch-*-step-*") for path in (folder / CHECKPOINTS).glob(kind)]


def begin_folder(folder: Path, identity: str, job: Job) -> None:
    """Remove the files of an earlier run and record the folder's new owner.  Files that do not belong to a run stay.

    Raises ConfigError if files have a run's file names but belong to no run.
    """
    mine = [folder / name for name in (IDENTITY, INITIAL, CHECKPOINTS, STEPS, JOURNALS, ADAPTER, PLAN, DEVICES) if (folder / name).exists()]
    if mine and not (folder / IDENTITY).is_file():
        raise ConfigError(
            f"A run in the folder '{folder}' was asked for.",
            f"It holds {', '.join(path.name for path in mine)}, which no run of the workbench wrote.",
            "Choose another folder with --workdir.",
        )
    for path in mine:
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != IDENTITY:
            path.unlink()
    # Last, so that leftovers of an earlier run can never pass for this run's files.
    write_text(folder / IDENTITY, f"{identity}\n{to_json(job.identity)}\n")


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def require_resumable(folder: Path) -> None:
    """Raise CacheError if the folder contains no run that can be resumed."""
    if not (folder / IDENTITY).is_file():
        found = "It holds no run." if folder.is_dir() else "There is no such folder."
        todo = "Name the folder of the interrupted run, or begin without --resume."
        raise CacheError(f"Resuming the run in '{folder}' was asked for.", found, todo)


def holds_run(folder: Path, identity: str, job: Job) -> bool:
    """Return whether the folder contains a run of exactly the same job; False if it contains no run.

    Raises CacheError if the run belongs to another job, naming the settings that differ.
    """
    try:
        kept, _, text = (folder / IDENTITY).read_text(encoding="utf-8", errors="replace").partition("\n")
    except OSError:
        return False
    if kept != identity:
        raise CacheError(
            f"Resuming the run in '{folder}' was asked for.",
            _difference(text, job),
            "Run without --resume, or repeat the interrupted run's own settings.",
        )
    return True


def _difference(text: str, job: Job) -> str:
    try:
        kept = _settings(from_json(text, Job, source=IDENTITY))
    except ConfigError:  # from an earlier version, or damaged
        return "It was made by another job, plan, model or dataset."
    mine = _settings(job.identity)
    names = [name for name in {**kept, **mine} if kept.get(name) != mine.get(name)]
    if not names:
        return "Its job is the same, but the plan, the model's weights or the dataset have changed."
    return f"It was made with {', '.join(f'{name} = {shown(kept.get(name))} instead of {shown(mine.get(name))}' for name in names)}."


def _settings(job: Job) -> dict[str, Any]:
    settings = to_builtins(job)
    return settings | {f"option {name}": value for name, value in settings.pop("options").items()}


_LAYERS = re.compile(r"-layers-(\d+)-(\d+)\.\w+$")
_WEIGHT = f"{STATE_KINDS[0]}/"


def save(folder: Path, run: str, epoch: int, layers: tuple[int, int], optimizer: Optimizer, *, keeps_former: bool) -> None:
    """Write the moments and parameters of some layers, each file atomically, the parameters last: they make the epoch count.

    run: its fingerprint.  keeps_former: whether to keep the moments of all epochs, so that a damaged checkpoint costs only its epoch.
    """
    tensors = optimizer.named_tensors()
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(_WEIGHT)}
    moments = {name: tensor for name, tensor in tensors.items() if name not in weights}
    State(step=optimizer.num_steps, tensors=moments).save(checkpoint_path(folder, "moments", epoch, layers), run)
    State(step=optimizer.num_steps, tensors=weights).save(checkpoint_path(folder, "epoch", epoch, layers), run)
    if not keeps_former:
        checkpoint_path(folder, "moments", epoch - 2, layers).unlink(missing_ok=True)


def weights_after(folder: Path, run: str, epoch: int, num_layers: int) -> dict[str, Tensor]:
    """Return the trained parameters after an epoch, by name.  run: its fingerprint.

    Raises MissingDataError if the checkpoint is incomplete, DamagedError if it was changed.
    """
    paths = covering(folder, "epoch", epoch, num_layers)
    if not paths:
        asked, found = f"What was trained until epoch {epoch + 1} was asked for.", f"'{folder / CHECKPOINTS}' does not hold it whole."
        raise MissingDataError(asked, found, "Give --workdir a folder that all devices share.")
    return {name.removeprefix(_WEIGHT): tensor for name, tensor in State.load(paths, run).tensors.items()}


def covering(folder: Path, kind: str, epoch: int, num_layers: int) -> tuple[Path, ...]:
    """Return checkpoints of an epoch that together cover all layers, or nothing.  kind: 'epoch' or 'moments'."""
    return cover(sorted((folder / CHECKPOINTS).glob(f"{kind}-{epoch}-layers-*.safetensors")), num_layers) or ()


def cover(paths: Sequence[Path], num_layers: int, start: int = 0) -> tuple[Path, ...] | None:
    """Return files, named by their layers, that cover the layers from `start` to the last without a gap; None if that is impossible."""
    if start == num_layers:
        return ()
    for path in paths:
        match = _LAYERS.search(path.name)
        if match is not None and int(match.group(1)) == start < int(match.group(2)):
            rest = cover(paths, num_layers, int(match.group(2)))
            if rest is not None:
                return (path, *rest)
    return None
