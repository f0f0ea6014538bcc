"""The programs of a plan, one for each sequence length, and the simulated time of every request of a job."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackCosts, StackShape
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import StepRecord
from workbench.methods.base import Prediction
from workbench.methods.galaxy_plus.planning import inference_of
from workbench.methods.galaxy_plus.prepare import PreparedJob
from workbench.schedules.inference import InferenceCosts, InferenceLayout, decode_schedule, inference_schedule
from workbench.simulator import simulate

KEPT_PROGRAMS = 128
"""Maximum number of programs that a rank keeps (least recently used go first): a task's lengths, or the steps of a text."""


class Prepared(NamedTuple):
    """A program, and the tokens, heads and columns that its operations compute."""

    layout: InferenceLayout
    program: Program


class Programs:
    """The programs of one cluster, by plan and lengths.  profile: the devices' costs; None: they run at full speed."""

    def __init__(self, cluster: Cluster, stacks: tuple[StackShape, ...], profile: InferenceProfile | None) -> None:
        self.cluster, self.stacks = cluster, stacks
        self._profile = profile or InferenceProfile(
            model="", source="analytic", stacks=stacks, costs=((StackCosts(pieces={}),) * len(stacks),) * cluster.world_size
        )
        self._kept = lru_cache(maxsize=KEPT_PROGRAMS)(self._made)

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...]) -> Prepared:
        """Return the program of one sequence (one length for each stack)."""
        return self._kept(plan, lengths)

    def token(self, plan: InferencePlan, *, past: int, memory_length: int) -> Prepared:
        """Return the program of one more token after `past` tokens."""
        return self._kept(plan, None, past, memory_length)

    def _made(self, plan: InferencePlan, lengths: tuple[int, ...] | None, past: int = 0, memory_length: int = 0) -> Prepared:
        if lengths is None:
            layout = InferenceLayout.decode(plan, self.stacks, past=past, memory_length=memory_length)
            schedule = decode_schedule(layout, self.cluster.world_size)
        else:
            layout = InferenceLayout.build(plan, self.stacks, lengths)
            schedule = inference_schedule(layout, self.cluster.world_size)
        return Prepared(layout, Program.on(self.cluster, schedule, InferenceCosts(self._profile, self.cluster, layout)))


REQUEST, TOKEN = "request", "next token"
"""Names of the timelines."""


def shown_request(prepared: PreparedJob) -> int:
    """Return the request whose timeline a report shows: the one closest to the mean length, in the middle of the run."""
    typical, middle = prepared.typical_length, prepared.num_requests // 2
    return min(range(prepared.num_requests), key=lambda number: (abs(prepared.test.lengths[number] - typical), abs(number - middle)))


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every request's simulated seconds, one after the other, and the timeline of a typical one."""
    chosen, inference, further = plan.inference, inference_of(profile), prepared.options.generate - 1
    assert chosen is not None
    programs = Programs(cluster, inference.stacks, inference)

    def token(lengths: tuple[int, ...], place: int) -> Program:
        return programs.token(chosen, past=lengths[-1] + place, memory_length=lengths[0] if len(lengths) > 1 else 0).program

    @cache
    def seconds(lengths: tuple[int, ...]) -> float:
        found_s = simulate(programs.sequence(chosen, lengths).program, memory=False).makespan_s
        if further > 0:  # each as long as the middle one: the cost grows linearly with the past length
            found_s += further * simulate(token(lengths, (further - 1) // 2), memory=False).makespan_s
        return found_s

    shown = shown_request(prepared)
    lengths = prepared.lengths(shown)
    title = f"Request {shown + 1}, {lengths[0]} tokens"
    timelines = {f"{REQUEST}, predicted": simulate(programs.sequence(chosen, lengths).program, title=title)}
    if further > 0:
        timelines[f"{TOKEN}, predicted"] = simulate(token(lengths, 0), title=f"The second new token of request {shown + 1}")
    steps = [
        StepRecord(epoch=0, step=number, samples=1, cached=False, predicted_s=seconds(prepared.lengths(number)))
        for number in range(prepared.num_requests)
    ]
    whole = sum(step.predicted_s or 0.0 for step in steps)
    return Prediction(steps=tuple(steps), epochs=(), timelines=timelines, phases_s={"answering": whole})
