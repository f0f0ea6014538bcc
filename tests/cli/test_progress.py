from __future__ import annotations

import json
import re

import pytest
from made_up_report import cluster
from rich.console import Console

from tests.clock import Clock
from workbench.cli.output import PLAIN_INTERVAL_S, RunProgress, print_json, print_table, print_text, report_error, say
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.report import StepRecord
from workbench.core.units import size_words
from workbench.methods.base import DeviceState, Event


def drawn(progress: RunProgress) -> str:
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(progress.draw())
    return captured.get()


def test_without_a_terminal_a_line_per_phase_and_epoch(capsys) -> None:
    clock = Clock()
    with RunProgress(Job(epochs=2), cluster(), clock=clock) as progress:
        progress.update(Event("phase", message="Planning"))
        for step in range(3):
            clock.now_s += 1
            progress.update(Event("step", 0, 0, step, 3, 0.5, samples=8))
            progress.update(Event("device", 1, message="1F0"))
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["Planning", "epoch 1: 3 steps", "epoch 1 done, loss 0.5000, 2.0 s"]
    assert captured.out == ""


def test_without_a_terminal_a_long_epoch_tells_every_few_seconds(capsys) -> None:
    clock = Clock()
    with RunProgress(Job(epochs=1), cluster(), clock=clock) as progress:
        records = (StepRecord(epoch=0, step=step, samples=8, cached=False, predicted_s=1.0) for step in range(100))
        progress.update(Event("predicted", predicted=tuple(records)))
        for step in range(20):
            progress.update(Event("device", 0, 0, step, 100, device=DeviceState("first epoch", 1.0, 0.75, 1)))
            progress.update(Event("step", 0, 0, step, 100, 0.5, samples=8))
            clock.now_s += 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 19 // PLAIN_INTERVAL_S
    name = cluster().devices[0].name
    assert lines[1] == f"epoch 1, step 6 of 100, loss 0.5000, 8 samples/s, 94 s left; computing: {name} 75%"


def test_on_a_terminal_epochs_and_devices_are_drawn(monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock = Clock()
    described = cluster()
    with RunProgress(Job(epochs=2), described, clock=clock) as progress:
        progress.update(Event("phase", message="Training"))
        records = (StepRecord(epoch=1, step=step, samples=8, cached=True, predicted_s=1.0) for step in range(10))
        progress.update(Event("predicted", predicted=tuple(records)))
        for step in (3, 4):
            clock.now_s += 2
            progress.update(Event("step", 0, 1, step, 10, 0.5, samples=8))
        budget = described.devices[1].memory_bytes
        progress.update(Event("device", 1, 1, 4, 10, device=DeviceState("cached epoch", 2.0, 0.5, budget // 4)))
        lines = drawn(progress).splitlines()
    assert lines[0].strip() == "Training (4 s), loss 0.5000, 4 samples/s, 10 s left"
    (epoch,) = [line for line in lines if line.startswith("epoch 2")]
    assert "5 of 10 steps" in epoch and "loss 0.5000" in epoch
    (device,) = [line for line in lines if line.startswith("slow")]
    assert "cached epoch, step 5 of 10" in device
    assert f"{size_words(budget // 4)} of {size_words(budget)}" in device
    assert device.count("25%") == 2  # of the step computing, of the budget in use


@pytest.mark.parametrize(
    ("error", "outcome"), [(None, "finished"), (KeyboardInterrupt, "stopped"), (ValueError, "failed")]
)
def test_how_it_ended_is_kept(error, outcome) -> None:
    progress = RunProgress(Job(), cluster())
    progress.__exit__(error, None, None)
    assert progress.state.snapshot().outcome == outcome


HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\x7f\x9b31m\u202etxt\ud83d ü 한 👍"
PLAIN = r"a\x1b[2J\x1b]0;owned\x07\r\x7f\x9b31m\u202etxt\ud83d ü 한 👍"


def test_text_of_devices_and_files_cannot_command_the_terminal(capsys) -> None:
    job = Job(epochs=1)
    progress = RunProgress(job, cluster())
    progress.update(Event("note", message=HOSTILE))
    assert PLAIN in drawn(progress).replace("\n", "") and "\x1b" not in drawn(progress)
    capsys.readouterr()
    say(HOSTILE)
    report_error(ConfigError("It was asked.", HOSTILE, "Mend it."), as_json=False)
    print_text(HOSTILE)
    print_table(HOSTILE, ("device", HOSTILE), [("alpha", HOSTILE)])
    captured = capsys.readouterr()
    assert captured.err.count(PLAIN) == 2 and captured.out.count(PLAIN) == 4
    assert all(character.isprintable() or character == "\n" for character in captured.err + captured.out)


def test_a_table_that_is_too_wide_goes_on_below(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    heads = ("name", *(f"number {at}" for at in range(6)))
    print_table("T", heads, [("a", *range(6)), ("b", *range(6))], keys=1)
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40 and sum(line.startswith("name") for line in lines) == 2
    assert all(any(f"number {at}" in line for line in lines) for at in range(6))


def test_json_keeps_the_value_of_hostile_text(capsys) -> None:
    print_json({"found": HOSTILE})
    text = capsys.readouterr().out
    assert json.loads(text) == {"found": HOSTILE}
    assert all(character.isprintable() or character == "\n" for character in text)


def test_bars_leave_room_for_their_words_in_a_narrow_terminal() -> None:
    progress = RunProgress(Job(epochs=2), cluster(), clock=Clock())
    for step in range(90):
        progress.update(Event("step", 0, 0, step, 90, 0.5, samples=8))
    for width in (80, 120):
        [bar, _] = [line for line in progress.state.snapshot().lines(width).splitlines() if "[" in line]
        assert len(bar) <= width and bar.endswith("mean loss 0.5000") and "#" in bar
