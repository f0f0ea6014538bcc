"""A job's profile: the host's measured operations scaled to each device, or the catalogue's figures (Galaxy+, section III-C)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.methods.base import Event, Notify
from workbench.methods.galaxy_plus.measuring import measure_host, sizes_of
from workbench.methods.galaxy_plus.prepare import METHOD, PreparedJob
from workbench.models.facts import ModelFacts
from workbench.models.loading import model_facts
from workbench.models.sharding import ModelLayout, What, model_layout, open_weights
from workbench.planners.galaxy_plus import stack_lengths
from workbench.profiler.inference import analytic_from
from workbench.profiler.inference_timing import MeasuredInference, cached_inference
from workbench.schedules.inference import InferenceCosts, InferenceLayout, pipeline_inference

LENGTHS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostQuestion:
    """What a profile of a host is of.  longest: tokens of a request.  what: what the head is asked for."""

    model: str
    facts: ModelFacts
    longest: int
    what: What

    @classmethod
    def of(cls, prepared: PreparedJob) -> HostQuestion:
        """Return a job's."""
        what: What = "last" if prepared.options.generate else "hidden"
        return cls(model=prepared.job.model, facts=prepared.facts, longest=prepared.longest, what=what)


def host_profile(prepared: PreparedJob, notify: Notify, *, refresh: bool = False) -> InferenceProfile:
    """Return what each operation costs on one unslowed core of this host, measured now or kept from before."""
    return answer_of_host(HostQuestion.of(prepared), notify, refresh=refresh)


def answer_of_host(asked: HostQuestion, notify: Notify, *, refresh: bool) -> InferenceProfile:
    """Return host_profile's answer."""
    # The name alone may be a folder in which another model lies by now.
    key = {"model": asked.model, "shape": asdict(asked.facts), "longest": asked.longest, "head": asked.what}

    def measure() -> MeasuredInference:
        notify(Event("phase", message=f"Profiling this machine (kept for {asked.model} and this length)", stage="profile"))
        layout = model_layout(asked.model)
        source = open_weights(asked.model, layout=layout)
        try:
            return measure_host(layout, source, longest=asked.longest, what=asked.what)
        finally:
            source.close()

    measured, note = cached_inference(key, measure, refresh=refresh)
    notify(Event("note", message=note))
    return replace(measured.profile, model=asked.model)


def measured_host(model: str, length: int, notify: Notify) -> InferenceProfile:
    """Return the profile of a core of this host for requests of so many tokens, measured now or kept from before."""
    return answer_of_host(HostQuestion(model=model, facts=model_facts(model), longest=length, what="hidden"), notify, refresh=False)


def made_up_host(model: str, flops_per_s: float) -> InferenceProfile:
    """Return the profile of an imagined core of so many FLOP/s, slower than this host's.

    With it a tiny model takes emulated devices as long as a large one would, and the host has little to do: to try out what the
    portal does, and for tests; the times are then of no device that exists.
    """
    device = Device(name="host", flops_per_s=flops_per_s, memory_bytes=1 << 40, link=Link(bytes_per_s=1e9))
    return analytic_profile(model, model_layout(model), Cluster(name="host", devices=(device,)))


def catalogue_profile(prepared: PreparedJob, cluster: Cluster) -> InferenceProfile:
    """Return the costs by the devices' FLOP/s."""
    vocabulary = prepared.facts.vocabulary_size if prepared.options.generate else 0
    return analytic_profile(prepared.job.model, prepared.layout, cluster, vocabulary)


def analytic_profile(model: str, layout: ModelLayout, cluster: Cluster, vocabulary: int = 0) -> InferenceProfile:
    """Return a model's costs by the devices' FLOP/s.  vocabulary: rows of the head, 0 for none."""
    first_bytes, last_bytes = layout.end_bytes
    return analytic_from(model, sizes_of(layout), cluster, first_bytes=first_bytes, last_bytes=last_bytes, vocabulary=vocabulary)


def as_profile(inference: InferenceProfile, cluster: Cluster) -> Profile:
    """Return the profile in the form that every method has: each layer's seconds on each device, whole, for sequences one by one."""
    rows = tuple(_layers(inference, cluster, rank) for rank in range(inference.world_size))
    return Profile(model=inference.model, method=METHOD, source=inference.source, layers=rows, inference=inference)


def _layers(inference: InferenceProfile, cluster: Cluster, rank: int) -> tuple[LayerProfile, ...]:
    seconds: dict[int, list[tuple[float, ...]]] = {}
    plan = InferencePlan(method=METHOD, paradigm="pipeline", ranks=(rank,), layers=(inference.num_layers,))
    for length in LENGTHS:
        layout = InferenceLayout.build(plan, inference.stacks, stack_lengths(inference, length, None))
        costs = InferenceCosts(inference, cluster, layout)
        for op in pipeline_inference(layout, cluster.world_size).ops[rank]:
            if op.kind == "LAYER":
                one = costs.seconds(rank, op)
                seconds.setdefault(op.stage, []).append((one, 2 * one))
    layers = []
    for number in range(inference.num_layers):
        shape = inference.stacks[inference.stack_of(number)]
        grid = Grid(batch_sizes=(1, 2), sequence_lengths=LENGTHS, seconds=tuple(zip(*seconds[number], strict=True)))
        layers.append(
            LayerProfile(
                name=f"layer {number}",
                times={"F": grid},
                frozen_bytes=shape.attention_bytes + shape.feed_forward_bytes + shape.layer_bytes,
                trainable_bytes=0,
                output_bytes_per_token=shape.hidden_bytes,
                context_bytes_per_token=0,
                workspace_bytes_per_token=inference.working_bytes_per_token,
            )
        )
    return tuple(layers)
