"""One rank's part of a run; an engine calls this."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError
from workbench.core.schedule import SEND, STEP
from workbench.methods.common.scaling import layers_seconds
from workbench.methods.common.session import DONE, IDLE, LOADING, WAITING, RankSession, StepTrace, trace_of
from workbench.methods.p_rge.compute import Logged, QueryHandlers, RankJob, RankPart, StageCompute
from workbench.methods.training.worker import DeviceWorker, note_pace_and_memory, together
from workbench.models.zeroth_order import StepLog
from workbench.planners.query_costs import Passing
from workbench.runtime.commands import End, StepDone
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls, serve_device
from workbench.runtime.jobs import tells_of_peer
from workbench.runtime.pacing import Pacer

TRAINING = "training"

Told = Callable[[StepLog, float], None]
"""Called with each finished step, whose record is enough to repeat it, and the seconds spent computing (0: unknown)."""


def run_rank(context: RankContext, rank_job: RankJob) -> RankPart:
    """Do this rank's part of a job as one of all ranks of a run, which ends if a device is lost."""

    def work(session: RankSession[RankJob]) -> RankPart:
        worker = QueryWorker(context.dilation)
        part = worker.steps(session, wants_pause=context.should_stop, told=lambda log, _: context.publish(Logged(log)))
        if part.error:
            raise DeviceLostError(f"Step {rank_job.first_step + len(part.records) + 1} was under way.", part.error, "Run with --resume.")
        session.progress.phase(WAITING)
        session.barrier()
        session.progress.phase(DONE)
        return part

    return together(context, rank_job, work)


def serve_rank(context: RankContext, address: str) -> None:
    """Do the jobs that the coordinator at `address` commands."""
    serve_device(context, address, QueryWorker(context.dilation))


class QueryWorker(DeviceWorker[RankJob]):
    """A DeviceWorker that keeps its layers from one job to the next."""

    def __init__(self, dilation: float) -> None:
        super().__init__(dilation)
        self._compute: StageCompute | None = None
        self._job: RankJob | None = None
        self._place = 0

    def train(self, context: RankContext, process_group: dist.ProcessGroup, job: RankJob, controls: Controls) -> tuple[End, RankPart]:
        """Do the steps of a job (see Worker)."""

        def told(record: StepLog, busy_s: float) -> None:
            context.publish(StepDone(record.step, busy_s, record))

        with self.session(context, process_group, job, controls) as session:
            part = self.steps(session, wants_pause=controls.wants_pause, told=told)
            return part.end, part

    def prepare(self, job: RankJob, place: int) -> None:
        """Load a member's layers, unless they are loaded, and apply the steps of the log; an idle rank has none."""
        index = job.plan.stage_of(place)
        self._job, self._place = job, place
        if index is None:
            return
        stage = job.plan.stages[index]
        if self._compute is None or not self._compute.suits(job, stage.start, stage.stop):
            self._compute = None  # free its memory before the others are loaded
            self._compute = StageCompute(job, stage.start, stage.stop)
        self._compute.catch_up(job.records)

    def slowness(self, factor: float, detail: None) -> float | None:
        """Return the time of one query on this device's layers relative to its profile."""
        job, compute = self._job, self._compute
        if job is None or compute is None:
            return None
        step = job.change.step
        batch, shape = job.batch(step), job.shape(step)
        incoming = None
        if not compute.model.is_first:
            incoming = torch.zeros(2 * shape.rows, shape.tokens, compute.model.backbone.hidden_size, dtype=compute.model.dtype)
        layers = job.profile.layers[self._place][compute.start : compute.stop]
        expected_s = layers_seconds(layers, "F", 2 * len(batch), shape.length) + layers_seconds(layers, STEP, 1, 1)
        if not expected_s:
            return 1.0
        pacer = Pacer(factor, dilation=self._dilation)
        paced = pacer.run(lambda: compute.forward(job, Passing(1, "both"), incoming, batch, step, [0]), expected_s)
        return (paced.end_s - paced.start_s - paced.late_s) / (self._dilation * expected_s)

    def steps(self, session: RankSession[RankJob], *, wants_pause: Callable[[], bool], told: Told) -> RankPart:
        """Do a job's steps until the last, a pause, or the loss of a device; an idle rank returns at once.

        wants_pause: whether to end after the current step, together with the others.
        """
        job, part = session.rank_job, RankPart(rank=session.rank)
        session.progress.phase(LOADING)
        self.prepare(job, session.rank)
        session.progress.phase(WAITING)
        step_of_all, compute = job.query_step(), self._compute
        session.barrier(job.program(step_of_all, job.first_step))
        if compute is None:
            session.progress.phase(IDLE)
            return part

        def made(record: StepLog, busy_s: float) -> None:
            part.records.append(record)
            told(record, busy_s)

        sent, per_epoch = 0, job.prepared.steps_per_epoch
        for number in range(job.first_step, job.last_step):
            epoch, at = divmod(number, per_epoch)
            if number == job.first_step or at == 0:
                session.progress.phase(TRAINING, epoch)
            batch = job.batch(number)
            handlers = QueryHandlers(
                rank=session.rank,
                rank_job=job,
                query_step=step_of_all,
                compute=compute,
                batch=batch,
                step=number,
                wants_pause=wants_pause,
            )
            begin_s = session.context.now_s()
            try:
                done = session.run(job.program(step_of_all, number), handlers.table())
            except (DeviceLostError, RuntimeError) as error:
                if not tells_of_peer(error):
                    raise
                part.end, part.error = "lost", str(error).splitlines()[0]
                if handlers.record is None:
                    part.losses = handlers.losses
                else:
                    part.steps.append(StepTrace(epoch, at, len(batch), begin_s, session.context.now_s(), handlers.loss))
                    made(handlers.record, 0.0)
                break
            assert handlers.record is not None
            trace = trace_of(session, done, epoch, at, per_epoch, len(batch), handlers.loss)
            made(handlers.record, trace.busy_s)
            sent += sum(span.nbytes for span in done.spans if span.op.kind == SEND)
            session.progress.step(trace, min(per_epoch, job.last_step - epoch * per_epoch), cached=False)
            part.steps.append(trace)
            if handlers.pauses and number + 1 < job.last_step:
                part.end = "paused"
                break
        note_pace_and_memory(session, part)
        part.nbytes["sent"] = sent
        return part
