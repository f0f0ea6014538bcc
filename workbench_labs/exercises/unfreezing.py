"""A student's policy of unfreezing: trainings of different pace, their time on a ring, and the policy's own run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.job import Fidelity
from workbench.core.proportions import proportional_parts
from workbench.methods.ringada.published import RING, layer_times, load_constants, round_program
from workbench.methods.ringada.schedule import Iteration
from workbench.simulator.steps import equal_blocks
from workbench_labs.course.verdict import (
    WrongAnswerError,
    comparison,
    whole_number,
)
from workbench_labs.exercises.pipelines import Both, both_ways
from workbench_labs.planning import on_this_computer
from workbench_labs.ring import ring_plan

BLOCKS = 12
ROUND = 10
"""Mini-batches between two calls of a policy."""
FLOOR, ABOVE = 0.2, 0.1
"""The loss that no training gets below, and how near it a training must come."""
MOST_ROUNDS = 600
SAVED = 0.05
"""The share of the time by which a policy must be faster than any fixed interval."""
INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
HIDDEN = 384
EXECUTED_ROUNDS = 12
"""Numbers of a sample that cross a boundary in an executed ring."""

Policy = Callable[[int, Sequence[float], int], Any]
"""(rounds done, mean loss of each, depth so far) -> depth of the next round."""


@cache
def seconds_by_depth() -> Mapping[int, float]:
    """Return the layer times of a mini-batch by the number of trained adapters: 12 blocks, 4 devices (simulated)."""
    constants = load_constants()
    return layer_times(constants, RING, constants.micro_batches)[0]


def learning(draws: Random) -> list[tuple[float, list[float]]]:
    """Return trainings that differ in pace: (rounds in which an adapter learns most of what it can, gains by adapter).

    The gains begin at the top.
    """
    trainings = []
    for pace in (4.0, 16.0, 64.0):
        for share in (0.5, 0.7):
            for _ in range(2):
                gains = [share**place for place in range(BLOCKS)]
                trainings.append((pace * draws.uniform(0.8, 1.25), [gain / sum(gains) for gain in gains]))
    return trainings


def policy_time(policy: Policy, pace: float, gains: Sequence[float]) -> tuple[float, list[int], list[float]]:
    """Return the layer times until a training's loss is ABOVE over its floor, and depth and loss of each round.

    The time is infinite after MOST_ROUNDS.  Raises WrongAnswerError for a depth that cannot be.
    """
    done, passed, depth = [0] * BLOCKS, 0.0, 1
    depths, losses = list[int](), list[float]()
    while len(losses) < MOST_ROUNDS:
        before = depth if depths else 1
        depth = whole_number(policy(len(losses), losses, before), 1, BLOCKS, "A depth")
        if depth < before:
            raise WrongAnswerError(
                f"After {len(losses)} rounds it goes from {before} back to {depth} trained adapters."
            )
        passed += ROUND * seconds_by_depth()[depth]
        done = [count + (place < depth) for place, count in enumerate(done)]
        left = sum(gain * math.exp(-count / pace) for gain, count in zip(gains, done, strict=True))
        depths.append(depth)
        losses.append(FLOOR + left)
        if left <= ABOVE:
            return passed, depths, losses
    return math.inf, depths, losses


def every(rounds: int) -> Policy:
    """Return the policy that unfreezes one more adapter after every so many rounds."""
    return lambda step, losses, depth: min(BLOCKS, 1 + step // rounds)


def all_at_once(step: int, losses: Sequence[float], depth: int) -> int:
    """Train all adapters from the beginning."""
    return BLOCKS


def judge_unfreeze(answer: Policy, draws: Random) -> str:
    """Is the policy faster than any fixed interval, on average over trainings whose pace it does not know?"""
    trainings = learning(draws)
    fixed = {
        f"every {rounds}": [policy_time(every(rounds), *training)[0] for training in trainings] for rounds in INTERVALS
    }
    fixed["all"] = [policy_time(all_at_once, *training)[0] for training in trainings]
    least = [min(times) for times in zip(*fixed.values(), strict=True)]

    def over_best(times: Sequence[float]) -> float:
        return fmean(time_s / best for time_s, best in zip(times, least, strict=True))

    scores = {name: over_best(times) for name, times in fixed.items()}
    best = min(scores, key=lambda name: scores[name])
    times_s = [policy_time(answer, *training)[0] for training in trainings]
    score = over_best(times_s)
    text = (
        f"On average it takes {score:.2f} times the time of the best interval for each training; the single interval \
that suits all best ({best}) {scores[best]:.2f} times."
    )
    if score > scores[best] * (1 - SAVED):
        rows = [
            (f"{pace:.1f}", f"{mine:.0f}", f"{times:.0f}", f"{lowest:.0f}")
            for (pace, _), mine, times, lowest in zip(trainings, times_s, fixed[best], least, strict=True)
        ]
        columns = ("pace (rounds)", "yours", best, "the best interval for this one")
        raise WrongAnswerError(
            f"{text} Be {100 * SAVED:.0f} % faster than that.",
            comparison("Layer times to the loss (simulated)", columns, rows),
        )
    return text


def run_policy(
    policy: Policy,
    *,
    cluster_name: str = "laptop-equal",
    layer_s: float = 0.004,
    fidelity: Fidelity = "auto",
) -> Both:
    """Return a ring of twelve blocks with the depths that a policy chooses on the first drawn training, a mini-batch
    for each round: simulated, and executed by emulated devices with made-up contents.
    """
    cluster = on_this_computer(load_cluster(cluster_name))
    depths = policy_time(policy, *learning(Random(0))[0])[1][:EXECUTED_ROUNDS]
    size = cluster.world_size
    profile, _ = equal_blocks(BLOCKS, size)
    profile = profile.with_layers(lambda layer, *_: layer.scaled(layer_s))
    iterations = [Iteration(0, BLOCKS - depth, load_constants().micro_batches) for depth in depths]
    plan = ring_plan(proportional_parts(BLOCKS, (1,) * size))
    program = round_program(profile, cluster, plan, iterations, hidden=HIDDEN)
    return both_ways(program, cluster, fidelity)
