"""Lab 02, Write the simulator: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from tests.labs.solutions import defined, sources

SOLUTIONS = sources("02")


def never_waits(orders: Any, forward_s: Any, backward_s: Any) -> Any:
    """Each device does one thing after another, whatever the others do."""
    if orders == [["B0", "F0"]]:
        raise ValueError
    times = []
    for stage, order in enumerate(orders):
        now, own = 0.0, []
        for operation in order:
            length = (forward_s if operation[0] == "F" else backward_s)[stage]
            own.append([now, now + length])
            now += length
        times.append(own)
    return times


def no_deadlock(orders: Any, forward_s: Any, backward_s: Any) -> Any:
    """The solution, but a deadlock returns what there is."""
    try:
        return defined(SOLUTIONS["event_loop"])["event_loop"](orders, forward_s, backward_s)
    except ValueError:
        return [[[0.0, 1.0], [1.0, 2.0]]]


def alternating(stages: int, stage: int, count: int) -> list[str]:
    """One forward and one backward from the beginning on every stage: right, but slow."""
    return [f"{kind}{number}" for number in range(count) for kind in "FB"]


def gpipe(stages: int, stage: int, count: int) -> list[str]:
    return [f"F{number}" for number in range(count)] + [f"B{number}" for number in range(count)]


def reversed_backwards(stages: int, stage: int, count: int) -> list[str]:
    """Each stage does its backward passes in another order."""
    backwards = [f"B{number}" for number in range(count)]
    return [f"F{number}" for number in range(count)] + (backwards if stage % 2 else backwards[::-1])


def backward_first(stages: int, stage: int, count: int) -> list[str]:
    return [f"B{number}" for number in range(count)] + [f"F{number}" for number in range(count)]


RIGHT = {"bubble": lambda drawn: Fraction(drawn["stages"] - 1, drawn["stages"] - 1 + drawn["micro_batches"])}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "event_loop": {
        "it returns nothing": (lambda *_: None, "The result is a list"),
        "devices never wait": (never_waits, "goes from"),
        "a deadlock is not noticed": (no_deadlock, "Raise ValueError"),
        "too few": (lambda orders, *_: [[] for _ in orders], "has .* entries"),
        "texts": (lambda orders, *_: [[["a", "b"] for _ in order] for order in orders], "A number is asked for"),
        "it fails": (lambda *_: {}[0], "KeyError"),
        "not a number": (lambda orders, *_: [[[math.nan] * 2 for _ in order] for order in orders], "finite"),
        "it empties the question": (lambda orders, *_: orders.clear() or [], "has .* entries"),
    },
    "gpipe": {
        "alternating": (alternating, "are possible"),
        "one operation twice": (lambda p, s, n: ["F0"] * 2 * n, "each has F and B once"),
        "backward before forward": (backward_first, "wait for each other"),
        "1F1B": (lambda p, s, n: defined(SOLUTIONS["one_f_one_b"])["one_f_one_b"](p, s, n), "all forward passes"),
    },
    "one_f_one_b": {
        "GPipe": (gpipe, "are enough"),
        "alternating": (alternating, "are possible"),
        "another order on each stage": (reversed_backwards, "are possible|wait for each other|are enough"),
        "no list": (lambda *_: "F0 B0", "is a list"),
    },
    "bubble": {
        "a constant": (0.5, "is not it"),
        "in per cent": (47.0, "is not it"),
        "one more stage": (
            lambda numbers: numbers["stages"] / (numbers["stages"] + numbers["micro_batches"]),
            "is not",
        ),
        "a text": ("a third", "A number is asked for"),
        "not a number": (math.nan, "finite"),
    },
}
