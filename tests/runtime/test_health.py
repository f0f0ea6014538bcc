"""What a real device says of itself: its battery, its heat, its energy meter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.runtime import health
from workbench.runtime.commands import Pong


def test_a_device_says_how_full_its_battery_is_and_whether_it_is_throttled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    battery = SimpleNamespace(percent=17.0, power_plugged=False)
    monkeypatch.setattr(health.psutil, "sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr(health, "SYSTEM", tmp_path)
    assert health.health() == Pong(0.17, False, None)
    write(health.THROTTLED, "50004\n")  # it is throttled now; the upper bits are of the past
    write("class/power_supply/BAT0/energy_now", "2000000\n")
    battery.power_plugged = True
    assert health.health() == Pong(None, True, pytest.approx(-7200))
    write(health.THROTTLED, "50000\n")
    write("class/powercap/intel-rapl:0/energy_uj", "3000000\n")
    write("class/powercap/intel-rapl:1/energy_uj", "no number\n")
    assert health.health() == Pong(None, False, pytest.approx(3.0))
