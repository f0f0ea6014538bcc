"""Lab 'Beside the model': the activation cache's test (PAC+, section IV-B), and weights in fewer bits (section IV-D,
Eq. 1 and 2).  The judge damages caches itself, and tries all 255 codes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from random import Random
from typing import Any

import torch

from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
)
from workbench_labs.exercises.judging import CLOSE, Function, code_exercise, require_close

CASES = 25
LEVELS = 127
"""The largest code of INT8."""
Record = list[list[float]]
"""A sentence's activations: for each tap its numbers."""


def _blocks(draws: Random) -> tuple[list[float], int]:
    """Return weights and a block size: with short last blocks, outliers and blocks of zeros among them."""
    size = draws.choice([2, 3, 4, 8])
    weights = [round(draws.gauss(0, 0.1), 4) for _ in range(draws.randint(size, 3 * size))]
    kind = draws.choice(["plain", "outlier", "zeros"])
    if kind == "outlier":
        weights[draws.randrange(len(weights))] = draws.choice([-2.0, 2.0])
    if kind == "zeros":
        weights[:size] = [0.0] * size
    return weights, size


def judge_quantize(answer: Function, draws: Random) -> str:
    """Is each code the best of all 255, and each constant its block's largest magnitude?"""
    for _ in range(CASES):
        weights, size = _blocks(draws)
        codes, constants = require_list(answer(weights, size), "The result (codes, constants)", 2)
        codes = require_list(codes, "The codes", len(weights))
        constants = require_list(constants, "The constants", math.ceil(len(weights) / size))
        for place, weight in enumerate(weights):
            largest = max(map(abs, weights[place // size * size : (place // size + 1) * size]))
            case = f"weights = {weights}, block_size = {size}"
            if abs(number_of(constants[place // size]) - largest) > CLOSE * largest:
                raise WrongAnswerError(
                    f"{case}: the constant of block {place // size} is {largest:g}, "
                    f"yours {number_of(constants[place // size]):g}."
                )
            code = number_of(codes[place])
            off = [abs(weight - code * largest / LEVELS) for code in range(-LEVELS, LEVELS + 1)]
            if code != int(code) or abs(code) > LEVELS or abs(weight - code * largest / LEVELS) > min(off) + 1e-9:
                best = off.index(min(off)) - LEVELS
                raise WrongAnswerError(
                    f"{case}: the weight {weight:g} has the code {best}, yours is {code:g}.",
                    comparison("Your codes", ("weight", "code"), zip(weights, codes, strict=True)),
                )
    return f"No other whole numbers from -127 to 127 are nearer, in {CASES} random cases."


def judge_dequantize(answer: Function, draws: Random) -> str:
    """Compare with Eq. 2, with torch."""
    for _ in range(CASES):
        size, length = draws.choice([2, 3, 4, 8]), draws.randint(3, 20)
        codes = [draws.randint(-LEVELS, LEVELS) for _ in range(length)]
        constants = [round(draws.uniform(0.1, 2), 2) for _ in range(math.ceil(length / size))]
        scales = (torch.tensor(constants, dtype=torch.float64) / LEVELS).repeat_interleave(size)[:length]
        case = f"codes = {codes}, constants = {constants}, block_size = {size}."
        require_close(answer(codes, constants, size), (scales * torch.tensor(codes)).tolist(), "The weights", case)
    return f"It undoes Eq. 1 in {CASES} random cases."


TOLERANCE = 0.01


def _record(draws: Random) -> Record:
    width = draws.randint(1, 4)
    return [[round(draws.uniform(-3, 3), 3) for _ in range(width)] for _ in range(draws.randint(2, 4))]


def _damaged(record: Record, how: str, draws: Random) -> Record | None:
    """Return what a cache holds of a record after some damage; None: nothing."""
    copied = copy.deepcopy(record)
    if how == "missing":
        return None
    if how == "cut off":
        return copied[:-1]
    if how == "a number missing":
        copied[-1].pop()
    if how == "a tap too many":
        copied.append(list(copied[-1]))
    if how in ("one number changed", "not a number", "rounded"):
        row = draws.choice(copied)
        sign = draws.choice([-1, 1])
        change = {"one number changed": 2.5 * TOLERANCE, "not a number": math.nan, "rounded": 0.5 * TOLERANCE}[how]
        row[draws.randrange(len(row))] += sign * change
    return copied


STILL_VALID = ("equal", "rounded")
DAMAGES = ("missing", "cut off", "a number missing", "a tap too many", "one number changed", "not a number")


def judge_stale_records(answer: Function, draws: Random) -> str:
    """Does it find exactly the records that were damaged?"""
    for case in range(CASES):
        fresh = {f"s{number}": _record(draws) for number in range(draws.randint(2, 5))}
        done = {name: draws.choice(STILL_VALID + DAMAGES) for name in fresh}
        done[draws.choice(sorted(fresh))] = DAMAGES[case % len(DAMAGES)]
        cached = {name: record for name in fresh if (record := _damaged(fresh[name], done[name], draws)) is not None}
        answered = answer(fresh, cached, TOLERANCE)
        answered = (
            sorted(answered, key=str) if isinstance(answered, set | frozenset) else require_list(answered, "The result")
        )
        stale = {name for name, change in done.items() if change not in STILL_VALID}
        wrong = stale.symmetric_difference(answered) if all(isinstance(name, str) for name in answered) else {"?"}
        if wrong or len(answered) != len(stale):
            rows = [
                (name, done[name], fresh[name], cached.get(name, ""), "yes" if name in answered else "no")
                for name in sorted(fresh)
            ]
            columns = ("sentence", "what was done", "fresh", "cached", "stale for you")
            raise WrongAnswerError(
                f"Stale are {', '.join(sorted(stale))}; your function returned {answered!r:.80}.",
                comparison(f"tolerance = {TOLERANCE}", columns, rows),
            )
    return f"It finds all damaged records, and no others, in {CASES} random caches."


def judge_cache_bytes(answer: Any, numbers: Numbers) -> str:
    """Compare with the size of tensors of these shapes (section V-B: s x h x (l + 1) values)."""
    taps = torch.empty(numbers["layers"] + 1, numbers["tokens"], numbers["hidden"], dtype=torch.bfloat16, device="meta")
    return require_number(
        answer,
        numbers["sentences"] * taps.nbytes / 1e6,
        0.01,
        f"{numbers['sentences']:,} x {numbers['tokens']} x {numbers['hidden']} x {numbers['layers'] + 1} x 2 bytes: "
        f"{numbers['sentences'] * taps.nbytes / 1e6:.1f} MB.",
    )


def _torch_stale(fresh: Mapping[str, Record], cached: Mapping[str, Record], tolerance: float) -> list[str]:
    def is_close(tap: list[float], other: list[float]) -> bool:
        return len(tap) == len(other) and torch.allclose(torch.tensor(tap), torch.tensor(other), rtol=0, atol=tolerance)

    def is_kept(name: str) -> bool:
        taps, others = fresh[name], cached.get(name, [])
        return len(taps) == len(others) and all(map(is_close, taps, others))

    return [name for name in fresh if not is_kept(name)]


EXERCISES = (
    Exercise(
        name="cache_bytes",
        question="""**The cache's size** (2 points). {sentences} sentences of {tokens} tokens pass through a model of \
{layers} layers that is {hidden} wide. How many MB (1e6 bytes) are their activations in bfloat16 (2 bytes a number), \
to 1 %?""",
        points=2,
        hints=(
            "How many taps has a token? The embedding counts as well.",
            "A tap is as wide as the model.",
            "Sentences x tokens x width x (layers + 1) x 2 bytes.",
        ),
        draw=lambda draws: {
            "sentences": 100 * draws.randint(5, 60),
            "tokens": draws.randint(12, 60),
            "hidden": draws.choice([256, 384, 512, 768, 1024]),
            "layers": draws.choice([4, 6, 12, 24]),
        },
        judge=judge_cache_bytes,
    ),
    code_exercise(
        name="stale_records",
        question="""**Write the cache's test** (6 points). `stale_records(fresh, cached, tolerance)` gets two dicts: \
the activations of some sentences from the backbone, and what the cache holds of them. Each is a list of taps, each \
tap a list of numbers. It returns a list of the names of all sentences whose record is missing, has another shape, or \
has a number that is not within `tolerance` of the fresh one.""",
        points=6,
        hints=(
            "Go over the names in `fresh`. What must hold for a record that may be used?",
            "Compare the number of taps, then the number of values of each tap, then the values.",
            "nan differs from everything, but `abs(nan - x) > tolerance` is False: ask `not abs(a - b) <= tolerance`.",
        ),
        judge=judge_stale_records,
        stand_in=_torch_stale,
    ),
    code_exercise(
        name="quantize",
        question="""**Write Eq. 1** (6 points). `quantize(weights, block_size)` gets a list of numbers. It cuts it \
into blocks (the last may be shorter) and returns `[codes, constants]`: a whole number from -127 to 127 for each \
weight, and the largest magnitude of each block.""",
        points=6,
        hints=(
            "`weights[start : start + block_size]` is a block. What is its largest magnitude?",
            "The code is `round(127 * weight / largest)`.",
            "A block of zeros has the largest magnitude 0: its codes are 0, and nothing is divided.",
        ),
        judge=judge_quantize,
    ),
    code_exercise(
        name="dequantize",
        question="""**Write Eq. 2** (3 points). `dequantize(codes, constants, block_size)` returns the weights, as \
far as rounding has left them.""",
        points=3,
        hints=(
            "What undoes a multiplication by 127 / largest?",
            "The block of the code at place i is i // block_size.",
            "codes[i] * constants[i // block_size] / 127 for each i.",
        ),
        judge=judge_dequantize,
    ),
)
