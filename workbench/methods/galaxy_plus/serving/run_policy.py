"""Galaxy+'s coordinator policy for a run: a list of requests under one plan."""

from __future__ import annotations

import math
import time
from collections import defaultdict

from workbench.core.plan import Plan
from workbench.core.timeline import Span
from workbench.methods.base import Event, Notify
from workbench.methods.common.records import device_event, from_beginning
from workbench.methods.galaxy_plus.serving.messages import Served, ServiceJob
from workbench.methods.galaxy_plus.serving.rescheduler import RequestTimes
from workbench.methods.galaxy_plus.serving.worker import SERVING
from workbench.methods.training.recording_policy import OncePolicy
from workbench.runtime.commands import Generation, StepDone

TOLD_EVERY_S = 0.2
"""Seconds between two events of a device's requests that a run shows."""


class RunPolicy(OncePolicy):
    """A OncePolicy that answers a list of requests under one plan.  served: each device's work on the requests, by
    rank.
    """

    job: ServiceJob

    def __init__(self, job: ServiceJob, plan: Plan, notify: Notify) -> None:
        super().__init__(job, plan, RequestTimes(job.plan.predicted_s, job.last_step), notify)
        self.served: dict[int, list[Served]] = {}
        self._told_s: dict[int, float] = {}
        self._num_shown = 0
        self._spans: dict[int, list[tuple[Span, ...]]] = defaultdict(list)

    def part(self, generation: Generation, place: int) -> ServiceJob:
        """Return the whole job (see Policy)."""
        return self.job

    def begun(self, generation: Generation) -> Generation:
        """Show the run's progress."""
        self.served = {rank: [] for rank in generation.members}
        return super().begun(generation)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Record a device's work on a request.  If requests are many and short, only some of them are shown."""
        served: Served = done.content
        self.served[rank].append(served)
        now_s, count = time.monotonic(), self.num_steps
        if served.spans:
            self._spans[done.step].append(served.spans)
            if len(self._spans[done.step]) == len(self.job.plan.ranks):
                spans = from_beginning(self._spans.pop(done.step))
                self._spans.clear()
                self.notify(Event("spans", rank, 0, done.step, count, spans=spans))
        if now_s - self._told_s.get(rank, -math.inf) < TOLD_EVERY_S and done.step < count - 1:
            return
        self._told_s[rank] = now_s
        step_s = served.end_s - served.start_s
        state = {"step_s": step_s, "busy_s": served.busy_s, "used_bytes": served.used_bytes}
        self.notify(
            device_event(
                rank, {"phase": SERVING, "epoch": 0, "step": done.step, "num_steps": count} | state, " request"
            )
        )
        if rank == self.job.plan.ranks[0]:
            shown, self._num_shown = done.step + 1 - self._num_shown, done.step + 1
            tokens = (len(served.token_s) + 1) * shown if self.job.generate else 0
            self.notify(Event("step", rank, 0, done.step, count, seconds=step_s, samples=shown, tokens=tokens))
