"""Lab 03, Beside the model: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np

from tests.labs.solutions import defined, sources

SOLUTIONS = sources("03")


def solution(name: str, *given: Any) -> Any:
    return defined(SOLUTIONS[name])[name](*given)


def other_gradient(**change: Any) -> Any:
    """Return a function whose gradients are right but for what `change` makes of them."""

    def gradient(tap: Any, side: Any, down: Any, mix: Any, after: Any) -> Any:
        result = solution("side_gradient", tap, side, down, mix, after)
        return result | {name: made(result, tap, side, down, mix, after) for name, made in change.items()}

    return gradient


def no_bend(tap: Any, side: Any, down: Any, mix: Any) -> Any:
    return (mix * np.array(down) @ np.array(tap) + (1 - mix) * np.array(side)).tolist()


def in_numpy(tap: Any, side: Any, down: Any, mix: Any) -> Any:
    return np.tanh(no_bend(tap, side, down, mix))


def only_shapes(fresh: Any, cached: Any, tolerance: Any) -> Any:
    return [name for name in fresh if list(map(len, fresh[name])) != list(map(len, cached.get(name, [])))]


def misses_nan(fresh: Any, cached: Any, tolerance: Any) -> Any:
    result = only_shapes(fresh, cached, tolerance)
    for name in fresh.keys() - set(result):
        pairs = zip(chain(*fresh[name]), chain(*cached[name]), strict=True)
        if any(abs(a - b) > tolerance for a, b in pairs):
            result.append(name)
    return result


def exact(fresh: Any, cached: Any, tolerance: Any) -> Any:
    return [name for name in fresh if fresh[name] != cached.get(name)]


def one_constant(weights: Any, block_size: Any) -> Any:
    largest = max(map(abs, weights))
    return [round(127 * weight / largest) for weight in weights], [largest] * math.ceil(len(weights) / block_size)


def cut_off(weights: Any, block_size: Any) -> Any:
    constants = solution("quantize", weights, block_size)[1]
    largest = [constants[place // block_size] for place in range(len(weights))]
    return [[int(127 * weight / most) if most else 0 for weight, most in zip(weights, largest, strict=True)], constants]


def no_zeros(weights: Any, block_size: Any) -> Any:
    blocks = [weights[first : first + block_size] for first in range(0, len(weights), block_size)]
    largest = [max(map(abs, block)) for block in blocks]
    return [round(127 * one / most) for block, most in zip(blocks, largest, strict=True) for one in block], largest


def megabytes(drawn: dict[str, Any], more_taps: int = 1, size: int = 2) -> float:
    return float(drawn["sentences"] * drawn["tokens"] * drawn["hidden"] * (drawn["layers"] + more_taps) * size / 1e6)


def epochs(drawn: dict[str, Any], moved: int = 1) -> int:
    first, cached = drawn["first_s"], drawn["cached_s"]
    return math.ceil((first + moved * drawn["moved_s"] - cached) / (first / 2 - cached) - 1e-9)


RIGHT = {"cache_bytes": megabytes, "half_time": epochs}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "side_layer": {
        "without tanh": (no_bend, "Entry 0 is"),
        "the tap alone": (lambda tap, side, down, mix: in_numpy(tap, [0] * len(side), down, mix), "yours is"),
        "mixed the other way": (lambda tap, side, down, mix: in_numpy(tap, side, down, 1 - mix), "yours is"),
        "the side unchanged": (lambda tap, side, down, mix: side, "yours is"),
        "as wide as the model": (lambda tap, side, down, mix: tap + side, "has .* entries"),
    },
    "side_gradient": {
        "tanh is forgotten": (
            other_gradient(side=lambda found, tap, side, down, mix, after: [(1 - mix) * one for one in after]),
            "gradient of side",
        ),
        "mix without the side": (
            other_gradient(mix=lambda found, tap, side, down, mix, after: sum(after)),
            "gradient of mix",
        ),
        "down without mix": (
            other_gradient(
                down=lambda found, tap, side, down, mix, after: (np.array(found["down"]) / mix / mix).tolist()
            ),
            "gradient of down, row 0",
        ),
        "one for the tap, too": (other_gradient(tap=lambda found, tap, *_: tap), "no gradient of the tap"),
        "the given": (lambda tap, side, down, mix, after: after, "A dict with"),
    },
    "stale_records": {
        "everything": (lambda fresh, cached, tolerance: list(fresh), "Stale are"),
        "nothing": (lambda fresh, cached, tolerance: [], "Stale are"),
        "only shapes": (only_shapes, "Stale are"),
        "nan is near everything": (misses_nan, "not a number"),
        "bit for bit": (exact, "rounded"),
        "missing alone": (lambda fresh, cached, _: sorted(fresh.keys() - cached.keys()), "Stale are"),
        "a number": (lambda fresh, cached, _: len(fresh) - len(cached), "is a list"),
    },
    "cache_bytes": {
        "without the embedding": (lambda drawn: megabytes(drawn, more_taps=0), "is not it"),
        "32 bits": (lambda drawn: megabytes(drawn, size=4), "is not it"),
        "of one sentence": (lambda drawn: megabytes(drawn) / drawn["sentences"], "is not it"),
        "in bytes": (lambda drawn: 1e6 * megabytes(drawn), "is not it"),
    },
    "quantize": {
        "one constant for all": (one_constant, "the constant of block|has the code"),
        "cut off instead of rounded": (cut_off, "has the code"),
        "a block of zeros": (no_zeros, "ZeroDivisionError"),
        "the given": (lambda weights, block_size: weights, "has .* entries|is a list"),
        "nothing but zeros": (
            lambda weights, size: [[0] * len(weights), solution("quantize", weights, size)[1]],
            "has the code",
        ),
        "not whole": (
            lambda weights, size: [
                [127 * weight for weight in weights],
                solution("quantize", weights, size)[1],
            ],
            "has the code",
        ),
    },
    "dequantize": {
        "the codes": (lambda codes, constants, size: codes, "Entry 0 is"),
        "the first constant": (lambda codes, constants, size: [code * constants[0] / 127 for code in codes], "is"),
        "128": (
            lambda codes, constants, size: [127 / 128 * one for one in solution("dequantize", codes, constants, size)],
            "yours is",
        ),
        "blocks alone": (lambda codes, constants, size: constants, "has .* entries"),
    },
    "half_time": {
        "one epoch less": (lambda drawn: epochs(drawn) - 1, "is not it"),
        "the ratio": (lambda drawn: drawn["first_s"] / drawn["cached_s"], "is not it"),
        "always two": (2, "is not it"),
        "a text": ("soon", "A number is asked for"),
    },
}
