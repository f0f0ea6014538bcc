"""The paper's testbed from one documented set of constants, and the seconds of a sample in each paradigm on it (PAC+,
sections V, VI-A).

Jetson clusters, and profiles of the paper's models (Table IV).  Plan, schedule, simulate: Table V's rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal, NamedTuple

from workbench.core.catalogue import MB, load_device
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.core.costs import collective_s
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Stage
from workbench.core.profile import Grid, Layers, Profile, trainable_bytes
from workbench.core.program import Program
from workbench.core.schedule import BROADCAST
from workbench.core.timeline import Timeline
from workbench.planners import Problem, TrainingProblem, candidates, plan_cached, standalone
from workbench.planners.fixed import data_parallel
from workbench.profiler.analytic import Technique, TechniqueSizes, analytic_profile
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.schedules.costs import plan_costs
from workbench.schedules.pipeline import cached_step
from workbench.simulator import simulate
from workbench.simulator.steps import THROUGH_BACKBONE, sample_s
from workbench_studies.papers.result import read_constants

PAPER = "pac_plus"
MODELS = ("T5-Base", "BART-Large", "T5-Large")
BASELINES: tuple[Technique, ...] = THROUGH_BACKBONE
DEVICES = 4
FLOPS_PER_CORE_AND_CYCLE = 2
GIB = (
    2**30
)  # the paper's GB: T5-Large's 737.7 million fp32 parameters are 2.75 of these (Table I) and 2.95 of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """constants.toml, which states the source of each value."""

    achieved_share: float
    backward_factor: float
    side_factor: float
    operation_overhead_s: float
    step_overhead_s: float
    nano_bytes: float
    tx2_bytes: float
    optimizer_bytes_per_trainable_byte: float
    link_efficiency: float
    bandwidth_mbit_per_s: float
    latency_ms: float
    nano_mb_per_s: float
    tx2_mb_per_s: float
    sequence_length: int
    mini_batch: int
    micro_batches: int
    target_tokens: int
    reduction: int
    lora_rank: int
    lora_dropout: bool
    bottleneck: int
    adapters_per_layer: int
    adapter_norms: bool
    cores_and_mhz: tuple[tuple[str, int, int], ...]
    datasets: tuple[tuple[str, int, int], ...]

    def samples(self, task: str) -> int:
        """Return the training samples of a task."""
        return next(samples for name, samples, _ in self.datasets if name == task)

    def device(self, model: str, name: str) -> Device:
        """Return a Jetson of the catalogue with these constants."""
        cores, mhz = next((cores, mhz) for known, cores, mhz in self.cores_and_mhz if known == model)
        tx2 = "tx2" in model
        rate = self.bandwidth_mbit_per_s * MEGABIT_BYTES * self.link_efficiency
        return replace(
            load_device(model, name=name),
            flops_per_s=self.achieved_share * cores * FLOPS_PER_CORE_AND_CYCLE * mhz * 1e6,
            memory_bytes=round(self.tx2_bytes if tx2 else self.nano_bytes),
            link=Link(bytes_per_s=rate, latency_s=self.latency_ms / 1e3),
            storage_bytes_per_s=(self.tx2_mb_per_s if tx2 else self.nano_mb_per_s) * MB,
        )


load_constants = partial(read_constants, PAPER, Constants)


@lru_cache(maxsize=256)
def nanos(constants: Constants, count: int) -> Cluster:
    """Return `count` Jetson Nano-H; four are Env. A."""
    devices = tuple(constants.device("jetson-nano-h", f"nano-h-{rank}") for rank in range(count))
    return Cluster(name=f"{count} Nano-H", devices=devices)


@lru_cache(maxsize=256)
def environment_b(constants: Constants) -> Cluster:
    """Return Env. B: Nano-H, Nano-L, TX2-H, TX2-L."""
    models = ("jetson-nano-h", "jetson-nano-l", "jetson-tx2-h", "jetson-tx2-l")
    return Cluster(
        name="Env. B", devices=tuple(constants.device(model, model.removeprefix("jetson-")) for model in models)
    )


def description(constants: Constants, model: str) -> ModelDescription:
    """Return a model with the decoder's target length of the constants."""
    return replace(describe(model), target_tokens=constants.target_tokens)


def technique_sizes(constants: Constants) -> TechniqueSizes:
    """Return the values that the paper's techniques add to a model."""
    named = {field.name for field in fields(Constants)}
    return TechniqueSizes(
        **{field.name: getattr(constants, field.name) for field in fields(TechniqueSizes) if field.name in named}
    )


def profile(constants: Constants, model: str, technique: Technique, cluster: Cluster) -> Profile:
    """Return the analytic profile of a model on a cluster, with the constants' factors and overheads."""
    return Profile(
        model=model,
        method=technique,
        source="analytic",
        layers=tuple(_layers(constants, model, technique, replace(device, name="one")) for device in cluster.devices),
        optimizer_bytes_per_trainable_byte=constants.optimizer_bytes_per_trainable_byte,
    )


@lru_cache(maxsize=512)
def _layers(constants: Constants, model: str, technique: Technique, device: Device) -> Layers:
    # Times are linear in the batch.
    sizes: Any = {"batch_sizes": (1, constants.mini_batch), "sequence_lengths": (constants.sequence_length,)}
    described, alone = description(constants, model), Cluster(name="one", devices=(device,))
    [layers] = analytic_profile(described, alone, technique=technique, sizes=technique_sizes(constants), **sizes).layers
    factors = {"B": constants.backward_factor, "SF": constants.side_factor, "SB": constants.side_factor}
    overheads = {"STEP": constants.step_overhead_s / len(layers)}

    def real(kind: str, grid: Grid) -> Grid:
        factor, overhead = factors.get(kind, 1.0), overheads.get(kind, constants.operation_overhead_s)
        return replace(grid, seconds=tuple(tuple(factor * cell + overhead for cell in row) for row in grid.seconds))

    return tuple(
        replace(layer, times={kind: real(kind, grid) for kind, grid in layer.times.items()}) for layer in layers
    )


Paradigm = Literal["standalone", "data_parallel", "pipeline_parallel", "hybrid"]


def problem(
    constants: Constants,
    model: str,
    technique: Technique,
    cluster: Cluster,
    *,
    batch_size: int | None = None,
    micro_batches: int = 1,
) -> TrainingProblem:
    """Return the problem of training a model on a cluster.  batch_size: samples of a mini-batch; the constants' if not
    given.
    """
    costs, batch_size = profile(constants, model, technique, cluster), batch_size or constants.mini_batch
    return Problem(
        costs, cluster, batch_size=batch_size, micro_batches=micro_batches, sequence_length=constants.sequence_length
    )


def pipeline(problem: TrainingProblem, *, max_group: int | None = None) -> Plan:
    """Return W_sigma of Algorithm 1 with as many micro-batches in flight as possible.  Raises the PlanError for one in
    flight.
    """
    in_flight, size = problem.micro_batches, problem.micro_batch_size
    while True:
        try:
            part = replace(problem, batch_size=in_flight * size, micro_batches=in_flight)
            return candidates(part, max_group=max_group)[0]
        except PlanError:
            if in_flight == 1:
                raise
            in_flight //= 2


class Step(NamedTuple):
    """A method's step on a cluster: seconds per sample and its plan, or the reason why it runs out of memory."""

    seconds_per_sample: float | None
    plan: Plan | None = None
    reason: str = ""


def step(
    constants: Constants, model: str, technique: Technique, paradigm: Paradigm, *, alone: int | None = None
) -> Step:
    """Return a method's step on Nano-H devices.

    Our readings where the paper is silent: a single device takes `alone` samples at a time (default: its share of the
    cluster's mini-batch, like each device of data parallelism).  The pipelines split a mini-batch into 4 micro-batches;
    if they do not fit, 2 or 1 of the same size are in flight, 'a reduction in the number of micro-batches
    simultaneously input into the pipeline' (section VI-B).
    """
    is_alone, is_pipeline = paradigm == "standalone", paradigm in ("pipeline_parallel", "hybrid")
    samples = (alone or constants.mini_batch // DEVICES) if is_alone else constants.mini_batch
    micro_batches, cluster = constants.micro_batches if is_pipeline else 1, nanos(constants, 1 if is_alone else DEVICES)
    to_plan = problem(constants, model, technique, cluster, batch_size=samples, micro_batches=micro_batches)
    try:
        if is_pipeline:
            plan = pipeline(to_plan, max_group=1 if paradigm == "pipeline_parallel" else None)
        else:
            plan = standalone(to_plan) if is_alone else data_parallel(to_plan)
    except PlanError as error:
        return Step(None, reason=str(error))
    return Step(sample_s(to_plan, plan), plan)


def redistribution_s(problem: TrainingProblem, plan: Plan, cached: Stage, samples: int) -> float:
    """Return the seconds to send the adapters and the activations of `samples` samples to the devices that train on
    them.

    Each device sends a sample's computed activations to the sample's new owner, all devices at once, and then each
    stage's adapters are broadcast.  Reading and writing the disks overlaps and is not counted.
    """
    busy_s: Counter[tuple[str, int]] = Counter()  # of each device's link, in each direction
    adapters_s = 0.0
    for stage in plan.stages:
        layers = problem.profile.layers[0][stage.start : stage.stop]
        per_sample = sum(layer.tap_bytes(1, problem.sequence_length) for layer in layers)
        others = [rank for rank in sorted(cached.ranks) if rank not in stage.ranks]
        adapters_s += collective_s(problem.cluster, BROADCAST, (stage.ranks[0], *others), trainable_bytes(layers))
        # A group with the whole model keeps its activations: owners follow the cache where possible.
        for giver, taker in product(stage.shares, cached.shares if len(plan.stages) > 1 else ()):
            if taker.rank != giver.rank:
                share = giver.samples / plan.micro_batch_size * taker.samples / problem.batch_size
                seconds = problem.cluster.link(giver.rank, taker.rank).transfer_s(round(samples * share * per_sample))
                for end in (("out", giver.rank), ("in", taker.rank)):
                    busy_s[end] += seconds  # type: ignore[assignment]
    return max(busy_s.values(), default=0.0) + adapters_s


def simulated_cached_step(problem: Problem[Profile]) -> tuple[Timeline, Stage]:
    """Return one step of a mini-batch from the activation cache, data parallel, and its shares (section V-B)."""
    stage = plan_cached(problem)
    plan = Plan(method=PAPER, stages=(stage,), micro_batch_size=problem.batch_size, num_micro_batches=1)
    schedule = cached_step(stage, [share.samples for share in stage.shares], world_size=problem.cluster.world_size)
    costs = plan_costs(
        problem.profile, problem.cluster, plan, sizes=(problem.batch_size,), lengths=(problem.sequence_length,)
    )
    return simulate(Program.on(problem.cluster, schedule, costs), memory=False), stage


Phases = tuple[float, float, float]
"""Hours of PAC+'s first epoch, of the redistribution, and of an epoch from the cache."""


def phases(constants: Constants, model: str, cluster: Cluster, plan: Plan, first_s: float, samples: int) -> Phases:
    """Return the hours of PAC+'s phases.  first_s: seconds of a sample in the first epoch."""
    to_plan = problem(constants, model, "parallel_adapters", cluster)
    timeline, cached = simulated_cached_step(to_plan)
    cached_s = samples * timeline.makespan_s / to_plan.batch_size
    return samples * first_s / 3600, redistribution_s(to_plan, plan, cached, samples) / 3600, cached_s / 3600


def hours(spent: Phases, epochs: int) -> float:
    """Return the hours of so many epochs."""
    first, moved, cached = spent
    return first + (moved + (epochs - 1) * cached if epochs > 1 else 0.0)
