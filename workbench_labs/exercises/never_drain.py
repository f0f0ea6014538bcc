"""Lab 'Never drain': versions of weights, cuts within memory, heads over processors, a successor (Confidant, sections
2.3 and 3).

The judges use the workbench's schedules and planners, or try all answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from random import Random
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.units import size_words
from workbench.methods.confidant.equations import compatibilities
from workbench.methods.confidant.heads import HeadProfile, random_profile
from workbench.planners.asynchronous import partition_in_order
from workbench.planners.equation3 import Equation3, pace_of
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
    whole_number,
)
from workbench_labs.exercises.cuts import cut_of, every_cut, stage_seconds
from workbench_labs.exercises.judging import (
    CLOSE,
    Function,
    code_exercise,
    counts_of,
    every_division,
    is_none,
    require_best,
    require_close,
    spans_of,
    within,
)
from workbench_labs.partition_by_hand import costs_of
from workbench_labs.weight_versions import delayed_descent, stashed

CASES = 50
HEAD_CASES = 12
PAPER_MODEL, PAPER_CLUSTER, PAPER_TOKENS = "BERT-Base", "pac-env-b", 128
AGREED = 0.03
"""By this share a largest learning rate may be off."""

Seconds = Sequence[Sequence[float]]


def operations_of(num_stages: int, stage: int, count: int) -> tuple[list[str], list[int]]:
    """Return a stage's operations, such as F0 and B0, and the version of the weights that each of them uses.

    From the workbench's asynchronous schedule of `count` mini-batches.
    """
    spans = [span for span in stashed(num_stages, count).spans if span.rank == stage and span.op.kind in "FB"]
    texts, versions = list[str](), list[int]()
    for span in spans:
        texts.append(f"{span.op.kind}{span.op.microbatch}")
        versions += [value.part for value in span.op.reads if value.name == "weight"][:1]
    return texts, versions


def judge_stash(answer: Function, draws: Random) -> str:
    """Compare the version of each operation with the workbench's schedule."""
    for _ in range(CASES):
        stages, count = draws.randint(1, 5), draws.randint(1, 9)
        stage = draws.randrange(stages)
        operations, expected = operations_of(stages, stage, count)
        case = f"Stage {stage} of {stages}, {count} mini-batches."
        require_close(answer(operations), expected, "The versions", case, given={"operation": operations})
    return f"Every mini-batch goes back with the version with which it came, in {CASES} pipelines of the workbench."


def judge_descend(answer: Function, draws: Random) -> str:
    """Compare the weights with delayed gradient descent, whose gradients are as old as the stage has others behind."""
    for _ in range(CASES):
        stages, count, width = draws.randint(1, 5), draws.randint(1, 12), draws.randint(1, 3)
        stage, rate = draws.randrange(stages), draws.choice([0.05, 0.1, 0.2])
        start = [draws.uniform(-1, 1) for _ in range(width)]
        inputs = [[draws.uniform(-1, 1) for _ in range(width)] for _ in range(count)]
        targets = [draws.uniform(-1, 1) for _ in range(count)]
        operations, _ = operations_of(stages, stage, count)
        expected = delayed_weights(start, inputs, targets, rate, stages - stage - 1)
        case = f"Stage {stage} of {stages}, {count} mini-batches, rate {rate}: its order is {' '.join(operations)}."
        weights = answer(operations, start, inputs, targets, rate)
        require_close(weights, expected, "The weights", case, right="gradients of old weights")
    return f"The weights are those of descent with old gradients, to {CLOSE:g}, in {CASES} trainings."


def delayed_weights(
    start: Sequence[float], inputs: Seconds, targets: Sequence[float], rate: float, delay: int
) -> list[float]:
    """Return the weights after a step for each input x with target y: w -= rate (v x - y) x, v being `delay` older."""
    versions = [list(start)]
    for step, (values, target) in enumerate(zip(inputs, targets, strict=True)):
        old = versions[max(0, step - delay)]
        error = sum(weight * value for weight, value in zip(old, values, strict=True)) - target
        versions.append([weight - rate * error * value for weight, value in zip(versions[-1], values, strict=True)])
    return versions[-1]


def stage_mb(counts: Sequence[int], layer_mb: Sequence[float], activation_mb: float) -> list[float]:
    """Return the MB of each stage: weights, gradients and stashed versions, and activations of all in flight."""
    return [
        sum(layer_mb[start:stop]) * (2 + behind) + activation_mb * (stop - start) * (behind + 1)
        for behind, (start, stop) in zip(reversed(range(len(counts))), spans_of(counts), strict=True)
    ]


def fitting_cuts(layer_mb: Sequence[float], activation_mb: float, budgets: Sequence[float]) -> list[tuple[int, ...]]:
    """Return every cut that fits."""
    cuts = every_cut(len(layer_mb), len(budgets))
    return [cut for cut in cuts if within(stage_mb(cut, layer_mb, activation_mb), budgets)]


def pace(counts: Sequence[int], layer_s: Seconds, link_s: Sequence[float]) -> float:
    """Return the seconds of a mini-batch in the long run: the slowest stage, or twice the slowest link (Eq. 3)."""
    links = (2 * link_s[start - 1] for start, _ in spans_of(counts) if start)
    return max(*stage_seconds(counts, layer_s), *links, 0.0)


def best_cut(
    layer_s: Seconds, link_s: Sequence[float], layer_mb: Sequence[float], activation_mb: float, budgets: Sequence[float]
) -> tuple[int, ...] | None:
    """Return the fastest of all cuts that fit, None if none does."""
    possible = fitting_cuts(layer_mb, activation_mb, budgets)
    return min(possible, key=lambda cut: pace(cut, layer_s, link_s), default=None)


def cut_case(draws: Random) -> tuple[list[list[float]], list[float], list[int], int, list[int]]:
    """Return layer_s, link_s, layer_mb, activation_mb and budgets_mb of a random cluster."""
    size = draws.randint(2, 4)
    layers = [draws.randint(2, 6) for _ in range(draws.randint(size, 8))]
    layer_s = [
        [factor * seconds for seconds in layers] for factor in (draws.choice([1, 1.5, 2, 3]) for _ in range(size))
    ]
    link_s = [draws.choice([0.5, 3.0, 10.0, 20.0]) for _ in layers]
    layer_mb, activation_mb = [draws.randint(4, 12) for _ in layers], draws.randint(1, 6)
    share = sum(stage_mb([len(layers) // size] * size, layer_mb, activation_mb)) / size
    return layer_s, link_s, layer_mb, activation_mb, [round(share * draws.uniform(0.9, 2.6)) for _ in range(size)]


def judge_partition(answer: Function, draws: Random) -> str:
    """Compare the pace with that of the best of all cuts that fit; where none fits, None is right."""
    refused = 0
    for _ in range(CASES):
        layer_s, link_s, layer_mb, activation_mb, budgets = cut_case(draws)
        size, layers = len(layer_s), len(layer_mb)
        possible = fitting_cuts(layer_mb, activation_mb, budgets)
        cut_given = answer(layer_s, link_s, layer_mb, activation_mb, budgets)
        if is_none(cut_given, possible, f"Budgets of {budgets} MB"):
            refused += 1
            continue
        counts = cut_of(cut_given, layers, size)
        rows = [
            (place, counts[place], f"{need:g}", budgets[place])
            for place, need in enumerate(stage_mb(counts, layer_mb, activation_mb))
        ]
        details = comparison("Your cut", ("place", "layers", "needs (MB)", "has (MB)"), rows)
        if counts not in possible:
            raise WrongAnswerError(f"Your cut {list(counts)} does not fit.", details)
        seconds = partial(pace, layer_s=layer_s, link_s=link_s)
        require_best(counts, possible, seconds, f"With your cut {list(counts)} a mini-batch", details)
    return f"It is the best cut that fits, in {CASES} random clusters; in {refused} of them it says that none fits."


@cache
def paper_costs(batch_size: int) -> Equation3:
    """Return the terms of Eq. 3 for the paper's side of the lab."""
    return costs_of(PAPER_MODEL, load_cluster(PAPER_CLUSTER), batch_size=batch_size, tokens=PAPER_TOKENS)


def judge_order(answer: Any, numbers: Numbers) -> str:
    """Does an order with its layers fit, and is it faster than Eq. 3's best in the cluster's order?"""
    costs = paper_costs(numbers["batch_size"])
    devices, layers = costs.cluster.devices, costs.profile.num_layers
    size = len(devices)
    entries = require_list(answer, "Order and layers", 2 * size)
    order = tuple(whole_number(device, 0, size - 1, "A device") for device in entries[:size])
    counts = cut_of(entries[size:], layers, size)
    if len(set(order)) < size:
        raise WrongAnswerError(f"The order {list(order)} names a device twice.")
    for place, (rank, (start, stop)) in enumerate(zip(order, spans_of(counts), strict=True)):
        need = costs.need(rank, size - place - 1, start, stop, num_stages=size).total_bytes
        if need > devices[rank].memory_bytes:
            has, name = devices[rank].memory_bytes, devices[rank].name
            raise WrongAnswerError(f"It does not fit: {name} has {size_words(has)} and needs {size_words(need)}.")
    cuts = (0, *accumulate(counts))
    mine, theirs = pace_of(costs, order, cuts), partition_in_order(costs, range(size)).pace_s
    case = f"A mini-batch takes {mine:.3g} s with yours, {theirs:.3g} s with Eq. 3's in the cluster's order."
    if mine >= theirs * (1 - CLOSE):
        raise WrongAnswerError(case)
    return case


def judge_heads(answer: Function, draws: Random) -> str:
    """Compare the slowest processor with that of the best of all divisions."""
    cases = list[HeadProfile]()
    while len(cases) < HEAD_CASES:
        profile = random_profile(draws)
        cases += [profile] * (profile.num_heads <= 16 and len(profile.seconds) <= 3)
    for profile in cases:
        times = [[round(1e3 * seconds, 3) for seconds in row] for row in profile.seconds]
        profile = HeadProfile(seconds=tuple(map(tuple, times)))
        counts = counts_of(answer(times), "The division", len(times), total=profile.num_heads)
        rows = [
            (place, count, f"{row[count - 1] if count else 0:g}", " ".join(f"{value:.1f}" for value in row))
            for place, (count, row) in enumerate(zip(counts, times, strict=True))
        ]
        columns = ("processor", "your heads", "its time (ms)", "time of 1, 2, ... heads (ms)")
        possible = every_division(profile.num_heads, len(times))
        text, case = f"With {list(counts)} a layer", comparison("The case", columns, rows)
        require_best(counts, possible, profile.time_s, text, case, unit="ms")
    return f"It is as fast as the best of all divisions, on {HEAD_CASES} devices."


def judge_stable_rate(answer: Any, numbers: Numbers) -> str:
    """Does a descent come down just below the rate, and run away just above it?"""
    rate, delay, curvature = number_of(answer), numbers["delay"], numbers["curvature"]

    def grows(learning_rate: float) -> bool:
        path = delayed_descent(1.0, lambda w: curvature * w, learning_rate, delay, 4000)
        return not max(map(abs, path[-50:])) < 1e-3

    if rate <= 0 or grows(rate * (1 - AGREED)) or not grows(rate * (1 + AGREED)):
        raise WrongAnswerError(f"{rate:g} is not the limit.")
    exact = 2 * math.sin(math.pi / (4 * delay + 2)) / curvature
    formula = f"2 sin(pi / (4 x {delay} + 2)) / {curvature:g}"
    return f"Below it the descent ends at 0, above it it does not ({formula} = {exact:.3f})."


def judge_compatibility(answer: Function, draws: Random) -> str:
    """Compare with the workbench's Eq. 4, where all devices differ and where some are alike."""
    for number in range(CASES):
        size, layers = draws.randint(1, 5), draws.randint(2, 4)
        capacities = [[draws.uniform(1, 9) for _ in range(layers)] for _ in range(size)]
        batteries = [draws.uniform(0.1, 1.0) for _ in range(size)]
        if number % 5 == 0:
            batteries = [0.7] * size
        if number % 5 == 1:
            capacities = [capacities[0]] * size
        left = draws.choice([0.25, 0.5, 1.0])
        expected = compatibilities(capacities, batteries, left, 1e-3)
        columns = {
            "device": range(size),
            "sum of seconds": [f"{sum(capacity):.2f}" for capacity in capacities],
            "charge": [f"{battery:.2f}" for battery in batteries],
        }
        answered, case = answer(capacities, batteries, left, 1e-3), f"With p = {left} and eta = 0.001:"
        require_close(answered, expected, "DC", case, given=columns, right="Eq. 4")
    return f"It is Eq. 4, in {CASES} cases."


def judge_notice(answer: Any, numbers: Numbers) -> str:
    """Compare with loading, the window under way, and the move, one after the other."""
    load_s = numbers["megabytes"] / numbers["megabytes_per_s"]
    expected = load_s + numbers["window_s"] + numbers["move_s"]
    right = f"{load_s:g} + {numbers['window_s']:g} + {numbers['move_s']:g} = {expected:g} s."
    return require_number(answer, expected, 0.005, right)


def plain_descend(operations: Sequence[str], weights: Any, inputs: Any, targets: Any, rate: float) -> list[float]:
    """Return the weights after a stage's operations, by the workbench's own descent with old gradients."""
    delay = sum(operation.startswith("F") for operation in operations[: operations.index("B0")]) - 1
    return delayed_weights(weights, inputs, targets, rate, delay)


EXERCISES = (
    code_exercise(
        name="partition",
        question="""**Cut within memory** (10 points). `partition(layer_s, link_s, layer_mb, activation_mb, \
budgets_mb)` returns how many layers each device gets, such as `[3, 1]`, or `None` if no cut fits. `layer_s[device]\
[layer]` are the seconds of a layer, forward and backward. A cut after layer *x* costs `2 * link_s[x]` (Eq. 3). With \
*d* devices behind it, a device needs `layer_mb` of each of its layers 2 + *d* times (weights, gradients, *d* stashed \
versions) and `activation_mb` of each layer 1 + *d* times. The least seconds of a mini-batch in the long run win.""",
        points=10,
        hints=(
            "A recursion over devices and layers as in lab 04: what is new in the maximum?",
            "How many devices are behind device i of N? It is known in the recursion: N - i - 1.",
            "best[i][n] = min over k of max(best[i - 1][k], 2 link_s[k - 1], seconds of layers k to n), infinite if "
            "they do not fit.",
        ),
        judge=judge_partition,
        stand_in=best_cut,
    ),
    Exercise(
        name="order",
        question="""**Another order** (5 points). Eq. 3 takes the devices in the order given. Find an order, and \
layers for each place, that fit and are faster than Eq. 3's best in the cluster's order ({batch_size} samples of 128 \
tokens, BERT-Base). Give one list: four devices by number from 0, then four numbers of layers. `explorer.answer` is \
that list for what the explorer shows.""",
        points=5,
        hints=(
            "The first device stashes three versions, the last none. Which device has least memory?",
            "Put a device with little memory last, a fast one with much memory first.",
            "*Best order* tries all orders; look at what it does with the slow devices.",
        ),
        draw=lambda draws: {"batch_size": draws.randint(8, 17)},
        judge=judge_order,
    ),
    code_exercise(
        name="stash",
        question="""**Stash the weights** (5 points). `stash(operations)` gets the operations of one stage, such as \
`["F0", "F1", "B0", "F2", "B1", "B2"]`. Each backward pass ends with an update, which makes the next version; \
the first is version 0. Return for each operation the version that it uses: a forward pass the newest, a backward pass \
that of its own forward pass.""",
        points=5,
        hints=(
            "Two things to remember: the newest version, and which version each mini-batch has used.",
            "After which operations is there one version more?",
            "`used[number] = newest` at F; at B look it up, then add 1 to the newest.",
        ),
        judge=judge_stash,
    ),
    code_exercise(
        name="descend",
        question="""**Train with it** (10 points). `descend(operations, weights, inputs, targets, rate)` trains a \
stage of one linear layer: mini-batch *m* has the input `inputs[m]` (a list as long as `weights`) and the target \
`targets[m]`. Its gradient is (v x - y) x, with the version v of the weights that its forward pass has used. An update \
subtracts rate times the gradient from the *newest* weights. Return the weights at the end.""",
        points=10,
        hints=(
            "Keep a copy of the weights for each mini-batch that has come and not gone back.",
            "`list(weights)` is a copy; `weights` alone is the same list, which changes.",
            "At F: stash[m] = copy. At B: error with stash[m], step from the newest weights, delete stash[m].",
        ),
        judge=judge_descend,
        stand_in=plain_descend,
    ),
    Exercise(
        name="stable_rate",
        question="""**How fast may it learn?** (2 points) What is the largest learning rate at which a descent into \
{curvature} w<sup>2</sup> / 2 with gradients that are {delay} updates old still comes down?""",
        points=2,
        hints=(
            "Move the slider of the explorer, which shows w<sup>2</sup> / 2, until this delay's line neither grows nor \
shrinks. What does the factor before w<sup>2</sup> do to the gradient?",
            "Try w_(t+1) = w_t - rate x factor x w_(t - delay) in a loop of your own, with the factor before "
            "w<sup>2</sup>.",
            "Without delay it is 2 over the factor; it falls about as 1 over the delay.",
        ),
        draw=lambda draws: {"delay": draws.randint(1, 5), "curvature": draws.choice([0.8, 1.25, 1.5, 2.5, 4])},
        judge=judge_stable_rate,
    ),
    code_exercise(
        name="heads",
        question="""**Heads over processors** (5 points). `heads(times)` gets `times[p][k - 1]`, the milliseconds of \
k heads on processor p, for 1 to K heads. It returns how many heads each processor gets, K in all, some perhaps none. \
All compute at the same time; the slowest counts.""",
        points=5,
        hints=(
            "How long does one more head make each processor?",
            "Give the heads away one by one: to which processor goes the next?",
            "To the one that ends first with it. No earlier gift need be taken back: times never fall with more heads.",
        ),
        judge=judge_heads,
    ),
    code_exercise(
        name="compatibility",
        question="""**Who stands in?** (5 points) `compatibility(capacities, batteries, p, eta)` returns Eq. 4's DC \
of each idle device. `capacities[device]` are the seconds of 1, 2, ... layers; H is their sum. H and the charge b are \
mapped to 0 to 1, from the least to the most of all devices. Where all are equal, H = 0 and b = 1.""",
        points=5,
        hints=(
            "Which device is the least compatible: the one with the largest or with the smallest H?",
            "(value - least) / (most - least), for the sums and for the charges.",
            "p * b / (H + eta) for each device; mind the case most == least.",
        ),
        judge=judge_compatibility,
    ),
    Exercise(
        name="notice",
        question="""**How early?** (2 points) A device that stands in reads {megabytes} MB from its disk at \
{megabytes_per_s} MB/s while all train. Then the window under way is finished ({window_s} s), and all stand still for \
the move ({move_s} s). How many seconds before it leaves must a device give notice, to 0.5 %?""",
        points=2,
        hints=(
            "What happens one after the other?",
            "Megabytes over megabytes per second are seconds.",
            "Loading, then a whole window at worst, then the move.",
        ),
        draw=lambda draws: {
            "megabytes": draws.randint(60, 200),
            "megabytes_per_s": draws.choice([20, 25, 40]),
            "window_s": draws.randint(10, 30) / 10,
            "move_s": draws.randint(2, 8) / 10,
        },
        judge=judge_notice,
    ),
)
