"""What an interrupted run has done is what all of its devices have logged, in the attempt that did it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plans import staged_plan
from workbench.core.sealed import SealedLog, owner_of
from workbench.methods.common.rank_results import StepTrace
from workbench.methods.training.interrupted import LogOwner, begin, take_up
from workbench.models.sealed_tensors import save_sealed
from workbench.runtime.snapshot import KINDS, Position, SnapshotFile

RUN, NUM_STEPS, LAYERS = "a run", 8, ((0, 3), (3, 6))


def job(folder: Path) -> Any:
    """Two devices, of which each has a stage, and one epoch."""
    phase = SimpleNamespace(epochs=range(1), cached=False, steps=lambda epoch: [None] * NUM_STEPS)
    return SimpleNamespace(
        folder=folder,
        plan=staged_plan(*((stop - start, {rank: 4}) for rank, (start, stop) in enumerate(LAYERS))),
        fingerprint=RUN,
        job=SimpleNamespace(epochs=1),
        cluster=SimpleNamespace(names=("alpha", "beta"), devices=()),
        phases=lambda: [phase],
    )


def log(folder: Path, rank: int, steps: range) -> Path:
    path = folder / "steps" / f"epoch-0-from-{steps.start}-rank-{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = SealedLog(path, LogOwner(owner=owner_of(RUN, path), ranks=(0, 1), steps=NUM_STEPS))
    for step in steps:
        lines.append(StepTrace(epoch=0, step=step, samples=4, start_s=step, end_s=step + 1, loss=rank * 0.5))
    return path


def save(folder: Path, step: int) -> None:
    for kind in KINDS:
        for layers in LAYERS:
            path = SnapshotFile(folder, kind, Position(0, step), layers).path
            save_sealed(path, owner_of(RUN, path), {f"{kind} {layers}": torch.zeros(1)})


@pytest.mark.parametrize(("is_lost", "step"), [(False, 5), (True, 3)])
def test_a_lost_log_of_the_second_attempt_is_not_made_up_for_by_the_first_ones(
    is_lost: bool, step: int, tmp_path: Path
) -> None:
    """The first one did six steps, the second one the fourth and fifth again: without a device's log of these, its part
    of their losses would be missing."""
    begin(job(tmp_path))
    for rank in (0, 1):
        log(tmp_path, rank, range(6))
        second = log(tmp_path, rank, range(3, 5))
    for taken in (3, 4, 5):
        save(tmp_path, taken)
    if is_lost:
        second.unlink()
    former = take_up(job(tmp_path))
    assert (former.epochs, former.step, len(former.state)) == (0, step, len(KINDS) * len(LAYERS))
    done = {
        rank: sorted(trace.step for result in former.results if result.rank == rank for trace in result.steps)
        for rank in (0, 1)
    }
    assert done == {rank: list(range(step)) for rank in (0, 1)}
