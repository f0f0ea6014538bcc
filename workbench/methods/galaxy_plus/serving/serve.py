"""Serve a stream of requests on emulated or real devices, and re-plan for the remaining devices after faults (section
III-E).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.errors import ConfigError, DeviceLostError
from workbench.core.inference import InferencePlan
from workbench.core.job import Fidelity
from workbench.core.report import dilation_note
from workbench.core.schedule import Ranks
from workbench.core.timeline import BUSY_OVERRUN_SHARE, late_share_of
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.common.services import ServiceInterrupted
from workbench.methods.galaxy_plus.costs import scaled_to
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners import plan, plans
from workbench.methods.galaxy_plus.planners.terms import problem_for
from workbench.methods.galaxy_plus.prepare import local_hidden, random_requests, shape_of_picture
from workbench.methods.galaxy_plus.prices import Programs, SequencePrice, replan, tune
from workbench.methods.galaxy_plus.profiles import HostQuestion, host_profile
from workbench.methods.galaxy_plus.serving.log import ServingLog, never_begun
from workbench.methods.galaxy_plus.serving.policy import ServingPolicy
from workbench.methods.galaxy_plus.serving.records import (
    ReschedulingSettings,
    ServedRequest,
    ServingEvent,
    ServingReport,
    StreamSettings,
)
from workbench.methods.galaxy_plus.serving.rescheduler import BlockTimes, Planner, Rescheduler, Times
from workbench.methods.galaxy_plus.serving.worker import serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.models.sharding import ModelLayout, ShardSpec, added_bytes, model_layout
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.engines import EngineCluster, default_pool
from workbench.runtime.pacing import find_dilation
from workbench.runtime.ssh_devices import SshEngines
from workbench.simulator import simulate


def planner_of(
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: tuple[int, ...],
    *,
    first: InferencePlan | None = None,
    is_priced: bool = True,
    left_out: Collection[int] = (),
    **kept: int,
) -> Planner:
    """Return the planner for some of the cluster's devices.

    lengths: tokens in each stack.  first: the plan of all devices at full speed; another method's plan is remade by its
    own planner.
    is_priced: whether candidates are compared by simulation or by Eq. 9.  left_out: devices that are never used.
    kept: kept_tokens and kept_texts of Problem.
    """
    everybody = frozenset(range(cluster.world_size))
    problem = problem_for(profile, cluster, lengths, **kept)
    price = SequencePrice(problem) if is_priced else None
    chosen = first
    if chosen is None:
        chosen = (
            plan(problem)
            if price is None
            else tune(problem, plans(problem), price, tries=40, both_ways=False, tile_tokens=0)
        )

    def planner(ranks: Ranks) -> InferencePlan:
        excluded = everybody.difference(ranks).union(left_out)
        if not excluded:
            return chosen
        return replan(chosen, problem, excluded=excluded, price=price)

    return planner


def simulated_times(profile: InferenceProfile, cluster: Cluster, lengths: tuple[int, ...]) -> Times:
    """Return the cost of a request by simulation of the plan's schedule; each plan and device state is
    simulated once.
    """

    @lru_cache(maxsize=256)
    def simulated(plan: InferencePlan, rank_factors: tuple[tuple[int, float], ...]) -> BlockTimes:
        slower = profile
        for rank, factor in rank_factors:
            slower = slower.slowed(rank, factor)
        timeline = simulate(Programs(cluster, profile.stacks, slower).sequence(plan, lengths).program, memory=False)
        blocks: dict[int, dict[int, float]] = {}
        for span in timeline.spans:
            if not span.op.is_communication:
                of_rank = blocks.setdefault(span.rank, {})
                of_rank[span.op.stage] = of_rank.get(span.op.stage, 0.0) + span.end_s - span.start_s
        return BlockTimes(timeline.makespan_s, blocks)

    def times(plan: InferencePlan, slow_downs: Mapping[int, float]) -> BlockTimes:
        return simulated(
            plan,
            tuple(
                sorted((rank, factor) for rank, factor in slow_downs.items() if rank in plan.ranks and factor != 1.0)
            ),
        )

    return times


def run_service(policy: ServingPolicy) -> None:
    """Serve the stream until every request is answered, no plan can ever fit again, or the policy ends the service."""
    coordinator = Coordinator(
        fleet=policy.fleet,
        policy=policy,
        say=lambda text: None,  # the report's events contain it
        show=policy.shown,
        turn=policy.turn,
        injected=policy.injected,
        clock=policy.faults_s,
        pace=policy.rescheduler.pace,
    )
    try:
        coordinator.run()
    except DeviceLostError:
        if policy.rescheduler.wanted >= 0:
            raise
        # No plan can ever fit again: the remaining requests are lost.


DEFAULT_LENGTH = 64
CALIBRATING_REQUESTS = 16


def usual_length(layout: ModelLayout) -> int:
    """Return the tokens of a request for which no length was given: a picture's, or DEFAULT_LENGTH at most."""
    if layout.family.reads_images:
        return shape_of_picture(layout)[0]
    return min(DEFAULT_LENGTH, layout.max_length or DEFAULT_LENGTH)


def serve(
    model: str,
    cluster: Cluster,
    engines: EngineCluster | SshEngines,
    host: InferenceProfile,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings | None = None,
    faults: Sequence[Fault] | FaultSchedule = (),
    first_plan: InferencePlan | None = None,
    left_out: Sequence[int] = (),
    is_over: Callable[[float], bool] = lambda now_s: False,
    on_event: Callable[[ServingEvent], None] | None = None,
    on_request: Callable[[ServedRequest], None] = lambda request: None,
    decided_by: type[Rescheduler] = Rescheduler,
) -> ServingReport:
    """Serve the stream and return its report.  Every answer is compared with the local model's.

    host: the profile of one unslowed core (one device), used for pacing and planning of the emulated devices; for real
    devices their own profiles.
    Requests are random tokens, stream.length of them each.
    faults: is_over may add to the schedule while requests are served.
    first_plan: plan for all devices; by default our planner's.  left_out: devices that no plan may use.
    is_over: called with the service's seconds; returns whether to end early.  decided_by: makes the decisions.
    The engines keep running.  Raises ConfigError, PlanError if nothing fits, RuntimeSetupError, and ServiceInterrupted
    with a report if the user ends the service.
    """
    settings = rescheduling or ReschedulingSettings()
    schedule = faults if isinstance(faults, FaultSchedule) else FaultSchedule(faults)
    is_real = engines.fidelity == "real"
    for fault in schedule.faults:
        if is_real and fault.kind == "slow":
            request = f"The fault 'slow' {fault.when} was asked for."
            raise ConfigError(
                request, "A real device cannot be slowed down from here.", "Kill or freeze it; or emulate the cluster."
            )
        if fault.kind in ("leave", "memory") or fault.unit != "s":
            raise ConfigError(
                f"The fault '{fault.kind}' {fault.when} was asked for.",
                "A service slows, kills and freezes devices, at seconds.",
                "Choose one of these.",
            )
        if fault.rank >= cluster.world_size:
            raise ConfigError(
                f"A fault of device {fault.rank} was asked for.",
                f"There are {cluster.world_size} devices.",
                "Name one of them.",
            )
    layout = model_layout(model)
    requests = random_requests(layout, stream.length or usual_length(layout), seed=stream.seed)
    lengths = requests[0].lengths
    profile = host if is_real else scaled_to(host, cluster)
    log = ServingLog(watch=on_event, arrivals_s=stream.arrival_times())
    times = simulated_times(profile, cluster, lengths)
    planner = planner_of(profile, cluster, lengths, first=first_plan, left_out=left_out)
    rescheduler = decided_by(settings, cluster.world_size, planner, times, log)
    answers = local_hidden(model, requests)
    setup = SessionSetup(
        model=model,
        cluster=cluster,
        host=None if is_real else host,
        timeout_s=settings.request_timeout_s,
        report_every_s=settings.report_every_s,
    )

    def holds_both(rank: int, first: ShardSpec, second: ShardSpec) -> bool:
        room = cluster.devices[rank].memory_bytes - profile.working_bytes(lengths)
        return added_bytes(layout, first, None) + added_bytes(layout, second, first) <= room

    with engines.service(serve_worker, [setup] * cluster.world_size) as service:
        policy = ServingPolicy.on(
            service,
            cluster,
            schedule,
            rescheduler,
            stacks=layout.stacks,
            num_steps=stream.num_requests,
            requests=requests,
            answers=answers,
            holds_both=holds_both,
            answered=on_request,
            read_memory=service.memory,
            is_over=is_over,
        )
        is_interrupted = False
        try:
            run_service(policy)
        except KeyboardInterrupt:
            is_interrupted = True
    overrun_share = late_share_of(zip(policy.late_s.values(), policy.paced_s.values(), strict=True))
    notes = (
        () if faults is schedule else never_begun(schedule.faults, cluster, log.end_s)
    )  # a schedule's times are guesses
    slowed = (dilation_note(engines.dilation),) if engines.dilation > 1 else ()
    if overrun_share > BUSY_OVERRUN_SHARE:
        notes += (
            f"Host too busy: the emulated devices were late by {overrun_share:.0%} of the time. "
            "Run again on a quiet host.",
        )
    report = log.report(
        policy.samples,
        source="real" if is_real else "emulated",
        fidelity="" if engines.fidelity == "real" else engines.fidelity,
        model=model,
        cluster=cluster,
        stream=stream,
        rescheduling=settings,
        faults=tuple(schedule.faults),
        memory=tuple(policy.memory),
        overrun_share=overrun_share,
        dilation=engines.dilation,
        valid=not notes,
        notes=notes + slowed + (engines.notes if isinstance(engines, SshEngines) else ()),
    )
    if is_interrupted:
        note = f"The service was interrupted: {len(report.requests)} of {stream.num_requests} requests were answered."
        raise ServiceInterrupted(replace(report, num_lost=0, notes=(note, *report.notes)))
    return report


def serve_emulated(
    question: HostQuestion,
    cluster: Cluster,
    *,
    stream: StreamSettings,
    fidelity: Fidelity = "auto",
    first_plan: InferencePlan | None = None,
    notify: Notify = ignore,
    **settings: Any,
) -> ServingReport:
    """Profile this machine, start emulated devices, calibrate their dilation with a few requests, and serve the stream.

    first_plan, settings: see `serve`.  The engines keep running for the next call.  Raises the errors of `serve`.
    """
    host = host_profile(question, notify)
    notify(Event("phase", message=f"Starting {cluster.in_words}"))
    engines = default_pool().acquire(cluster, fidelity)
    notify(Event("phase", message="Calibrating: can this machine keep pace with the devices?"))
    served = partial(serve, question.model, cluster, engines, host, first_plan=first_plan)
    keep_pace(engines, lambda: served(stream=replace(stream, num_requests=CALIBRATING_REQUESTS, rate_per_s=0.0)))
    return served(stream=stream, **settings)


def keep_pace(engines: EngineCluster, served: Callable[[], ServingReport]) -> None:
    """Slow emulated devices down until this machine keeps pace with them.  served: serves a few requests."""

    def late_share(dilation: float) -> float:
        engines.dilate(dilation)
        try:
            return served().overrun_share
        except ServiceInterrupted:
            raise KeyboardInterrupt from None  # none of the stream's requests was served

    engines.dilate(find_dilation(late_share))
