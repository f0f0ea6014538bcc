"""A device's part of a run: every epoch of every phase, or the steps of a sweep.

DeviceWorker is the device side of every method that trains; TrainingWorker is for methods with phases and epochs.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Generic, Self

import torch
import torch.distributed as dist

from workbench.core.cluster import Device
from workbench.core.errors import DeviceLostError
from workbench.core.heat import Heat
from workbench.core.program import Program
from workbench.methods.common.rank_results import RankResult, StepTrace, on_rank_zeros_clock
from workbench.methods.common.records import IN_USE, WARM_UP_STEPS
from workbench.methods.common.session import DONE, IDLE, LOADING, WAITING, DeviceSession, RankSession, transfers_of
from workbench.methods.common.session import AJob as ASessionJob
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.interrupted import EpochLog
from workbench.methods.training.phases import AJob, Loaded
from workbench.methods.training.rank_phases import RankPhase, StepPhase
from workbench.methods.training.rank_snapshots import KeptInMemory, RankSnapshots
from workbench.runtime.commands import End, StepDone
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls, Worker
from workbench.runtime.executor import Execution
from workbench.runtime.jobs import tells_of_peer
from workbench.runtime.memory import MemoryBudget, read_memory, release_free_memory
from workbench.runtime.pacing import Pacer
from workbench.runtime.snapshot import Position
from workbench.runtime.work_folder import reporting_full_disk

PhasesOn = Callable[[RankSession[AJob], RankResult], Sequence[RankPhase[AJob]]]


class Paused(Exception):
    """The devices pause between two steps."""


class DeviceWorker(Worker, Generic[ASessionJob]):
    """A runtime.device_server.Worker: runs a job's steps together with the other devices."""

    def __init__(self, dilation: float) -> None:
        """dilation: see RankContext."""
        self._open, self._dilation = ExitStack(), dilation
        self._budget: MemoryBudget | None = None
        self._heat: Heat | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.__exit__(*exc)  # the budget reports the refused allocation

    def budget(self, device: Device) -> MemoryBudget:
        """Return this device's memory budget, which starts at the first call, after the common imports."""
        if self._budget is None:
            self._budget = self._open.enter_context(MemoryBudget(device.name, device.memory_bytes))
            gc.freeze()  # of the libraries nothing is ever freed: a collection that looks at them takes 0.2 s
        return self._budget

    def heat(self, context: RankContext) -> Heat | None:
        """Return this emulated device's heat, which lasts over all jobs; None if it keeps its speed."""
        if self._heat is None and context.device.sustained and context.fidelity != "real":
            self._heat = Heat(context.device.sustained)
        return self._heat

    def relative_s(self, factor: float, work: Callable[[], object], expected_s: float, rounds: int = 1) -> float:
        """Return the seconds of some work over those that a cold device of this kind takes.  Delays by a busy host do
        not count.  factor: see Pacer.
        """
        pacer = Pacer(factor, dilation=self._dilation, heat=self._heat)
        paced = [pacer.run(work, expected_s) for _ in range(rounds)]
        taken_s = paced[-1].end_s - paced[0].start_s - pacer.late_s
        return taken_s / (self._dilation * rounds * expected_s)

    @contextmanager
    def session(
        self, context: RankContext, process_group: dist.ProcessGroup, job: ASessionJob, controls: Controls
    ) -> Iterator[RankSession[ASessionJob]]:
        """Yield an open session of a job, reachable by the coordinator (see Worker.train)."""
        job.prepare_imports(job.cluster.devices[context.rank])
        with (
            reporting_full_disk(job.folder),
            RankSession(context, job, process_group, self.budget(context.device), self.heat(context)) as session,
        ):
            controls.watch(session.executor, session.pacer)
            yield session


class StepWorker(DeviceWorker[ASessionJob]):
    """A DeviceWorker of a job's steps, which all devices do until the last, a pause, or the loss of a device.

    result_type: type of a job's result.
    """

    result_type: ClassVar[type[RankResult]] = RankResult

    def __init__(self, dilation: float) -> None:
        super().__init__(dilation)
        self._reference_s = min(dilation * self.relative_s(0.0, _reference_work(), 1.0) for _ in range(5))

    def slowness(self, factor: float, detail: None) -> float | None:
        """Return the duration of a fixed computation relative to its duration when the device began."""
        return self.relative_s(factor, _reference_work(), self._reference_s)

    def train(
        self, context: RankContext, process_group: dist.ProcessGroup, job: ASessionJob, controls: Controls
    ) -> tuple[End, RankResult]:
        """Run a job (see Worker)."""
        result = self.result_type(rank=context.rank)
        end: End = "finished"
        try:
            with self.session(context, process_group, job, controls) as session:
                session.progress.phase(LOADING)
                try:
                    self.work(session, result, controls)
                    session.progress.phase(DONE)
                finally:
                    note_pace_and_memory(session, result)
        except Paused:
            end = "paused"
        except (DeviceLostError, RuntimeError) as error:
            if not tells_of_peer(error):
                raise
            error.__traceback__ = None  # it would keep the layers in memory
            end = "lost"
        return end, on_rank_zeros_clock(result, context.clock_offset_s) if context.clock_offset_s else result

    @abstractmethod
    def work(self, session: RankSession[ASessionJob], result: RankResult, controls: Controls) -> None:
        """Run the steps of a job and record them in the result.  Raises Paused if all devices pause, DeviceLostError if
        one is lost.
        """


class TrainingWorker(StepWorker[AJob]):
    """A StepWorker of phases.

    phases_on: builds a job's phases on this rank; they record all other work in the result.
    """

    def __init__(self, phases_on: PhasesOn[AJob], dilation: float) -> None:
        super().__init__(dilation)
        self._phases_on, self._kept, self._loaded = phases_on, KeptInMemory(), list[Loaded]()

    def work(self, session: RankSession[AJob], result: RankResult, controls: Controls) -> None:
        """Run all phases of a job (see StepWorker)."""
        try:
            phases = self._phases_on(session, result)
            if session.rank_job.sweep:
                phases[0].load(0)
                sweep(phases[0])
                return
            before = 0
            for phase in phases:
                self._train(phase, before, controls)
                before += sum(phase.phase.counts)
        finally:
            result.snapshots = self._kept.names()

    def _train(self, phase: RankPhase, before: int, controls: Controls) -> None:
        """Do the remaining epochs of a phase, and release its layers.  before: steps so far."""
        rank_job = phase.rank_job
        epochs = phase.phase.epochs[max(0, rank_job.start_epoch - phase.phase.epochs.start) :]
        if not epochs:
            return
        loaded = self._loaded.pop() if self._loaded else None
        if loaded is None or not (rank_job.homes or rank_job.state) or not phase.take(loaded):
            del loaded
            release_free_memory()  # also that of a step that was given up
            phase.load(epochs.start)
        is_begun = epochs.start == rank_job.start_epoch
        begins_at = Position(epochs.start, rank_job.start_step if is_begun else 0)
        snapshots = RankSnapshots(phase, begins_at, self._kept)
        if is_begun:
            snapshots.restore(epochs.start * len(phase.phase.steps(epochs.start)) + rank_job.start_step)
        try:
            with snapshots:
                _do_epochs(phase, epochs, snapshots, before, controls)
        except (Paused, DeviceLostError, RuntimeError):
            self._loaded[:] = filter(None, [phase.hand_on()])
            raise
        finally:
            phase.result.paces.append(phase.session.pacer.lap())
        del snapshots  # it references the optimizer
        phase.release()

    def prepare(self, job: AJob, place: int) -> None:
        """Import the libraries of a job, and load its layers."""
        job.prepare_imports(job.cluster.devices[place])
        self.budget(job.cluster.devices[place])
        self._loaded[:] = filter(None, [job.loaded(place)])


def _reference_work() -> Callable[[], object]:
    """Return some matrix products."""
    matrix = torch.ones(256, 256)
    return lambda: [matrix @ matrix for _ in range(8)]


def _do_epochs(phase: RankPhase, epochs: range, snapshots: RankSnapshots, before: int, controls: Controls) -> None:
    """Do epochs of a phase whose layers are loaded.  before: steps before the phase.  Raises Paused if all pause."""
    session, rank_job, result = phase.session, phase.rank_job, phase.result
    for epoch in epochs:
        steps = phase.phase.steps(epoch)
        begin = rank_job.start_step if epoch == rank_job.start_epoch else 0
        first = before + (epoch - phase.phase.epochs.start) * len(steps)
        note = partial(_note, session.context.publish, EpochLog(phase, epoch, begin), snapshots, first, len(steps) - 1)
        with phase.epoch(epoch, begin):
            if epoch == epochs.start:
                session.progress.phase(WAITING)
                session.barrier(phase.phase.program(phase.shape(steps[0])))
            session.progress.phase(IDLE if phase.optimizer is None else phase.label or f"epoch {epoch + 1}", epoch)

            def begins(step: int, first: int = first) -> None:
                if first + step >= rank_job.until or not controls.begins(first + step):
                    session.any_rank(True)  # all have finished the step before
                    raise Paused

            try:
                result.steps += run_steps(phase, steps, epoch=epoch, begin=begin, begins=begins, note=note)
            except Paused:
                snapshots.pause()
                raise
        _note_memory(phase)
        snapshots.end_epoch(epoch)
        drains = epoch + 1 not in epochs or phase.phase.steps(epoch + 1)[0].shape.continues is None
        if drains and phase.optimizer is not None:
            session.progress.phase(WAITING)
        if drains and session.any_rank(
            False
        ):  # those that train pause in mid-epoch; a rank without a share learns it here
            raise Paused


def note_pace_and_memory(session: DeviceSession, result: RankResult) -> None:
    """Record in a result how well the host kept pace since it was last recorded, and the peak memory."""
    result.paces.append(session.pacer.lap())
    result.nbytes["peak resident"] = read_memory().peak_rss_bytes


def _note_memory(phase: RankPhase) -> None:
    """Record the memory that counts against the device's budget, if the system reports it."""
    if phase.takes_part and (used := phase.session.progress.used_bytes) is not None:
        name, nbytes = IN_USE[phase.phase.cached], phase.result.nbytes
        nbytes[name] = max(used, nbytes.get(name, 0))


def _note(
    publish: Callable[[StepDone], None],
    log: EpochLog,
    snapshots: RankSnapshots,
    first: int,
    last: int,
    trace: StepTrace,
) -> None:
    """Log a finished step of an epoch, store its state and then report it, so that no step is reported that is lost.

    first: the number of the epoch's first step.
    last: the epoch's last step.
    """
    log.append(trace)
    report = partial(publish, StepDone(first + trace.step, trace.busy_s, trace.loss, trace.transfers))
    if trace.step < last:
        snapshots.stepped(Position(trace.epoch, trace.step + 1), report)
    else:
        snapshots.wait()  # steps are reported in order
        report()


def sweep(phase: StepPhase) -> None:
    """Run the steps of a sweep, whose layers are loaded; the first ones run twice as a warm-up."""
    session, epoch = phase.session, phase.phase.steps(0)
    steps = [epoch[number] for number in phase.rank_job.sweep]
    session.barrier(phase.phase.program(steps[0].shape))
    run_steps(phase, steps[:WARM_UP_STEPS])
    session.pacer.reset()
    phase.restart()
    phase.result.steps = run_steps(phase, steps)


def run_steps(
    phase: StepPhase,
    steps: Sequence[PlannedStep],
    *,
    epoch: int = 0,
    begin: int = 0,
    begins: Callable[[int], None] | None = None,
    note: Callable[[StepTrace], None] | None = None,
    program: Callable[[StepShape], Program] | None = None,
) -> list[StepTrace]:
    """Run an epoch's steps from `begin` on and return them; a rank without a share returns at once.

    begins: called before every step.  note: called after every step that this rank has completed.
    program: the program of a step without a loss, instead of the phase's.
    """
    session = phase.session
    if not phase.takes_part:
        return []
    traces = []
    for number in range(begin, len(steps)):
        planned = steps[number]
        if begins is not None:
            begins(number)
        shape = phase.shape(planned)
        done = session.run((program or phase.phase.program)(shape), phase.handlers(epoch, planned))
        trace = _trace_of(session, done, epoch, number, len(steps), shape, phase.loss(done, epoch, number))
        session.progress.step(trace, len(steps), done.spans, cached=phase.phase.cached, trains=program is None)
        traces.append(trace)
        if note is not None:
            note(trace)
    return traces


def _trace_of(
    session: RankSession, done: Execution, epoch: int, step: int, num_steps: int, shape: StepShape, loss: float
) -> StepTrace:
    """Return a step's record; spans are included only for some steps around the one that a report shows."""
    compute = [span for span in done.spans if not span.op.is_communication]
    keep = abs(step - session.rank_job.traced_step(epoch, num_steps)) <= session.rank_job.trace_steps // 2
    return StepTrace(
        epoch=epoch,
        step=step,
        samples=shape.samples,
        start_s=min((span.start_s for span in done.spans), default=0.0),
        end_s=done.ended_s,
        loss=loss,
        spans=tuple(done.spans) if keep else (),
        memory=tuple(done.memory) if keep else (),
        lowest_trained=shape.lowest_trained,
        busy_s=sum(span.end_s - span.start_s - span.late_s for span in compute),
        transfers=transfers_of(session.rank_job.cluster, done.spans, session.context.clock_offset_s),
    )
