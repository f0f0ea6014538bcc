"""What one unslowed core of this host takes for a model's operations: by it emulated devices are paced and planned for."""

from __future__ import annotations

from dataclasses import asdict, replace

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.inference import InferenceProfile
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.galaxy_plus.measuring import measure_host, sizes_of
from workbench.models.facts import ModelFacts
from workbench.models.loading import model_facts
from workbench.models.sharding import model_layout, open_weights
from workbench.profiler.inference import analytic_from
from workbench.profiler.inference_timing import MeasuredInference, cached_inference

GIVEN_DEVICE = Device(name="host", flops_per_s=1.0, memory_bytes=1 << 40, link=Link(bytes_per_s=1e9))


def measured_host(model: str, length: int, notify: Notify = ignore, *, refresh: bool = False) -> InferenceProfile:
    """Return the profile of a core of this host, measured now or kept from before.  length: tokens of a request."""
    facts: ModelFacts = model_facts(model)
    layout = model_layout(model)

    def measure() -> MeasuredInference:
        notify(Event("phase", message="Profiling this machine (once)"))
        source = open_weights(model, layout=layout)
        try:
            return measure_host(layout, source, longest=length, what="hidden")
        finally:
            source.close()

    key = {"model": model, "shape": asdict(facts), "longest": length, "head": "hidden"}
    measured, note = cached_inference(key, measure, refresh=refresh)
    notify(Event("note", message=note))
    return replace(measured.profile, model=model)


def made_up_host(model: str, flops_per_s: float) -> InferenceProfile:
    """Return the profile of an imagined core of so many FLOP/s, slower than this host's.

    With it a tiny model takes emulated devices as long as a large one would, and the host has little to do: to try out what the
    portal does, and for tests; the times are then of no device that exists.
    """
    layout = model_layout(model)
    one = Cluster(name="host", devices=(replace(GIVEN_DEVICE, flops_per_s=flops_per_s),))
    first_bytes, last_bytes = layout.end_bytes
    return analytic_from(model, sizes_of(layout), one, first_bytes=first_bytes, last_bytes=last_bytes)
