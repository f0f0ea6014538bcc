from __future__ import annotations

from made_up_report import cluster

from workbench.cli.progress import RunProgress
from workbench.methods.base import Event


def test_without_a_terminal_a_line_per_phase_and_epoch(capsys) -> None:
    with RunProgress(cluster()) as progress:
        progress.update(Event("phase", message="Planning"))
        for step in range(3):
            progress.update(Event("step", 0, 0, step, 3, 0.5))
        progress.update(Event("device", 1, message="1F0"))
        progress.update(Event("epoch", epoch=0, loss=0.25, seconds=2.0))
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["Planning", "epoch 1: 3 steps", "epoch 1 done, loss 0.2500, 2.0 s"]
    assert captured.out == ""


def test_on_a_terminal_bar_and_devices_are_drawn(monkeypatch) -> None:
    from rich.console import Console

    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with RunProgress(cluster()) as progress:
        progress.update(Event("step", 0, 1, 4, 10, 0.5))
        progress.update(Event("device", 1, message="1F0"))
        console = Console(width=120, record=True, file=None, force_terminal=False)
        with console.capture() as captured:
            console.print(progress._draw())
    drawn = captured.get()
    assert "epoch 2, loss 0.5000" in drawn
    assert "5/10" in drawn
    assert "slow  1F0" in drawn
