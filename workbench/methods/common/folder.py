"""The folder of a run: what it holds and whose it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workbench.core.errors import CacheError, ConfigError
from workbench.core.job import Job
from workbench.core.serial import from_json, shown, to_builtins, to_json, write_text

IDENTITY, INITIAL = "fingerprint.txt", "initial.safetensors"
CHECKPOINTS, STEPS, JOURNALS, ADAPTER = "checkpoints", "steps", "journals", "adapter"


def steps_path(folder: Path, epoch: int, rank: int) -> Path:
    """Return where a rank notes an epoch's steps, for the Report of a run that is resumed."""
    return folder / STEPS / f"epoch-{epoch}-rank-{rank}.json"


def steps_log_path(folder: Path, epoch: int, rank: int) -> Path:
    """Return where a rank notes the steps of an epoch that is not finished, line by line."""
    return folder / STEPS / f"epoch-{epoch}-rank-{rank}.jsonl"


def journal_path(folder: Path, epoch: int, stage: int) -> Path:
    """Return where a stage's adapters are kept after every step of an epoch; stage -1: the whole adapter."""
    return folder / JOURNALS / f"epoch-{epoch}-{'whole' if stage < 0 else f'stage-{stage}'}.bin"


def checkpoint_path(folder: Path, epoch: int, stage: int | None = None) -> Path:
    """Return where what is trained is kept as it was after an epoch: whole, or one stage's."""
    return folder / CHECKPOINTS / f"epoch-{epoch}{'' if stage is None else f'-stage-{stage}'}.safetensors"


def moments_path(folder: Path, epoch: int, stage: int) -> Path:
    """Return where a stage's moments are kept apart, until the next epoch is done."""
    return folder / CHECKPOINTS / f"moments-{epoch}-stage-{stage}.safetensors"


def moments_paths(folder: Path) -> list[Path]:
    """Return the moments that are kept apart."""
    return sorted((folder / CHECKPOINTS).glob("moments-*"))


def begin_folder(folder: Path, identity: str, job: Job) -> None:
    """Remove what an earlier run left and note whose the folder is now; files that are not a run's stay.

    Raises ConfigError if it holds files that are named like a run's but are none.
    """
    mine = held_by_run(folder)
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
    # Last, so that what an earlier run left can never pass for this one's.
    write_text(folder / IDENTITY, f"{identity}\n{to_json(job)}\n")


def held_by_run(folder: Path) -> list[Path]:
    """Return what a run keeps in the folder."""
    names = [folder / name for name in (IDENTITY, INITIAL, CHECKPOINTS, STEPS, JOURNALS, ADAPTER)]
    return [path for path in names if path.exists()] + rank_folders(folder)


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders in which the ranks keep tapes and caches."""
    return sorted(path for path in folder.glob("rank-*") if path.is_dir() and path.name.removeprefix("rank-").isdigit())


def disk_bytes(folders: list[Path]) -> int:
    """Return the bytes of all files in some folders."""
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def require_resumable(folder: Path) -> None:
    """Raise CacheError if the folder holds no run that could be resumed."""
    if not (folder / IDENTITY).is_file():
        found = "It holds no run." if folder.is_dir() else "There is no such folder."
        todo = "Name the folder of the interrupted run, or begin without --resume."
        raise CacheError(f"Resuming the run in '{folder}' was asked for.", found, todo)


def holds_run(folder: Path, identity: str, job: Job) -> bool:
    """Return whether the folder holds a run of the very same job, False if it holds none.

    Raises CacheError for another job's, naming the settings that differ.
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


def finished_epochs(folder: Path, identity: str, job: Job, world_size: int, checkpoints: Callable[[int], Iterable[Path]]) -> int | None:
    """Return how many epochs an interrupted run of the very same job has finished: those whose files are whole.

    checkpoints: the files of an epoch; of epoch -1, what a run begins with.
    None: there is no run to go on with.  Raises CacheError if the folder holds another job's run.
    """
    if not (holds_run(folder, identity, job) and all(map(is_whole, checkpoints(-1)))):
        return None
    count = 0
    while count < job.epochs:
        steps = all(steps_path(folder, count, rank).is_file() for rank in range(world_size))
        if not (steps and all(map(is_whole, checkpoints(count)))):
            break
        count += 1
    return count


def _difference(text: str, job: Job) -> str:
    try:
        kept = _settings(from_json(text, Job, source=IDENTITY))
    except ConfigError:  # of an earlier version, or damaged
        return "It was made by another job, plan, model or dataset."
    mine = _settings(job)
    names = [name for name in {**kept, **mine} if kept.get(name) != mine.get(name)]
    if not names:
        return "Its job is the same, but the plan, the model's weights or the dataset have changed."
    return f"It was made with {', '.join(f'{name} = {shown(kept.get(name))} instead of {shown(mine.get(name))}' for name in names)}."


def _settings(job: Job) -> dict[str, Any]:
    settings = to_builtins(job)
    return settings | {f"option {name}": value for name, value in settings.pop("options").items()}


def is_whole(path: Path) -> bool:
    """Return whether a safetensors file is there, and as long as its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
