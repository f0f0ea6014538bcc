"""The device side of a service or of a run: load a plan's slices, answer requests together, report and probe (on an
engine).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError, WorkbenchError
from workbench.core.timeline import Span
from workbench.methods.common.rank_results import RankResult, StepTrace, on_rank_zeros_clock
from workbench.methods.common.session import DONE, IDLE, LOADING, WAITING, DeviceReporter
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.galaxy_plus.serving.drafts import draft_plan
from workbench.methods.galaxy_plus.serving.guessing import GIVES_UP, PAUSES, WAITS
from workbench.methods.galaxy_plus.serving.messages import (
    BlockReport,
    Failed,
    Loaded,
    Served,
    ServiceBegun,
    ServiceJob,
    UnderWay,
)
from workbench.methods.galaxy_plus.serving.reporting_pacer import ReportingPacer
from workbench.methods.galaxy_plus.serving.texts import WORD_EVERY_S, write_texts
from workbench.methods.galaxy_plus.session import Holding, InferenceSession, SessionSetup, Slices
from workbench.methods.training.worker import DeviceWorker, note_pace_and_memory
from workbench.models.configuration import import_family
from workbench.models.sharding import ModelShard, model_layout, shard_spec
from workbench.runtime.commands import End, StepDone
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls, serve_device
from workbench.runtime.jobs import tells_of_peer
from workbench.runtime.memory import read_memory, release_free_memory

WARM_UP = -1
"""Number of the requests before the first measured one: a process does much work for the first time then."""
SERVING = "answering"
_WARM_UPS = 2
_PROBE_ROUNDS = 8  # one round of a small model is too short for a sleep to match
_PROBE_S = 0.002  # least seconds of an emulated device's round: the block is computed so many times


def serve_worker(context: RankContext, setup: SessionSetup) -> None:
    """Answer requests on the coordinator's commands."""
    serve_device(context, ServingWorker(context, setup))


class ServingWorker(DeviceWorker[Any]):
    """A runtime.device_server.Worker: keeps its slices and programs from one plan to the next.

    An emulated device reads its disk at Device.storage_bytes_per_s; 0: as fast as the host does.
    """

    def __init__(self, context: RankContext, setup: SessionSetup) -> None:
        super().__init__(context.dilation)
        for name in filter(None, (setup.model, setup.draft and setup.draft.model)):
            import_family(name)
        self._context, self._setup = context, setup
        self._layout = model_layout(setup.model)
        self._is_paced = setup.paced_by(context) is not None
        self._holdings: dict[int, Holding] = {}
        self._newest: ModelShard | None = None
        self._slices = Slices(setup.model, self._layout)
        self._loading = threading.Lock()
        self._is_serving = False
        self._programs = Programs(setup.cluster, self._layout.stacks, setup.paced_by(context) or setup.costs)
        self._fastest_probe_s: float | None = None
        self._draft: Holding | None = None
        self._reported = WARM_UP, -1  # the current request, and its plan
        self._pacer = ReportingPacer(
            float(self._is_paced),
            every_s=setup.report_every_s,
            tell=self._report,
            dilation=context.dilation,
            heat=self.heat(context) if self._is_paced else None,
        )

    def __exit__(self, *exc: Any) -> None:
        """Close the file of the weights."""
        with self._loading:
            self._slices.close()
        super().__exit__(*exc)

    def _now_s(self) -> float:
        """Return the time on the coordinator's clock."""
        return self._context.now_s() + self._context.clock_offset_s

    # Weights.

    def prepare(self, job: ServiceJob, place: int) -> None:
        """Load the slices of a job's plan.  Those of the serving plan stay loaded."""
        self._load(job)

    def _load(self, job: ServiceJob) -> Holding | None:
        """Return this device's slices for a job's plan, read if necessary; None if that fails.  In a run the error is
        raised.
        """
        spec, now_s = job.specs.get(self._context.rank), self._context.now_s
        if spec is None:
            return Holding(plan=job.plan, shard=None)
        with self._loading:
            holding = self._holdings.get(job.index)
            if holding is not None and holding.shard is not None and holding.shard.spec == spec:
                self._context.publish(Loaded(job.index, 0.0, 0))
                return holding
            begin_s = now_s()
            try:
                if not self._is_serving:
                    self._holdings.clear()
                shard, read_bytes = self._slices.read(spec, self._newest, release=not self._is_serving)
            except Exception as error:  # of any kind: the coordinator waits for a message
                if self._setup.is_run:
                    raise
                self._context.publish(Loaded(job.index, now_s() - begin_s, 0, f"{type(error).__name__}: {error}"))
                return None
            if self._is_paced and self._context.device.storage_bytes_per_s:
                left_s = begin_s + read_bytes / self._context.device.storage_bytes_per_s - now_s()
                time.sleep(max(0.0, left_s) * self._context.dilation)
            self._newest = shard
            holding = self._holdings[job.index] = Holding(plan=job.plan, shard=shard)
            self._context.publish(Loaded(job.index, now_s() - begin_s, read_bytes))
            return holding

    def _load_draft(self) -> Holding:
        """Return the draft that this device guesses with, read if necessary."""
        choice, costs = self._setup.draft, self._setup.draft_costs
        assert choice is not None and costs is not None, "a service with a draft"
        if self._draft is None:
            model = choice.model or self._setup.model
            layout = choice.layout(model)
            plan, slices = draft_plan(self._context.rank, layout.stacks), Slices(model, layout)
            # What the device holds of the same model is not held a second time: its ends, and layers that it has whole.
            shard, _ = slices.read(shard_spec(plan, 0, layout.stacks), None if choice.model else self._newest)
            slices.close()
            programs = Programs(self._setup.cluster, layout.stacks, costs)
            self._draft = Holding(plan=plan, shard=shard.in_int4() if choice.is_int4 else shard, programs=programs)
        return self._draft

    # Requests.

    def train(
        self, context: RankContext, process_group: dist.ProcessGroup, job: ServiceJob, controls: Controls
    ) -> tuple[End, RankResult | None]:
        """Answer the requests of a job (see Worker)."""
        self._reported = WARM_UP, job.index
        budget = self.budget(self._context.device) if self._setup.is_run else None
        self._reporter = DeviceReporter(self._context, budget)
        result = RankResult(rank=self._context.rank)
        self._reporter.phase(LOADING)
        try:
            with InferenceSession(
                self._context,
                self._setup,
                process_group,
                devices=job.members,
                layout=self._layout,
                pacer=self._pacer,
                programs=self._programs,
            ) as session:
                controls.watch(session.executor, self._pacer if self._is_paced else None)
                end = self._serve(session, job, controls, result)
                note_pace_and_memory(session, result)
        except (DeviceLostError, RuntimeError) as error:
            if not tells_of_peer(error):
                raise
            error.__traceback__ = None  # it would keep the session in memory
            return "lost", None
        except WorkbenchError as error:
            if self._setup.is_run:
                raise
            self._context.publish(Failed(self._reported[0], str(error)))
            return "lost", None
        finally:
            self._is_serving = False
        return end, on_rank_zeros_clock(result, self._context.clock_offset_s)

    def _serve(self, session: InferenceSession, job: ServiceJob, controls: Controls, result: RankResult) -> End:
        """Load, warm up, and answer the requests; record all else in the result."""
        begin = self._context.now_s()
        holding = self._load(job)
        if holding is None:
            return "lost"
        draft: Holding | int | None = job.draft_rank
        if draft == self._context.rank:
            draft = self._load_draft()
        result.spent_s["loading"] = self._context.now_s() - begin
        self._is_serving = True
        self._holdings = {job.index: holding}
        release_free_memory()
        result.nbytes["weights"] = 0 if holding.shard is None else holding.shard.held_bytes
        result.nbytes["private memory with the model"] = read_memory().anonymous_bytes
        lengths = sorted({request.lengths for request in job.requests})
        programs = [self._programs.sequence(job.plan, tokens).program for tokens in lengths]
        self._reporter.phase(WAITING)
        session.barrier(programs[0])
        if job.begin_s is None:
            for request in job.requests[:_WARM_UPS]:
                session.respond(holding, request, job.generate)
            session.barrier()
            session.pacer.reset()
        begin_s = self._now_s() if job.begin_s is None else job.begin_s
        is_first = self._context.rank == job.plan.ranks[0]
        if is_first:
            self._context.publish(ServiceBegun(job.index, begin_s))
        self._reporter.phase(IDLE if holding.shard is None else SERVING)
        end: End = "finished"
        numbers = range(job.first_step, job.last_step) if holding.shard is not None else ()
        if job.writes_texts:
            end = write_texts(session, holding, job, controls, draft)
            numbers = ()
            if end == "lost":
                return end
        for number in numbers:
            word = self._lead(session, job, controls, number, begin_s) if is_first else self._follow(session, job)
            if word == GIVES_UP:
                return "lost"
            if word == PAUSES:
                end = "paused"
                break
            since_s = self._now_s()
            if is_first:
                self._context.publish(UnderWay(number, since_s))
            self._context.publish(StepDone(number, 0.0, self._answer(session, holding, job, number, since_s, result)))
        self._reporter.phase(WAITING)
        session.barrier()
        self._reporter.phase(DONE)
        return end

    def _lead(self, session: InferenceSession, job: ServiceJob, controls: Controls, number: int, begin_s: float) -> int:
        """Wait for a request, announce it to the plan's other devices, and return its number; or return a code for
        another action.
        """
        arrival_s = begin_s + job.arrivals_s[number] if job.arrivals_s else 0.0
        told_s = self._now_s()
        while True:
            now_s = self._now_s()
            word = number if arrival_s <= now_s else WAITS
            if not controls.is_wanted():
                word = GIVES_UP
            elif controls.wants_pause():
                word = PAUSES
            if word != WAITS or now_s - told_s > WORD_EVERY_S:
                session.control.tell(job.plan.ranks, [word])
                told_s = now_s
            if word != WAITS:
                return word
            time.sleep(min(0.01, arrival_s - now_s) * self._context.dilation)

    def _follow(self, session: InferenceSession, job: ServiceJob) -> int:
        """Receive the first device's message: the number of the next request, or a code for another action."""
        while (word := session.control.listen(job.plan.ranks[0])[0]) == WAITS:
            pass
        return word

    def _answer(
        self,
        session: InferenceSession,
        holding: Holding,
        job: ServiceJob,
        number: int,
        since_s: float,
        result: RankResult,
    ) -> Served:
        late_s, paced_s = self._pacer.late_s, self._pacer.paced_s
        self._reported = number, job.index
        self._pacer.forget()
        output, answers = session.respond(holding, job.requests[number % len(job.requests)], job.generate)
        self._pacer.tell()
        if number == job.shown:
            for step, answer in enumerate(answers[:2]):
                result.steps.append(
                    StepTrace(0, step, 1, answer.start_s, answer.end_s, 0.0, answer.spans, answer.memory)
                )
        is_returned = self._context.rank == job.plan.ranks[0] and (job.num_outputs is None or number < job.num_outputs)
        return Served(
            output.numpy() if is_returned and output is not None else None,
            since_s,
            self._now_s(),
            answers[0].start_s + self._context.clock_offset_s,
            answers[-1].end_s + self._context.clock_offset_s,
            sum(answer.busy_s for answer in answers),
            self._pacer.late_s - late_s,
            self._pacer.paced_s - paced_s,
            _sent_bytes(span for answer in answers for span in answer.spans),
            tuple(later.end_s - earlier.end_s for earlier, later in pairwise(answers)),
            self._reporter.used_bytes,
            self._reporter.shown_spans(since_s, answers[0].spans) if self._setup.is_run else (),
        )

    def _report(self, blocks: dict[int, float]) -> None:
        number, index = self._reported
        if number != WARM_UP and self._setup.report_every_s < math.inf:
            self._context.publish(BlockReport(index, blocks))

    def slowness(self, factor: float, detail: int) -> float:
        """Compute a feed-forward block of `detail` tokens, a few times, alone and without the model's weights (see
        Worker).
        """
        shape = self._layout.stacks[0]
        hidden = torch.rand(detail, shape.hidden_size)
        up = torch.rand(shape.hidden_size, shape.columns)
        host = self._setup.host
        expected_s = 0.0
        if self._is_paced and host is not None:
            costs = host.costs[0][0].scaled(1 / (self._context.device.host_share or 1.0))
            expected_s = sum(costs.seconds(kind, detail, shape.columns) for kind in ("UP", "DOWN"))
        times = max(1, math.ceil(_PROBE_S / expected_s)) if expected_s else 1
        expected_s *= times

        def blocks() -> None:
            for _ in range(times):
                (hidden @ up) @ up.T

        if expected_s > 0:
            return self.relative_s(factor, blocks, expected_s, _PROBE_ROUNDS)
        seconds = self.relative_s(0.0, blocks, 1.0, _PROBE_ROUNDS)
        self._fastest_probe_s = min(seconds, self._fastest_probe_s or seconds)
        return seconds / self._fastest_probe_s


def _sent_bytes(spans: Iterable[Span]) -> int:
    """Return the bytes sent to other devices."""
    return sum(span.nbytes for span in spans if span.op.kind != "RECV")
