"""Checks about the ring (RingAda, section IV-B), and asynchronous pipelines, heads, changing devices (Confidant,
sections 2.3 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from workbench.methods.confidant.equations import compatibilities
from workbench.methods.confidant.heads import HeadProfile, best_allocation
from workbench.planners.asynchronous import Equation3, Partition, pace_of, partition_in_order
from workbench_labs.confidant import delayed_descent
from workbench_labs.exercises.training import Verdict, code_verdict, exercise


@exercise("The device with least memory should not come first: the first one stashes most. Take lab.partition.")
def check_own_partition(answer: Partition, costs: Equation3, *, order: Sequence[int]) -> tuple[bool, str]:
    """Does the student's partition fit, and is it faster than Eq. 3's in an order of the devices?"""
    if not isinstance(answer, Partition):
        return False, f"A Partition is asked for, this is {answer!r}."
    last, devices = len(answer.order) - 1, costs.cluster.devices
    layers, is_cut = costs.profile.num_layers, all(start < stop for start, stop in pairwise(answer.cuts))
    if not is_cut or len(answer.cuts) != last + 2 or (answer.cuts[0], answer.cuts[-1]) != (0, layers):
        return False, f"The cuts {answer.cuts} do not give all {layers} layers to the devices {answer.order}, in order."
    if len(set(answer.order)) <= last or not set(answer.order) <= set(range(len(devices))):
        return False, f"{answer.order} are not different devices of the cluster."
    for at, (rank, (start, stop)) in enumerate(zip(answer.order, pairwise(answer.cuts), strict=True)):
        if costs.need(rank, last - at, start, stop, num_stages=last + 1).total_bytes > devices[rank].memory_bytes:
            return False, f"It does not fit on '{devices[rank].name}'."
    mine, theirs = pace_of(costs, answer.order, answer.cuts), partition_in_order(costs, order).pace_s
    said = f"A mini-batch takes {mine:.3g} s with yours, {theirs:.3g} s with Eq. 3's in the cluster's order."
    return mine < theirs, said


@exercise("Give one number of heads for each processor, together all heads; the slowest counts.")
def check_heads(answer: Sequence[int], profile: HeadProfile) -> tuple[bool, str]:
    """Does the division of all heads over the processors take the least time?"""
    heads = profile.num_heads
    if (
        not isinstance(answer, Sequence)
        or len(answer) != len(profile.seconds)
        or any(count not in range(heads + 1) for count in answer)
    ):
        return False, f"{answer!r} is no allocation of {heads} heads to {len(profile.seconds)} processors."
    if sum(answer) != heads:
        return False, f"These are {sum(answer)} of {heads} heads."
    mine_s, best_s = profile.time_s(answer), profile.time_s(best_allocation(profile))
    return (
        mine_s <= best_s,
        f"They take {mine_s * 1e3:g} ms; {'no other take' if mine_s <= best_s else 'it can be done in'} less.",
    )


def check_compatibility_code(answer: Callable[..., Sequence[float]] | None) -> Verdict:
    """Does a function of (capacity vectors, batteries, p, eta) compute Eq. 4?  It returns each idle device's
    compatibility.
    """
    three = ([[1.0, 2.0, 3.0], [1.5, 3.0, 4.5], [2.0, 4.5, 7.0]], [0.2, 0.9, 1.0])
    cases = {
        "three devices": (*three, 0.5),
        "half of the run left of that": (*three, 0.25),
        "a fast device with little charge": ([[1.0, 1.0], [9.0, 9.0]], [0.1, 0.3], 1.0),
        "equal charges": ([[1.0, 2.0], [2.0, 4.0]], [0.7, 0.7], 0.5),
        "equal speeds": ([[1.0, 2.0], [2.0, 1.0]], [0.4, 0.7], 0.5),
        "one device": ([[1.0, 2.0]], [0.3], 1.0),
    }

    def tried(capacities: list[list[float]], batteries: list[float], left: float) -> tuple[Any, Any]:
        expected = compatibilities(capacities, batteries, left, 1e-3)
        return _rounded(expected), _rounded(answer(capacities, batteries, left, 1e-3)) if answer else None

    hint = (
        "Eq. 4: p b / (H + eta), H and b mapped onto 0 to 1. Where all are equal, take H = 0 and b = 1: nothing "
        "tells them apart."
    )
    return code_verdict(answer, hint, [(name, partial(tried, *given)) for name, given in cases.items()])


def check_delayed_code(answer: Callable[..., float] | None) -> Verdict:
    """Does a function of (w, gradient, learning rate, delay, steps) compute the delayed update?  It returns the last
    weight.
    """
    gradients: dict[str, Callable[[float], float]] = {
        "w": lambda w: w,
        "2 (w - 1)": lambda w: 2 * (w - 1),
        "w^3": lambda w: w**3,
    }
    settings = [(0.1, 0, 5), (0.1, 1, 1), (0.2, 2, 7), (0.3, 3, 10), (0.1, 3, 0)]

    def tried(gradient: Callable[[float], float], rate: float, delay: int, steps: int) -> tuple[Any, Any]:
        expected = delayed_descent(0.5, gradient, rate, delay, steps)[-1]
        return _rounded([expected]), _rounded([answer(0.5, gradient, rate, delay, steps)]) if answer else None

    hint = "w_(t+1) = w_t - rate x gradient(w_(t-delay)): keep the versions. The first mini-batches come with w_0."
    cases = [
        (f"gradient {name}, rate {rate:g}, delay {delay}, {steps} steps", partial(tried, gradient, rate, delay, steps))
        for name, gradient in gradients.items()
        for rate, delay, steps in settings
    ]
    return code_verdict(answer, hint, cases)


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
