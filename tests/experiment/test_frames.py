"""The way of a job: from run(job) to an operation on a device, few functions call each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_job import two_devices

from tests.experiment.frames import frames_up_to, note_operations
from workbench import experiment
from workbench.core import Job
from workbench.runtime import engine_session
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.engines import EngineCluster

MOST_FRAMES = 12
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "pac_plus": ("F", {"epochs": 1}),
    "p_rge": ("F", {"model": "tiny-llama", "micro_batches": 1, "options": {"queries": 2, "steps": 2}}),
    "galaxy_plus": ("QKV", {"model": "tiny-gpt2", "micro_batches": 1, "options": {"generate": 2}}),
}
"""Of each method a forward operation, and a small job."""


@pytest.fixture(scope="module")
def noting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineCluster, Path]]:
    """Return engines that write their operations' frames into a folder."""
    folder = tmp_path_factory.mktemp("frames")
    with EngineCluster.start(two_devices(), fidelity="paced") as engines:
        engines.run(note_operations, [folder] * 2)
        yield engines, folder


@pytest.mark.parametrize("method", JOBS)
def test_at_most_twelve_frames_on_either_side(
    method: str, job: Job, noting: tuple[EngineCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, folder = noting
    kind, changes = JOBS[method]
    for path in folder.iterdir():
        path.unlink()
    commands: list[list[str]] = []
    write = engine_session._Pipe.write

    def noted(pipe: Any, data: bytes) -> None:
        if frames_up_to(sys._getframe(1), Coordinator._begin.__code__):
            commands.append(frames_up_to(sys._getframe(1), experiment.run.__code__))
        write(pipe, data)

    monkeypatch.setattr(engine_session._Pipe, "write", noted)
    few = replace(job, method=method, train_samples=16, validation_samples=4, test_samples=4, **changes)
    experiment.run(few, two_devices(), engines=engines, workdir=tmp_path)
    assert len(commands) == 2
    for frames in commands:
        assert len(frames) + 1 <= MOST_FRAMES, " ".join(frames)  # with the call of `write`
    operations = {path.name: path.read_text().split("\n")[1:] for path in folder.iterdir()}
    assert operations.get(f"0 {kind}") or operations.get(f"1 {kind}")
    for name, frames in operations.items():
        # A thread of its own has a stack of its own.
        assert len(frames) <= MOST_FRAMES, f"{name}: {' '.join(frames)}"
