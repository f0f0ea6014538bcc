"""The programs of a plan, one for each sequence length, and the simulated time of every request of a job."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, StackCosts, StackShape
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import StepRecord
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
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
        self._kept: OrderedDict[tuple, Prepared] = OrderedDict()

    def sequence(self, plan: InferencePlan, lengths: tuple[int, ...]) -> Prepared:
        """Return the program of one sequence (one length for each stack)."""
        return self._program(
            (plan, lengths),
            lambda: InferenceLayout.build(plan, self.stacks, lengths),
            lambda layout: inference_schedule(layout, self.cluster.world_size),
        )

    def token(self, plan: InferencePlan, *, past: int, memory_length: int) -> Prepared:
        """Return the program of one more token after `past` tokens."""
        return self._program(
            (plan, past, memory_length),
            lambda: InferenceLayout.decode(plan, self.stacks, past=past, memory_length=memory_length),
            lambda layout: decode_schedule(layout, self.cluster.world_size),
        )

    def _program(
        self, key: tuple, layout_of: Callable[[], InferenceLayout], schedule_of: Callable[[InferenceLayout], Schedule]
    ) -> Prepared:
        found = self._kept.get(key)
        if found is None:
            layout = layout_of()
            costs = InferenceCosts(self._profile, self.cluster, layout)
            found = Prepared(layout, Program.on(self.cluster, schedule_of(layout), costs))
            self._kept[key] = found
            if len(self._kept) > KEPT_PROGRAMS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


REQUEST, TOKEN = "request", "next token"
"""Names of the timelines."""


class Predictor:
    """Simulates requests of one plan on one cluster."""

    def __init__(self, profile: InferenceProfile, cluster: Cluster, plan: InferencePlan) -> None:
        self._programs, self._plan = Programs(cluster, profile.stacks, profile), plan
        self._seconds: dict[tuple[int, ...], float] = {}

    def timeline(self, lengths: tuple[int, ...], *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of one sequence."""
        made = simulate(self._programs.sequence(self._plan, lengths).program, title=title, memory=memory)
        self._seconds[lengths] = made.makespan_s
        return made

    def seconds(self, lengths: tuple[int, ...]) -> float:
        """Return the seconds of one sequence."""
        if lengths not in self._seconds:
            self.timeline(lengths, memory=False)
        return self._seconds[lengths]

    def token_timeline(self, past: int, memory_length: int, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of one more token."""
        token = self._programs.token(self._plan, past=past, memory_length=memory_length)
        return simulate(token.program, title=title, memory=memory)

    def tokens_s(self, lengths: tuple[int, ...], count: int) -> float:
        """Return the seconds of `count` more tokens: `count` times the middle one (the cost grows linearly with the past length)."""
        if count < 1:
            return 0.0
        past, memory_length = (lengths[-1] + (count - 1) // 2), (lengths[0] if len(lengths) > 1 else 0)
        key = (-1, past, memory_length)
        if key not in self._seconds:
            self._seconds[key] = self.token_timeline(past, memory_length, memory=False).makespan_s
        return count * self._seconds[key]


def shown_request(prepared: PreparedJob) -> int:
    """Return the request whose timeline a report shows: the one closest to the mean length, in the middle of the run."""
    typical, middle = prepared.typical_length, prepared.num_requests // 2
    return min(range(prepared.num_requests), key=lambda number: (abs(prepared.test.lengths[number] - typical), abs(number - middle)))


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every request's simulated seconds, one after the other, and the timeline of a typical one."""
    assert plan.inference is not None
    generate = prepared.options.generate
    predictor = Predictor(inference_of(profile), cluster, plan.inference)
    shown = shown_request(prepared)
    lengths = prepared.lengths(shown)
    timelines = {f"{REQUEST}, predicted": predictor.timeline(lengths, title=f"Request {shown + 1}, {lengths[0]} tokens")}
    if generate > 1:
        memory_length, title = lengths[0] if len(lengths) > 1 else 0, f"The second new token of request {shown + 1}"
        timelines[f"{TOKEN}, predicted"] = predictor.token_timeline(lengths[-1], memory_length, title=title)
    steps = []
    for number in range(prepared.num_requests):
        lengths = prepared.lengths(number)
        seconds = predictor.seconds(lengths) + predictor.tokens_s(lengths, generate - 1)
        steps.append(StepRecord(epoch=0, step=number, samples=1, cached=False, predicted_s=seconds))
    whole = sum(step.predicted_s or 0.0 for step in steps)
    return Prediction(steps=tuple(steps), epochs=(), timelines=timelines, phases_s={"answering": whole})
