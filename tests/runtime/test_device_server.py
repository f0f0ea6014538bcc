"""What a real device says of itself: its battery, its heat, its energy meter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.runtime import device_server
from workbench.runtime.commands import Pong


def test_a_device_says_how_full_its_battery_is_and_whether_it_is_throttled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    battery = SimpleNamespace(percent=17.0, power_plugged=False)
    monkeypatch.setattr(device_server.psutil, "sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr(device_server, "SYSTEM", tmp_path)
    assert device_server.health() == Pong(0.17, False, None)
    write(device_server.THROTTLED, "50004\n")  # it is throttled now; the upper bits are of the past
    write("class/power_supply/BAT0/energy_now", "2000000\n")
    battery.power_plugged = True
    assert device_server.health() == Pong(None, True, pytest.approx(-7200))
    write(device_server.THROTTLED, "50000\n")
    write("class/powercap/intel-rapl:0/energy_uj", "3000000\n")
    write("class/powercap/intel-rapl:1/energy_uj", "no number\n")
    assert device_server.health() == Pong(None, False, pytest.approx(3.0))
