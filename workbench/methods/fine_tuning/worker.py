"""One rank's whole run: every epoch through its stage, forward and back. This is what an engine is asked to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.folder import steps_path
from workbench.methods.common.reporting import DONE, IDLE, LOADING, WAITING
from workbench.methods.common.session import RankResult, RankSession, StepTrace, on_rank_zeros_clock, trace_of
from workbench.methods.common.steps import PAD_TO_MULTIPLE, PlannedStep
from workbench.methods.common.stepwise import EpochLog
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.folder import moments_path, restore_stage, save_stage
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers
from workbench.methods.fine_tuning.layout import planned_epoch
from workbench.methods.fine_tuning.session import RankJob
from workbench.models.loading import import_family, load_stage
from workbench.models.lora import require_peft
from workbench.models.techniques import TechniqueStage
from workbench.runtime.context import RankContext
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule
from workbench.runtime.memory import MemoryBudget, read_memory, release_free_memory
from workbench.runtime.process_group import group
from workbench.runtime.work_folder import full_disk_told
from workbench.schedules.pieces import StepLayout
from workbench.tasks.tokenize import collate

JOURNAL_BYTES = 32_000_000
"""A stage with more parameters and moments than this is kept after every epoch only: to copy them after every step would cost more
time than a crash of the program loses."""


def run_rank(context: RankContext, rank_job: RankJob) -> RankResult:
    """Do this rank's part of the job.  Checkpoints go to rank_job.folder, epoch by epoch."""
    prepare_imports(rank_job)
    with (
        full_disk_told(rank_job.folder),
        group(context, rank_job.timeout_s) as process_group,
        MemoryBudget(context.device.name, context.device.memory_bytes) as budget,
        RankSession(context, rank_job, process_group, budget) as session,
    ):
        result = _Run(session, rank_job).all()
    return on_rank_zeros_clock(result, context.clock_offset_s) if context.clock_offset_s else result


def prepare_imports(rank_job: RankJob) -> None:
    """Import what the model needs, so that a memory budget that begins afterwards counts the model alone."""
    import_family(rank_job.job.model)
    if rank_job.config.technique == "lora":
        require_peft()


class _Run:
    """The state of one rank between its epochs."""

    def __init__(self, session: RankSession, rank_job: RankJob) -> None:
        self._session, self._rank_job = session, rank_job
        self._result = RankResult(rank=session.rank)
        self._index = rank_job.plan.stage_of(session.rank)
        self._is_writer = self._index is not None and session.rank == rank_job.plan.stages[self._index].ranks[0]

    def all(self) -> RankResult:
        """Do every epoch that is left."""
        session, rank_job = self._session, self._rank_job
        start, epochs = rank_job.start_epoch, rank_job.job.epochs
        for epoch in range(start):
            path = steps_path(rank_job.folder, epoch, session.rank)
            self._result.steps += from_json(path.read_bytes(), list[StepTrace], source=f"'{path}'")
        if start < epochs:
            steps_per_epoch = len(self._steps(start))
            session.progress.phase(LOADING)
            compute, optimizer = build_stage(rank_job, self._index, steps_per_epoch)
            if start and optimizer is not None and self._index is not None:
                restore_stage(rank_job.folder, start - 1, self._index, optimizer, start * steps_per_epoch)
            self._result.nbytes["private memory with the model"] = read_memory().anonymous_bytes
            session.progress.phase(WAITING)
            session.barrier(rank_job.programs().step(self._steps(start)[0].shape))
            for epoch in range(start, epochs):
                self._epoch(epoch, compute, optimizer)
            release_free_memory()
        session.progress.phase(DONE)
        self._result.overrun_share = session.pacer.overrun_share
        self._result.late_s, self._result.paced_s = session.pacer.late_s, session.pacer.paced_s
        self._result.nbytes["peak resident"] = read_memory().peak_rss_bytes
        return self._result

    def _steps(self, epoch: int) -> tuple[PlannedStep, ...]:
        rank_job = self._rank_job
        return planned_epoch(rank_job.split.lengths, rank_job.plan, seed=rank_job.job.seed, epoch=epoch)

    def _epoch(self, epoch: int, compute: StageCompute | None, optimizer: FlatAdamW | None) -> None:
        session, rank_job = self._session, self._rank_job
        steps = self._steps(epoch)
        log = EpochLog(
            session,
            epoch,
            optimizer,
            stage=-1 if self._index is None else self._index,
            writes_journal=self._is_writer and optimizer is not None and optimizer.state_bytes <= JOURNAL_BYTES,
            num_steps=len(steps),
        )
        begin = 0
        if rank_job.resumes and epoch == rank_job.start_epoch:
            begin = log.agree(usable=True)
            self._result.resumed_at = (epoch, begin)
        log.begin()
        session.progress.phase(IDLE if self._index is None else f"epoch {epoch + 1}", epoch)
        start_s = self._session.context.now_s()
        traces = log.done + train_epoch(session, rank_job, steps, compute, optimizer, epoch=epoch, begin=begin, note=log)
        self._result.phases_s[f"epoch {epoch + 1}"] = (start_s, self._session.context.now_s())
        self._result.steps += traces
        if self._is_writer and optimizer is not None and self._index is not None:
            save_stage(rank_job.folder, epoch, self._index, optimizer)
        write_text(steps_path(rank_job.folder, epoch, session.rank), to_json(traces))
        if log.takes_part:
            session.progress.phase(WAITING)
        session.barrier()
        log.end()
        if self._is_writer and self._index is not None:
            moments_path(rank_job.folder, epoch - 1, self._index).unlink(missing_ok=True)


def build_stage(rank_job: RankJob, index: int | None, steps_per_epoch: int) -> tuple[StageCompute | None, FlatAdamW | None]:
    """Return a stage's layers and their optimizer, (None, None) for a rank without a stage."""
    if index is None:
        return None, None
    job, stage = rank_job.job, rank_job.plan.stages[index]
    model = TechniqueStage(load_stage(job.model, stage.start, stage.stop), rank_job.config)
    schedule = LinearSchedule(peak=job.learning_rate, num_steps=job.epochs * steps_per_epoch, warmup_fraction=job.warmup_fraction)
    return StageCompute(model), FlatAdamW(model, learning_rate=schedule, weight_decay=job.weight_decay)


def train_epoch(
    session: RankSession,
    rank_job: RankJob,
    steps: Sequence[PlannedStep],
    compute: StageCompute | None,
    optimizer: FlatAdamW | None,
    *,
    epoch: int = 0,
    begin: int = 0,
    note: Callable[[StepTrace], None] | None = None,
) -> list[StepTrace]:
    """Train one epoch on this rank and return its steps; a rank that the plan leaves idle returns at once.

    begin: the first step to do.  note: is called after every step that this rank has completed.
    """
    index = rank_job.plan.stage_of(session.rank)
    if index is None or compute is None or optimizer is None:
        return []
    stage, programs = rank_job.plan.stages[index], rank_job.programs()
    traces = []
    for number, planned in list(enumerate(steps))[begin:]:
        handlers = BackpropagationHandlers(
            rank=session.rank,
            layout=StepLayout(plan=rank_job.plan, sizes=planned.shape.sizes, lengths=planned.shape.lengths),
            shared=rank_job.shared,
            batches=[collate(rank_job.split, micro, PAD_TO_MULTIPLE) for micro in planned.samples],
            compute=compute,
            optimizer=optimizer,
            epoch=epoch,
            layers=rank_job.layers[stage.start : stage.stop],
        )
        done = session.run(programs.step(planned.shape), handlers.table())
        trace = trace_of(session, done, epoch, number, len(steps), planned.shape.samples)
        session.progress.step(trace, len(steps), cached=False)
        traces.append(trace)
        if note is not None:
            note(trace)
    return traces
