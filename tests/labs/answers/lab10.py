"""Lab 10, Never drain: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from tests.labs.solutions import defined, sources
from workbench.planners.asynchronous import partition_in_any_order, partition_in_order
from workbench_labs.exercises.cuts import equal_cut
from workbench_labs.exercises.never_drain import paper_costs

SOLUTIONS = sources("10")


def listed(found: Any) -> list[int]:
    return [*found.order, *(stop - start for start, stop in pairwise(found.cuts))]


def faster_order(drawn: dict[str, Any]) -> list[int]:
    return listed(partition_in_any_order(paper_costs(drawn["batch_size"])))


def the_planners(drawn: dict[str, Any]) -> list[int]:
    return listed(partition_in_order(paper_costs(drawn["batch_size"]), range(4)))


def by_speed(drawn: dict[str, Any]) -> list[int]:
    return listed(partition_in_order(paper_costs(drawn["batch_size"]), range(4), in_memory=False))


def without_memory(layer_s: Any, link_s: Any, layer_mb: Any, activation_mb: Any, budgets_mb: Any) -> Any:
    most = [10**9] * len(budgets_mb)
    return defined(SOLUTIONS["partition"])["partition"](layer_s, link_s, layer_mb, activation_mb, most)


def without_links(layer_s: Any, link_s: Any, layer_mb: Any, activation_mb: Any, budgets_mb: Any) -> Any:
    free = [0.0] * len(link_s)
    return defined(SOLUTIONS["partition"])["partition"](layer_s, free, layer_mb, activation_mb, budgets_mb)


def newest(operations: Any) -> list[int]:
    done, results = 0, []
    for operation in operations:
        results.append(done)
        done += operation.startswith("B")
    return results


def fresh(operations: Any, weights: Any, inputs: Any, targets: Any, rate: float) -> list[float]:
    """Descent without a stash: every gradient of the newest weights."""
    for number, (values, target) in enumerate(zip(inputs, targets, strict=True)):
        error = sum(weight * value for weight, value in zip(weights, values, strict=True)) - target
        weights = [weight - rate * error * value for weight, value in zip(weights, values, strict=True)]
        assert number < len(operations)
    return list(weights)


def back_to_the_old(operations: Any, weights: Any, inputs: Any, targets: Any, rate: float) -> list[float]:
    """Steps from the stashed weights instead of the newest."""
    kept = {}
    for operation in operations:
        number = int(operation[1:])
        if operation.startswith("F"):
            kept[number] = list(weights)
            continue
        old, values = kept[number], inputs[number]
        error = sum(weight * value for weight, value in zip(old, values, strict=True)) - targets[number]
        weights = [weight - rate * error * value for weight, value in zip(old, values, strict=True)]
    return list(weights)


def by_first_head(times: Any) -> list[int]:
    """In proportion to the speed with one head; the rest for the first."""
    speeds = [1 / row[0] for row in times]
    counts = [int(len(times[0]) * speed / sum(speeds)) for speed in speeds]
    return [counts[0] + len(times[0]) - sum(counts), *counts[1:]]


def halves(times: Any) -> list[int]:
    return equal_cut(len(times[0]), len(times))


def stable_rate(delay: int, curvature: float) -> float:
    return 2 * math.sin(math.pi / (4 * delay + 2)) / curvature


def seconds_alone(capacities: Any, batteries: Any, p: float, eta: float) -> list[float]:
    return [p * battery / (sum(capacity) + eta) for capacity, battery in zip(capacities, batteries, strict=True)]


RIGHT = {
    "order": faster_order,
    "stable_rate": lambda drawn: stable_rate(drawn["delay"], drawn["curvature"]),
    "notice": lambda drawn: drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["window_s"] + drawn["move_s"],
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "partition": {
        "equal": (lambda layer_s, *_: equal_cut(len(layer_s[0]), len(layer_s)), "does not fit|possible|asked for"),
        "memory is ignored": (without_memory, "does not fit|None is asked for"),
        "links are free": (without_links, "are possible"),
        "never": (lambda *_: None, "is possible; your function returned None"),
    },
    "order": {
        "the planner's own": (the_planners, "with Eq. 3's in the cluster's order"),
        "memory is ignored": (by_speed, "does not fit|in the cluster's order"),
        "one device twice": ([2, 2, 1, 3, 3, 3, 3, 3], "names a device twice"),
        "one layer on one device": ([2, 1], "has 8 entries"),
        "too few layers": ([0, 1, 2, 3, 1, 1, 1, 1], "in all"),
    },
    "stash": {
        "the newest": (newest, "Stage"),
        "the number of the mini-batch": (lambda operations: [int(operation[1:]) for operation in operations], "Stage"),
        "a constant": (lambda operations: [0] * len(operations), "Stage"),
        "one short": (lambda operations: newest(operations)[1:], "entries"),
    },
    "descend": {
        "without a stash": (fresh, "its order is"),
        "from the stashed weights": (back_to_the_old, "its order is"),
        "nothing learned": (lambda operations, weights, *_: list(weights), "its order is"),
    },
    "stable_rate": {
        "without delay": (lambda drawn: 2 / drawn["curvature"], "is not the limit"),
        "one delay more": (lambda drawn: stable_rate(drawn["delay"] + 1, drawn["curvature"]), "is not the limit"),
        "of another curve": (lambda drawn: stable_rate(drawn["delay"], 1), "is not the limit"),
        "a small one": (0.01, "is not the limit"),
    },
    "heads": {
        "equal": (halves, "are possible"),
        "by speed": (by_first_head, "are possible"),
        "all on one": (lambda times: [len(times[0]), *[0] * (len(times) - 1)], "are possible"),
        "one too many": (lambda times: [halves(times)[0] + 1, *halves(times)[1:]], "in all"),
    },
    "compatibility": {
        "not mapped": (seconds_alone, "With p"),
        "the charge alone": (lambda capacities, batteries, p, eta: [p * battery for battery in batteries], "With p"),
        "all alike": (lambda capacities, batteries, p, eta: [1.0] * len(batteries), "With p"),
    },
    "notice": {
        "loading alone": (lambda drawn: drawn["megabytes"] / drawn["megabytes_per_s"], "is not it"),
        "without the move": (
            lambda drawn: drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["window_s"],
            "is not it",
        ),
        "without the window": (
            lambda drawn: drawn["megabytes"] / drawn["megabytes_per_s"] + drawn["move_s"],
            "is not it",
        ),
        "a constant": (7.3, "is not it"),
    },
}
