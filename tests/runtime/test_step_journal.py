"""A step journal outlives a kill, and never gives back a record that is not whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.step_journal import StepJournal


def optimizer(seed: int = 0) -> FlatAdamW:
    torch.manual_seed(seed)
    return FlatAdamW(nn.Linear(3, 5), learning_rate=LinearSchedule(peak=0.1, num_steps=100), weight_decay=0.01)


def take_step(optimizer: FlatAdamW) -> None:
    optimizer.gradients.copy_(torch.linspace(-1, 1, optimizer.gradients.numel()) * (1 + optimizer.num_steps))
    optimizer.step()


def test_the_last_two_steps_are_kept_and_each_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    first, states = optimizer(), {}
    journal = StepJournal(tmp_path / "j" / "journal.bin", first, writable=True)
    assert journal.kept_steps() == ()
    for _ in range(5):
        take_step(first)
        journal.write()
        states[first.num_steps] = [vector.clone() for vector in first.state_vectors()]
    take_step(first)
    for steps in (4, 5):
        second = optimizer(seed=1)
        found = StepJournal(tmp_path / "j" / "journal.bin", second, writable=False)
        assert found.kept_steps() == (4, 5)
        found.restore(steps)
        assert second.num_steps == steps
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), states[steps], strict=True))
        while second.num_steps < first.num_steps:
            take_step(second)
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), first.state_vectors(), strict=True))


def test_reading_makes_no_file_and_another_model_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.bin"
    assert StepJournal(path, optimizer(), writable=False).kept_steps() == ()
    assert not path.exists()
    mine = optimizer()
    take_step(mine)
    StepJournal(path, mine, writable=True).write()
    other = FlatAdamW(nn.Linear(3, 6), learning_rate=LinearSchedule(peak=0.1, num_steps=100), weight_decay=0.0)
    assert StepJournal(path, other, writable=False).kept_steps() == ()


@pytest.mark.parametrize(("at", "expected"), [(0.3, (1,)), (0.9, (2,))])
def test_a_record_with_a_changed_byte_is_not_used(at: float, expected: tuple[int, ...], tmp_path: Path) -> None:
    path, mine = tmp_path / "journal.bin", optimizer()
    journal = StepJournal(path, mine, writable=True)
    for _ in range(2):
        take_step(mine)
        journal.write()
    del journal
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)
    assert StepJournal(path, mine, writable=False).kept_steps() == expected


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_step_journal import StepJournal, optimizer, take_step
mine = optimizer()
from pathlib import Path
journal = StepJournal(Path({str(tmp_path / "journal.bin")!r}), mine, writable=True)
for _ in range(3):
    take_step(mine)
    journal.write()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == -signal.SIGKILL
    expected, found = optimizer(), optimizer(seed=1)
    for _ in range(3):
        take_step(expected)
    journal = StepJournal(tmp_path / "journal.bin", found, writable=False)
    assert journal.kept_steps() == (2, 3)
    journal.restore(3)
    assert all(torch.equal(*pair) for pair in zip(found.state_vectors(), expected.state_vectors(), strict=True))
