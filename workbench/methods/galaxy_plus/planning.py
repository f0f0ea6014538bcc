"""Plan a job with its system's planner, in the form that all methods use (Galaxy+, III-C); simulate its requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import StepRecord
from workbench.core.timeline import Timeline, busy_of
from workbench.methods.base import Prediction
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import METHOD, InferenceOptions
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS, algorithm_1, check, lengths_of, plans
from workbench.methods.galaxy_plus.planners.search import is_split
from workbench.methods.galaxy_plus.prepare import PreparedJob
from workbench.methods.galaxy_plus.prices import Programs, SequencePrice, choose_tiles, tune
from workbench.methods.galaxy_plus.profiles import inference_of
from workbench.methods.galaxy_plus.schedules import InferenceLayout
from workbench.methods.training.heating import Stretch, gets_hot, heated
from workbench.planners.problem import Problem
from workbench.simulator import makespan_s, simulate


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all requests, for one of mean length.  Raises PlanError, naming device and bytes, if nothing
    fits.
    """
    problem, scheme = problem_of(prepared, profile, cluster), prepared.options.scheme
    price = SequencePrice(problem)
    chosen = _chosen(prepared.options, problem, price)
    if scheme is not None:
        chosen = replace(chosen, notes=(*chosen.notes, _price_of_splitting(scheme, problem, price, chosen)))
    return as_plan(replace(chosen, predicted_s=price(chosen), length=problem.sequence_length), problem.profile.stacks)


def problem_of(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Problem[InferenceProfile]:
    """Return the planning problem of a request of mean length; the longest one must fit in memory."""
    sizes: dict[str, Any] = {"sequence_length": prepared.typical_length, "memory_length": prepared.longest}
    if prepared.options.generate:
        written = prepared.longest if prepared.decoder_length is None else prepared.decoder_length
        sizes["kept_tokens"] = written + prepared.options.generate * (prepared.decoder_length is not None)
    return Problem(inference_of(profile), cluster, **sizes, decoder_length=prepared.decoder_length)


def _chosen(options: InferenceOptions, problem: Problem[InferenceProfile], price: SequencePrice) -> InferencePlan:
    """Return the plan of the job's system with its tiles, as requested or the fastest; our own planner also tunes it by
    small shifts.
    """
    ways: dict[str, Any] = {"both_ways": options.both_ways, "tile_tokens": options.tile_tokens}
    if options.system == "galaxy_plus" and options.planner == "own":
        return tune(
            problem,
            plans(problem, schemes=options.scheme),
            price,
            schemes=options.scheme,
            overlap=options.overlap,
            **ways,
        )
    if options.planner == "algorithm_1":
        chosen = algorithm_1(problem, substitute=options.scheme != 1)
    else:
        chosen = INFERENCE_SYSTEMS[options.system](problem)
    return (
        choose_tiles(chosen, price, overlap=options.overlap is not False, **ways)
        if chosen.paradigm == "hybrid"
        else chosen
    )


def _price_of_splitting(
    scheme: int, problem: Problem[InferenceProfile], price: SequencePrice, chosen: InferencePlan
) -> str:
    """Describe the cost of a forced scheme relative to the best single device.  Raises ConfigError if there is nothing
    to split.
    """
    request = f"Scheme {scheme} was asked for"
    if not is_split(chosen):
        raise ConfigError(f"{request}.", "The sequence stays on one device.", "Add a device, or leave scheme out.")
    split = f"{request}: split over {chosen.num_positions} devices a sequence takes {price(chosen) * 1e3:.1f} ms"
    alone: list[tuple[float, str]] = []
    for rank, device in enumerate(problem.cluster.devices):
        single = InferencePlan.on_one_device(rank, problem.profile.stacks)
        with suppress(PlanError):
            check(problem, single)
            alone.append((price(single), device.name))
    if not alone:
        return f"{split}; it does not fit on any single device."
    seconds, name = min(alone)
    return f"{split}, on '{name}' alone {seconds * 1e3:.1f} ms."


def as_plan(chosen: InferencePlan, stacks: Sequence[StackShape]) -> Plan:
    """Return a plan as stages: one stage of all layers if they are split inside, one stage for each device in a
    pipeline.
    """
    first, is_whole = stacks[0], chosen.paradigm in ("sequence", "pipeline")
    tokens = chosen.tokens(chosen.length) if chosen.shares else (chosen.length,) * chosen.num_positions
    units = (first.num_units,) * chosen.num_positions if is_whole else chosen.units
    columns = (first.columns,) * chosen.num_positions if is_whole else chosen.columns
    parts = zip(chosen.ranks, units, columns, tokens, strict=True)
    shares = [
        Share(rank=rank, samples=1, heads=heads, columns=device_columns, tokens=count)
        for rank, heads, device_columns, count in parts
    ]
    if chosen.paradigm == "pipeline":
        own_layers = zip(shares, chosen.layers, accumulate(chosen.layers), strict=True)
        stages = [Stage(start=stop - count, stop=stop, shares=(share,)) for share, count, stop in own_layers if count]
    else:
        stages = [Stage(start=0, stop=sum(shape.num_layers for shape in stacks), shares=tuple(shares))]
    return Plan(
        method=chosen.method,
        stages=tuple(stages),
        micro_batch_size=1,
        num_micro_batches=1,
        predicted_s={"one sequence": chosen.predicted_s},
        inference=chosen,
        notes=chosen.notes,
    )


def check_plan(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> InferencePlan:
    """Return how a plan splits sequences.  Raises ConfigError for a plan of another model, method or cluster."""
    request, chosen = f"A plan of '{plan.method}' was asked for.", plan.inference
    if chosen is None:
        raise ConfigError(
            request,
            f"{METHOD} splits single sequences; this plan does not say how.",
            "Give a plan made by this method.",
        )
    if max(chosen.ranks) >= cluster.world_size:
        raise ConfigError(
            request,
            f"It uses ranks {chosen.ranks}; the cluster has {cluster.in_words}.",
            "Plan for this cluster.",
        )
    problem = problem_of(prepared, profile, cluster)
    stacks = problem.profile.stacks
    for name, total in (("units", stacks[0].num_units), ("columns", stacks[0].columns)):
        parts = getattr(chosen, name)
        if parts and sum(parts) != total:
            raise ConfigError(
                request, f"Its {name} are {parts}; '{prepared.job.model}' has {total}.", "Let the parts add up."
            )
    InferenceLayout.build(chosen, stacks, lengths_of(problem))
    return chosen


REQUEST, TOKEN = "request", "next token"
"""Names of the timelines."""


def shown_request(prepared: PreparedJob) -> int:
    """Return the request whose timeline a report shows: the one closest to the mean length, in the middle of
    the run.
    """
    typical, middle = prepared.typical_length, prepared.num_requests // 2
    return min(
        range(prepared.num_requests),
        key=lambda number: (abs(prepared.test.lengths[number] - typical), abs(number - middle)),
    )


class Requests:
    """A run's requests, in sequence, under one plan (see methods.training.heating.Steps)."""

    def __init__(self, prepared: PreparedJob, profile: InferenceProfile, cluster: Cluster, plan: InferencePlan) -> None:
        self._prepared, self._profile, self._cluster, self._plan = prepared, profile, cluster, plan
        self._programs = Programs(cluster, profile.stacks, profile)
        self._seconds, self._busy_s = cache(self._find_seconds), cache(self._find_busy_s)
        self._slowed = cache(self._find_slowed)

    def seconds(self, step: int) -> float:
        """Return the seconds of a request, with the tokens of its text."""
        return self._seconds(self._prepared.lengths(step))

    def heating_s(self, step: int, place: int) -> float:
        """Return the seconds of a request during which a device computes."""
        return self._busy_s(self._prepared.lengths(step))[place]

    def slowed(self, factors: tuple[float, ...]) -> Requests:
        """Return the same requests on slower devices.  factors: how many times slower, by place."""
        return self._slowed(factors)

    def timelines(self, step: int) -> dict[str, Timeline]:
        """Return the timelines of a request and of the token after the first."""
        lengths = self._prepared.lengths(step)
        title = f"Request {step + 1}, {lengths[0]} tokens"
        shown = {f"{REQUEST}, predicted": simulate(self._sequence(lengths), title=title)}
        if self._further > 0:
            title = f"The second new token of request {step + 1}"
            shown[f"{TOKEN}, predicted"] = simulate(self._token(lengths, 0), title=title)
        return shown

    @property
    def _further(self) -> int:
        return self._prepared.options.generate - 1

    def _sequence(self, lengths: tuple[int, ...]) -> Program:
        return self._programs.sequence(self._plan, lengths, room=self._room(lengths)).program

    def _token(self, lengths: tuple[int, ...], place: int) -> Program:
        before = (*lengths[:-1], lengths[-1] + place)
        return self._programs.token(self._plan, before, room=self._room(lengths)).program

    def _room(self, lengths: tuple[int, ...]) -> int:
        return lengths[-1] + self._prepared.options.generate if self._prepared.options.generate else 0

    def _middle(self, lengths: tuple[int, ...]) -> Program:
        """Return the token for which all further ones stand: the cost grows linearly with the past length."""
        return self._token(lengths, (self._further - 1) // 2)

    def _find_seconds(self, lengths: tuple[int, ...]) -> float:
        first_s = makespan_s(self._sequence(lengths))
        return first_s + self._further * makespan_s(self._middle(lengths)) if self._further > 0 else first_s

    def _find_busy_s(self, lengths: tuple[int, ...]) -> list[float]:
        counts = [(self._sequence(lengths), 1)] + [(self._middle(lengths), self._further)] * (self._further > 0)
        timelines = [(simulate(program, memory=False).by_rank(), count) for program, count in counts]
        ranks = range(self._cluster.world_size)
        return [sum(count * busy_of(spans[rank]) for spans, count in timelines) for rank in ranks]

    def _find_slowed(self, factors: tuple[float, ...]) -> Requests:
        profile = self._profile
        for rank, factor in enumerate(factors):
            profile = profile.slowed(rank, factor) if factor != 1 else profile
        return self if profile is self._profile else Requests(self._prepared, profile, self._cluster, self._plan)


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
    """Return every request's simulated seconds, one after the other, and the timeline of a typical one.  Those of
    devices that get hot take as long as they do then.
    """
    chosen, shown, each = plan.inference, shown_request(prepared), range(prepared.num_requests)
    assert chosen is not None
    requests = Requests(prepared, inference_of(profile), cluster, chosen)
    timetables = dict.fromkeys(each, requests)
    if gets_hot(cluster):
        timetables = heated(cluster, [Stretch(requests, tuple(range(cluster.world_size)), each)])
    steps = [
        StepRecord(epoch=0, step=number, samples=1, cached=False, predicted_s=timetables[number].seconds(number))
        for number in each
    ]
    total_s = sum(step.predicted_s or 0.0 for step in steps)
    timelines = timetables[shown].timelines(shown)
    return Prediction(steps=tuple(steps), epochs=(), timelines=timelines, phases_s={"answering": total_s})
