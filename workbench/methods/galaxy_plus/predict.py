"""Simulate every request of a job, with the length that it really has; equal lengths are simulated once."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.galaxy_plus.planning import inference_of
from workbench.methods.galaxy_plus.prepare import PreparedJob
from workbench.methods.galaxy_plus.programs import Programs
from workbench.schedules.inference import Exchange
from workbench.simulator import simulate

REQUEST, TOKEN = "request", "next token"
"""Names of the timelines."""


class Predictor:
    """Prices requests of one plan on one cluster."""

    def __init__(self, profile: InferenceProfile, cluster: Cluster, plan: InferencePlan, *, exchange: Exchange = "direct") -> None:
        self._programs, self._plan, self._exchange = Programs(cluster, profile.stacks, profile), plan, exchange
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
        token = self._programs.token(self._plan, past=past, memory_length=memory_length, exchange=self._exchange)
        return simulate(token.program, title=title, memory=memory)

    def tokens_s(self, lengths: tuple[int, ...], count: int) -> float:
        """Return the seconds of `count` more tokens: of the middle one, so many times (its price grows linearly with what is before)."""
        if count < 1:
            return 0.0
        past, memory_length = (lengths[-1] + (count - 1) // 2), (lengths[0] if len(lengths) > 1 else 0)
        key = (-1, past, memory_length)
        if key not in self._seconds:
            self._seconds[key] = self.token_timeline(past, memory_length, memory=False).makespan_s
        return count * self._seconds[key]


def shown_request(prepared: PreparedJob) -> int:
    """Return the request whose timeline a report shows: the one whose length is nearest to the mean, in the middle of the run."""
    typical, middle = prepared.typical_length, prepared.num_requests // 2
    return min(range(prepared.num_requests), key=lambda number: (abs(prepared.test.lengths[number] - typical), abs(number - middle)))


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every request's simulated seconds, one after the other, and the timeline of a typical one."""
    assert plan.inference is not None
    generate = prepared.options.generate
    predictor = Predictor(inference_of(profile), cluster, plan.inference, exchange=prepared.options.exchange)
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
