"""Lab 01, A device is four numbers: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import re
from statistics import mean
from typing import Any

import numpy as np

from tests.labs.solutions import defined, sources
from workbench_labs.exercises.own_cluster import GIVEN

SOLUTIONS = sources("01")


def cluster_text(cores: float, factor: float, megabits: float, *, rest: float = 500, count: int = 3) -> str:
    """Return a cluster's file: one fast device, and slow ones."""
    slowest = min(0.9 * cores / (factor + 2), 0.9 / factor)
    shares = [slowest] * (count - 1) + [factor * slowest]
    devices = "".join(
        f'[[device]]\nname = "d{number}"\nhost_share = {share}\ngflops = {60 * share}\n'
        f"bandwidth_mbit_per_s = {rest if number else megabits}\n"
        for number, share in enumerate(shares)
    )
    return f'name = "mine"\n[defaults]\nmodel = "laptop-core"\n{devices}'


def of_numbers(**changes: Any) -> Any:
    """Return an answer that is made of a student's numbers, some of them changed."""
    return lambda drawn: cluster_text(**drawn | {name: change(drawn) for name, change in changes.items()})


def least_squares(messages: Any) -> Any:
    """A line through all measurements, the disturbed ones among them."""
    points = np.array(messages)
    rows = np.stack([np.ones(len(points)), points[:, 0]], axis=1)
    latency_s, per_byte = np.linalg.lstsq(rows, points[:, 1], rcond=None)[0]
    return [latency_s, 1 / per_byte]


def means(messages: Any) -> Any:
    small, large = (mean(taken for size, taken in messages if size == end) for end in (1, 1_000_000))
    return [small, 1e6 / (large - small)]


def swapped(messages: Any) -> Any:
    return defined(SOLUTIONS["fit_link"])["fit_link"](messages)[::-1]


def added(operation: Any, device: Any) -> float:
    """Arithmetic and memory one after the other."""
    sent = operation["sent_bytes"]
    return (
        operation["flops"] / device["flops_per_s"]
        + operation["memory_bytes"] / device["memory_bytes_per_s"]
        + (device["latency_s"] + sent / device["bytes_per_s"] if sent else 0)
    )


def always_latency(operation: Any, device: Any) -> float:
    own = defined(SOLUTIONS["seconds_of"])["seconds_of"](operation, device)
    return own + (0 if operation["sent_bytes"] else device["latency_s"])


def only_arithmetic(operation: Any, device: Any) -> float:
    return operation["flops"] / device["flops_per_s"]


def transfer_s(drawn: Any) -> float:
    megabits = min(drawn["first_mbit"], drawn["second_mbit"])
    return (drawn["first_ms"] + drawn["second_ms"]) / 1e3 + 8 * drawn["megabytes"] / megabits


RIGHT = {
    "cluster": of_numbers(),
    "transfer": transfer_s,
    "ridge": lambda drawn: 6 * drawn["gflops"] / drawn["gigabytes"],
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "cluster": {
        "the given one": (GIVEN, "One link of|not|cores"),
        "two devices": (of_numbers(count=lambda drawn: 2), "three or more"),
        "too many cores": (of_numbers(count=lambda drawn: 30), "there are"),
        "another factor": (of_numbers(factor=lambda drawn: drawn["factor"] - 1), "times as fast"),
        "equal gflops": (lambda drawn: re.sub("gflops = .*", "gflops = 9", cluster_text(**drawn)), "By gflops, the"),
        "equal links": (of_numbers(rest=lambda drawn: drawn["megabits"]), "One link of"),
        "no file": ("three devices", "not valid TOML|malformed|TOML"),
        "a number": (3, "text of a cluster's file"),
    },
    "fit_link": {
        "least squares": (least_squares, "ms and .* bytes/s"),
        "means": (means, "ms and .* bytes/s"),
        "the other way round": (swapped, "ms and .* bytes/s"),
        "a constant": (lambda messages: [1e-3, 1e7], "ms and .* bytes/s"),
        "one number": (lambda messages: [1e-3], "has 2 entries"),
    },
    "seconds_of": {
        "one after the other": (added, "at the same time"),
        "always a latency": (always_latency, "Nothing to do|alone"),
        "no memory": (only_arithmetic, "Memory alone"),
        "a constant": (lambda operation, device: 0.0, "Arithmetic alone"),
    },
    "transfer": {
        "the faster end": (
            lambda drawn: 8 * drawn["megabytes"] / max(drawn["first_mbit"], drawn["second_mbit"]),
            "is not",
        ),
        "the larger latency alone": (lambda drawn: transfer_s(drawn | {"first_ms": 0}), "is not it"),
        "no latency": (lambda drawn: transfer_s(drawn | {"first_ms": 0, "second_ms": 0}), "is not it"),
        "bits for bytes": (lambda drawn: drawn["megabytes"] / min(drawn["first_mbit"], drawn["second_mbit"]), "is not"),
        "a constant": (1.0, "is not it"),
        "a text": ("long", "A number is asked for"),
    },
    "ridge": {
        "a constant": (64, "is not it"),
        "half": (lambda drawn: 3 * drawn["gflops"] / drawn["gigabytes"] - 3, "is not it"),
        "turned over": (lambda drawn: 6 * drawn["gigabytes"] / drawn["gflops"] - 2, "is not it"),
    },
}
