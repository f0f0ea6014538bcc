"""What ended in its middle goes on with the next step, whatever was damaged meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.experiment.running import KEPT_AFTER_A_RUN, losses, run, stop_in
from workbench.core import Job, Report
from workbench.core.errors import CacheError
from workbench.methods.base import Event


def copied(stopped: tuple[Path, bool], folder: Path) -> bool:
    """Copy a run that was stopped; return whether that was in its last epoch's middle."""
    shutil.copytree(stopped[0], folder, dirs_exist_ok=True)
    return stopped[1]


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_interrupted_run_goes_on_from_its_last_completed_step(
    epoch: int, job: Job, whole: tuple[Report, Path], stopped: tuple[Path, bool], tmp_path: Path
) -> None:
    in_its_middle = copied(stopped, tmp_path) if epoch == 2 else stop_in(job, tmp_path, epoch)
    again: list[Event] = []
    resumed = run(
        job, tmp_path, resume=True, progress=lambda event: again.append(event) if event.kind == "step" else None
    )
    assert losses(resumed) == losses(whole[0])
    assert again[0].epoch == epoch
    assert again[0].step > 0 or not in_its_middle
    assert len(again) == sum(
        (event_epoch, step) >= (again[0].epoch, again[0].step) for event_epoch, step, _ in losses(whole[0])
    )
    assert resumed.metrics == whole[0].metrics
    assert {path.name for path in tmp_path.iterdir()} == KEPT_AFTER_A_RUN


def test_a_finished_run_is_resumed_without_training(whole: tuple[Report, Path], job: Job) -> None:
    report, folder = whole
    steps: list[Event] = []
    again = run(job, folder, resume=True, progress=lambda event: steps.append(event) if event.kind == "step" else None)
    assert not steps
    assert losses(again) == losses(report)
    assert again.metrics == report.metrics
    assert "all 3 epochs were finished" in again.notes[0]


def _take_from_another(cache: Path) -> None:
    [other] = (one for one in cache.parents[1].glob("*/cache") if one != cache)
    shutil.rmtree(cache)
    shutil.copytree(other, cache)


# What else can be wrong with a cache is told alike: tests/runtime/test_activation_cache.py.
@pytest.mark.parametrize(("damage", "said"), [(_take_from_another, "It belongs to "), (shutil.rmtree, "missing")])
def test_a_cache_that_cannot_be_used_is_told_and_filled_again(
    damage: Callable[[Path], None],
    said: str,
    job: Job,
    whole: tuple[Report, Path],
    stopped: tuple[Path, bool],
    tmp_path: Path,
) -> None:
    copied(stopped, tmp_path)
    damage(next(path for path in sorted(tmp_path.glob("devices/*/cache")) if (path / "taps.bin").stat().st_size))
    resumed = run(job, tmp_path, resume=True)
    assert [said in note for note in resumed.notes if "activation cache" in note] == [True]  # and nothing of a tape
    assert "filling the cache again" in resumed.phases_s
    assert [loss for _, _, loss in losses(resumed)] == pytest.approx(
        [loss for _, _, loss in losses(whole[0])], rel=1e-6
    )


def test_a_damaged_snapshot_costs_its_epoch_at_most(
    job: Job, whole: tuple[Report, Path], stopped: tuple[Path, bool], tmp_path: Path
) -> None:
    """If a snapshot within the epoch is still there, only the steps after it."""
    copied(stopped, tmp_path)
    [snapshot] = (tmp_path / "snapshots").glob("weights-epoch-2-step-0-*")
    content = bytearray(snapshot.read_bytes())
    content[-1] ^= 1
    snapshot.write_bytes(content)
    resumed = run(job, tmp_path, resume=True)
    assert resumed.notes[0].startswith(("Resumed after epoch 1 of 3", "Resumed after step 3 of epoch 2 of 3"))
    assert any("were changed after they were written" in note for note in resumed.notes)
    assert losses(resumed) == losses(whole[0])


def test_what_is_no_file_costs_what_it_would_hold(
    job: Job, whole: tuple[Report, Path], stopped: tuple[Path, bool], tmp_path: Path
) -> None:
    """A folder instead of the plan, and a pipe instead of a log: reading it would never end."""
    copied(stopped, tmp_path)
    log = next((tmp_path / "steps").glob("epoch-2-*-rank-0.jsonl"))
    for path, place in ((tmp_path / "plan.json", Path.mkdir), (log, os.mkfifo)):
        path.unlink()
        place(path)
    resumed = run(job, tmp_path, resume=True)
    messages = [note for note in resumed.notes if "It is not a file." in note]
    assert [name in " ".join(messages) for name in ("'plan.json'", f"'{log.name}'")] == [True, True]
    assert losses(resumed) == losses(whole[0])


def test_an_initial_state_that_was_changed_lets_the_run_start_over(
    job: Job, whole: tuple[Report, Path], stopped: tuple[Path, bool], tmp_path: Path
) -> None:
    copied(stopped, tmp_path)
    content = bytearray((tmp_path / "initial.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "initial.safetensors").write_bytes(content)
    resumed = run(job, tmp_path, resume=True)
    assert resumed.notes[0] == "The run starts over."
    assert resumed.notes[1].startswith("'initial.safetensors' was to be read. The values of ")
    assert losses(resumed) == losses(whole[0])


def test_another_job_is_not_resumed(job: Job, whole: tuple[Report, Path]) -> None:
    with pytest.raises(CacheError, match=r"made with learning_rate = 0.002 instead of 0.001\."):
        run(replace(job, learning_rate=1e-3), whole[1], resume=True)
    [snapshot] = (whole[1] / "snapshots").glob("weights-epoch-3-step-0-*")
    with safe_open(snapshot, framework="pt") as kept:
        assert kept.keys()
