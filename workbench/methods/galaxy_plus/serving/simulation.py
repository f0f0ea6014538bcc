"""Serve a stream in virtual time: the same portal and the same faults as on emulated devices, without either."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, never_begun
from workbench.core.inference import InferenceProfile
from workbench.core.serving import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import Planner, Times
from workbench.methods.galaxy_plus.serving.virtual_portal import SimulatedWorld, VirtualPortal

__all__ = ["SimulatedWorld", "simulate_serving"]


def simulate_serving(
    profile: InferenceProfile,
    cluster: Cluster,
    planner: Planner,
    times: Times,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings | None = None,
    faults: Sequence[Fault] = (),
    world: SimulatedWorld | None = None,
) -> ServingReport:
    """Return what serving the stream would be like.

    planner, times: see service.planner_of and service.simulated_times.  Weights are read at Device.storage_bytes_per_s.
    Raises PlanError if no plan fits the whole cluster.
    """
    settings = rescheduling or ReschedulingSettings()
    service = VirtualPortal(profile, cluster, planner, times, stream, settings, faults, world or SimulatedWorld())
    service.run()
    log = service.log
    notes = never_begun(faults, cluster, max((request.end_s for request in log.requests), default=0.0))
    return ServingReport(
        source="simulated",
        model=profile.model,
        cluster=cluster,
        stream=stream,
        rescheduling=settings,
        faults=tuple(faults),
        plans=tuple(log.plans),
        requests=tuple(log.requests),
        events=tuple(log.events),
        samples=tuple(log.samples),
        num_lost=stream.num_requests - len(log.requests),
        valid=not notes,
        notes=notes,
    )
