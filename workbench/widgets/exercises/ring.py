"""Checks about the ring (RingAda, section IV-B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.plan import Plan
from workbench.methods.ringada.rounds import initiator_order
from workbench.schedules.ringada import terminator
from workbench.widgets.exercises.training import Verdict, code_verdict, number_verdict
from workbench.widgets.ring_lab import ring_plan


def check_terminator(answer: int | None, *, blocks: tuple[int, ...], depth: int) -> Verdict:
    """Which device of a ring, counted from 1, is the terminator?"""
    expected = terminator(ring_plan(blocks), sum(blocks) - depth) + 1
    hint = f"The {depth} top adapters are trained. Whose block is the lowest of them?"
    right = f"Block {sum(blocks) - depth + 1} of {sum(blocks)} is the lowest that is trained, and device {expected} has it."
    return number_verdict(answer, expected, hint, right, 0)


def check_terminator_code(answer: Callable[[Sequence[tuple[int, int]], int], int] | None) -> Verdict:
    """Does a function of each device's (first, last) blocks, from 1, and the depth compute the paper's inequality?  It returns a place."""
    cases = [((4, 5, 2, 3), depth) for depth in range(1, 15)] + [((1, 1, 10), depth) for depth in range(1, 13)] + [((6,), 3)]

    def tried(blocks: tuple[int, ...], depth: int) -> tuple[int, Any]:
        plan: Plan = ring_plan(blocks)
        spans = [(stage.start + 1, stage.stop) for stage in plan.stages]
        return terminator(plan, plan.num_layers - depth), answer(spans, depth) if answer else None

    hint = "Section IV-B: beta(u) <= N - Dep + 1 <= epsilon(u), N blocks in all; return the place of u in the list, from 0."
    return code_verdict(answer, hint, [(f"blocks {blocks}, depth {depth}", partial(tried, blocks, depth)) for blocks, depth in cases])


def check_next_initiator_code(answer: Callable[[int, Sequence[int], Callable[[int, int], float]], int] | None) -> Verdict:
    """Does a function of (present device, devices not yet initiator, rate of a link) make the paper's choice?"""
    rates = [{(0, 1): 1.0, (0, 2): 5.0, (1, 2): 2.0, (0, 3): 3.0, (1, 3): 9.0, (2, 3): 4.0}, {(0, 1): 1.0, (0, 2): 2.0, (1, 2): 3.0}]

    def tried(of: dict[tuple[int, int], float]) -> tuple[list[int], list[int]]:
        size = 1 + max(max(pair) for pair in of)
        devices = tuple(Device(name=f"d{rank}", flops_per_s=1e9, memory_bytes=1, link=Link(bytes_per_s=1.0)) for rank in range(size))
        pairs = {f"d{a}>d{b}": Link(bytes_per_s=rate) for (x, y), rate in of.items() for a, b in ((x, y), (y, x))}
        expected = list(initiator_order(Cluster(name="ring", devices=devices, pairs=pairs), ring_plan((1,) * size)))
        found, left = [0], list(range(1, size))
        while left and answer is not None:
            found.append(answer(found[-1], tuple(left), lambda a, b: of[min(a, b), max(a, b)]))
            left.remove(found[-1])
        return expected, found

    hint = "Section IV-B, 3: of the devices that are left, the one with the best channel to the present one."
    return code_verdict(answer, hint, [(f"the rates {of}", partial(tried, of)) for of in rates])
