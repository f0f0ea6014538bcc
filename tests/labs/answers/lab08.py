"""Lab 08, Break it: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

from statistics import median
from typing import Any

from workbench_labs.exercises.straggling import break_even


def never(times_ms: Any, history: Any) -> list[int]:
    return []


def at_once(times_ms: Any, history: Any) -> list[int]:
    """Leaves out on a single report."""
    usual = [*history, times_ms][0]
    return [device for device, one in enumerate(times_ms) if one is not None and one > 1.8 * usual[device]]


def too_soon(times_ms: Any, history: Any) -> list[int]:
    """Leaves out what is a tenth slower."""
    reports = [*history, times_ms]
    lately = reports[-3:]
    return [
        device
        for device in range(len(times_ms))
        if len(lately) == 3 and all((one[device] or 0) > 1.1 * reports[0][device] for one in lately)
    ]


def for_ever(times_ms: Any, history: Any) -> list[int]:
    """Never takes a device back."""
    reports = [*history, times_ms]
    return [
        device
        for device in range(len(times_ms))
        if sum((report[device] or 0) > 1.8 * reports[0][device] for report in reports) >= 3
    ]


def the_slowest(times_ms: Any, history: Any) -> list[int]:
    return [max(range(len(times_ms)), key=lambda device: times_ms[device] or 0.0)]


def plain_quotient(measured: Any, expected: Any) -> list[float]:
    return [
        median(one / other for one, other in zip(own, true, strict=True))
        for own, true in zip(measured, expected, strict=True)
    ]


def with_itself(measured: Any, expected: Any) -> list[float]:
    """Compares with the median over all devices."""
    quotients = [
        [one / other for one, other in zip(own, true, strict=True)]
        for own, true in zip(measured, expected, strict=True)
    ]
    usual = [median(column) for column in zip(*quotients, strict=True)]
    return [median(one / other for one, other in zip(times, usual, strict=True)) for times in quotients]


RIGHT = {
    "break_even": lambda drawn: break_even(drawn["device"], drawn["percent"]),
    "outage": lambda drawn: (
        drawn["silence_s"] + drawn["plan_s"] + drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["request_s"]
    ),
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "break_even": {
        "at once": (1.0, "without the device it takes"),
        "as long as without it": (lambda drawn: break_even(drawn["device"], 0), "without the device it takes"),
        "much too late": (4.0, "without the device it takes"),
        "below one": (0.5, "without the device it takes"),
    },
    "slowness": {
        "not relative": (plain_quotient, "devices"),
        "itself among the others": (with_itself, "devices"),
        "a constant": (lambda measured, expected: [1.0] * len(measured), "devices"),
    },
    "rule": {
        "never": (never, "With the script 'long'"),
        "at once": (at_once, "With the script 'short'"),
        "a tenth slower": (too_soon, "With the script 'mild'"),
        "for ever": (for_ever, "With the script"),
        "the slowest": (the_slowest, "With the script"),
        "all": (lambda times_ms, history: list(range(len(times_ms))), "not all"),
        "none": (lambda times_ms, history: None, "are a list"),
    },
    "outage": {
        "without silence": (
            lambda drawn: drawn["plan_s"] + drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["request_s"],
            "is not it",
        ),
        "without the plan": (
            lambda drawn: drawn["silence_s"] + drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["request_s"],
            "is not it",
        ),
        "silence alone": (lambda drawn: drawn["silence_s"], "is not it"),
        "without the request": (
            lambda drawn: drawn["silence_s"] + drawn["plan_s"] + drawn["megabytes"] / drawn["megabytes_per_s"],
            "is not it",
        ),
    },
}
