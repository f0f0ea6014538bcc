"""Heat: how a device slows down while it computes, and recovers while it waits.

A device's curve gives its speed over seconds of computing, relative to its speed when cold.  One rule covers cooling:
each second of computing adds a second of heat, each second of waiting takes one away, and heat never falls below 0.
So a device that computes less than half of the time stays cold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from workbench.core.errors import ConfigError
from workbench.core.ranges import Seconds, Share, require_ranges
from workbench.core.serial import shown

MOST_LEVELS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A speed that a device has from so much heat on.  heat_s: seconds.  speed: relative to the cold device."""

    heat_s: Seconds
    speed: Share

    def __post_init__(self) -> None:
        require_ranges(self, "A level of sustained speed")


Levels = tuple[Level, ...]
"""A device's curve, by ascending heat; () for a device that keeps its speed."""


def require_curve(levels: Levels, owner: str) -> None:
    """Raise ConfigError unless the levels begin cold, at full speed, and only get hotter and slower."""
    if not levels:
        return
    request = f"{owner} has sustained = {as_text(levels)}."
    if len(levels) > MOST_LEVELS:
        raise ConfigError(request, f"There are {len(levels)} levels.", f"Give at most {MOST_LEVELS}.")
    if levels[0] != Level(heat_s=0.0, speed=1.0):
        raise ConfigError(request, "A cold device has its full speed.", "Begin with [0, 1.0].")
    for before, after in pairwise(levels):
        if after.heat_s <= before.heat_s:
            problem = f"{after.heat_s:g} s do not follow {before.heat_s:g} s."
            raise ConfigError(request, problem, "Sort the levels by their seconds, each once.")
        if after.speed > before.speed:
            problem = f"Its speed rises from {before.speed:g} to {after.speed:g} as it gets hotter."
            raise ConfigError(request, problem, "Give speeds that only fall.")


def read_curve(written: object, owner: str) -> Levels:
    """Return the levels of a curve as cluster files write it; () for an empty list.  Raises ConfigError."""
    if not isinstance(written, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in written):
        request = f"{owner} asks for sustained = {shown(repr(written))}."
        problem = "It is not a list of pairs: seconds of computing, and the speed from then on."
        raise ConfigError(request, problem, "Write, for example, [[0, 1.0], [180, 0.8]].")
    try:
        levels = tuple(Level(heat_s=heat_s, speed=speed) for heat_s, speed in written)
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error.asked[:1].lower()}{error.asked[1:]}", error.found, error.todo) from None
    require_curve(levels, owner)
    return levels


def as_text(levels: Levels) -> str:
    """Return a curve as cluster files write it: '[[0, 1], [180, 0.8]]'."""
    return f"[{', '.join(f'[{level.heat_s:g}, {level.speed:g}]' for level in levels)}]"


def speed_at(levels: Levels, heat_s: float) -> float:
    """Return a device's relative speed after this much heat; 1 without a curve."""
    if not levels:
        return 1.0
    return levels[bisect_right(levels, heat_s, key=lambda level: level.heat_s) - 1].speed


def curve_of(samples: Sequence[tuple[float, float]]) -> Levels:
    """Return the curve of a measurement, in steps of a twentieth of the cold speed.

    samples: seconds of computing and the rate then, by time.  Raises ConfigError without any.
    """
    if not samples:
        raise ConfigError("A curve of sustained speed was asked for.", "No sample was taken.", "Measure for longer.")
    cold, slowest = samples[0][1], 1.0
    rounded = list[tuple[float, float]]()
    for busy_s, rate in samples:
        slowest = min(slowest, max(0.05, round(20 * rate / cold) / 20))
        rounded.append((busy_s, slowest))
    firsts = [next(group) for _, group in groupby(rounded, key=lambda sample: sample[1])]
    return tuple(
        Level(heat_s=0.0 if number == 0 else round(busy_s, 1), speed=speed)
        for number, (busy_s, speed) in enumerate(firsts)
    )


class Heat:
    """A device's heat as time passes.  heat_s: the present heat in seconds."""

    def __init__(self, levels: Levels = ()) -> None:
        self._levels = levels
        self._until_s: float | None = None
        self.heat_s = 0.0

    @property
    def speed(self) -> float:
        """Return the device's present speed, relative to the cold device."""
        return speed_at(self._levels, self.heat_s)

    def cool(self) -> None:
        """Let the device be cold again."""
        self.heat_s = 0.0

    def advance(self, now_s: float, busy_s: float = 0.0) -> None:
        """Let time pass until now_s, of which the device has computed the last busy_s and has waited before.

        The first call begins the time.  busy_s that exceeds the time that has passed counts as that time.
        """
        passed_s = max(0.0, now_s - (now_s - busy_s if self._until_s is None else self._until_s))
        busy_s = min(busy_s, passed_s)
        self.heat_s = max(0.0, self.heat_s - (passed_s - busy_s)) + busy_s
        self._until_s = now_s if self._until_s is None else max(now_s, self._until_s)
