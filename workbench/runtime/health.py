"""A device's reply to a ping: its charge, its temperature, its energy meter and its free memory."""

from __future__ import annotations

from pathlib import Path

import psutil

from workbench.runtime.commands import Pong
from workbench.runtime.context import RankContext
from workbench.runtime.memory import read_memory
from workbench.runtime.power import PowerMeter, ina_watts, number, pmic_watts

SYSTEM = Path("/sys")
THROTTLED = "devices/platform/soc/soc:firmware/get_throttled"
"""Bits of a Raspberry Pi's present state: 1 the clock is capped, 2 it is throttled, 3 its soft temperature limit is
reached."""
COUNTERS = {"class/powercap/intel-rapl:?/energy_uj": 1e-6, "class/power_supply/*/energy_now": -3600e-6}
"""Joules in a unit of a counter of energy: the processor's own (often for root only), or else what a battery has left,
in microwatt-hours."""


ZONES = "class/thermal/thermal_zone*/temp"


class Health:
    """Reads this machine's state.  meter: sums the power of sensors up, if the machine has no counter of energy."""

    def __init__(self, meter: PowerMeter | None = None) -> None:
        self._meter = meter or PowerMeter((lambda: ina_watts(SYSTEM), pmic_watts))

    def reply(self, context: RankContext, footprint_bytes: int) -> Pong:
        """Return the reply to a ping; a real device fills it in.

        footprint_bytes: memory of the process before its job.
        """
        if not context.device.address:
            return Pong()
        free_bytes = psutil.virtual_memory().available + read_memory().anonymous_bytes - footprint_bytes
        return self.read()._replace(memory_bytes=free_bytes)

    def read(self) -> Pong:
        """Return this machine's charge, whether heat slows it down, and its energy meter."""
        battery = getattr(psutil, "sensors_battery", lambda: None)()
        charge = None if battery is None or battery.power_plugged else battery.percent / 100
        state = number(SYSTEM / THROTTLED, 16) or 0
        return Pong(charge, bool(state & 0b1110), self._energy_j())

    @property
    def temperature_c(self) -> float | None:
        """Return the temperature of this machine's hottest zone; None if it reports none."""
        return max((value / 1000 for path in SYSTEM.glob(ZONES) if (value := number(path)) is not None), default=None)

    def _energy_j(self) -> float | None:
        for pattern, unit in COUNTERS.items():
            readings = [value for path in SYSTEM.glob(pattern) if (value := number(path)) is not None]
            if readings:
                return unit * sum(readings)
        return self._meter.read_j()
