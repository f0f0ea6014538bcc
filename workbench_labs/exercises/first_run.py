"""Lab 'Ten minutes': two numbers about the run, for later."""

from __future__ import annotations

from random import Random
from typing import Any

from workbench_labs.course.verdict import Exercise, Numbers, require_number


def judge_waits(answer: Any, numbers: Numbers) -> str:
    """Compare with both devices' busy time, sample by sample."""
    fast, slow = (sum([numbers[which]] * numbers["samples"]) for which in ("fast_ms", "slow_ms"))
    share = (slow - fast) / slow
    return require_number(answer, share, 0.01, f"It works for {fast} of {slow} ms, and waits for {share:.0%}.")


def judge_training(answer: Any, numbers: Numbers) -> str:
    """Compare with the sum of all epochs."""
    epochs = [numbers["first_s"]] + [numbers["cached_s"]] * (numbers["epochs"] - 1)
    return require_number(answer, sum(epochs), 0, f"{' + '.join(map(str, epochs))} = {sum(epochs)} s.")


def _two_devices(draws: Random) -> Numbers:
    fast = 2 * draws.randint(3, 9)
    return {"samples": draws.randint(2, 8), "fast_ms": fast, "slow_ms": fast + draws.randint(3, 30)}


def _epochs(draws: Random) -> Numbers:
    first = 2 * draws.randint(10, 25)
    return {"first_s": first, "cached_s": first // draws.randint(4, 8), "epochs": draws.randint(3, 8)}


EXERCISES = (
    Exercise(
        name="waits",
        question="""**Who waits?** (2 points) Two devices take {samples} samples each. One needs {fast_ms} ms for a \
sample, the other {slow_ms} ms. A step ends when both have finished. During which share of the step does the faster \
one wait, to 1 % of it?""",
        points=2,
        hints=(
            "How long does the step take, and how long does the faster one work?",
            "Share of waiting = (step - own work) / step.",
            "The number of samples cancels: (slow - fast) / slow.",
        ),
        draw=_two_devices,
        judge=judge_waits,
    ),
    Exercise(
        name="training",
        question="""**A whole training** (2 points) The first epoch takes {first_s} s, one from the cache {cached_s} \
s. How many seconds do {epochs} epochs take?""",
        points=2,
        hints=(
            "How many of the epochs come from the cache?",
            "All but the first.",
            "first + (epochs - 1) x cached.",
        ),
        draw=_epochs,
        judge=judge_training,
    ),
)
