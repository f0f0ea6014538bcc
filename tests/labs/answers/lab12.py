"""Lab 12, Kit day: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

from typing import Any

from workbench_labs.exercises.cuts import equal_cut


def seconds(drawn: dict[str, Any], devices: int) -> float:
    """Return the seconds of a mini-batch on one or two devices, by the formula of filling, steady state, draining."""
    work = 3 * drawn["layers"] * drawn["layer_ms"] / devices
    return work * (drawn["micro_batches"] + devices - 1) + 2 * drawn["send_ms"] * (devices - 1)


def speed_up(drawn: dict[str, Any]) -> float:
    return seconds(drawn, 1) / seconds(drawn, 2)


def equal(layer_s: Any, layer_bytes: Any, budgets: Any, send_s: Any, micro_batches: Any) -> list[int]:
    return equal_cut(len(layer_bytes), len(budgets))


def first_that_fits(layer_s: Any, layer_bytes: Any, budgets: Any, send_s: Any, micro_batches: Any) -> list[int]:
    """Fill one device after the other: right about memory, wrong about time."""
    counts, device, room = [0] * len(budgets), 0, budgets[0]
    for nbytes in layer_bytes:
        while nbytes > room:
            device += 1
            room = budgets[device]
        counts[device] += 1
        room -= nbytes
    return counts


RIGHT = {"two_devices": speed_up}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "two_devices": {
        "twice": (2.0, "is not it"),
        "the inverse": (lambda drawn: 1 / speed_up(drawn), "is not it"),
        "messages are free": (lambda drawn: speed_up(drawn | {"send_ms": 0}), "is not it"),
        "no drain": (lambda drawn: 2 * drawn["micro_batches"] / (drawn["micro_batches"] + 0.5), "is not it"),
        "a text": ("faster", "A number is asked for"),
    },
    "planner": {
        "equal parts": (equal, "does not fit|asked for"),
        "all on the first": (lambda *case: [len(case[1]), *[0] * (len(case[2]) - 1)], "does not fit|asked for"),
        "memory alone": (first_that_fits, "does not fit|asked for|IndexError"),
        "too many layers": (lambda *case: [len(case[1])] * len(case[2]), "in all"),
        "negative": (lambda *case: [-1, len(case[1]) + 1, *[0] * (len(case[2]) - 2)], "from 0 on"),
        "a text": (lambda *case: "3, 1", "is a list"),
    },
}
