"""Lab 09, Data that stay: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
from typing import Any


def half_at_once(step: int, losses: Any, depth: int) -> int:
    return 6


def nearest_point(states: Any, embeddings: Any) -> list[int]:
    def off(state: Any, one: Any) -> float:
        return math.dist(state, one)

    return [min(range(len(embeddings)), key=lambda at: off(state, embeddings[at])) for state in states]


def largest_product(states: Any, embeddings: Any) -> list[int]:
    def product(state: Any, one: Any) -> float:
        return sum(a * b for a, b in zip(state, one, strict=True))

    return [max(range(len(embeddings)), key=lambda at: product(state, embeddings[at])) for state in states]


def without_last_place(message: Any, ids: Any) -> bool:
    return any(message[at : at + len(ids)] == ids for at in range(len(message) - len(ids)))


def all_contexts(blocks: Any, depth: int, block_mb: int, context_mb: int) -> list[int]:
    return [count * (block_mb + context_mb) for count in blocks]


def everywhere_the_same(blocks: Any, depth: int, block_mb: int, context_mb: int) -> list[float]:
    return [(sum(blocks) * block_mb + depth * context_mb) / len(blocks)] * len(blocks)


RIGHT = {
    "least_time": lambda drawn: 2 * drawn["depth"],
    "link_bytes": lambda drawn: 4 * drawn["samples"] * drawn["tokens"] * drawn["hidden"],
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "terminator": {
        "the last device": (lambda spans, depth: len(spans) - 1, "the gradient stops at place"),
        "one block too high": (
            lambda spans, depth: next(
                place for place, (_, last) in enumerate(spans) if last >= min(spans[-1][1], spans[-1][1] - depth + 2)
            ),
            "the gradient stops at place",
        ),
        "counted from 1": (
            lambda spans, depth: (
                1 + next(place for place, (_, last) in enumerate(spans) if last >= spans[-1][1] - depth + 1)
            ),
            "the gradient stops at place|whole number from 0",
        ),
        "a text": (lambda spans, depth: "the first", "A number is asked for"),
    },
    "next_initiator": {
        "the next on the ring": (lambda now, left, rates: left[0], "comes device"),
        "the slowest": (lambda now, left, rates: min(left, key=lambda one: rates[now][one]), "comes device"),
        "of all devices": (
            lambda now, left, rates: max(range(len(rates)), key=lambda one: rates[now][one]),
            "are left",
        ),
    },
    "least_time": {
        "all blocks": (lambda drawn: 2 * drawn["blocks"], "is not it"),
        "forward alone": (lambda drawn: drawn["depth"], "is not it"),
        "one too many": (lambda drawn: 2 * drawn["depth"] + 2, "is not it"),
    },
    "unfreeze": {
        "all at once": (lambda step, losses, depth: 12, "Be 5 % faster"),
        "the paper's interval": (lambda step, losses, depth: min(12, 1 + step // 4), "Be 5 % faster"),
        "one at a time": (lambda step, losses, depth: min(12, depth + 1), "Be 5 % faster"),
        "half": (half_at_once, "Be 5 % faster"),
        "never": (lambda step, losses, depth: 1, "Be 5 % faster"),
        "freezes again": (lambda step, losses, depth: 12 - step % 12, "goes from"),
        "too deep": (lambda step, losses, depth: 13, "whole number from 1 to 12"),
    },
    "memory": {
        "nothing is frozen": (all_contexts, "adapters trained"),
        "an average": (everywhere_the_same, "adapters trained"),
        "weights alone": (
            lambda blocks, depth, block, context: [block * count for count in blocks],
            "adapters trained",
        ),
        "one number": (lambda blocks, depth, block, context: block, "is a list"),
    },
    "link_bytes": {
        "numbers, not bytes": (lambda drawn: drawn["samples"] * drawn["tokens"] * drawn["hidden"], "is not it"),
        "one sentence": (lambda drawn: 4 * drawn["tokens"] * drawn["hidden"], "is not it"),
        "token ids": (lambda drawn: 4 * drawn["samples"] * drawn["tokens"], "is not it"),
    },
    "leak": {
        "any order": (lambda message, ids: set(ids) <= set(message), "the answer is"),
        "never": (lambda message, ids: False, "the answer is True"),
        "always": (lambda message, ids: True, "the answer is False"),
        "not the last place": (without_last_place, "the answer is True"),
        "the first id": (lambda message, ids: ids[0] in message, "the answer is False"),
    },
    "invert": {
        "without lengths": (largest_product, "words of a text are right"),
        "the nearest point": (nearest_point, "words of a text are right"),
        "a constant": (lambda states, embeddings: [0] * len(states), "words of a text are right"),
        "a vector": (lambda states, embeddings: states[:3], "has 12 entries"),
    },
}
