"""Faults injected into devices: 'kill:beta@step40', 'slow:beta:4@step20-60'.  All methods use this format."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from msgspec import Meta

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.ranges import Count, Seconds, Slowness, range_of, require_range, require_ranges
from workbench.core.serial import shown

FaultKind = Literal["slow", "memory", "kill", "freeze", "leave"]
WITH_FACTOR = "slow", "memory"
"""Faults of a device that stays in the run."""
Unit = Literal["step", "s"]
RETURN = "return"
EXAMPLES: dict[Unit, str] = {
    "step": "kill:beta@step40, slow:beta:4@step20-60 or return:beta@step60",
    "s": "kill:beta@10-30s or slow:1:4@10s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault injected into a device, from `start` to `end` (None: until the run ends).

    unit: 'step' counts finished steps, 's' counts seconds since the run began.
    kind: 'slow' (computes `factor` times slower, by the pacer), 'memory' (another program leaves 1 / factor of its
    memory to the run), 'kill' (SIGKILL), 'freeze' (SIGSTOP: it does not answer, and is ended when the timeout detects
    that), 'leave' (it announces that it leaves).  At `end` a new process replaces a device that is gone.
    to: not the device itself is slow, but its messages to this rank.
    """

    kind: FaultKind
    rank: Annotated[int, Meta(ge=0, le=10**6)]
    start: Seconds
    end: Seconds | None = None
    factor: Slowness = 1.0
    unit: Unit = "s"
    to: Annotated[int, Meta(ge=0, le=10**6)] | None = None

    def __post_init__(self) -> None:
        require_ranges(self, "A fault")
        request = f"A fault '{self.kind}' of device {self.rank} {self.when}, factor {self.factor:g}, was asked for."
        if self.end is not None and not self.start < self.end:
            raise ConfigError(request, "It must end after it begins.", "Give a later end.")
        has_factor = self.kind in WITH_FACTOR
        if has_factor != (self.factor > 1):
            problem = "That changes nothing." if has_factor else f"Only {' and '.join(WITH_FACTOR)} have a factor."
            raise ConfigError(
                request, problem, "Give a factor above 1, such as 4." if has_factor else "Leave the factor out."
            )

    @property
    def text(self) -> str:
        """Return the fault in the format that parse_faults reads; in whole steps if it is counted in steps."""
        effect = (
            f"{self.kind}:{self.rank}"
            + ("" if self.to is None else f">{self.to}")
            + (f":{self.factor:g}" if self.factor > 1 else "")
        )
        if self.unit == "s":
            return f"{effect}@{self.start:g}" + ("" if self.end is None else f"-{self.end:g}") + "s"
        start = max(1, round(self.start))
        return f"{effect}@step{start}" + ("" if self.end is None else f"-{max(start + 1, round(self.end))}")

    @property
    def when(self) -> str:
        """Return the fault's time in words."""
        if self.unit == "step":
            return f"at step {self.start:g}" + ("" if self.end is None else f" to {self.end:g}")
        return f"at {self.start:g} s" + ("" if self.end is None else f" to {self.end:g} s")


def parse_faults(text: str, cluster: Cluster, unit: Unit = "step") -> tuple[Fault, ...]:
    """Parse 'KIND:DEVICE[:FACTOR]@FROM[-TO]; ...' and return the faults by start time.

    DEVICE: a name, or a number from 0; for 'slow' also 'SENDER>RECEIVER', a link between two devices that train.
    FROM, TO: steps ('@step20', or '@20' if the unit is steps) or seconds ('@20s', or '@20').  A run that is counted in
    steps takes seconds, too, since all devices were ready; a service has no steps.
    'return:DEVICE@WHEN' ends the device's previous fault.  Raises ConfigError naming the invalid part.
    """
    faults: list[Fault] = []
    for word in (part.strip() for part in text.split(";")):
        if word:
            _add(faults, word, cluster, unit)
    return tuple(sorted(faults, key=lambda fault: (fault.unit, fault.start)))


def _add(faults: list[Fault], word: str, cluster: Cluster, unit: Unit) -> None:
    request = f"The fault '{shown(word)}' was asked for."
    target, separator, when = word.rpartition("@")
    kind, _, rest = target.partition(":")
    names = cluster.names
    # The last colon precedes the factor, unless it is part of a device's name.
    device, colon, factor = (rest, "", "") if rest in names or ":" not in rest else rest.rpartition(":")
    kinds = [kind for kind in (*get_args(FaultKind), RETURN) if unit == "step" or kind not in ("memory", "leave")]
    if not separator or not device or (colon and not factor):
        raise ConfigError(
            request, "It is not KIND:DEVICE[:FACTOR]@FROM[-TO].", f"Write, for example, {EXAMPLES[unit]}."
        )
    if kind not in kinds:
        raise ConfigError(request, f"Kinds are {', '.join(kinds)}.", did_you_mean(kind, kinds))
    ends = [device] if device in names or kind != "slow" or unit == "s" else device.split(">")
    for end in ends:
        if end not in names and not (end.isascii() and end.isdecimal() and len(end) < 10 and int(end) < len(names)):
            problem = f"The devices of '{cluster.name}' are {', '.join(names)}."
            raise ConfigError(request, problem, "Name one of them, or its number from 0.")
    rank, *receivers = (names.index(end) if end in names else int(end) for end in ends)
    if len(receivers) > 1 or rank in receivers:
        raise ConfigError(
            request,
            "A link leads from one device to another.",
            f"Write, for example, slow:{names[0]}>{names[-1]}:4@step20.",
        )
    start, stop, own_unit = _times(request, when, unit)
    if unit == "s" and own_unit == "step":
        raise ConfigError(request, "Here faults are counted in seconds.", f"Write, for example, {EXAMPLES[unit]}.")
    try:
        slowness = _number(factor) if factor else (4.0 if kind in WITH_FACTOR else 1.0)
    except ValueError:
        raise ConfigError(
            request, f"The factor '{shown(factor)}' is not a number.", "Write, for example, slow:beta:4@20."
        ) from None
    if factor and kind not in WITH_FACTOR:
        problem = f"Only {' and '.join(WITH_FACTOR)} have a factor."
        if kind == "leave":  # Confidant's alpha
            problem += (
                " How long before a device leaves it must give notice is computed, not set: a note of the report "
                "says it."
            )
        raise ConfigError(request, problem, f"Write {kind}:{shown(device)}@{shown(when)}.")
    if own_unit == "step":
        for name, value in (("step", start), ("last step", stop)):
            if value is not None:
                require_range(int(value) if value == value // 1 else value, Count, f"The fault '{shown(word)}'", name)
    if kind == RETURN:
        before = [
            i
            for i, other in enumerate(faults)
            if other.rank == rank and (other.end, other.unit) == (None, own_unit) and other.kind not in WITH_FACTOR
        ]
        if stop is not None or not before:
            counts = "steps" if own_unit == "step" else "seconds"
            problem = "A return has one time." if stop is not None else f"By then '{names[rank]}' has not gone."
            raise ConfigError(request, problem, f"Name a kill, freeze or leave of the device before it, in {counts}.")
        gone = faults.pop(before[-1])
        kind, start, stop = gone.kind, gone.start, start
    require_range(slowness, range_of(Fault, "factor"), f"The fault '{shown(word)}'", "factor")
    try:
        to = receivers[0] if receivers else None
        faults.append(Fault(kind=kind, rank=rank, start=start, end=stop, factor=slowness, unit=own_unit, to=to))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{request} {error.asked}", error.found, error.todo) from None


def _times(request: str, when: str, unit: Unit) -> tuple[float, float | None, Unit]:
    """Return start, end and unit of a fault's times."""
    fault_unit: Unit = "step" if when.startswith("step") else "s" if when.endswith("s") else unit
    start, dash, end = when.removeprefix("step").removesuffix("s").partition("-")
    try:
        return _number(start), _number(end) if dash else None, fault_unit
    except ValueError:
        raise ConfigError(
            request, f"'{shown(when)}' names no step and no seconds.", f"Write, for example, {EXAMPLES[unit]}."
        ) from None


def _number(text: str) -> float:
    """Parse a number.  Raises ValueError for anything else, including unusual forms that float() accepts."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    return float(text.removesuffix("s"))


class FaultSchedule:
    """The starts and ends of faults, by time.  `due` returns each start and each end once, in order.

    faults: the initial ones and those added during the run.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults: list[Fault] = []
        self._moments: dict[Unit, list[tuple[float, int, bool]]] = {"step": [], "s": []}
        self._factors: dict[tuple[FaultKind, int, int | None], dict[int, float]] = {}
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Add a fault.  If its start or end is already past, it happens now."""
        number = len(self.faults)
        self.faults.append(fault)
        insort(self._moments[fault.unit], (fault.start, number, True))
        if fault.end is not None:
            insort(self._moments[fault.unit], (fault.end, number, False))

    def end(self, rank: int, now_s: float) -> None:
        """End a device's faults that have no end yet."""
        for number, fault in enumerate(self.faults):
            if fault.rank == rank and fault.end is None:
                end = self.faults[number] = replace(fault, end=max(now_s, math.nextafter(fault.start, math.inf)))
                insort(self._moments[fault.unit], (end.end or now_s, number, False))

    def hasten(self, rank: int) -> bool:
        """If a fault of the device ends at a step, end it now; return whether any fault of the device has an end."""
        ends = [
            (moments, moment)
            for moments in self._moments.values()
            for moment in moments
            if not moment[2]
            and self.faults[moment[1]].rank == rank
            and (moment[1], True) not in {(n, begins) for _, n, begins in moments}
        ]
        for moments, moment in ends:
            if moments is self._moments["step"]:
                moments.remove(moment)
                moments.insert(0, (0.0, *moment[1:]))
        return bool(ends)

    @property
    def next_s(self) -> float:
        """Return the second of the next start or end, infinity if there is none."""
        return self._moments["s"][0][0] if self._moments["s"] else math.inf

    def due(self, now_s: float, step: int = 0) -> list[tuple[Fault, bool]]:
        """Return the faults that start (True) or end (False) by now.  step: the number of finished steps."""
        changes = []
        for unit, now in (("s", now_s), ("step", step)):
            moments = self._moments[unit]  # type: ignore[index]
            while moments and moments[0][0] <= now:
                _, number, begins = moments.pop(0)
                fault = self.faults[number]
                if fault.kind in WITH_FACTOR:
                    factors = self._factors.setdefault((fault.kind, fault.rank, fault.to), {})
                    if begins:
                        factors[number] = fault.factor
                    else:
                        factors.pop(number, None)
                changes.append((fault, begins))
        return changes

    def not_begun(self) -> list[Fault]:
        """Return the faults that were not due yet."""
        return [self.faults[number] for moments in self._moments.values() for _, number, begins in moments if begins]

    def factor(self, rank: int, to: int | None = None, *, kind: FaultKind = "slow") -> float:
        """Return how many times slower a device, or its link to another one, is now (or has less memory), by all its
        current faults.
        """
        factors = self._factors.get((kind, rank, to)) if self._factors else None
        return math.prod(factors.values()) if factors else 1.0
