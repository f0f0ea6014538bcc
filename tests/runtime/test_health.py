"""What a real device says of itself: its battery, its heat, its energy meter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from workbench.runtime import health, power
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
    machine = health.Health()
    read = machine.read
    assert machine.temperature_c is None
    write("class/thermal/thermal_zone0/temp", "48300\n")
    write("class/thermal/thermal_zone1/temp", "81000\n")
    assert machine.temperature_c == 81.0
    assert read() == Pong(0.17, False, None)
    write(health.THROTTLED, "50004\n")  # it is throttled now; the upper bits are of the past
    write("class/power_supply/BAT0/energy_now", "2000000\n")
    battery.power_plugged = True
    assert read() == Pong(None, True, pytest.approx(-7200))
    write(health.THROTTLED, "50000\n")
    write("class/powercap/intel-rapl:0/energy_uj", "3000000\n")
    write("class/powercap/intel-rapl:1/energy_uj", "no number\n")
    assert read() == Pong(None, False, pytest.approx(3.0))


def ina(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for file, text in {"name": name, **files}.items():
        (folder / file).write_text(f"{text}\n")


THREE = {"in1_input": "5000", "curr1_input": "400", "in2_input": "5000", "curr2_input": "200"}
THREE |= {"in3_input": "no data", "curr3_input": "70", "in4_input": "2", "curr4_input": "670"}


@pytest.mark.parametrize(
    ("chips", "watts"),
    [
        ([("ina219", {"power1_input": "3500000", "in1_input": "5000", "curr1_input": "900"})], 3.5),
        ([("ina3221", THREE)], 3.0),
        ([("ina3221", THREE | {"in1_label": "VDD_IN", "in2_label": "VDD_SOC"})], 2.0),  # the first feeds the others
        ([("ina219", {"power1_input": "1000000"}), ("ina219", {"power1_input": "2000000"})], 3.0),
        ([("cpu_thermal", {"power1_input": "9000000"}), ("ina219", {})], None),
    ],
)
def test_the_power_of_ina_sensors(tmp_path: Path, chips: list[tuple[str, dict[str, str]]], watts: float | None) -> None:
    for index, (name, files) in enumerate(chips):
        ina(tmp_path / f"class/hwmon/hwmon{index}", name, files)
    result = power.ina_watts(tmp_path)
    assert result is None if watts is None else result == pytest.approx(watts)


PI_5 = """\
   3V7_WL_SW_A current(0)=0.09661580A
   VDD_CORE_A current(7)=2.00000000A
   3V7_WL_SW_V volt(8)=3.70000000V
   VDD_CORE_V volt(15)=0.80000000V
   EXT5V_V volt(24)=5.15000000V
"""


@pytest.mark.parametrize(
    ("script", "watts"),
    [
        (f"cat <<'END'\n{PI_5}END", 2 * 0.8 + 0.0966158 * 3.7),
        ("echo 'error=1 error_msg=\"Command not registered\"'; exit 255", None),  # a Pi 4
        (None, None),
    ],
)
def test_the_power_of_a_raspberry_pi_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, watts: float | None
) -> None:
    if script is not None:
        (tmp_path / "vcgencmd").write_text(f"#!/bin/sh\n[ $1 = pmic_read_adc ] || exit 1\n{script}\n")
        (tmp_path / "vcgencmd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    result = power.pmic_watts()
    assert result is None if watts is None else result == pytest.approx(watts)


def test_power_is_summed_up_where_nothing_counts_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readings, requests, now = iter([2.0, 4.0, None, 4.0]), [], [10.0]

    def none() -> None:
        requests.append(now[0])

    meter = power.PowerMeter((none, lambda: next(readings)), clock=lambda: now[0])
    monkeypatch.setattr(health, "SYSTEM", tmp_path)
    read, joules = health.Health(meter).read, []
    for now[0] in (10.0, 12.0, 13.0, 15.0):
        joules.append(read().meter_j)
    assert joules == [0.0, 6.0, 6.0, 18.0] and requests == [10.0]  # a gap is bridged; what is not there is asked once
    ina(tmp_path / "class/powercap/intel-rapl:0", "package", {"energy_uj": "5000000"})
    assert read().meter_j == pytest.approx(5.0)
    assert power.PowerMeter((none,)).read_j() is None
