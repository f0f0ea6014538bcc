"""Lab 00, Ten minutes: right answers, and wrong ones with what is said of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

RIGHT = {
    "waits": lambda drawn: Fraction(drawn["slow_ms"] - drawn["fast_ms"], drawn["slow_ms"]),
    "training": lambda drawn: drawn["first_s"] + drawn["cached_s"] * (drawn["epochs"] - 1),
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "waits": {
        "the ratio": (lambda drawn: drawn["slow_ms"] / drawn["fast_ms"], "is not it"),
        "in ms": (lambda drawn: drawn["samples"] * (drawn["slow_ms"] - drawn["fast_ms"]), "is not it"),
        "over the faster": (lambda drawn: (drawn["slow_ms"] - drawn["fast_ms"]) / drawn["fast_ms"], "is not it"),
        "a text": ("half", "A number is asked for"),
    },
    "training": {
        "all from the cache": (lambda drawn: drawn["cached_s"] * drawn["epochs"], "is not it"),
        "none from the cache": (lambda drawn: drawn["first_s"] * drawn["epochs"], "is not it"),
        "one epoch more": (lambda drawn: drawn["first_s"] + drawn["cached_s"] * drawn["epochs"], "is not it"),
    },
}
