"""Simulate mini-batches of a planned training in virtual time: a plan's schedule with its costs, without a run."""

from __future__ import annotations

from typing import Literal

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.plan import Plan
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.timeline import Timeline
from workbench.planners.problem import Problem
from workbench.schedules.costs import plan_costs
from workbench.schedules.hetpipe import asynchronous_1f1b
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import backpropagation, gpipe_order, hybrid_1f1b, one_f_one_b_order
from workbench.simulator.simulate import makespan_s, simulate

THROUGH_BACKBONE: tuple[Literal["full", "adapters", "lora"], ...] = ("full", "adapters", "lora")
"""Techniques whose backward pass runs through the backbone."""
SAMPLES = 32
"""Samples in a mini-batch of equal blocks; only the number of its parts matters."""
FP32_BYTES = 4
FULL_AFTER = 12
"""Mini-batches after which an asynchronous pipeline counts as full."""


def simulated_step(
    problem: Problem[Profile], plan: Plan, *, title: str = "One mini-batch", gpipe: bool = False
) -> Timeline:
    """Return the timeline of one mini-batch, replayed operation by operation, without memory.

    The steps are PAC+'s, or those of a technique inside the backbone.  gpipe: whether all forward passes come first.
    """
    return simulate(step_program(problem, plan, gpipe=gpipe), title=title, memory=False)


def step_program(problem: Problem[Profile], plan: Plan, *, gpipe: bool = False) -> Program:
    """Return the program of one mini-batch (see simulated_step)."""
    sizes = (plan.micro_batch_size,) * plan.num_micro_batches
    order, world_size = gpipe_order if gpipe else one_f_one_b_order, problem.cluster.world_size
    if problem.profile.method in THROUGH_BACKBONE:
        schedule = backpropagation(plan, sizes, world_size=world_size, order=order)
    else:
        schedule = hybrid_1f1b(plan, sizes, world_size=world_size, order=order)
    costs = plan_costs(
        problem.profile, problem.cluster, plan, sizes=sizes, lengths=(problem.sequence_length,) * len(sizes)
    )
    return Program.on(problem.cluster, insert_transfers(schedule), costs)


def step_s(problem: Problem[Profile], plan: Plan) -> float:
    """Return the price of a plan: the simulated seconds of one mini-batch."""
    return makespan_s(step_program(problem, plan))


def sample_s(problem: Problem[Profile], plan: Plan) -> float:
    """Return a mini-batch's simulated seconds over its samples."""
    return step_s(problem, plan) / plan.mini_batch_size


def mini_batches(
    profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, count: int, title: str = ""
) -> Timeline:
    """Return some mini-batches through an empty asynchronous pipeline."""
    program = _mini_batches_program(profile, cluster, plan, tokens=tokens, count=count)
    return simulate(program, title=title, memory=False)


def _mini_batches_program(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, count: int) -> Program:
    sizes = (plan.micro_batch_size,) * count
    costs = plan_costs(profile, cluster, plan, sizes=sizes, lengths=(tokens,) * count, stashes_weights=True)
    schedule = insert_transfers(asynchronous_1f1b(plan, count, world_size=cluster.world_size))
    return Program.on(cluster, schedule, costs)


def pace_s(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int) -> float:
    """Return the simulated seconds of one more mini-batch in an asynchronous pipeline that is full."""
    short, long = (
        makespan_s(_mini_batches_program(profile, cluster, plan, tokens=tokens, count=count))
        for count in (FULL_AFTER, 2 * FULL_AFTER)
    )
    return (long - short) / FULL_AFTER


def equal_blocks(
    layers: int, devices: int, backward: float = 1.0, transfer_s: float = 0.0, side: float = 0.0
) -> tuple[Profile, Cluster]:
    """Return blocks whose forward pass of a mini-batch takes 1 s, and equal devices.

    backward: time of the backward pass relative to the forward pass.  transfer_s: seconds of a mini-batch's activation
    on a link.  side: seconds of a side layer's forward pass, if side layers are trained next to the blocks; its
    backward pass takes twice as long.
    """
    grid = Grid(batch_sizes=(1, SAMPLES), sequence_lengths=(1,), seconds=((1 / SAMPLES,), (1.0,)))
    forward, back = (grid.scaled(side), grid.scaled(2 * side)) if side else (grid, grid.scaled(backward))
    times = {"P": grid, "F": forward, "B": back, "A": back}
    block = LayerProfile(name="block", times=times, frozen_bytes=0, trainable_bytes=0)
    profile = Profile(
        model=f"{layers} equal blocks", method="ringada", source="analytic", layers=((block,) * layers,) * devices
    )
    link = Link(bytes_per_s=FP32_BYTES * SAMPLES / transfer_s if transfer_s else 1e18)
    equal_devices = (
        Device(name=f"device {rank + 1}", flops_per_s=1e9, memory_bytes=10**9, link=link) for rank in range(devices)
    )
    return profile, Cluster(name="equal", devices=tuple(equal_devices))
