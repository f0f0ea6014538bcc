"""The folder of a run: its contents and owner, and digests that identify a model."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.core.errors import CacheError, ConfigError
from workbench.core.files import files_digest
from workbench.core.job import Job
from workbench.core.run_files import IDENTITY, WORK_FILES, remove_run_files
from workbench.core.serial import from_json, read_text, shown, to_builtins, to_json, write_text
from workbench.models.configuration import stored_weights
from workbench.models.loading import load_stack


def weights_digest(module: nn.Module) -> str:
    """Return a digest of a module's parameters and buffers: names, types and bytes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def model_digest(name: str) -> str:
    """Return a digest of a model's weights: of its safetensors files and their config.json.

    A model without such files is loaded.  Raises as load_stack does.
    """
    tensors = stored_weights(name)
    if tensors is None:
        return weights_digest(load_stack(name))
    paths = sorted({tensor.path for tensor in tensors.values()})
    settings = paths[0].with_name("config.json")
    return files_digest([*paths, settings] if settings.is_file() else paths)


def begin_folder(folder: Path, identity: str, job: Job) -> None:
    """Remove the files of an earlier run and record the folder's new owner.  Files that do not belong to a run stay.

    Raises ConfigError if files have a run's file names but belong to no run.
    """
    mine = [folder / name for name in WORK_FILES if (folder / name).exists()]
    if mine and not (folder / IDENTITY).is_file():
        raise ConfigError(
            f"A run in the folder '{folder}' was asked for.",
            f"It holds {', '.join(path.name for path in mine)}, which no run of the workbench wrote.",
            "Choose another folder with --workdir.",
        )
    remove_run_files(folder, keep=(IDENTITY,))
    # Last, so that leftovers of an earlier run can never pass for this run's files.
    write_text(folder / IDENTITY, f"{identity}\n{to_json(job.identity)}\n")


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def require_resumable(folder: Path) -> None:
    """Raise CacheError if the folder contains no run that can be resumed."""
    if not (folder / IDENTITY).is_file():
        problem = "It holds no run." if folder.is_dir() else "There is no such folder."
        todo = "Name the folder of the interrupted run, or begin without --resume."
        raise CacheError(f"Resuming the run in '{folder}' was asked for.", problem, todo)


def holds_run(folder: Path, identity: str, job: Job) -> bool:
    """Return whether the folder contains a run of exactly the same job; False if it contains no run.

    Raises CacheError if the run belongs to another job, naming the settings that differ.
    """
    path, text = folder / IDENTITY, ""
    if not path.is_file():
        return False
    with suppress(ConfigError):  # it is no text, or too large
        text = read_text(path, "the run's job")
    stored_identity, _, text = text.partition("\n")
    if stored_identity != identity:
        raise CacheError(
            f"Resuming the run in '{folder}' was asked for.",
            _difference(text, job),
            "Run without --resume, or repeat the interrupted run's own settings.",
        )
    return True


def _difference(text: str, job: Job) -> str:
    try:
        stored = _settings(from_json(text, Job, source=IDENTITY))
    except ConfigError:
        return f"Another version of the workbench made it, or its {IDENTITY} was changed."
    mine = _settings(job.identity)
    names = [name for name in {**stored, **mine} if stored.get(name) != mine.get(name)]
    if not names:
        return "Its job is the same, but the plan, the model's weights or the dataset have changed."
    return (
        "It was made with "
        f"{', '.join(f'{name} = {shown(stored.get(name))} instead of {shown(mine.get(name))}' for name in names)}."
    )


def _settings(job: Job) -> dict[str, Any]:
    settings = to_builtins(job)
    return settings | {f"option {name}": value for name, value in settings.pop("options").items()}
