"""How far are methods from optimal?  Seconds of a mini-batch on random unequal clusters over lower bounds.

Every method fine-tunes all weights of BERT-Base with the same samples of the same devices.  Seconds are simulated with
costs that are computed from sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from statistics import fmean

from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.core.plan import Plan, one_device_stages
from workbench.core.program import Program
from workbench.methods.ringada.costs import RingLayout, ring_costs
from workbench.methods.ringada.estimate import RingEstimate
from workbench.methods.ringada.planner import plan_ring
from workbench.methods.ringada.schedule import Iteration, ring_round
from workbench.planners import Problem, TrainingProblem, candidates
from workbench.planners.asynchronous import Equation3, plan_asynchronous
from workbench.profiler.analytic import analytic_profile
from workbench.profiler.descriptions import describe
from workbench.schedules.costs import Crossing, plan_costs
from workbench.schedules.hetpipe import hetpipe as hetpipe_waves
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import ORDERS, backpropagation
from workbench.schedules.torch_csv import read_torch_csv
from workbench.simulator import makespan_s
from workbench.simulator.steps import pace_s
from workbench_studies.papers.compare.lower_bound import Bound, Placement, makespan_bound, placements
from workbench_studies.papers.pac_plus.hetpipe import hetpipe, virtual_worker_costs

MODEL, TOKENS = "BERT-Base", 128
DEVICES, MICRO_BATCHES, SAMPLES = 4, 8, 4
"""Devices of a cluster, micro-batches of a mini-batch, samples of a micro-batch."""
FLOPS_PER_S, MBIT_PER_S, LATENCY_S = (20e9, 400e9), (50.0, 1000.0), 1e-4
"""Ranges of a device's speed and of its link, each drawn evenly on a logarithmic scale; latency of a link."""
AMPLE_BYTES = 10**12
"""Memory of a device: it limits no method here."""
SYNCHRONOUS = ("GPipe", "1F1B", "ZB-H1", "RingAda")
"""Methods whose stages have one device each and which wait for the mini-batch's update: CP-SAT bounds them."""
SHARED = ("PAC+", "HetPipe")
"""Methods that divide a layer's samples among devices."""
METHODS = (*SYNCHRONOUS, "Confidant", *SHARED)
TRIED = 24
"""Placements that a method without a planner tries."""
LONG, SHORT = 16, 8
"""Waves of HetPipe: the later ones are timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """One cluster.  seconds: time of a mini-batch by each method; in the long run if it is asynchronous.

    bound: the bound of synchronous pipelines.  pace_s: the least of a pipeline that never drains.  busy_s: seconds if
    no device ever waited and samples could be divided at will.
    """

    seed: int
    seconds: dict[str, float]
    bound: Bound
    pace_s: float
    busy_s: float

    def least_s(self, method: str) -> float:
        """Return the bound of a method's class."""
        if method in SYNCHRONOUS:
            return self.bound.seconds
        return self.busy_s if method in SHARED else self.pace_s


def random_cluster(seed: int) -> Cluster:
    """Return devices whose speeds and links are drawn with a seed."""
    draw = random.Random(seed)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    devices = tuple(
        Device(
            name=f"device {number + 1}",
            flops_per_s=between(*FLOPS_PER_S),
            memory_bytes=AMPLE_BYTES,
            link=Link(bytes_per_s=MEGABIT_BYTES * between(*MBIT_PER_S), latency_s=LATENCY_S),
        )
        for number in range(DEVICES)
    )
    return Cluster(name=f"random {seed}", devices=devices)


def distance(seed: int, limit_s: float) -> Distance:
    """Return the methods' seconds on a random cluster, and the bounds."""
    problem = random_problem(seed)
    choices = list(placements(problem.profile, problem.cluster, samples=SAMPLES, tokens=TOKENS))
    seconds = method_seconds(problem, choices)
    known_s = min(seconds[name] for name in SYNCHRONOUS)
    alone = [
        problem.profile.train_s(rank, MICRO_BATCHES * SAMPLES, TOKENS) for rank in range(problem.cluster.world_size)
    ]
    return Distance(
        seed=seed,
        seconds=seconds,
        bound=makespan_bound(choices, MICRO_BATCHES, known_s=known_s, limit_s=limit_s),
        pace_s=min(_without_latency(placement, problem.cluster).pace(MICRO_BATCHES) for placement in choices),
        busy_s=1 / sum(1 / one_s for one_s in alone),
    )


def _without_latency(placement: Placement, cluster: Cluster) -> Placement:
    """Return a placement whose transfers take no latency: an asynchronous mini-batch crosses a link in one piece."""
    pairs = list(zip(placement.ranks, placement.ranks[1:], strict=False))
    return replace(
        placement,
        up=tuple(up_s - cluster.link(a, b).latency_s for up_s, (a, b) in zip(placement.up, pairs, strict=True)),
        down=tuple(down_s - cluster.link(b, a).latency_s for down_s, (a, b) in zip(placement.down, pairs, strict=True)),
    )


def random_problem(seed: int) -> TrainingProblem:
    """Return a mini-batch on a random cluster."""
    cluster = random_cluster(seed)
    profile = analytic_profile(MODEL, cluster, technique="full", sequence_lengths=(TOKENS,))
    size = MICRO_BATCHES * SAMPLES
    return Problem(profile, cluster, sequence_length=TOKENS, batch_size=size, micro_batches=MICRO_BATCHES)


def method_seconds(problem: TrainingProblem, choices: Sequence[Placement]) -> dict[str, float]:
    """Return the simulated seconds of a mini-batch by each of METHODS.

    choices: all placements.  GPipe, 1F1B and ZB-H1 have no planner, so each gets the best, simulated, of the TRIED ones
    with the lowest simple bounds.  The others have the plans of their own planners.
    """
    shared = candidates(problem, order="all")
    return {
        **{name: makespan_s(program) for name, program in order_programs(problem, choices).items()},
        "RingAda": _ring_s(problem),
        "Confidant": _confidant_s(problem),
        "PAC+": min(makespan_s(_pipeline(problem, plan, "1f1b")) for plan in shared),
        "HetPipe": _hetpipe_s(problem),
    }


def order_programs(problem: TrainingProblem, choices: Sequence[Placement]) -> dict[str, Program]:
    """Return the mini-batches of GPipe, 1F1B and ZB-H1 (see method_seconds)."""
    tried = nsmallest(TRIED, choices, key=lambda placement: placement.simple_bound(MICRO_BATCHES))
    plans = [_plan(placement) for placement in tried]
    return {
        "GPipe": min((_pipeline(problem, plan, "gpipe") for plan in plans), key=makespan_s),
        "1F1B": min((_pipeline(problem, plan, "1f1b") for plan in plans), key=makespan_s),
        "ZB-H1": min((_zero_bubble(problem, plan) for plan in plans), key=makespan_s),
    }


def _plan(placement: Placement) -> Plan:
    stages = one_device_stages(placement.ranks, placement.cuts, SAMPLES)
    return Plan(method="pipeline", stages=stages, micro_batch_size=SAMPLES, num_micro_batches=MICRO_BATCHES)


def _sizes(plan: Plan) -> tuple[int, ...]:
    return (plan.micro_batch_size,) * plan.num_micro_batches


def _pipeline(problem: TrainingProblem, plan: Plan, order: str) -> Program:
    sizes, cluster = _sizes(plan), problem.cluster
    schedule = backpropagation(plan, sizes, order=ORDERS[order], world_size=cluster.world_size)
    costs = plan_costs(problem.profile, cluster, plan, sizes=sizes, lengths=(TOKENS,) * len(sizes))
    return Program.on(cluster, insert_transfers(schedule), costs)


def zb_h1_cells(num_stages: int, stage: int, num_micro_batches: int) -> Iterator[str]:
    """Yield a stage's operations in the order of ZB-H1 (Qi et al., 2024), as cells of torch's CSV.

    It is 1F1B's, with I in the place of B.  W follows `stage` micro-batches later, where 1F1B would wait.
    """
    warmup = min(num_stages - stage - 1, num_micro_batches)
    for m in range(warmup):
        yield f"{stage}F{m}"
    for m in range(num_micro_batches):
        if warmup + m < num_micro_batches:
            yield f"{stage}F{warmup + m}"
        yield f"{stage}I{m}"
        if m >= stage:
            yield f"{stage}W{m - stage}"
    for m in range(max(0, num_micro_batches - stage), num_micro_batches):
        yield f"{stage}W{m}"


def _zero_bubble(problem: TrainingProblem, plan: Plan) -> Program:
    cluster, sizes = problem.cluster, _sizes(plan)
    of_rank = {stage.ranks[0]: number for number, stage in enumerate(plan.stages)}
    rows = [
        ",".join(zb_h1_cells(len(plan.stages), of_rank[rank], len(sizes))) if rank in of_rank else '""'
        for rank in range(cluster.world_size)
    ]
    costs = plan_costs(problem.profile, cluster, plan, sizes=sizes, lengths=(TOKENS,) * len(sizes))
    half = {kind: lambda rank, op: costs.seconds(rank, op._replace(kind="B")) / 2 for kind in "IW"}
    costs = replace(costs, seconds_by_kind={**costs.seconds_by_kind, **half})
    return Program.on(cluster, read_torch_csv("\n".join(rows)), costs)


def _ring_s(problem: TrainingProblem) -> float:
    """Return the mean over the initiators of RingAda's mini-batch with all layers unfrozen, the head at the initiator
    without cost.
    """
    profile = replace(problem.profile, method="ringada").with_layers(
        lambda layer, *_: layer.with_times({"P": layer.times["F"], "A": layer.times["B"]})
    )
    plan = plan_ring(RingEstimate(replace(problem, profile=profile), depths={profile.num_layers: 1}))
    sizes, ranks = _sizes(plan), [stage.ranks[0] for stage in plan.stages]
    makespans = []
    for initiator in ranks:
        iterations = [Iteration(initiator, 0, len(sizes))]
        layout = RingLayout(plan=plan, iterations=iterations, sizes=sizes, lengths=(TOKENS,) * len(sizes))
        crossing = Crossing(hidden_size=describe(MODEL).hidden)
        costs = ring_costs(profile, problem.cluster, layout, crossing=crossing, head_values=0, beside_bytes=0)
        schedule = ring_round(plan, iterations, costs.seconds, in_flight=1, world_size=problem.cluster.world_size)
        makespans.append(makespan_s(Program.on(problem.cluster, schedule, costs)))
    return fmean(makespans)


def _confidant_s(problem: TrainingProblem) -> float:
    """Return the seconds of a whole mini-batch in Confidant's pipeline once it is full."""
    plan = plan_asynchronous(Equation3(problem), searches=True, method="confidant")
    return pace_s(problem.profile, problem.cluster, plan, tokens=TOKENS)


def _hetpipe_s(problem: TrainingProblem) -> float:
    """Return HetPipe's seconds for as many samples as a mini-batch has, once its pipelines are full."""
    workers = hetpipe(problem)
    costs = virtual_worker_costs(problem.profile, problem.cluster, workers, sequence_length=TOKENS)
    long, short = (
        makespan_s(Program.on(problem.cluster, insert_transfers(hetpipe_waves(workers, waves)), costs))
        for waves in (LONG, SHORT)
    )
    return (long - short) / ((LONG - SHORT) * workers.wave_samples) * problem.batch_size
