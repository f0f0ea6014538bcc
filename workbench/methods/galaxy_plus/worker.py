"""One rank's whole run: it loads its slices and answers every request.  An engine calls this."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from workbench.core.inference import InferencePlan
from workbench.methods.common.session import DONE, IDLE, LOADING, WAITING, DeviceReporter, RankResult, StepTrace, on_rank_zeros_clock
from workbench.methods.galaxy_plus.prepare import request_of
from workbench.methods.galaxy_plus.session import Holding, InferenceSession, SessionSetup
from workbench.methods.training.worker import note_pace_and_memory
from workbench.models.loading import import_family
from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget, read_memory, release_free_memory
from workbench.runtime.process_group import group
from workbench.tasks.tokenize import TokenizedSplit

SERVING = "answering"
TOLD_EVERY_S = 0.2
UNMEASURED = 2
"""Requests that are answered once before the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The job for an engine; the same on every rank, sent once.

    requests: the sequences, answered in order.  generate: new tokens for each.
    shown: the request whose spans are kept.  kept: number of answers that the first device returns, of the first requests.
    """

    setup: SessionSetup
    plan: InferencePlan
    requests: TokenizedSplit
    generate: int = 0
    shown: int = 0
    kept: int = 4


class RequestTrace(NamedTuple):
    """One request on one rank, in seconds of the device's monotonic clock.  busy_s: spent computing.  token_s: of each further token."""

    start_s: float
    end_s: float
    busy_s: float
    bytes_sent: int = 0
    token_s: tuple[float, ...] = ()


@dataclass(kw_only=True)
class RankServed(RankResult):
    """An engine's results.  outputs: answers to the first requests, as lists of numbers or as tensors; only from the first device.

    steps: the shown request, and its second new token if there is one.
    """

    requests: list[RequestTrace] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def serve_rank(context: RankContext, rank_job: RankJob) -> RankServed:
    """Do this rank's part of every request."""
    import_family(rank_job.setup.model)
    torch.set_grad_enabled(False)
    try:
        with (
            group(context, rank_job.setup.timeout_s) as process_group,
            MemoryBudget(context.device.name, context.device.memory_bytes) as budget,
            InferenceSession(context, rank_job.setup, process_group) as session,
        ):
            result = _Run(context, session, rank_job, budget).all()
        return on_rank_zeros_clock(result, context.clock_offset_s) if context.clock_offset_s else result
    finally:
        torch.set_grad_enabled(True)


class _Run:
    """The state of one rank between its requests."""

    def __init__(self, context: RankContext, session: InferenceSession, rank_job: RankJob, budget: MemoryBudget) -> None:
        self._context, self._session, self._job, self._reporter = context, session, rank_job, DeviceReporter(context, budget)
        self._result = RankServed(rank=context.rank)
        self._is_first = context.rank == rank_job.plan.ranks[0]
        self._told_s = float("-inf")

    def all(self) -> RankServed:
        """Load, warm up, answer every request."""
        session, job, result = self._session, self._job, self._result
        self._reporter.phase(LOADING)
        begin = self._context.now_s()
        holding = session.load(job.plan)
        result.spent_s["loading"] = self._context.now_s() - begin
        release_free_memory()
        result.nbytes["weights"] = 0 if holding.shard is None else holding.shard.held_bytes
        result.nbytes["private memory with the model"] = read_memory().anonymous_bytes
        lengths = sorted({len(ids) for ids in job.requests.ids})
        programs = [session.prepare(job.plan, request_of(job.requests, job.requests.lengths.index(number))).program for number in lengths]
        self._reporter.phase(WAITING)
        session.barrier(programs[0])
        count = len(job.requests)
        for number in range(min(UNMEASURED, count)):
            self._answer(holding, number)
        session.barrier()
        session.pacer.reset()
        result.requests.clear()
        self._reporter.phase(IDLE if holding.shard is None else SERVING)
        if holding.shard is not None:
            for number in range(count):
                if not self._goes_on():
                    break
                self._answer(holding, number, is_measured=True)
        self._reporter.phase(WAITING)
        session.barrier()
        note_pace_and_memory(session, result)
        self._reporter.phase(DONE)
        return result

    def _goes_on(self) -> bool:
        """Return whether another request follows: the first device checks whether the run should end, and notifies the others."""
        session, ranks = self._session, self._job.plan.ranks
        if not self._is_first:
            return bool(session.control.listen(ranks[0], session.setup.timeout_s))
        goes_on = not self._context.should_stop()
        session.control.tell(ranks, goes_on)
        return goes_on

    def _answer(self, holding: Holding, number: int, *, is_measured: bool = False) -> None:
        job, session, result = self._job, self._session, self._result
        request = request_of(job.requests, number)
        if job.generate:
            tokens, answers = session.generate(holding, request, job.generate)
            output: torch.Tensor | None = torch.tensor(tokens)
        else:
            answers = [session.answer(holding, request)]
            output = answers[0].output
        if not is_measured:
            return
        trace = RequestTrace(
            answers[0].start_s,
            answers[-1].end_s,
            sum(answer.busy_s for answer in answers),
            sum(span.nbytes for answer in answers for span in answer.spans if span.op.kind != "RECV"),
            tuple(later.end_s - earlier.end_s for earlier, later in pairwise(answers)),
        )
        result.requests.append(trace)
        if number == job.shown:
            for step, one in enumerate(answers[:2]):
                result.steps.append(StepTrace(0, step, 1, one.start_s, one.end_s, 0.0, one.spans, one.memory))
        if self._is_first and number < job.kept and output is not None:
            result.outputs.append(output.clone())
        self._tell_request(number, trace)

    def _tell_request(self, number: int, trace: RequestTrace) -> None:
        """Report a request; if requests are many and short, only some of them, because reporting costs time."""
        now, count = time.monotonic(), len(self._job.requests)
        if now - self._told_s < TOLD_EVERY_S and number < count - 1:
            return
        self._told_s = now
        self._context.publish(
            {
                "phase": SERVING,
                "epoch": 0,
                "step": number,
                "num_steps": count,
                "step_s": trace.end_s - trace.start_s,
                "busy_s": trace.busy_s,
                "used_bytes": self._reporter.used_bytes,
            }
        )
