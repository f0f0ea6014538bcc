"""HetPipe's planner and costs: devices into virtual workers, their layers into pipelines (Park et al., ATC 2020; PAC+,
VI-A).

The paper leaves some points open.  Our reading: a virtual worker's mini-batch is as large as the other systems'
micro-batch, so that the same number of samples is in work.  N_m is at most the length of the longest pipeline, because
more mini-batches only wait.  The shards' servers are devices of the virtual workers.  A single virtual worker is an
asynchronous pipeline without data parallelism; it is used only if two do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts, busiest_s, opaque
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Layers, Profile, trainable_bytes
from workbench.core.schedule import MERGE, PULL, STEP, Op, Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.planners.balance import Balanced, StageTimes, balance
from workbench.planners.closed_form import ClosedForm
from workbench.planners.hybrid import candidates
from workbench.planners.memory import Need, fits, in_flight, rank_need
from workbench.planners.orders import sorted_orders
from workbench.planners.problem import Problem
from workbench.schedules.costs import COMPUTED, plan_costs

Groups = tuple[tuple[int, ...], ...]
MOST_IN_EVERY_ORDER = 4
"""A virtual worker with at most this many devices is planned in every order, a larger one by speed and by memory."""


def hetpipe(problem: Problem) -> VirtualWorkers:
    """Return the virtual workers that train the most samples per second, as `wave_seconds` predicts; several workers if
    they fit.

    problem: a problem of full fine-tuning.  Three kinds of groups are compared: workers with devices of one model each,
    workers with devices of every model, and any number of workers of about equal speed.
    Raises PlanError, naming device, stage and bytes, if the model does not fit even as one pipeline of all devices, one
    batch at a time.
    """
    profile, cluster, size = problem.profile, problem.cluster, problem.micro_batch_size
    settings: list[tuple[bool, float, int, VirtualWorkers, dict[str, float]]] = []
    times: dict[bool, StageTimes] = {}
    for groups in allocations(profile, cluster, problem.sequence_length):
        several = len(groups) > 1
        if several not in times:
            depth = range(min(cluster.world_size, profile.num_layers))
            times[several] = StageTimes(problem, copies=[live + several for live in depth])
        for mini_batches in range(1, max(map(len, groups)) + 1):
            pipelines = [_pipeline(problem, times[several], group, mini_batches) for group in groups]
            plans = tuple(
                Plan(method="hetpipe", stages=balanced.stages, micro_batch_size=size, num_micro_batches=mini_batches)
                for balanced in pipelines
                if balanced is not None
            )
            if len(plans) < len(groups):
                break  # more in flight needs more memory
            workers = VirtualWorkers(pipelines=plans, in_flight=mini_batches)
            need_bytes = needs(profile, workers, sequence_length=problem.longest)
            if not fits(cluster, need_bytes):
                break
            parts = wave_seconds(profile, cluster, workers, sequence_length=problem.sequence_length)
            settings.append((not several, sum(parts.values()) / workers.wave_samples, len(settings), workers, parts))
    if not settings:
        # The setting with the least memory: one pipeline of all devices with one mini-batch at a time.
        least = replace(problem, batch_size=size, micro_batches=1)
        candidates(least, order=range(min(cluster.world_size, profile.num_layers)), max_group=1, method="hetpipe")
        raise PlanError(
            "HetPipe was asked for.",
            "The model fits on all devices together, but with no virtual workers.",
            "Add memory.",
        )
    *_, workers, parts = min(settings, key=lambda setting: setting[:3])
    return replace(workers, predicted_s=parts)


def needs(profile: Profile, workers: VirtualWorkers, *, sequence_length: int) -> dict[int, Need]:
    """Return the predicted peak of every rank: an upper bound of the schedule's memory (schedules/hetpipe.py).

    Each further mini-batch in flight adds one copy of the weights, because its backward pass uses the version of its
    forward pass.  With several virtual workers, memory also has a push being sent or the result of a pull, and for each
    shard that the rank serves the global weights and the others' pushes.
    """
    needs_by_rank = {}
    count = len(workers.pipelines)
    shards = workers.shards()
    for plan in workers.pipelines:
        for index, stage in enumerate(plan.stages):
            rank = stage.ranks[0]
            live = in_flight(index, len(plan.stages), workers.in_flight)
            samples = plan.micro_batch_size
            need = rank_need(
                profile,
                rank,
                stage.start,
                stage.stop,
                samples=samples,
                sequence_length=sequence_length,
                in_flight=live,
                copies=live - 1 + (count > 1),
            )
            served = sum(
                layer.trainable_bytes
                for shard in shards
                if count > 1 and shard.server == rank
                for layer in profile.layers[rank][shard.start : shard.stop]
            )
            needs_by_rank[rank] = replace(need, weights_bytes=need.weights_bytes + count * served)
    return needs_by_rank


def wave_seconds(
    profile: Profile, cluster: Cluster, workers: VirtualWorkers, *, sequence_length: int
) -> dict[str, float]:
    """Return the predicted seconds of a wave in steady state, by part.

    pipeline: the slowest virtual worker's, N_m times the longer of two times: its slowest stage (with STEP), or a
    mini-batch's way through the pipeline and back, divided by the mini-batches in flight.  synchronization: push and
    pull.
    """
    closed_form = ClosedForm(Problem(profile, cluster, sequence_length=sequence_length))
    pipeline_s = 0.0
    for plan in workers.pipelines:
        phases = closed_form(plan.stages, 1)
        # With one mini-batch, beginning, execution and ending are its way through the pipeline and back.
        turn_s = phases.total_s / min(workers.in_flight, len(plan.stages))
        for stage in plan.stages:
            rank, (start, stop) = stage.ranks[0], (stage.start, stage.stop)
            update_s = profile.seconds(rank, STEP, 1, 1, start, stop)
            turn_s = max(turn_s, profile.train_s(rank, plan.micro_batch_size, sequence_length, start, stop) + update_s)
        pipeline_s = max(pipeline_s, workers.in_flight * turn_s)
    return {"pipeline": pipeline_s, "synchronization": _synchronization_s(profile, cluster, workers)}


def _synchronization_s(profile: Profile, cluster: Cluster, workers: VirtualWorkers) -> float:
    """Return the seconds to push every shard to its server and pull it back: the busiest interface in each
    direction.
    """
    pushes = []
    for shard in workers.shards() if len(workers.pipelines) > 1 else ():
        nbytes = trainable_bytes(profile.layers[shard.server][shard.start : shard.stop])
        pushes += [(owner, shard.server, nbytes) for owner in shard.owners if owner != shard.server]
    return busiest_s(cluster, pushes) + busiest_s(
        cluster, [(server, owner, nbytes) for owner, server, nbytes in pushes]
    )


def allocations(profile: Profile, cluster: Cluster, sequence_length: int) -> list[Groups]:
    """Return the divisions of the devices into virtual workers: by node, equal and hybrid, without repetitions."""
    count = cluster.world_size
    speeds = [1 / max(profile.train_s(rank, 1, sequence_length), 1e-12) for rank in range(count)]
    makes: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        makes.setdefault(device.model or f"{speeds[rank]:.3g}/s", []).append(rank)
    divisions: list[list[list[int]]] = [list(makes.values())]
    shared = math.gcd(*(len(ranks) for ranks in makes.values()))
    for workers in (workers for workers in range(1, shared + 1) if shared % workers == 0):
        divisions.append(
            [[rank for ranks in makes.values() for rank in ranks[worker::workers]] for worker in range(workers)]
        )
    fastest = sorted(range(count), key=lambda rank: (-speeds[rank], rank))
    for workers in range(1, count + 1):
        groups: list[list[int]] = [[] for _ in range(workers)]
        for rank in fastest:
            min(groups, key=lambda group: (sum(speeds[member] for member in group), len(group))).append(rank)
        divisions.append(groups)
    fits = [[sorted(group) for group in groups] for groups in divisions if max(map(len, groups)) <= profile.num_layers]
    return list(dict.fromkeys(tuple(sorted(map(tuple, groups))) for groups in fits))


def _pipeline(problem: Problem, times: StageTimes, group: Sequence[int], in_flight: int) -> Balanced | None:
    """Return the most balanced pipeline of all of a group's devices, None if none fits; on a tie, the one that sends
    the fewest bytes.
    """
    profile, length = problem.profile, problem.sequence_length
    if len(group) <= MOST_IN_EVERY_ORDER:
        orders = list(permutations(group))
    else:
        orders = [
            tuple(rank for rank in order if rank in group) for order in sorted_orders(profile, problem.cluster, length)
        ]
    best: tuple[float, int, Balanced] | None = None
    for order in dict.fromkeys(orders):
        for balanced in balance(times, profile.num_layers, order, in_flight, max_group=1):
            moved = sum(
                profile.layers[stage.ranks[0]][stage.stop - 1].output_bytes(1, length)
                for stage, _ in pairwise(balanced.stages)
            )
            if len(balanced.stages) == len(group) and (best is None or (balanced.bottleneck_s, moved) < best[:2]):
                best = (balanced.bottleneck_s, moved, balanced)
    return None if best is None else best[2]


def virtual_worker_costs(
    profile: Profile, cluster: Cluster, workers: VirtualWorkers, *, sequence_length: int
) -> TableCosts:
    """Return the costs of hetpipe.  Each pipeline costs what it would alone with weight stashing; a profile has no
    shapes.

    PULL and MERGE read the parameters once, like the optimizer, and cost the same.  PUSH sends the sum that STEP has
    made.
    """
    shards = workers.shards()
    numbered: list[tuple[int, TableCosts]] = []  # of a stage, counted through all pipelines: its number in its own
    of_rank: dict[int, TableCosts] = {}
    for plan in workers.pipelines:
        sizes, lengths = (plan.micro_batch_size,), (sequence_length,)
        alone = plan_costs(profile, cluster, plan, sizes=sizes, lengths=lengths, stashes_weights=True)
        numbered += [(number, alone) for number in range(len(plan.stages))]
        of_rank |= {stage.ranks[0]: alone for stage in plan.stages}

    def shard(number: int) -> Layers:
        return profile.layers[shards[number].server][shards[number].start : shards[number].stop]

    def alone_s(rank: int, op: Op) -> float:
        return of_rank[rank].seconds(rank, op._replace(kind=STEP if op.kind == PULL else op.kind, microbatch=0))

    def alone_spec(value: Value) -> Spec:
        number, alone = numbered[value.stage]
        return alone.spec(value._replace(stage=number, microbatch=0))

    return TableCosts(
        seconds_by_kind=dict.fromkeys((*COMPUTED, STEP, PULL), alone_s)
        | {MERGE: lambda rank, op: sum(layer.seconds(STEP, 1, 1) for layer in shard(op.stage))},
        bytes_by_name=dict.fromkeys(("weight", "ctx", "act", "grad"), alone_spec)
        | dict.fromkeys(("push", "global"), lambda value: opaque(trainable_bytes(shard(value.stage)))),
        resident_by_rank={rank: alone.resident_bytes(rank) for rank, alone in of_rank.items()},
        cluster=cluster,
    )
