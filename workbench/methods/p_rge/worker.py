"""The device side of a P-RGE run: its layers with trainable values, its operations, and the loop of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.core.errors import DivergedError
from workbench.core.schedule import SEND, STEP, Op
from workbench.methods.common.rank_results import RankResult, StepTrace
from workbench.methods.common.session import IDLE, WAITING, RankSession
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.query_costs import Passing
from workbench.methods.p_rge.rank_job import PRGERankJob, QueryResult, QueryStep
from workbench.methods.p_rge.zeroth_order import (
    CausalModel,
    PrecisionWarning,
    Prge,
    StepLog,
    load_causal_model,
    make_log,
    replay,
)
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.rank_phases import StepPhase
from workbench.methods.training.worker import Paused, StepWorker, run_steps, sweep
from workbench.runtime.commands import StepDone
from workbench.runtime.device_server import Controls
from workbench.runtime.executor import Contents, Execution, Handler
from workbench.runtime.memory import release_free_memory
from workbench.tasks.prompts import PromptBatch


def load_model(prepared: PreparedJob, span: tuple[int, int] | None = None) -> CausalModel:
    """Return a job's model, or its layers [start, stop), frozen in the job's precision.  Raises the errors of
    load_causal_model.

    Weights with another dtype than the activations, see PRGEOptions, are dequantized layer by layer.
    """
    dtype = getattr(torch, prepared.activation_type)
    return load_causal_model(
        prepared.job.model, prepared.trainable, span=span, quantization=prepared.quantization, dtype=dtype
    )


class StageCompute:
    """Layers [start, stop) on this device, and the number of log steps applied to their trainable values."""

    def __init__(self, rank_job: PRGERankJob, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        # Also for a whole model: reading layer by layer needs no more memory during loading than afterwards.
        self.model = load_model(rank_job.prepared, (start, stop))
        self.num_steps = 0
        self._estimator: Prge | None = None
        release_free_memory()

    def suits(self, rank_job: PRGERankJob, start: int, stop: int) -> bool:
        """Return whether these are the layers of a job, and have not applied more steps than it."""
        return (self.start, self.stop) == (start, stop) and self.num_steps <= len(rank_job.records)

    def catch_up(self, records: Sequence[StepLog]) -> None:
        """Apply the steps of a log that are missing in theta."""
        self.num_steps += replay(self.model.trainables, records[self.num_steps :])

    def forward(
        self,
        rank_job: PRGERankJob,
        passing: Passing,
        incoming: Tensor | None,
        batch: PromptBatch,
        step: int,
        queries: Sequence[int],
    ) -> Tensor:
        """Return the hidden states (2n*E, t, d) of a group of n queries after these layers, pass after pass, or their
        losses (2n,).

        incoming: the previous stage's result, None for the first.
        """
        config = replace(rank_job.estimator, execution=passing.execution)
        if self._estimator is None or self._estimator.config != config:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrecisionWarning)  # the driver warns once
                self._estimator = Prge(self.model, config)
        estimator = self._estimator
        passes = None
        if incoming is not None:
            passes = list(incoming.chunk(passing.passes(len(queries))[0]))
        outputs = estimator.forward_stage(passes, batch, step, queries)
        return estimator.arranged(outputs, len(queries)) if self.model.is_last else torch.cat(outputs)


@dataclass(kw_only=True)
class QueryHandlers:
    """One step's operations on one rank.

    result: what the rank returns: its record of the step, or the losses that it knows if another device is lost before
    that.
    wants_pause: called when losses are sent; a flag after them informs the others, so that all stop after the same
    step.
    losses: the losses that this rank knows, by part.  pauses: whether a rank wants all to stop after this step.
    """

    rank: int
    rank_job: PRGERankJob
    query_step: QueryStep
    compute: StageCompute
    batch: PromptBatch
    step: int
    result: QueryResult
    wants_pause: Callable[[], bool]
    losses: dict[int, float] = field(default_factory=dict)
    pauses: bool = False

    def __post_init__(self) -> None:
        self.result.losses = self.losses

    @property
    def loss(self) -> float:
        """Return this rank's part of the loss of a completed step.  All ranks know all losses, so each reports a part,
        and the progress display adds them up.
        """
        loss = self.result.records[-1].loss
        assert loss is not None
        return loss / len(self.rank_job.plan.busy_ranks)

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        return {"F": self._forward, STEP: self._update}

    def _forward(self, op: Op, reads: Contents) -> Contents:
        queries = self.query_step.queries(op.part)
        incoming = next((content for value, content in zip(op.reads, reads, strict=True) if value.name == "act"), None)
        result = self.compute.forward(
            self.rank_job, self.query_step.passings[self.rank], incoming, self.batch, self.step, queries
        )
        if not self.compute.model.is_last:
            return (result,)
        self._know(op.part, result)
        return (torch.cat([result, torch.tensor([float(self.wants_pause())])]),)

    def _update(self, op: Op, reads: Contents) -> Contents:
        for value, content in zip(op.reads, reads, strict=True):
            if value.name == "loss":
                self._know(value.part, content[:-1])
                self.pauses = self.pauses or bool(content[-1])
        record = record_of(self.rank_job, self.step, self.losses)
        self.compute.model.trainables.apply(record)
        self.compute.num_steps += 1
        self.result.records.append(record)
        self.result.losses = {}  # if a device is lost before the next step begins here, nothing is known of that step
        return (None,)

    def _know(self, part: int, losses: Tensor) -> None:
        self.losses |= {part + index: loss for index, loss in enumerate(losses.tolist())}


def record_of(rank_job: PRGERankJob, step: int, losses: dict[int, float]) -> StepLog:
    """Return the record of a step from the losses of some queries, all parts of each (Algorithm 1, lines 10 to 14).

    Raises DivergedError for a loss that is not finite, ConfigError if these do not suffice for a step (see usable_of).
    """
    config = rank_job.estimator
    each = config.rule.query_parts
    queries = sorted({part // each for part in losses})
    parts = torch.tensor([losses[each * query + part] for query in queries for part in range(each)])
    if not bool(torch.isfinite(parts).all()):
        raise DivergedError(
            f"Training with learning_rate = {rank_job.job.peak_learning_rate:g} was asked for.",
            f"It diverged: a loss of step {step + 1} is {float(parts[~torch.isfinite(parts)][0])}.",
            "Lower learning_rate or epsilon.",
        )
    return make_log(config, step, parts.tolist(), queries)


def usable_of(rank_job: PRGERankJob, losses: dict[int, float]) -> dict[int, float]:
    """Return the losses of those queries of which all parts are known; none if they do not suffice for a step."""
    config = rank_job.estimator
    each = config.rule.query_parts
    queries = {part // each for part in losses}
    complete = [query for query in queries if all(each * query + part in losses for part in range(each))]
    results = {query: tuple(losses[each * query + part] for part in range(each)) for query in complete}
    if not config.slopes(results):
        return {}
    return {part: loss for part, loss in losses.items() if part // each in results}


class QueryPhase(StepPhase[PRGERankJob]):
    """P-RGE's only phase on one rank.  wants_pause: see QueryHandlers."""

    result: QueryResult

    def __init__(
        self,
        session: RankSession[PRGERankJob],
        result: QueryResult,
        compute: StageCompute | None,
        wants_pause: Callable[[], bool],
    ) -> None:
        super().__init__(session, session.rank_job.phases()[0], result)
        self.compute, self._wants_pause, self._query_step = compute, wants_pause, self.rank_job.query_step()
        self._step: QueryHandlers | None = None
        result.nbytes["sent"] = 0

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of the next step (see StepPhase)."""
        self._step = QueryHandlers(
            rank=self.session.rank,
            rank_job=self.rank_job,
            query_step=self._query_step,
            compute=self.compute,
            batch=self.rank_job.batch(planned),
            step=self.rank_job.first_step + len(self.result.records),
            result=self.result,
            wants_pause=self._wants_pause,
        )
        return self._step.table()

    def loss(self, done: Execution, epoch: int, step: int) -> float:
        """Return this rank's part of the loss (see StepPhase), and count the bytes that it has sent."""
        assert self._step is not None
        self.result.nbytes["sent"] += sum(span.nbytes for span in done.spans if span.op.kind == SEND)
        return self._step.loss

    def note(self, trace: StepTrace) -> None:
        """Report a completed step.  Raises Paused if all stop after it."""
        assert self._step is not None
        self.result.steps.append(trace)
        record = self.result.records[-1] = replace(self.result.records[-1], seconds=trace.end_s - trace.start_s)
        self.session.context.publish(StepDone(record.step, trace.busy_s, record))
        if self._step.pauses and record.step + 1 < self.rank_job.last_step:
            raise Paused


class QueryWorker(StepWorker[PRGERankJob]):
    """A StepWorker that keeps its layers between jobs."""

    result_type = QueryResult

    def __init__(self, dilation: float) -> None:
        super().__init__(dilation)
        self._compute: StageCompute | None = None

    def work(self, session: RankSession[PRGERankJob], result: RankResult, controls: Controls) -> None:
        """Run the steps of a job (see StepWorker)."""
        assert isinstance(result, QueryResult)
        job = session.rank_job
        self.prepare(job, session.rank)
        session.progress.phase(WAITING)
        session.executor.ends_at_failure = False  # what this device still finds counts in a step of a loss
        phase = QueryPhase(
            session, result, None if job.plan.stage_of(session.rank) is None else self._compute, controls.wants_pause
        )
        if job.sweep:
            sweep(phase)
            return
        first_epoch, begin = job.begins_at
        session.barrier(phase.phase.program(phase.phase.steps(first_epoch)[begin].shape))
        for epoch in phase.phase.epochs[first_epoch:]:
            session.progress.phase("training" if phase.takes_part else IDLE, epoch)
            run_steps(phase, phase.phase.steps(epoch), epoch=epoch, begin=begin, note=phase.note)
            begin = 0

    def prepare(self, job: PRGERankJob, place: int) -> None:
        """Load a member's layers, unless they are loaded, and apply the steps of the log; an idle rank has none."""
        index = job.plan.stage_of(place)
        if index is None:
            return
        stage = job.plan.stages[index]
        if self._compute is None or not self._compute.suits(job, stage.start, stage.stop):
            self._compute = None  # free its memory before the others are loaded
            self._compute = StageCompute(job, stage.start, stage.stop)
        self._compute.catch_up(job.records)
