"""One rank's whole run: every epoch of every phase. A method's run_rank, which an engine is asked to call, calls `train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.program import Program
from workbench.methods.common.records import WARM_UP_STEPS
from workbench.methods.common.reporting import DONE, IDLE, WAITING
from workbench.methods.common.session import RankResult, RankSession, StepTrace, loss_of, on_rank_zeros_clock, trace_of
from workbench.methods.training.checkpoints import save
from workbench.methods.training.epoch_log import EpochLog
from workbench.methods.training.phases import AJob, RankPhase
from workbench.methods.training.steps import PlannedStep, StepShape
from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget, read_memory
from workbench.runtime.process_group import group
from workbench.runtime.state import State
from workbench.runtime.work_folder import full_disk_told


def train(
    context: RankContext, rank_job: AJob, phases_on: Callable[[RankSession[AJob], RankResult], Sequence[RankPhase[AJob]]]
) -> RankResult:
    """Do this rank's part of the job.  Checkpoints go to rank_job.folder, epoch by epoch.

    phases_on: makes the job's phases as a rank does them; they note in the result what is not a step.
    """
    rank_job.prepare_imports()
    with (
        full_disk_told(rank_job.folder),
        group(context, rank_job.timeout_s) as process_group,
        MemoryBudget(context.device.name, context.device.memory_bytes) as budget,
        RankSession(context, rank_job, process_group, budget) as session,
    ):
        result = RankResult(rank=session.rank)
        phases = phases_on(session, result)
        if rank_job.sweep:
            _sweep(phases[0])
        else:
            for phase in phases:
                _train_phase(phase)
        session.progress.phase(DONE)
        result.overrun_share = session.pacer.overrun_share
        result.late_s, result.paced_s = session.pacer.late_s, session.pacer.paced_s
        result.nbytes["peak resident"] = read_memory().peak_rss_bytes
    return on_rank_zeros_clock(result, context.clock_offset_s) if context.clock_offset_s else result


def _train_phase(phase: RankPhase) -> None:
    """Do the epochs of a phase that are left, and release its layers."""
    session, rank_job, result = phase.session, phase.rank_job, phase.result
    epochs = phase.phase.epochs[max(0, rank_job.start_epoch - phase.phase.epochs.start) :]
    if not epochs:
        return
    phase.load(epochs.start)
    if epochs.start == rank_job.start_epoch and rank_job.state and phase.optimizer is not None:
        num_steps = epochs.start * len(phase.phase.steps(epochs.start)) + rank_job.start_step
        state = State.load(rank_job.state, phase.optimizer.named_tensors())
        phase.optimizer.load_named_tensors(state.tensors, num_steps)
    for epoch in epochs:
        steps = phase.phase.steps(epoch)
        begin = rank_job.start_step if epoch == rank_job.start_epoch else 0
        log = EpochLog(phase, epoch, begin)
        with phase.epoch(epoch, begin):
            if epoch == epochs.start:
                session.progress.phase(WAITING)
                session.barrier(phase.phase.program(steps[0].shape))
            session.progress.phase(IDLE if phase.optimizer is None else phase.label or f"epoch {epoch + 1}", epoch)
            result.steps += run_steps(phase, steps, epoch=epoch, begin=begin, note=log)
        if phase.is_writer and phase.optimizer is not None:
            save(rank_job.folder, epoch, phase.layers, phase.optimizer, keeps_former=phase.keeps_steps)
        if phase.optimizer is not None:
            session.progress.phase(WAITING)
        session.barrier()
        log.end()
    del log  # it knows the optimizer
    phase.release()


def _sweep(phase: RankPhase) -> None:
    """Run the steps of a sweep, some of them twice at the beginning as a warm-up."""
    session, steps = phase.session, phase.rank_job.sweep
    phase.load(0)
    session.barrier(phase.phase.program(steps[0].shape))
    run_steps(phase, steps[:WARM_UP_STEPS])
    session.pacer.reset()
    if phase.optimizer is not None:
        phase.optimizer.set_num_steps(0)  # the schedule of learning rates has no steps for a warm-up
    phase.result.steps = run_steps(phase, steps)


def run_steps(
    phase: RankPhase,
    steps: Sequence[PlannedStep],
    *,
    epoch: int = 0,
    begin: int = 0,
    note: Callable[[StepTrace], None] | None = None,
    program: Callable[[StepShape], Program] | None = None,
) -> list[StepTrace]:
    """Run an epoch's steps from `begin` on and return them; a rank without a share returns at once.

    note: is called after every step that this rank has completed.  program: of a step without a loss, instead of the phase's.
    """
    session = phase.session
    if phase.optimizer is None:
        return []
    traces = []
    for number, planned in list(enumerate(steps))[begin:]:
        done = session.run((program or phase.phase.program)(planned.shape), phase.handlers(epoch, planned))
        trace = trace_of(session, done, epoch, number, len(steps), planned.shape.samples, loss_of(session, done, epoch, number))
        session.progress.step(trace, len(steps), cached=phase.phase.cached, trains=program is None)
        traces.append(trace)
        if note is not None:
            note(trace)
    return traces
