"""`workbench run --method p_rge` killed in mid-run: nothing is left running, and the same command with --resume ends
the same."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from in_process import call
from run_command import Command
from tiny_job import write_data

from tests.waiting import LIMIT_S, wait_for
from workbench.core.report import Report
from workbench.methods.p_rge.zeroth_order import read_log
from workbench.runtime.engines import default_pool

STEPS = 30
JOB = (
    "--method",
    "p_rge",
    "--model",
    "tiny-llama-2",
    "--batch-size",
    "2",
    "--micro-batches",
    "1",
    "--learning-rate",
    "0.005",
)
OPTIONS = ("--option", "queries=4", "--option", f"steps={STEPS}")


def steps_of(command: Command) -> Path:
    return command.work / "steps" / "log.jsonl"


def wait_for_steps(command: Command, count: int) -> None:
    def are_made() -> bool:
        assert command.process is not None
        assert command.process.poll() is None, "the run ended early"
        return steps_of(command).is_file() and len(steps_of(command).read_bytes().splitlines()) > count

    wait_for(are_made, f"{count} steps")


def said_by(command: Command, *more: str) -> str:
    """Give the command in this process; return what it said."""
    done = call(*command.words[3:], *more)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_that_is_killed_goes_on_from_its_log_and_makes_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, cache = write_data(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))
    reference, killed = (Command(tmp_path_factory.mktemp("c"), data, cache, (*JOB, *OPTIONS)) for _ in range(2))
    try:
        text = said_by(reference)
        assert "accuracy" in text
        # What gradients would have moved stands beside what travelled, unless a profile measured on a busy machine left
        # a device out.
        plan = Report.read(reference.report).plan
        divided = sum(len(stage.shares) for stage in plan.stages) > 1
        assert ("first-order data parallelism would send" in text) == divided
        default_pool().stop()
        process = killed.start()
        wait_for_steps(killed, 5)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        assert killed.survivors() == []
        _, kept = read_log(steps_of(killed))
        assert 5 <= len(kept) < STEPS
        monkeypatch.setattr(tempfile, "tempdir", str(killed.temporary))
        said_by(killed, "--resume")
        assert f"of {STEPS} steps" in " ".join(Report.read(killed.report).notes)
        assert read_log(steps_of(killed)) == read_log(steps_of(reference))
        losses = [[step.loss for step in Report.read(one.report).steps] for one in (killed, reference)]
        assert losses[0] == losses[1] and len(losses[0]) == STEPS
        assert (killed.work / "adapter" / "trained.safetensors").read_bytes() == (
            reference.work / "adapter" / "trained.safetensors"
        ).read_bytes()
        default_pool().stop()
        assert killed.survivors() == []
    finally:
        killed.end()
        default_pool().stop()
