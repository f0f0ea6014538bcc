"""A step journal outlives a kill, and never gives back a record that is not whole."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_script
from torch import nn

from tests.waiting import LIMIT_S
from workbench.methods.common.folder import journal_path
from workbench.methods.training.interrupted import EpochLog
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.step_journal import StepJournal, read_journal

RUN = "a run"


def optimizer(seed: int = 0) -> FlatAdamW:
    torch.manual_seed(seed)
    return FlatAdamW(nn.Linear(3, 5), learning_rate=LinearSchedule(peak=0.1, num_steps=100), weight_decay=0.01)


def take_step(optimizer: FlatAdamW) -> None:
    optimizer.gradients.copy_(torch.linspace(-1, 1, optimizer.gradients.numel()) * (1 + optimizer.num_steps))
    optimizer.step()


def kept_steps(path: Path) -> list[int]:
    return [state.step for state in read_journal(path, RUN).states]


def test_the_last_two_steps_are_kept_and_each_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    first, states, path = optimizer(), {}, tmp_path / "j" / "journal.bin"
    journal = StepJournal(path, RUN, first)
    assert kept_steps(path) == []
    for _ in range(5):
        take_step(first)
        journal.write()
        states[first.num_steps] = [vector.clone() for vector in first.state_vectors()]
    take_step(first)
    assert kept_steps(path) == [4, 5]
    for state in read_journal(path, RUN).states:
        second = optimizer(seed=1)
        second.load_named_tensors(state.tensors, state.step)
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), states[state.step], strict=True))
        while second.num_steps < first.num_steps:
            take_step(second)
        assert all(torch.equal(*pair) for pair in zip(second.state_vectors(), first.state_vectors(), strict=True))


def test_a_state_that_is_too_large_for_every_step_is_saved_at_a_pause(tmp_path: Path) -> None:
    """On the one of equal ranks that writes; devices that back each other up keep it in memory instead."""
    mine, session = optimizer(), SimpleNamespace(rank=0, context=SimpleNamespace(clock_offset_s=0.0))
    plan = SimpleNamespace(cached=None, busy_ranks={0})
    phase: Any = SimpleNamespace(
        session=session,
        rank_job=SimpleNamespace(folder=tmp_path, fingerprint=RUN, present=plan),
        phase=SimpleNamespace(cached=False, steps=lambda epoch: range(4)),
        layers=(0, 2),
        optimizer=mine,
        keeps_steps=False,
    )
    path = journal_path(tmp_path, 0, phase.layers)
    for phase.is_writer, phase.is_backed_up in ((False, False), (True, True), (True, False)):
        log = EpochLog(phase, 0, 0)
        take_step(mine)
        assert not path.exists()
        log.pause()
    [state] = read_journal(path, RUN).states
    assert state.step == mine.num_steps == 3
    assert all(torch.equal(tensor, state.tensors[name]) for name, tensor in mine.named_tensors().items())


def test_a_file_that_is_none_has_no_steps(tmp_path: Path) -> None:
    """Missing, cut off, or of something else; reading makes none."""
    path = tmp_path / "journal.bin"
    assert kept_steps(path) == []
    assert not path.exists()
    mine = optimizer()
    journal = StepJournal(path, RUN, mine)
    take_step(mine)
    journal.write()
    whole = path.read_bytes()
    for data in (whole[:-4], whole[:20], b"", b"\xff" * 200, whole + b"\0"):
        path.write_bytes(data)
        assert kept_steps(path) == []


@pytest.mark.parametrize(("at", "expected"), [(0.45, [1]), (0.9, [2])])
def test_a_record_with_a_changed_byte_is_not_used(at: float, expected: list[int], tmp_path: Path) -> None:
    path, mine = tmp_path / "journal.bin", optimizer()
    journal = StepJournal(path, RUN, mine)
    for _ in range(2):
        take_step(mine)
        journal.write()
    del journal
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)
    assert kept_steps(path) == expected
    assert "one of its two records was changed" in read_journal(path, RUN).damage


def test_another_runs_or_another_layers_journal_is_not_used(tmp_path: Path) -> None:
    path, mine = tmp_path / "epoch-0-layers-0-3.bin", optimizer()
    journal = StepJournal(path, RUN, mine)
    take_step(mine)
    journal.write()
    assert read_journal(path, RUN).damage == "" and len(read_journal(path, RUN).states) == 1
    assert read_journal(path, "another") == ((), "it belongs to epoch-0-layers-0-3.bin of run a run")
    path.rename(tmp_path / "epoch-0-layers-3-6.bin")
    assert read_journal(tmp_path / "epoch-0-layers-3-6.bin", RUN) == ((), "it belongs to epoch-0-layers-0-3.bin of run a run")


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from test_step_journal import RUN, StepJournal, optimizer, take_step
mine = optimizer()
from pathlib import Path
journal = StepJournal(Path({str(tmp_path / "journal.bin")!r}), RUN, mine)
for _ in range(3):
    take_step(mine)
    journal.write()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with run_script(script, tmp_path / "printed") as process:
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
    expected = optimizer()
    for _ in range(3):
        take_step(expected)
    before, last = read_journal(tmp_path / "journal.bin", RUN).states
    assert (before.step, last.step) == (2, 3)
    assert all(torch.equal(last.tensors[name], tensor) for name, tensor in expected.named_tensors().items())
