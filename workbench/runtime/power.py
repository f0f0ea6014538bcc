"""The power that a board without a battery draws, read from its sensors, and summed up to joules.

Raspberry Pi 5: its power chip (PMIC) measures current and voltage of its rails; USB devices, HATs and the chip's own
loss are not among them.  INA219 and INA3221 (Jetson boards have one): hwmon shows them once their driver is loaded;
what they measure is what they are wired to.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

HWMON = "class/hwmon/hwmon*"
INA_NAMES = frozenset({"ina219", "ina220", "ina226", "ina3221"})
INA_CHANNELS = range(1, 4)
"""Channels with a current and a bus voltage; an INA3221's further inputs are shunt voltages and sums."""
WHOLE_BOARD = frozenset({"VDD_IN", "POM_5V_IN"})
"""Labels of the channel of a Jetson that feeds the others."""
PMIC = ("vcgencmd", "pmic_read_adc")
PMIC_TIMEOUT_S = 1.0
_RAIL = re.compile(r"(\w+)_([AV]) (?:current|volt)\(\d+\)=([\d.]+)[AV]")


def ina_watts(system: Path) -> float | None:
    """Return the watts of all INA sensors below `system` (/sys), None if there are none."""
    chips = [path for path in system.glob(HWMON) if _text(path / "name") in INA_NAMES]
    watts = [value for chip in chips if (value := _chip_watts(chip)) is not None]
    return sum(watts) if watts else None


def _chip_watts(chip: Path) -> float | None:
    micro_w = number(chip / "power1_input")
    if micro_w is not None:
        return micro_w / 1e6
    channels: dict[str, float] = {}
    for channel in INA_CHANNELS:
        milli_v, milli_a = number(chip / f"in{channel}_input"), number(chip / f"curr{channel}_input")
        if milli_v is not None and milli_a is not None:
            channels[_text(chip / f"in{channel}_label") or str(channel)] = milli_v * milli_a / 1e6
    board_watts = [watts for label, watts in channels.items() if label in WHOLE_BOARD]
    return sum(board_watts or channels.values()) if channels else None


def pmic_watts() -> float | None:
    """Return the watts of a Raspberry Pi 5's rails, None on other machines."""
    try:
        done = subprocess.run(PMIC, capture_output=True, text=True, timeout=PMIC_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    readings: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for rail, unit, value in _RAIL.findall(done.stdout):
        readings[unit][rail] = float(value)
    rails = readings["A"].keys() & readings["V"].keys()
    return sum(readings["A"][rail] * readings["V"][rail] for rail in rails) if rails else None


class PowerMeter:
    """Sums the power of the first sensor that answers up to joules; power between two readings changes evenly.

    sensors: functions that return watts, or None.  A sensor that does not answer the first time is not read again.
    """

    def __init__(
        self, sensors: tuple[Callable[[], float | None], ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensors, self._clock = sensors, clock
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def read_j(self) -> float | None:
        """Read the power now and return the joules since the first reading; None without a sensor."""
        watts: float | None = None
        while self._sensors and (watts := self._sensors[0]()) is None and self._last is None:
            self._sensors = self._sensors[1:]
        if watts is not None:
            now_s = self._clock()
            if self._last is not None:
                last_s, last_w = self._last
                self._joules += (now_s - last_s) * (watts + last_w) / 2
            self._last = now_s, watts
        return None if self._last is None else self._joules


def number(path: Path, base: int = 10) -> int | None:
    """Return the whole number in a file, None if it cannot be read or has none."""
    try:
        return int(path.read_text(), base)
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
