"""User-defined plans, and the planners of PAC+'s baselines (section VI-A): standalone, EDDL, Eco-FL, Asteroid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Literal, get_args

from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError, PlanError, check_choice
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Grid, Layers, Profile
from workbench.core.proportions import proportional_parts
from workbench.planners import memory
from workbench.planners.balance import StageTimes
from workbench.planners.closed_form import ClosedForm
from workbench.planners.hybrid import candidates, plan
from workbench.planners.orders import sorted_orders
from workbench.planners.problem import Problem

Dispatch = Literal["speed", "equal", "best"]


def fixed_plan(
    problem: Problem[Profile],
    *,
    layers: Sequence[int],
    groups: Sequence[Sequence[int]],
    dispatch: Dispatch = "speed",
    check_memory: bool = True,
    method: str = "fixed",
) -> Plan:
    """Return the plan of stages with `layers[i]` layers on the ranks `groups[i]`.

    dispatch: samples in proportion to each rank's "speed", "equal", or "best" by Eq. 4.  Each rank of a group no larger
    than the micro-batch gets at least one sample (except with "best", which may leave a slow device without samples).
    Raises ConfigError if the numbers do not fit together, PlanError if memory does not suffice.
    """
    profile, cluster, size, count = problem.profile, problem.cluster, problem.micro_batch_size, problem.micro_batches
    require_form(profile.model, profile.num_layers, cluster, layers, groups)
    check_choice("dispatch", dispatch, get_args(Dispatch))
    times = StageTimes(problem) if dispatch == "best" else None
    stages: list[Stage] = []
    for index, (stop, group) in enumerate(zip(accumulate(layers), groups, strict=True)):
        start = stop - layers[index]
        samples = () if times is None else times.shares(start, stop, group, memory.in_flight(index, len(layers), count))
        if not any(samples):  # with "best": nothing fits, and memory.check names the device
            samples = _spread(_speeds(problem, start, stop, group) if dispatch == "speed" else [1] * len(group), size)
        shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True))
        stages.append(Stage(start=start, stop=stop, shares=shares))
    cost = ClosedForm(problem)(stages, count)
    fixed = Plan(
        method=method, stages=tuple(stages), micro_batch_size=size, num_micro_batches=count, predicted_s=cost.parts()
    )
    if check_memory:
        memory.check(profile, cluster, fixed, sequence_length=problem.longest)
    return fixed


def standalone(problem: Problem[Profile]) -> Plan:
    """Return the plan of one device, the fastest on which the model fits.  Raises PlanError if it fits on none."""
    layers = (problem.profile.num_layers,)
    plans = problem.alone(lambda rank: fixed_plan(problem, layers=layers, groups=((rank,),), method="standalone"))
    return min(plans, key=lambda plan: plan.total_s)


def data_parallel(problem: Problem[Profile]) -> Plan:
    """Return the plan of the whole model on every device, samples in proportion to speed (EDDL).  Raises PlanError if
    it does not fit.
    """
    everyone = tuple(range(problem.cluster.world_size))
    return fixed_plan(problem, layers=(problem.profile.num_layers,), groups=(everyone,), method="data_parallel")


def pipeline_parallel(problem: Problem[Profile]) -> Plan:
    """Return the balanced pipeline with one device for each stage (Eco-FL).  Raises PlanError if it does not fit.

    With more devices than layers, the first num_layers take part.
    """
    ranks = tuple(range(min(problem.cluster.world_size, problem.profile.num_layers)))
    return candidates(problem, order=ranks, method="pipeline_parallel", max_group=1)[0]


def _speeds(problem: Problem[Profile], start: int, stop: int, group: Sequence[int]) -> list[int]:
    """Return integer weights to one part in a million, by the layers' times; equal if there are none."""
    size, length = problem.micro_batch_size, problem.sequence_length
    times_s = [problem.profile.train_s(rank, size, length, start, stop) for rank in group]
    return (
        [round(1e6 * min(times_s) / time_s) if time_s > 0 else 1 for time_s in times_s]
        if min(times_s) > 0
        else [1] * len(group)
    )


def _spread(weights: Sequence[int], size: int) -> tuple[int, ...]:
    """Divide `size` in proportion to weights, at least one each if there are enough."""
    counts = list(proportional_parts(size, weights))
    if size >= len(counts):
        while 0 in counts:
            counts[counts.index(max(counts))] -= 1
            counts[counts.index(0)] += 1
    return tuple(counts)


def require_form(
    model: str, num_layers: int, cluster: Cluster, layers: Sequence[int], groups: Sequence[Sequence[int]]
) -> None:
    """Raise ConfigError unless stages of `layers` layers on the ranks `groups` cover the model, each on devices of its
    own.
    """
    if not all(isinstance(group, Sequence) for group in groups):
        request = f"Stages of {list(layers)} layers on the groups {list(groups)} were asked for."
        raise ConfigError(
            request,
            "A group is a list of ranks, also of one.",
            "Write such as [(0,), (1, 2)], with a comma after one rank.",
        )
    request = f"Stages of {list(layers)} layers on the groups {[list(group) for group in groups]} were asked for."
    if not layers or len(layers) != len(groups):
        raise ConfigError(
            request, f"That is {len(layers)} stages and {len(groups)} groups.", "Name a group for each stage."
        )
    if min(layers) < 1 or sum(layers) != num_layers:
        raise ConfigError(
            request,
            f"Model '{model}' has {num_layers} layers, and no stage may be empty.",
            f"Let the layers sum to {num_layers}.",
        )
    ranks = [rank for group in groups for rank in group]
    if any(not group for group in groups):
        raise ConfigError(request, "A group is empty.", "Give each stage a device.")
    unknown = sorted({rank for rank in ranks if not 0 <= rank < cluster.world_size})
    if unknown:
        raise ConfigError(
            request, f"Cluster '{cluster.name}' has ranks 0 to {cluster.world_size - 1}.", f"Drop {unknown}."
        )
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(request, f"Ranks {twice} appear more than once.", "Give a device one stage.")


def whole_batches(planner: Callable[[Problem[Profile]], Plan]) -> Callable[[Problem[Profile]], Plan]:
    """Return a planner that works 'strictly at the mini-batch granularity' (section VI-B) and ignores micro_batches."""
    return lambda problem: planner(replace(problem, micro_batches=1))


def asteroid(problem: Problem[Profile]) -> Plan:
    """Return the fastest hybrid pipeline of full fine-tuning (Asteroid; Ye et al., MobiCom 2024).

    problem: a problem of full fine-tuning.  As far as PAC+ describes it, its architecture is PAC+'s; its samples,
    groups and cuts are fitted to the devices.  Our choices: the cost function (PhaseTimes.bottleneck_s), the orders
    (the cluster's, by speed, by memory), and a finer division of a mini-batch than `micro_batches` if that is faster or
    the only way to fit.
    Raises PlanError, naming device, stage and bytes, if nothing fits even with one sample in each micro-batch.
    """
    _ = problem.micro_batch_size  # refuses impossible numbers
    profile, cluster, batch_size = problem.profile, problem.cluster, problem.batch_size
    orders = dict.fromkeys(
        [tuple(range(cluster.world_size)), *sorted_orders(profile, cluster, problem.sequence_length)]
    )
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for finer in (count for count in range(problem.micro_batches, batch_size + 1) if batch_size % count == 0):
        cut = replace(problem, micro_batches=finer)
        times = StageTimes(cut)
        for order in orders:
            try:
                plans += candidates(cut, order=order, objective="bottleneck", method="asteroid", times=times)[:1]
            except PlanError as error:
                refusal = error
    if not plans:
        assert refusal is not None
        raise refusal

    closed_form = ClosedForm(problem)
    return min(plans, key=lambda plan: closed_form(plan.stages, plan.num_micro_batches).bottleneck_s)


def homogeneous(problem: Problem[Profile], *, cached: bool = True) -> Plan:
    """Return PAC+ (Homo)'s plan: Algorithm 1 with all devices at their mean speed; its predicted time uses the real
    devices.

    It plans with the memory of the smallest device, so any plan that it finds can run, as in Fig. 12.  cached: see
    hybrid.plan.
    Raises PlanError, naming device, stage and bytes, if it finds no plan or one does not fit.
    """
    profile, cluster, longest = problem.profile, problem.cluster, problem.longest
    alike = replace(profile, layers=(_mean_layers(profile),) * profile.world_size)
    planned = plan(replace(problem, profile=alike, cluster=_alike(cluster)), cached=cached, method="homogeneous")
    memory.check(profile, cluster, planned, sequence_length=longest)
    return replace(planned, predicted_s=ClosedForm(problem)(planned.stages, problem.micro_batches).parts(), notes=())


def _alike(cluster: Cluster) -> Cluster:
    devices = cluster.devices
    link = Link(
        bytes_per_s=fmean(device.link.bytes_per_s for device in devices),
        latency_s=fmean(device.link.latency_s for device in devices),
    )
    memory_bytes = min(device.memory_bytes for device in devices)
    return replace(cluster, pairs={}).with_devices(memory_bytes=memory_bytes, link=link)


def _mean_layers(profile: Profile) -> Layers:
    """Return every layer with its seconds averaged over the devices."""
    layers = []
    for rows in zip(*profile.layers, strict=True):
        kinds = dict.fromkeys(kind for layer in rows for kind in layer.times)
        times = {kind: _mean_grid([layer.times[kind] for layer in rows if kind in layer.times]) for kind in kinds}
        layers.append(replace(rows[0], times=times))
    return tuple(layers)


def _mean_grid(grids: Sequence[Grid]) -> Grid:
    """Return the mean at every batch size and length at which one of the grids was measured."""
    batch_sizes = sorted({size for grid in grids for size in grid.batch_sizes})
    lengths = sorted({length for grid in grids for length in grid.sequence_lengths})
    return Grid.of(batch_sizes, lengths, lambda size, length: fmean(grid(size, length) for grid in grids))


PARADIGMS: dict[str, Callable[[Problem[Profile]], Plan]] = {
    "standalone": whole_batches(standalone),
    "data_parallel": whole_batches(data_parallel),
    "pipeline_parallel": pipeline_parallel,
    "hybrid": partial(plan, cached=False),
}
