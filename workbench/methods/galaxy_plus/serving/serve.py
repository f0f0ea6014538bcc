"""Serve a stream of requests on emulated devices, whatever happens to them: the entry point of section III-E's system."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, FaultSchedule, never_begun
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.report import dilation_note
from workbench.core.serving import ReschedulingSettings, ServedRequest, ServingEvent, ServingReport, StreamSettings
from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.methods.galaxy_plus.requests import Request
from workbench.methods.galaxy_plus.serving.log import ServingLog
from workbench.methods.galaxy_plus.serving.placement import Placement
from workbench.methods.galaxy_plus.serving.portal import Portal
from workbench.methods.galaxy_plus.serving.references import is_right, local_answers, random_requests
from workbench.methods.galaxy_plus.serving.rescheduler import Rescheduler
from workbench.methods.galaxy_plus.serving.samples import Samples
from workbench.methods.galaxy_plus.serving.service import planner_of, simulated_times, without
from workbench.methods.galaxy_plus.serving.stream import RequestQueue
from workbench.methods.galaxy_plus.serving.worker import WorkerSetup, serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.models.sharding import model_layout
from workbench.profiler.inference import scaled_to
from workbench.runtime.devices import EngineDevices, Fleet
from workbench.runtime.engines import EngineCluster
from workbench.runtime.pacing import find_dilation

DEFAULT_LENGTH = 64
CALIBRATING_REQUESTS = 16
STUCK = 3.0
"""A device that has been at one command for so many times the timeout of a request will not end it."""
RESTARTS = 3
"""A device that dies by itself is started again so often."""


def serve(
    model: str,
    cluster: Cluster,
    engines: EngineCluster,
    host: InferenceProfile,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings | None = None,
    faults: Sequence[Fault] | FaultSchedule = (),
    requests: Sequence[Request] = (),
    first_plan: InferencePlan | None = None,
    left_out: Sequence[int] = (),
    is_over: Callable[[float], bool] = lambda now_s: False,
    is_priced: bool = True,
    on_event: Callable[[ServingEvent], None] | None = None,
    on_request: Callable[[ServedRequest], None] = lambda request: None,
) -> ServingReport:
    """Return what serving the stream was like.  Every answer is compared with the local model's.

    host: the profile of one unslowed core (one device), by which the emulated devices are paced and planned for.
    requests: served in turn, all of one length; without any, random tokens of stream.length.
    faults: a schedule may be added to while requests are served, by is_over.
    first_plan: for all devices; without one our planner's.  left_out: devices that no plan may use.
    is_priced: plans are compared by simulation (else by Eq. 9).
    is_over: asked (with the seconds of the service) whether to end before all were answered.
    Engines are left running, as they were.  Raises ConfigError, PlanError if nothing fits, RuntimeSetupError.
    """
    settings = rescheduling or ReschedulingSettings()
    schedule = faults if isinstance(faults, FaultSchedule) else FaultSchedule(faults)
    for fault in schedule.faults:
        if fault.kind == "leave" or fault.unit != "s":
            raise ConfigError(
                f"The fault '{fault.kind}' {fault.when} was asked for.",
                "A service slows, kills and freezes devices, at seconds.",
                "Choose one of these.",
            )
        if fault.rank >= cluster.world_size:
            raise ConfigError(
                f"A fault of device {fault.rank} was asked for.", f"There are {cluster.world_size} devices.", "Name one of them."
            )
    layout = model_layout(model)
    asked = tuple(requests) or random_requests(layout, stream.length or min(DEFAULT_LENGTH, layout.max_length), seed=stream.seed)
    lengths = asked[0].lengths
    if any(request.lengths != lengths for request in asked):
        raise ConfigError("Requests of several lengths were given.", "Devices are compared in equal work.", "Pad them to one length.")
    profile = scaled_to(host, cluster)
    log = ServingLog(watch=on_event)
    times = simulated_times(profile, cluster, lengths)
    planner = without(planner_of(profile, cluster, lengths, first=first_plan, is_priced=is_priced), left_out)
    rescheduler = Rescheduler(settings, cluster.world_size, planner, times, log)
    answers = local_answers(model, layout, asked)
    samples = Samples(cluster.world_size)
    working = profile.working_bytes_per_token * max(lengths)
    room = {rank: device.memory_bytes - working for rank, device in enumerate(cluster.devices)}
    with engines.service() as service:
        session = SessionSetup(model=model, cluster=cluster, host=host, timeout_s=settings.request_timeout_s)
        setups = [
            WorkerSetup(
                session=session,
                address=service.address,
                timeout_s=settings.request_timeout_s,
                report_every_s=settings.report_every_s,
                storage_bytes_per_s=device.storage_bytes_per_s,
            )
            for device in cluster.devices
        ]
        fleet = Fleet(
            EngineDevices(service, serve_worker, setups.__getitem__, engines.now_s),
            [device.name for device in cluster.devices],
            schedule,
            silence_s=settings.silence_s,
            longest_command_s=STUCK * settings.request_timeout_s,
            num_restarts=RESTARTS,
        )
        portal = Portal(
            fleet,
            Placement(fleet, layout, lengths, room),
            rescheduler,
            settings,
            log,
            samples,
            RequestQueue(stream),
            asked,
            lambda number, output: is_right(output, answers[number % len(answers)]),
            on_request,
            service.memory,
        )
        portal.run(is_over)
    overrun_share = portal.late_s / portal.paced_s if portal.paced_s else 0.0
    end_s = max((request.end_s for request in log.requests), default=0.0)
    notes = () if faults is schedule else never_begun(schedule.faults, cluster, end_s)  # a schedule's times are guesses
    slowed = (dilation_note(engines.dilation),) if engines.dilation > 1 else ()
    if overrun_share > BUSY_OVERRUN_SHARE:
        notes += (f"Host too busy: {overrun_share:.0%} of the emulated devices' time was late. Run again on a quiet host.",)
    return ServingReport(
        source="emulated",
        fidelity=engines.fidelity,
        model=model,
        cluster=cluster,
        stream=stream,
        rescheduling=settings,
        faults=tuple(schedule.faults),
        plans=tuple(log.plans),
        requests=tuple(log.requests),
        events=tuple(log.events),
        samples=samples.over(settings.report_every_s, end_s),
        memory=tuple(portal.memory),
        num_lost=stream.num_requests - len(log.requests),
        overrun_share=overrun_share,
        dilation=engines.dilation,
        valid=not notes,
        notes=notes + slowed,
    )


def calibrate(
    model: str,
    cluster: Cluster,
    engines: EngineCluster,
    host: InferenceProfile,
    *,
    stream: StreamSettings,
    first_plan: InferencePlan | None = None,
) -> None:
    """Set the engines' dilation so that this machine keeps pace, by some requests that nobody counts."""
    short = replace(stream, num_requests=CALIBRATING_REQUESTS, rate_per_s=0.0)

    def late_share(dilation: float) -> float:
        engines.dilate(dilation)
        return serve(model, cluster, engines, host, stream=short, first_plan=first_plan).overrun_share

    find_dilation(late_share)
