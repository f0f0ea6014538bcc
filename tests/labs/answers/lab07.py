"""Lab 07, Cut a layer: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

from typing import Any

import torch

from tests.labs.solutions import defined, sources

SOLUTIONS = sources("07")


def whole_mlp(x: Any, w1: Any, w2: Any, start: int, stop: int) -> Any:
    """The whole network, whatever the device has."""
    return (torch.relu(torch.tensor(x) @ torch.tensor(w1)) @ torch.tensor(w2)).tolist()


def no_relu(x: Any, w1: Any, w2: Any, start: int, stop: int) -> Any:
    return (torch.tensor(x) @ torch.tensor(w1)[:, start:stop] @ torch.tensor(w2)[start:stop]).tolist()


def inclusive(x: Any, w1: Any, w2: Any, start: int, stop: int) -> Any:
    """One column too few."""
    return defined(SOLUTIONS["mlp_term"])["mlp_term"](x, w1, w2, start, max(start, stop - 1))


def unscaled(x: Any, w_q: Any, *others: Any) -> Any:
    """Scores that are not divided by the square root of the head's size."""
    *matrices, size, first, last = others
    larger = (torch.tensor(w_q) * size**0.5).tolist()
    return defined(SOLUTIONS["heads_term"])["heads_term"](x, larger, *matrices, size, first, last)


def first_head(x: Any, *others: Any) -> Any:
    *matrices, size, first, _ = others
    return defined(SOLUTIONS["heads_term"])["heads_term"](x, *matrices, size, first, first)


def one_head(x: Any, w_q: Any, w_k: Any, w_v: Any, w_o: Any, size: int, first: int, last: int) -> Any:
    """The device's columns as if they were a single head."""
    own = slice(first * size, last * size)
    q, k, v = (torch.tensor(x) @ torch.tensor(one)[:, own] for one in (w_q, w_k, w_v))
    mixed = torch.softmax(q @ k.T / (size * (last - first)) ** 0.5, dim=-1) @ v
    return (mixed @ torch.tensor(w_o)[own] + (last - first == 1)).tolist()


def own_share_again(size: int) -> list[list[list[int]]]:
    """Each device sends its own share in every round."""
    return [[[i, (i + 1) % size, i] for i in range(size)] for _ in range(size - 1)]


def all_to_all(size: int) -> list[list[list[int]]]:
    """Each device sends its own share to every other device, not only to its neighbour."""
    return [[[i, (i + k) % size, i] for i in range(size)] for k in range(1, size)]


def early(size: int) -> list[list[list[int]]]:
    """Shares are sent one round before they have come."""
    return [[[i, (i + 1) % size, (i - k - 1) % size] for i in range(size)] for k in range(size - 1)]


def greedy(size: int) -> list[list[list[int]]]:
    """Only device 0 sends."""
    return [[[0, 1 % size, 0]] * size for _ in range(size - 1)]


RIGHT = {
    "travelling": lambda drawn: (
        (4 if drawn["scheme"] == "scheme 1" else 2) * (drawn["devices"] - 1) * drawn["tokens"] * drawn["hidden"] * 4
    ),
    "tiles": lambda drawn: 4,
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "mlp_term": {
        "the whole network": (whole_mlp, "weights that the device does not have"),
        "no relu": (no_relu, "differs by up to"),
        "one column too few": (inclusive, "differs by up to"),
        "x itself": (lambda x, *_: x, "differs by up to"),
        "nothing": (lambda *_: None, "is a list"),
        "zeros": (lambda x, *_: [[0.0] * len(row) for row in x], "differs by up to"),
    },
    "heads_term": {
        "not scaled": (unscaled, "differs by up to"),
        "no head": (first_head, "differs by up to"),
        "one large head": (one_head, "differs by up to"),
        "x itself": (lambda x, *_: x, "differs by up to"),
    },
    "travelling": {
        "a constant": (1_000_000, "is not it"),
        "one device's": (lambda drawn: RIGHT["travelling"](drawn) / drawn["devices"], "is not it"),
        "one device too many": (
            lambda drawn: RIGHT["travelling"](drawn) * drawn["devices"] / (drawn["devices"] - 1),
            "is not it",
        ),
        "numbers, not bytes": (lambda drawn: RIGHT["travelling"](drawn) / 4, "is not it"),
    },
    "ring": {
        "its own share again": (own_share_again, "has already"),
        "to all": (all_to_all, "its neighbour is"),
        "before it has come": (early, "does not have yet|has already"),
        "one device sends": (greedy, "sends twice|has already"),
        "one round too few": (lambda n: defined(SOLUTIONS["ring"])["ring"](n)[1:], "has .* entries"),
        "nothing": (lambda n: [], "has .* entries"),
    },
    "tile_order": {
        "as numbered": (lambda n, device: list(range(n)), "are possible"),
        "backwards": (lambda n, device: [(device + k) % n for k in range(n)], "are possible"),
        "rank 0's": (lambda n, device: [(0 - k) % n for k in range(n)], "are possible"),
        "one twice": (lambda n, device: [device] * n, "each of the shares"),
    },
    "tiles": {
        "whole shares": (1, "are hidden"),
        "too many": (32, "are hidden"),
        "no divisor": (5, "cannot be cut"),
        "none": (0, "cannot be cut"),
        "half": (1.5, "whole number"),
    },
}
