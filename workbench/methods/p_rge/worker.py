"""One rank's part of a run: this is what an engine is asked to call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError
from workbench.core.program import Program
from workbench.core.schedule import SEND, STEP
from workbench.methods.common.layers import layers_seconds
from workbench.methods.common.reporting import DONE, IDLE, LOADING, WAITING
from workbench.methods.common.session import RankSession, trace_of
from workbench.methods.p_rge.compute import StageCompute
from workbench.methods.p_rge.handlers import QueryHandlers
from workbench.methods.p_rge.layout import QueryStep, samples_of, shape_of
from workbench.methods.p_rge.prices import step_program
from workbench.methods.p_rge.session import Logged, RankJob, RankPart
from workbench.models.loading import import_family
from workbench.models.zeroth_order import StepLog
from workbench.planners.query_costs import Passing
from workbench.runtime.commands import End, StepDone
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls, serve_device
from workbench.runtime.executor import Execution
from workbench.runtime.failures import tells_of_peer
from workbench.runtime.memory import MemoryBudget, read_memory
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group
from workbench.tasks.prompts import PromptBatch, collate_prompts

TRAINING = "training"


def run_rank(context: RankContext, rank_job: RankJob) -> RankPart:
    """Do this rank's part of a job, as one of all ranks of a run, which ends when a device dies."""
    import_family(rank_job.job.model)
    with (
        MemoryBudget(context.device.name, context.device.memory_bytes) as budget,
        group(context, rank_job.timeout_s) as process_group,
        RankSession(context, rank_job, process_group, budget) as session,
    ):
        index = rank_job.plan.stage_of(session.rank)
        session.progress.phase(LOADING)
        compute = None if index is None else ready_compute(rank_job, index, None)
        session.progress.phase(WAITING)
        training = Training(session, rank_job, compute, wants_pause=context.should_stop, told=lambda log, _: context.publish(Logged(log)))
        session.barrier(training.program(rank_job.first_step))
        part = training.steps()
        if part.error:
            raise DeviceLostError(f"Step {rank_job.first_step + len(part.records) + 1} was under way.", part.error, "Run with --resume.")
        session.progress.phase(WAITING)
        session.barrier()
        session.progress.phase(DONE)
        return part


def serve_rank(context: RankContext, setup: tuple[str, str]) -> None:
    """Do one job after the other as a coordinator says.  setup: the model, and the address of the coordinator's commands."""
    model, address = setup
    import_family(model)
    with MemoryBudget(context.device.name, context.device.memory_bytes) as budget:
        serve_device(context, address, QueryWorker(budget, context.dilation))


class QueryWorker:
    """A runtime.device_server.Worker: keeps its layers from one job to the next."""

    def __init__(self, budget: MemoryBudget, dilation: float) -> None:
        self._budget, self._dilation = budget, dilation
        self._compute: StageCompute | None = None
        self._job: RankJob | None = None
        self._place = 0

    def train(self, context: RankContext, process_group: dist.ProcessGroup, job: RankJob, controls: Controls) -> tuple[End, RankPart]:
        """Do the steps of a job (see Worker)."""
        with RankSession(context, job, process_group, self._budget) as session:
            controls.watch(session.executor, session.pacer if session.slows_down else None)
            session.progress.phase(LOADING)
            self.prepare(job, session.rank)
            session.progress.phase(WAITING)

            def told(record: StepLog, busy_s: float) -> None:
                context.publish(StepDone(record.step, busy_s, record))

            training = Training(session, job, self._compute, wants_pause=controls.wants_pause, told=told)
            session.barrier(training.program(job.first_step))
            part = training.steps()
            return part.end, part

    def prepare(self, job: RankJob, place: int) -> None:
        """Load a member's layers, and make the steps of the log."""
        index = job.plan.stage_of(place)
        assert index is not None, "only members of the plan are told to train"
        self._job, self._place = job, place
        self._compute = ready_compute(job, index, self._compute)

    def slowness(self, factor: float, detail: None) -> float | None:
        """Return how many times longer than by its profile this device takes for one query, on the layers that it has."""
        job, compute = self._job, self._compute
        if job is None or compute is None:
            return None
        passing, batch = Passing(1, "both"), batch_of(job, job.change.step)
        shape = shape_of(job.train, job.job.seed, job.change, job.change.step, width=job.packing_width)
        incoming = None
        if not compute.model.is_first:
            incoming = torch.zeros(2 * shape.rows, shape.tokens, compute.model.backbone.hidden_size, dtype=compute.model.dtype)
        layers = job.profile.layers[self._place][compute.start : compute.stop]
        expected_s = layers_seconds(layers, "F", 2 * len(batch), shape.length) + layers_seconds(layers, STEP, 1, 1)
        if not expected_s:
            return 1.0
        pacer = Pacer(factor, dilation=self._dilation)
        paced = pacer.run(lambda: compute.forward(job, passing, incoming, batch, job.change.step, [0]), expected_s)
        return (paced.end_s - paced.start_s - paced.late_s) / (self._dilation * expected_s)


def ready_compute(rank_job: RankJob, index: int, former: StageCompute | None) -> StageCompute:
    """Return a stage's layers with all steps of the job's log made; those that are there already, if they will do."""
    stage = rank_job.plan.stages[index]
    compute = former
    if compute is None or not compute.suits(rank_job, stage.start, stage.stop):
        del former, compute
        compute = StageCompute(rank_job, stage.start, stage.stop)
    compute.catch_up(rank_job.records)
    return compute


class Training:
    """The steps of one RankJob on one rank.

    wants_pause: whether to end after the step under way, together with the others.  told: takes each step that is made, whose record is
    enough to make it anew, and the seconds spent computing (0: unknown).
    """

    def __init__(
        self,
        session: RankSession[RankJob],
        rank_job: RankJob,
        compute: StageCompute | None,
        *,
        wants_pause: Callable[[], bool],
        told: Callable[[StepLog, float], None],
    ) -> None:
        self._session, self._job, self._compute, self._wants_pause, self._tell = session, rank_job, compute, wants_pause, told
        self._part = RankPart(rank=session.rank, end="finished")
        self._sent = 0
        self._step = QueryStep.build(rank_job.plan, rank_job.passings, session.context.world_size)
        self._stage = rank_job.plan.stage_of(session.rank)
        self._loss_share = 1 / len(rank_job.plan.stages[-1].shares)  # of those whose losses progress adds up; all ranks know all losses

    def steps(self) -> RankPart:
        """Do them until the last, a pause, or the loss of a device; an idle rank returns at once."""
        session, job, part = self._session, self._job, self._part
        if self._compute is None or self._stage is None:
            session.progress.phase(IDLE)
            return part
        for step in range(job.first_step, job.last_step):
            epoch = step // job.steps_per_epoch
            if step == job.first_step or step % job.steps_per_epoch == 0:
                session.progress.phase(TRAINING, epoch)
            batch = batch_of(job, step)
            handlers = QueryHandlers(session.rank, job, self._step, self._compute, batch, step, wants_pause=self._wants_pause)
            try:
                done = session.run(self.program(step), handlers.table())
            except (DeviceLostError, RuntimeError) as error:
                if not tells_of_peer(error):
                    raise
                part.end, part.error = "lost", str(error).splitlines()[0]
                part.losses = handlers.losses if handlers.record is None else {}
                if handlers.record is not None:
                    self._told(handlers.record, 0.0)
                break
            assert handlers.record is not None
            self._told(handlers.record, sum(span.end_s - span.start_s - span.late_s for span in done.spans if not span.op.is_communication))
            self._note(step, epoch, done, len(batch), handlers)
            if handlers.pauses and step + 1 < job.last_step:
                part.end = "paused"
                break
        part.late_s, part.paced_s = session.pacer.late_s, session.pacer.paced_s
        part.nbytes = {"peak resident": read_memory().peak_rss_bytes, "sent": self._sent}
        return part

    def program(self, step: int) -> Program:
        """Return the program of a step, the same on every rank."""
        job = self._job
        shape = shape_of(job.train, job.job.seed, job.change, step, width=job.packing_width)
        return step_program(job.profile, job.cluster, self._step, shape, job.crossing)

    def _told(self, record: StepLog, busy_s: float) -> None:
        self._part.records.append(record)
        self._tell(record, busy_s)

    def _note(self, step: int, epoch: int, done: Execution, samples: int, handlers: QueryHandlers) -> None:
        session, per_epoch = self._session, self._job.steps_per_epoch
        self._sent += sum(span.nbytes for span in done.spans if span.op.kind == SEND)
        loss = self._loss_share * sum(handlers.losses.values()) / len(handlers.losses)
        trace = trace_of(session, done, epoch, step - epoch * per_epoch, per_epoch, samples, loss)
        session.progress.step(trace, min(per_epoch, self._job.last_step - epoch * per_epoch), cached=False)
        self._part.steps.append(trace)


def batch_of(rank_job: RankJob, step: int) -> PromptBatch:
    """Return the batch of a step."""
    return collate_prompts(rank_job.train, samples_of(len(rank_job.train), rank_job.job.seed, rank_job.change, step))
