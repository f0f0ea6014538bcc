"""What the executed comparisons have in common: model, tasks, rates, and how small the quick ones are (PAC+, section VI-A)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.reproduce.pac_plus.executed_build import run_all
from workbench.reproduce.pac_plus.executed_runs import Outcome, RunFolder, Training
from workbench.reproduce.pac_plus.executed_statistics import RESAMPLES
from workbench.reproduce.result import Settings
from workbench.tasks import load_task
from workbench.tasks.task import Task

MODEL, QUICK_MODEL = "all-MiniLM-L6-v2", "tiny-bert"
RATES = {"full": 5e-5, "adapters": 1e-3, "lora": 2e-3, "parallel_adapters": 2e-3}
"""Learning rates that an earlier search on sentiment found good, each technique's own."""
TITLES = {"sentiment": "sentiment", "mrpc": "MRPC", "stsb": "STS-B", "sst2": "SST-2"}
LABELS = {"full": "Full Model", "adapters": "Adapters", "lora": "LoRA", "parallel_adapters": "Parallel Adapters"}
SST2_TRAIN = 8000
"""Of SST-2's 67,349 training phrases; all other tasks are taken whole."""
_QUICK = (48, 24, 24)
PROTOCOL = (
    "Each technique sees the same mini-batches of 32 for three epochs under AdamW with its own learning rate; the epoch is chosen on the "
    "validation split and the test split is scored once, by that epoch's weights. The backbone is all-MiniLM-L6-v2, 22.6 million "
    "parameters; the paper's are T5-Base to T5-Large, 10 to 33 times as large. LoRA is peft's, r = 8, alpha = 16, on W_q and W_v. "
    "All compute in float32; a cached activation is kept in bfloat16.",
    "GLUE's own test labels are secret: STS-B and SST-2 are tested on the published validation split and choose the epoch on samples "
    "kept back from the training split; of SST-2 8,000 training samples are taken. MRPC has a labelled test split.",
)


def tasks_of(settings: Settings) -> tuple[str, ...]:
    """Return the tasks: the embedded one, and GLUE's where a folder is given."""
    return ("sentiment",) if settings.data is None else ("sentiment", "mrpc", "stsb", "sst2")


def training(settings: Settings, task: str, technique: str, seed: int, **changes: Any) -> Training:
    """Return a training of the comparison, or its quick version."""
    quick = {"model": QUICK_MODEL, "epochs": 1, "max_length": 32, "samples": _QUICK, "batch_size": 16}
    full = {"model": MODEL, "samples": (SST2_TRAIN if task == "sst2" else None, None, None)}
    given: dict[str, Any] = {"learning_rate": RATES[technique]} | (quick if settings.quick else full) | changes
    return Training(task=task, technique=technique, seed=seed, **given)


def run_trainings(settings: Settings, trainings: list[Training]) -> dict[Training, Outcome]:
    """Run what was not run before; outcomes are kept in the settings' workdir."""
    return run_all(trainings, RunFolder(run_folder(settings)), settings.data, settings.progress)


def resamples(settings: Settings) -> int:
    """Return how many test sets a paired test draws."""
    return 50 if settings.quick else RESAMPLES


def run_folder(settings: Settings) -> Path | None:
    """Return where outcomes are kept."""
    return None if settings.workdir is None else settings.workdir / "trainings"


def task_of(settings: Settings, one: Training) -> Task:
    """Return a training's task, with its test labels."""
    samples = dict(zip(("train_samples", "validation_samples", "test_samples"), one.samples, strict=True))
    return load_task(one.task, data=None if one.task.startswith("sentiment") else settings.data, **samples)
