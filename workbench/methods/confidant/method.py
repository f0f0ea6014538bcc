"""Confidant as a Method: its partition of the layers (section 3.2), and heads over a device's processors (3.3).

Model, data, operations and training are those of fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import KEEP, Plan
from workbench.core.profile import Grid, LayerProfile, Layers, Profile
from workbench.methods.base import Notify, Planned
from workbench.methods.common.device_counts import publishing
from workbench.methods.common.scaling import cached_measurement, describe_facts
from workbench.methods.confidant.equations import compatibilities, memory_notes
from workbench.methods.confidant.heads import divide, processors_in_order, quickened
from workbench.methods.confidant.options import ConfidantOptions
from workbench.methods.fine_tuning.measure import measure_parts
from workbench.methods.fine_tuning.method import FineTuning, choose_activations, pace_of_job, stage_costs
from workbench.methods.fine_tuning.method import rank_job as whole_layers
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.fine_tuning.prepare import PreparedJob, checked, prepare_by
from workbench.methods.option_values import read_options
from workbench.models.sharding.trained import column_groups, require_divisible
from workbench.planners.asynchronous import asynchronous_plan, even_partition, partition_in_order, plan_asynchronous
from workbench.planners.equation3 import Equation3
from workbench.planners.recomputation import profile_with
from workbench.profiler.descriptions import LayerShape
from workbench.profiler.processors import Place, pinned, place_of
from workbench.runtime.context import RankContext
from workbench.schedules.division import Division


def require_known(job: Job) -> ConfidantOptions:
    """Return the options.  Raises ConfigError for an unknown option, task or model."""
    options = read_options("confidant", ConfidantOptions, job.options)
    if options.schedule != "asynchronous_1f1b" or options.paradigm != "hybrid":
        raise ConfigError(
            f"Confidant with schedule = '{options.schedule}' and paradigm = '{options.paradigm}' was asked for.",
            "Confidant is an asynchronous pipeline.",
            "Leave both out, or use method fine_tuning.",
        )
    return checked(job, options)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape."""
    return prepare_by(job, require_known(job))


def divisions(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> dict[int, Division]:
    """Return how devices with several processors divide their layers, by rank.  Raises the errors of
    methods.confidant.heads.divide.
    """
    options, facts = _options(prepared), prepared.facts
    columns = column_groups(facts.feed_forward_size) if options.split == "heads_and_columns" else 0
    sizes = {"samples": prepared.job.batch_size, "length": prepared.typical_length}
    divisions_by_rank = {}
    for rank, device in enumerate(cluster.devices):
        layer = profile.layers[rank][0]
        if _divides(prepared, device) and "HF" in layer.times:
            division = divide(
                layer, device, heads=facts.num_key_value_heads, columns=columns, by=options.heads, **sizes
            )
            if division is not None:
                divisions_by_rank[rank] = division
    return divisions_by_rank


def _divides(prepared: PreparedJob, *devices: Device) -> bool:
    several = (
        len(device.processors) > 1 and device.framework == "torch" for device in devices
    )  # JAX computes whole layers
    return _options(prepared).split != "none" and any(several)


def _options(prepared: PreparedJob) -> ConfidantOptions:
    assert isinstance(prepared.options, ConfidantOptions)
    return prepared.options


def costs_of(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Equation3:
    """Return the costs for partitions: a device whose processors share its layers is faster accordingly."""
    shared = divisions(prepared, profile, cluster)
    quick = quickened(profile, shared, samples=prepared.job.batch_size, length=prepared.typical_length)
    return stage_costs(prepared, quick, cluster)


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> FineTuningRankJob:
    """Return the description of a run under a plan, for every rank; one processor recomputes whole layers."""
    released = {rank for stage in plan.stages if stage.activations != KEEP for rank in stage.ranks}
    shared = divisions(prepared, profile, cluster)
    whole_divisions = {rank: division for rank, division in shared.items() if rank not in released}
    return replace(whole_layers(prepared, profile, cluster, plan), divisions=whole_divisions)


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan.  Raises PlanError, naming the device that has too little memory, and by how much."""
    options = _options(prepared)
    train = range(min(options.devices or cluster.world_size, cluster.world_size))
    profile, cluster = profile.part(train), cluster.part(train)

    def plan_with(profile: Profile) -> Plan:
        costs, partition = costs_of(prepared, profile, cluster), options.partition
        if partition in ("memory_aware", "any_order"):
            searches = partition == "any_order"
            simulated_s = pace_of_job(prepared, costs)
            return plan_asynchronous(costs, searches=searches, method="confidant", simulated_s=simulated_s)
        order = tuple(range(cluster.world_size))[: profile.num_layers]
        stages = (
            even_partition(costs, order) if partition == "even" else partition_in_order(costs, order, in_memory=False)
        )
        return asynchronous_plan(costs, stages, method="confidant")

    plan = choose_activations(prepared, profile, cluster, plan_with)
    shared = rank_job(prepared, profile, cluster, plan).divisions
    notes = (
        f"On {cluster.devices[rank].name} processors share each layer: {division.described()}."
        for rank, division in shared.items()
    )
    costs = costs_of(prepared, profile, cluster)
    return replace(plan, notes=(*plan.notes, *memory_notes(prepared.facts, costs, plan), *notes))


def stand_in(
    prepared: PreparedJob,
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    rank: int,
    idle: Sequence[int],
    remaining_share: float,
) -> int | None:
    """Return the idle device that is most compatible by Eq. 4, of those with memory for the stage of `rank`; None if no
    device has.
    """
    index = plan.stage_of(rank)
    assert index is not None
    stage, num_stages = plan.stages[index], len(plan.stages)
    costs = costs_of(prepared, profile_with(profile, cluster, stage.activations), cluster)
    behind = num_stages - 1 - index
    fitting = [
        candidate
        for candidate in idle
        if costs.stage(candidate, behind, num_stages)[stage.start, stage.stop] < math.inf
    ]
    capacities = [costs.seconds(candidate)[0, 1:] for candidate in fitting]
    scores = compatibilities(capacities, [cluster.devices[candidate].battery for candidate in fitting], remaining_share)
    return max(zip(scores, fitting, strict=True), key=lambda pair: pair[0])[1] if fitting else None


class Confidant(FineTuning):
    """Fine-tuning in an asynchronous pipeline over heterogeneous devices."""

    name = "confidant"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    rank_job = staticmethod(rank_job)
    stand_in = staticmethod(stand_in)

    def profile(self, prepared: PreparedJob, cluster: Cluster, notify: Notify, **settings: Any) -> Profile:
        """Return every layer's cost on every device, and the costs of heads and columns if processors share them (see
        ProfiledMethod).
        """
        divides = _divides(prepared, *cluster.devices)
        if divides:
            require_divisible(
                prepared.job.model,
                is_single_stack=prepared.facts.num_encoder_layers is None,
                is_parallel=prepared.facts.is_parallel,
                storage=prepared.quantization.storage,
                technique=prepared.options.technique,
            )
        profile = super().profile(prepared, cluster, notify, **settings)
        if not divides or profile.source == "measured":
            return profile
        if profile.source == "analytic":
            share = LayerShape(describe_facts(prepared.facts), 0, prepared.typical_length).attention_share
            shares = {"H": share, "C": 1 - share}
            return profile.with_layers(
                lambda layer, *_: layer.with_times(
                    {f"{kind}{way}": layer.times[way].scaled(shares[kind]) for kind in "HC" for way in "FB"}
                )
            )
        parts = self.host_parts(prepared, notify, refresh=settings.get("refresh", False))
        each = [
            {kind: grid.scaled(1 / host_share) for kind, grid in parts.items()} for host_share in cluster.host_shares()
        ]
        return profile.with_layers(lambda layer, rank, _: layer.with_times(each[rank]))

    def device_layers(self, context: RankContext, prepared: PreparedJob, *, refresh: bool) -> Layers:
        """Return every layer's cost on this device's first processor, and the costs of what processors can share (see
        LayerMethod).
        """
        prepared = replace(prepared, options=require_known(prepared.job))  # a message has only fine-tuning's options
        times, device = dict[str, Grid](), context.device
        if not _divides(prepared, device):
            return super().device_layers(context, prepared, refresh=refresh)
        for number, processor in enumerate(processors_in_order(device, cores_first=True)):
            place = place_of(processor.name, device.name)
            with pinned(place):
                if not number:
                    layers = self.host_layers(prepared, publishing(context), refresh=refresh)
                parts = self.host_parts(prepared, publishing(context), refresh=refresh, place=place)
            times |= {f"{kind}@{number}" if number else kind: grid for kind, grid in parts.items()}
        return tuple(layer.with_times(times) for layer in layers)

    def notes(self, planned: Planned[PreparedJob]) -> tuple[str, ...]:
        """Add that a requested split divides no layer, because one processor alone is faster (see Method)."""
        prepared, profile, cluster, _ = planned
        split_options = [
            f"{name} = {prepared.job.options[name]}" for name in ("split", "heads") if name in prepared.job.options
        ]
        if not split_options or not _divides(prepared, *cluster.devices) or divisions(prepared, profile, cluster):
            return super().notes(planned)
        options = " and ".join(split_options)
        note = f"The option {options} has no effect here: on each device a single processor is faster."
        return (note, *super().notes(planned))

    def host_parts(
        self, prepared: PreparedJob, notify: Notify, *, refresh: bool, place: Place | None = None
    ) -> dict[str, Grid]:
        """Return the seconds of a layer's heads and columns, measured now or stored earlier.

        place: a processor of this device; None: one unslowed core of this host.
        """
        (settings, _), model = self.measured(prepared), prepared.job.model
        key = {
            "parts of": model,
            "shape": asdict(prepared.facts),
            "max_length": prepared.profiled_length,
            **settings,
        }
        device = "cpu" if place is None else str(place.device)

        def measure() -> Profile:
            times = measure_parts(
                self.measured_stack(prepared),
                prepared.config,
                max_length=prepared.profiled_length,
                device=device,
            )
            parts = LayerProfile(name="parts of a layer", times=times, frozen_bytes=0, trainable_bytes=0)
            return Profile(model=model, method=self.name, source="measured", layers=((parts,),))

        if place is not None:
            key |= {"processor": [device, *place.cores]}
        words = f"{model} and its length, parts of a layer"
        return cached_measurement(key, Profile, measure, words, notify, refresh=refresh).layers[0][0].times

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Reject unknown names, a single device, and more devices than the cluster has (see Method)."""
        super().require_known(job, cluster)
        if (num_devices := self.known(job).devices) > cluster.world_size:
            raise ConfigError(
                f"The option devices = {num_devices:,} of confidant was asked for.",
                f"Cluster '{cluster.name}' has {cluster.in_words}.",
                "Lower it, or leave it out to train on all.",
            )
        if cluster.world_size < 2:
            raise ConfigError(
                f"Confidant on cluster '{cluster.name}' was asked for.",
                "It has one device, and a pipeline needs two or more.",
                "Add a device, or use --method fine_tuning --option paradigm=standalone.",
            )
