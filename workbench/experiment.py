"""run(job, cluster, mode) -> Report: the one entry point for notebooks, papermill and the command line."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.assets.fetch import cache_folder
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Fidelity, Job, Mode
from workbench.core.methods import declaration_of
from workbench.core.names import FP32_BYTES
from workbench.core.once import shared_results
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS, Report, SweepPoint, dilation_note
from workbench.core.run_files import REPORT
from workbench.core.schedule import paused_collector
from workbench.core.serial import text_digest, to_json
from workbench.core.step_parts import StepParts
from workbench.core.timeline import BUSY_OVERRUN_SHARE
from workbench.core.units import counted
from workbench.methods import load_method
from workbench.methods.base import Event, Method, Notify, Outcome, Planned, Prediction, counting, ignore
from workbench.methods.checked import prepared_job
from workbench.methods.common.folder import require_resumable
from workbench.methods.devices import connected, require_emulated
from workbench.methods.option_values import as_published, differences_note
from workbench.methods.step_parts import step_parts, typical_step_s
from workbench.methods.sustained import plan_over_run, predicted
from workbench.models.hub import require_weights
from workbench.profiler.cache import host_fingerprint
from workbench.runtime.engine_service import Engines
from workbench.runtime.work_folder import own_folder, reporting_full_disk


def plan(job: Job, cluster: Cluster, mode: Mode = "simulate", *, progress: Notify | None = None) -> Plan:
    """Return the method's plan for the job on the cluster.  Raises PlanError if nothing fits.

    mode: the mode that the plan is for.  It decides where the cost of devices unlike this host comes from (see
    profile).
    """
    job = _settled(job)
    with shared_results():
        method, prepared, costs = _profiled(job, cluster, mode, progress or ignore)
        plan = _planned(method, prepared, costs, cluster)
        planned = Planned(prepared, costs, cluster, plan)
        note = differences_note(job)
        notes = (*plan.notes, *method.notes(planned), *([note] if note else []))
        return replace(plan, notes=(*notes, step_parts(method, planned).sentence))


def _settled(job: Job) -> Job:
    """Return the job with the paper's settings, if it asks for them."""
    return as_published(job) if job.as_published else job


@paused_collector()
def _planned(method: Method, prepared: Any, costs: Profile, cluster: Cluster) -> Plan:
    """Return the method's plan, with a note on the devices that it leaves out."""
    plan = plan_over_run(method, prepared, costs, cluster)
    note = plan.idle_note(cluster.names)
    return replace(plan, notes=(*plan.notes, note)) if note else plan


def profile(
    job: Job,
    cluster: Cluster,
    mode: Mode = "simulate",
    *,
    progress: Notify | None = None,
    refresh: bool = False,
) -> Profile:
    """Return the cost of every layer on every device.

    The cost on an emulated device is measured on this host and scaled to the device's share of a core.  For devices
    that are only simulated, or real but not contacted here, the cost on another device model is computed from its
    FLOP/s.
    refresh: repeat measurements that are cached.
    """
    return _profiled(_settled(job), cluster, mode, progress or ignore, refresh=refresh)[2]


def _profiled(
    job: Job, cluster: Cluster, mode: Mode, notify: Notify, *, refresh: bool = False
) -> tuple[Method, Any, Profile]:
    method = load_method(job.method)
    prepared = prepared_job(method, job, cluster, notify)
    is_emulated = mode == "execute" and not cluster.is_real
    return method, prepared, method.profile(prepared, cluster, notify, emulated=is_emulated, refresh=refresh)


def run(
    job: Job,
    cluster: Cluster,
    mode: Mode = "execute",
    *,
    progress: Notify | None = None,
    workdir: Path | None = None,
    resume: bool = False,
    fidelity: Fidelity = "auto",
    chosen_plan: Plan | None = None,
    costs: Profile | None = None,
    engines: Engines | None = None,
) -> Report:
    """Plan, simulate and (mode 'execute') run a job on a cluster.

    workdir: where the run keeps snapshots, cache, the trained adapter and its report; only one run may use it at a
    time.  By default it is a separate folder under the cache folder.
    resume: continue an interrupted run of the same job from its newest snapshot.
    chosen_plan: run this plan instead of the planner's.  costs: plan and pace by these instead of measuring.
    engines: execute on these instead of on devices started here (see runtime.torchrun); fidelity is then ignored.
    Raises WorkbenchError for every error that a user can cause.  An interrupted run leaves its workdir for `resume`.
    """
    if not isinstance(job, Job) or not isinstance(cluster, Cluster):
        raise ConfigError(
            "A run of a job on a cluster was asked for.",
            f"They are {type(job).__name__} and {type(cluster).__name__}.",
            "Give Job(...) and load_cluster('laptop').",
        )
    if mode not in ("simulate", "execute"):
        raise ConfigError(f"The mode '{mode}' was asked for.", "There are simulate and execute.", "Choose one.")
    job = _settled(job)
    if mode == "execute":
        require_weights(job.model)
    if mode == "execute" and engines is None and cluster.is_real:
        run_folder = (workdir or cache_folder() / "runs" / run_name(job, cluster)).absolute()
        with connected(job, cluster, run_folder, progress or ignore) as real:

            def with_health(event: Event) -> None:
                if event.device is not None:
                    event = event._replace(device=event.device._replace(health=real.health(event.rank)))
                (progress or ignore)(event)

            report = run(
                job,
                cluster,
                mode,
                progress=with_health,
                workdir=run_folder,
                resume=resume,
                fidelity=fidelity,
                chosen_plan=chosen_plan,
                costs=costs,
                engines=real,
            )
            timelines = {
                name: replace(timeline, clock_bound_s=real.clock_bound_s) if timeline.source == "real" else timeline
                for name, timeline in report.timelines.items()
            }
            report = replace(report, notes=(*report.notes, *real.notes), timelines=timelines)
            report.write(run_folder / REPORT)
            return report
    if mode == "execute" and engines is None:
        require_emulated(cluster, fidelity)
    folder = (workdir or cache_folder() / "runs" / run_name(job, cluster)) if mode == "execute" else None
    if resume and folder is not None and declaration_of(job.method).trains:
        require_resumable(folder)
    began = [("load", time.monotonic())]

    def notify(event: Event) -> None:
        if event.stage:
            began.append((event.stage, time.monotonic()))
        (progress or ignore)(event)

    with contextlib.nullcontext() if folder is None else own_folder(folder):
        method, planned, prediction, notes = _predicted(
            job, cluster, mode, notify, chosen_plan=chosen_plan, costs=costs, engines=engines, folder=folder
        )
        prepared, costs, _, decided = planned
        parts = step_parts(method, planned, is_planners=chosen_plan is None)
        notify(Event("predicted", predicted=prediction.steps))
        timelines = {name.removesuffix(", predicted"): timeline for name, timeline in prediction.timelines.items()}
        notify(Event("plan", step=0, plan=decided, timelines=timelines))
        if folder is None:
            return _report(job, cluster, decided, prediction, None, _spent(began), parts, notes=notes)
        from workbench.methods.calibration import Calibration
        from workbench.methods.common.result_file import write_result
        from workbench.methods.common.room import require_running_room
        from workbench.runtime.engines import default_pool

        with reporting_full_disk(folder):
            calibration, dilation, running = None, 1.0, engines
            if running is None:
                if declaration_of(job.method).trains:
                    is_whole = method.holds_whole_model(prepared)
                    layers = method.layer_costs(prepared, batch=1, sequence_length=1)
                    require_running_room(job.model, layers, decided, cluster, is_whole=is_whole)
                notify(Event("phase", message=f"Starting {cluster.in_words}", stage="start devices"))
                count_ready = counting(notify, "devices that are ready")
                running = emulated = default_pool().acquire(cluster, fidelity, on_ready=count_ready)
                calibration = Calibration(method, planned, emulated)
                dilation = calibration.dilate(
                    max((step.predicted_s or 0.0 for step in prediction.steps), default=0.0), notify
                )
            running.is_watched = False
            notify(Event("watch", watch=partial(setattr, running, "is_watched", True)))
            outcome = method.execute(planned, prediction, running, folder=folder, resume=resume, notify=notify)
            report = _report(job, cluster, decided, prediction, outcome, _spent(began), parts, dilation, notes=notes)
            if outcome.technique:
                write_result(report, prepared, outcome.technique)
            report.write(folder / REPORT)
        if calibration is not None and not report.valid:
            calibration.forget()
        return report


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A job that is simulated.  report: without the parts of a step, which take several further simulations."""

    report: Report
    method: Method
    planned: Planned[Any]

    @property
    def step_s(self) -> float:
        """Return the seconds of a typical first-epoch step, simulated now."""
        return typical_step_s(self.method, self.planned)

    @cached_property
    def parts(self) -> StepParts:
        """Return the parts of that step, simulated at the first call."""
        with shared_results():
            return step_parts(self.method, self.planned)


def simulated(job: Job, cluster: Cluster, *, progress: Notify | None = None) -> Simulated:
    """Plan and simulate a job on a cluster, to compare it with others (see run)."""
    job, notify = _settled(job), progress or ignore
    method, planned, prediction, notes = _predicted(job, cluster, "simulate", notify)
    report = _report(job, cluster, planned.plan, prediction, None, {}, None, notes=notes)
    return Simulated(report=report, method=method, planned=planned)


def _predicted(
    job: Job,
    cluster: Cluster,
    mode: Mode,
    notify: Notify,
    *,
    chosen_plan: Plan | None = None,
    costs: Profile | None = None,
    engines: Engines | None = None,
    folder: Path | None = None,
) -> tuple[Method, Planned[Any], Prediction, tuple[str, ...]]:
    """Return a job's method, its plan, every step of it as simulated, and notes on it (see run)."""
    method = load_method(job.method)
    prepared = prepared_job(
        method, job, cluster, notify, warms_up=mode == "execute" and engines is None, engines=engines
    )
    costs = costs or method.profile(prepared, cluster, notify, emulated=mode == "execute", engines=engines)
    notify(Event("phase", message=f"Planning for {cluster.in_words}", stage="plan"))
    with shared_results():
        decided = chosen_plan or _planned(method, prepared, costs, cluster)
        method.check(prepared, costs, cluster, decided, folder=folder)
        planned = Planned(prepared, costs, cluster, decided)
        notes = (*prepared.task.notes, *method.notes(planned))
        for note in notes:
            notify(Event("note", message=note))
        prediction = predicted(method, planned)
    if trained := method.num_trained(prepared):
        layers = method.layer_costs(prepared, batch=1, sequence_length=1)
        number = sum(layer.trainable_params + layer.frozen_params - layer.copied_params for layer in layers)
        nbytes = {TRAINED_WEIGHTS: FP32_BYTES * trained, ALL_WEIGHTS: FP32_BYTES * number}
        prediction = replace(prediction, bytes=prediction.bytes | nbytes)
    return method, planned, prediction, notes


def sweep(
    job: Job,
    cluster: Cluster,
    plans: dict[str, Plan],
    mode: Mode = "execute",
    *,
    num_steps: int = 8,
    fidelity: Fidelity = "auto",
    progress: Notify | None = None,
    workdir: Path | None = None,
    engines: Engines | None = None,
) -> tuple[SweepPoint, ...]:
    """Return the step time of a few first-epoch steps under each plan: simulated, and also measured if mode is
    'execute'.

    workdir: a folder, which is made and removed.  engines: the real devices' engines; by default they are connected
    here.
    """
    notify, job = progress or ignore, _settled(job)
    method = load_method(job.method)
    folder = workdir or cache_folder() / "runs" / f"sweep-{os.getpid()}"
    if mode == "execute" and engines is None and cluster.is_real:
        with connected(job, cluster, folder, notify) as real:
            return sweep(
                job, cluster, plans, mode, num_steps=num_steps, progress=progress, workdir=folder, engines=real
            )
    is_emulated = mode == "execute" and engines is None
    if is_emulated:
        require_emulated(cluster)
    prepared = prepared_job(method, job, cluster, notify, warms_up=is_emulated, engines=engines)
    costs = method.profile(prepared, cluster, notify, emulated=mode == "execute", engines=engines)

    def measured(engines: Engines | None, words: str, most_late: float = math.inf) -> tuple[SweepPoint, ...]:
        """Return the plans' points up to the first one in which more than this share of the devices' time is late."""
        points: list[SweepPoint] = []
        notify(Event("phase", message=words, stage="sweep"))
        for number, (name, plan) in enumerate(plans.items()):
            notify(Event("count", message=f"plans; now '{name}'", step=number, num_steps=len(plans)))
            notify(Event("plan", step=0, plan=plan))
            planned = Planned(prepared, costs, cluster, plan)
            points.append(method.sweep_point(planned, name, engines, num_steps=num_steps, folder=folder))
            if points[-1].overrun_share > most_late:
                break
        return tuple(points)

    all_plans = counted(len(plans), "plan")
    simulated = measured(None, f"Simulating {all_plans}")  # reject an impossible plan before executing any
    if mode == "simulate":
        return simulated
    from workbench.runtime.engines import default_pool
    from workbench.runtime.pacing import LADDER, asked_dilation, find_dilation

    points: tuple[SweepPoint, ...] = ()
    rounds = itertools.count(1)

    def late_share(dilation: float) -> float:
        nonlocal points
        emulated.dilate(dilation)
        # The host did not keep pace: all plans are measured again on slower devices.
        again = f" again, at a time dilation of {dilation:g}" if next(rounds) > 1 else ""
        is_last = dilation >= LADDER[-1] or asked_dilation() is not None
        points = measured(emulated, f"Measuring {all_plans}{again}", math.inf if is_last else BUSY_OVERRUN_SHARE)
        return max((point.overrun_share for point in points), default=0.0)

    try:
        if engines is not None:  # real devices have no deadlines
            return tuple(replace(point, overrun_share=0.0) for point in measured(engines, f"Measuring {all_plans}"))
        emulated = default_pool().acquire(cluster, fidelity)
        # The devices may still run as slowly as the job before needed.
        dilation = find_dilation(late_share, BUSY_OVERRUN_SHARE, first=emulated.dilation)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(replace(point, dilation=dilation) for point in points)


def run_name(job: Job, cluster: Cluster) -> str:
    """Return the name of the folder that keeps the state of this job's run on this cluster."""
    digest = text_digest(to_json(job.identity) + to_json(cluster), 12)
    return f"{job.method}-{job.task}-{digest}".replace("/", "_")


def environment() -> dict[str, str]:
    """Return the software and hardware that the numbers were obtained with."""
    return host_fingerprint() | {
        "load average": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
    }


def _spent(began: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds spent in each stage of a run so far, summed over stages of the same name.  began: the start
    time of each stage.
    """
    spent_s: dict[str, float] = {}
    for (stage, begin_s), (_, end_s) in pairwise([*began, ("", time.monotonic())]):
        spent_s[stage] = spent_s.get(stage, 0.0) + end_s - begin_s
    return spent_s


def _report(
    job: Job,
    cluster: Cluster,
    decided: Plan,
    prediction: Prediction,
    outcome: Outcome | None,
    spent_s: dict[str, float],
    parts: StepParts | None,
    dilation: float = 1.0,
    *,
    notes: tuple[str, ...] = (),
) -> Report:
    """Return the report.  outcome: None for a simulation.  notes: remarks on the job under its plan (see
    Method.notes).
    """
    report = Report(
        mode="simulate" if outcome is None else "execute",
        source="simulated",
        job=replace(job, learning_rate=job.peak_learning_rate),
        cluster=cluster,
        plan=decided,
        steps=prediction.steps,
        epochs=prediction.epochs,
        timelines=dict(prediction.timelines),
        phases_s=prediction.phases_s,
        bytes=prediction.bytes,
        spent_s=spent_s,
        environment=environment(),
        step_parts=parts,
    )
    note = differences_note(job)
    differences = (note,) if note else ()
    if outcome is None:
        change_notes = prediction.notes + tuple(recovery.described for recovery in prediction.recoveries)
        return replace(report, recoveries=prediction.recoveries, notes=notes + change_notes + differences)
    busy = outcome.overrun_share > BUSY_OVERRUN_SHARE
    metrics = {name: value for name, value in outcome.metrics.items() if math.isfinite(value)}
    waiting = {recovery.what: recovery for recovery in reversed(prediction.recoveries)}
    recoveries = tuple(
        replace(recovery, predicted_s=waiting[recovery.what].seconds if recovery.what in waiting else None)
        for recovery in outcome.recoveries
    )
    notes += outcome.notes + tuple(recovery.described for recovery in recoveries)
    notes += tuple(f"The metric '{name}' is no number and left out." for name in outcome.metrics if name not in metrics)
    if dilation > 1:
        notes += (dilation_note(dilation),)
    if busy:
        late = (
            f"the emulated devices were late by {outcome.overrun_share:.0%} of the time, at most "
            f"{BUSY_OVERRUN_SHARE:.0%} is valid"
        )
        notes += (f"Host too busy: {late}. Close other programs and run again.",)
    return replace(
        report,
        source="real" if outcome.fidelity == "real" else "emulated",
        fidelity="" if outcome.fidelity == "real" else outcome.fidelity,
        steps=outcome.steps,
        epochs=outcome.epochs,
        timelines=report.timelines | outcome.timelines,
        metrics=metrics,
        chosen_epoch=outcome.chosen_epoch,
        phases_s={f"{name}, predicted": seconds for name, seconds in prediction.phases_s.items()} | outcome.phases_s,
        bytes=prediction.bytes | outcome.bytes,
        recoveries=recoveries,
        overrun_share=outcome.overrun_share,
        dilation=dilation,
        valid=not busy,
        notes=notes + differences,
        artifacts=outcome.artifacts,
    )
