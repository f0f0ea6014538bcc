"""RingAda as a Method: its specifics, and its plan: blocks and ring order, from the depths of its rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import KEEP, Activations, Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.timeline import busy_of
from workbench.methods.base import Planned
from workbench.methods.ringada.estimate import RingEstimate
from workbench.methods.ringada.measure import from_adapters, measure_layers
from workbench.methods.ringada.phases import phases_on
from workbench.methods.ringada.planner import Segment, plan_ring, plan_segments
from workbench.methods.ringada.prepare import PreparedJob, check_plan, prepare, require_known
from workbench.methods.ringada.rank_job import RingRankJob, Round, beside_bytes
from workbench.methods.training.backpropagation import AnalyticTechnique, BackpropagationMethod
from workbench.methods.training.phases import once_for_plan
from workbench.methods.training.profiled import Measurement
from workbench.methods.training.state_costs import planning_problem
from workbench.methods.training.trained import Trained
from workbench.models.techniques import num_trained
from workbench.planners.memory import Demand, require_room, too_small
from workbench.planners.recomputation import plan_within_memory, profile_with
from workbench.profiler.analytic import TechniqueSizes
from workbench.tasks.batching import check_rule, split_samples

_IN_FLIGHT = (1, 2, 4, 8)
_MOST_SEGMENTS = 16
"""Maximum number of times at which layers may be moved: planning takes a second or two."""


def owned_by(prepared: PreparedJob, cluster: Cluster) -> Mapping[str, tuple[int, ...]]:
    """Return the rows of each device's samples, D_u, by name.  Raises ConfigError for an impossible rule or a device
    without data.
    """
    if prepared.owned is not None:
        return prepared.owned
    names = cluster.names
    owned = split_samples(prepared.task.train, len(names), prepared.options.data, prepared.job.seed, names)
    return {name: prepared.train.rows_of(indices) for name, indices in zip(names, owned, strict=True)}


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> RingRankJob:
    """Return the description of a run under a plan, for every rank."""
    return RingRankJob.of(
        prepared,
        profile,
        cluster,
        plan,
        config=prepared.config,
        facts=prepared.facts,
        options=prepared.options,
        policy=prepared.policy,
        owned=owned_by(prepared, cluster),
        typical_length=prepared.typical_length,
    )


def prices_of(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Callable[[Activations], RingEstimate]:
    """Return a function of what happens to the activations: the estimate of rings in which that happens."""
    return cache(lambda activations: pricer(prepared, profile_with(profile, cluster, activations), cluster))


def demands(prices: Callable[[Activations], RingEstimate], plan: Plan) -> list[Demand]:
    """Return the memory that each stage of a plan needs, at any time of the run.  prices: see prices_of."""
    return [
        prices(stage.activations).demand(rank, stage.start, stage.stop)
        for _, stages in plan.assignments
        for stage in stages
        for rank in stage.ranks
    ]


def pricer(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> RingEstimate:
    """Return a function that computes the cost of a ring for all rounds."""
    depths, cached = _depths(prepared, cluster, range(prepared.steps_on(cluster.world_size)))
    return RingEstimate(
        planning_problem(prepared, profile, cluster),
        depths=depths,
        cached=cached,
        rest_bytes=beside_bytes(prepared.facts, prepared.config),
        has_side=prepared.options.technique == "parallel",
    )


def _depths(prepared: PreparedJob, cluster: Cluster, rounds: range) -> tuple[Counter[int], Counter[int]]:
    """Return the mini-batches of some rounds by their number of unfrozen layers, and those of them that read caches."""
    policy, per_round = prepared.policy, cluster.world_size * prepared.options.local_iterations
    depths = [
        policy.num_layers - policy.first_unfrozen(number, per_round * number + step)
        for number in rounds
        for step in range(per_round)
    ]
    filled = per_round * max(0, _filled(prepared, prepared.steps_on(cluster.world_size)) - rounds.start)
    return Counter(depths[:filled]), Counter(depths[filled:])


def _filled(prepared: PreparedJob, num_rounds: int) -> int:
    """Return the number of rounds before the caches are full: after an epoch each sample has passed."""
    return num_rounds // prepared.job.epochs if prepared.options.cache else num_rounds


def segments(prepared: PreparedJob, price: RingEstimate) -> tuple[Segment, ...]:
    """Return the run's rounds, divided where one more layer is trained (several for a deep model) and where the caches
    are full.
    """
    policy, cluster = prepared.policy, price.cluster
    num_rounds, per_round = (
        prepared.steps_on(cluster.world_size),
        cluster.world_size * prepared.options.local_iterations,
    )
    lowest = [policy.first_unfrozen(number, per_round * number) for number in range(num_rounds)]
    full = _filled(prepared, num_rounds)
    begins = [
        number for number in range(num_rounds) if not number or number == full or lowest[number] < lowest[number - 1]
    ]
    begins = sorted({*begins[:: -(-len(begins) // _MOST_SEGMENTS)], full} - {num_rounds})
    return tuple(
        Segment(first, price.counts(*_depths(prepared, cluster, range(first, stop))))
        for first, stop in pairwise([*begins, num_rounds])
    )


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the blocks, the ring order, what happens to activations (see planners.recomputation), and the number of
    mini-batches in flight.

    Blocks and order follow the unfreezing where that pays in the simulated run too, moves included.  Raises PlanError
    if nothing fits, ConfigError for an impossible split of the data.
    """
    options, prices = prepared.options, prices_of(prepared, profile, cluster)

    def needs(plan: Plan) -> Mapping[int, int]:
        nbytes = dict[int, int]()
        for demand in demands(prices, plan):
            nbytes[demand.rank] = max(nbytes.get(demand.rank, 0), demand.nbytes)
        return nbytes

    def seconds(plan: Plan) -> float:
        run = rank_job(prepared, profile, cluster, plan)
        return _three_rounds(run)[0] / len(_sampled(run))

    choice = options.activations if options.technique == "serial" else KEEP
    plan = plan_within_memory(choice, profile, cluster, partial(plan_with, prepared, cluster), needs, seconds)
    return plan if options.federated else with_in_flight(rank_job(prepared, profile, cluster, plan))


def plan_with(prepared: PreparedJob, cluster: Cluster, profile: Profile) -> Plan:
    """Return the plan with a profile, which says whether activations are recomputed (see plan_job)."""
    if prepared.options.federated:
        return _everywhere(prepared, pricer(prepared, profile, cluster))
    price = pricer(prepared, profile, cluster)
    once = plan_ring(price)
    if not prepared.options.replan or prepared.policy.is_adaptive:
        return once
    parts, run = segments(prepared, price), rank_job(prepared, profile, cluster, once)
    if len(parts) == 1:
        return once
    plan = plan_segments(once, price, parts, run.change_s)
    follows = bool(plan.later) and _simulated_s(replace(run, plan=plan), parts) < _simulated_s(run, parts)
    return plan if follows else once


def _everywhere(prepared: PreparedJob, price: RingEstimate) -> Plan:
    """Return the plan of federated averaging: the whole model on every device that has room for it.  Raises PlanError
    if none has.
    """
    job, cluster, stop = prepared.job, price.cluster, prepared.facts.num_layers
    size = job.batch_size // job.micro_batches
    usable = [rank for rank in range(cluster.world_size) if price.fits(rank)[0, stop]]
    if not usable:
        roomiest = max(range(cluster.world_size), key=lambda rank: cluster.devices[rank].memory_bytes)
        raise too_small(cluster, price.demand(roomiest, 0, stop))
    stage = Stage(start=0, stop=stop, shares=tuple(Share(rank=rank, samples=size) for rank in usable))
    notes = ("The samples of devices without room for the whole model are not trained on.",) * (
        len(usable) < cluster.world_size
    )
    return Plan(
        method="ringada", stages=(stage,), micro_batch_size=size, num_micro_batches=job.micro_batches, notes=notes
    )


def with_in_flight(run: RingRankJob) -> Plan:
    """Return the plan with the fewest mini-batches in flight that fit in memory and are within 1 % of the shortest
    time.

    Time and memory are simulated for the first, the middle and the last round.
    """
    seconds_by_count: dict[int, float] = {}
    chosen = 0
    for count in (min(run.options.in_flight, run.steps_per_round),) if run.options.in_flight else _IN_FLIGHT:
        planned = replace(run, plan=replace(run.plan, in_flight=count))
        is_first = not seconds_by_count  # it is taken in any case if no other fits
        simulated = partial(_three_rounds, planned, memory=not is_first)
        seconds, busy_s, peaks = once_for_plan(planned, ("three rounds", is_first), simulated)
        if is_first or all(
            peak <= device.memory_bytes for peak, device in zip(peaks, run.cluster.devices, strict=True)
        ):
            seconds_by_count[count] = seconds
        chosen = min(
            count for count, seconds in seconds_by_count.items() if seconds <= 1.01 * min(seconds_by_count.values())
        )
        # No round is shorter than the work of its busiest device, and none has more mini-batches to let in.
        if seconds_by_count[chosen] <= 1.01 * busy_s or count >= run.steps_per_round:
            break
    return replace(run.plan, in_flight=chosen)


def _three_rounds(run: RingRankJob, *, memory: bool = False) -> tuple[float, float, list[int]]:
    """Return the simulated seconds of the first, the middle and the last round, those in which their busiest devices
    compute, and the largest bytes of each device (0 without `memory`).

    Of rounds that differ in their samples alone, the one with the most tokens stands for the others.
    """
    predictor = run.predictor(run.phases()[0])
    alike: dict[object, list[Round]] = {}
    for number in _sampled(run):
        planned = run.round(number)
        alike.setdefault((planned.shape.iterations, planned.shape.cached, planned.shape.since), []).append(planned)
    counts = [len(rounds) for rounds in alike.values()]
    timelines = [predictor.timeline(max(rounds, key=_tokens), memory=memory) for rounds in alike.values()]
    peaks = [max(timeline.peak_bytes(rank) for timeline in timelines) for rank in range(run.cluster.world_size)]
    busy_s = [max(map(busy_of, timeline.by_rank())) for timeline in timelines]
    seconds = [timeline.makespan_s for timeline in timelines]
    return sum(map(mul, counts, seconds)), sum(map(mul, counts, busy_s)), peaks


def _sampled(run: RingRankJob) -> list[int]:
    return sorted({0, run.num_rounds // 2, run.num_rounds - 1})


def _tokens(planned: Round) -> int:
    return sum(map(mul, planned.shape.sizes, planned.shape.lengths))


def _simulated_s(run: RingRankJob, parts: Sequence[Segment]) -> float:
    """Return the seconds of a run: one simulated round for each segment, plus the moves of layers."""
    predictor, per_round = run.predictor(run.phases()[0]), run.steps_per_round
    middle = [(part.num_steps // per_round, part.first + part.num_steps // per_round // 2) for part in parts]
    rounds_s = once_for_plan(
        run,
        "its segments",
        lambda: sum(count * predictor.seconds(run.round(number)) for count, number in middle),
    )
    return rounds_s + run.changes_s


class RingAda(BackpropagationMethod[PreparedJob]):
    """Adapters, unfrozen from the top, on a ring of devices that keep their data local."""

    name = "ringada"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    check_plan = staticmethod(check_plan)
    rank_job = staticmethod(rank_job)
    phases_on = staticmethod(phases_on)
    trained = Trained

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Reject unknown names, and an impossible split of the data (see Method)."""
        super().require_known(job, cluster)
        check_rule(require_known(job).data, cluster.world_size)

    def notes(self, planned: Planned[PreparedJob]) -> tuple[str, ...]:
        """Add that a round is longer than an epoch, which has one at least (see Method)."""
        prepared, samples = planned.prepared, len(planned.prepared.train)
        in_round = prepared.job.batch_size * prepared.options.local_iterations * planned.cluster.world_size
        if in_round < 2 * samples:
            return super().notes(planned)
        times = f"{in_round / samples:.0f} times the {samples:,} of an epoch"
        advice = f"A round trains on {in_round:,} samples, {times}: lower local_iterations."
        return (*super().notes(planned), advice)

    def num_trained(self, prepared: PreparedJob) -> int:
        """Return the number of the technique's weights (see Method)."""
        return num_trained(prepared.config, prepared.facts)

    def measured(self, prepared: PreparedJob) -> Measurement:
        """Return the settings that affect layer costs, and a function that measures them (see LayerMethod)."""
        config, caches = prepared.config, prepared.options.cache
        key: dict[str, Any] = {
            f"{prepared.options.technique} adapters": asdict(replace(config, seed=0, label_mean=0.0, label_std=1.0))
        }
        key |= {"cache": True} if caches else {}
        return key, lambda max_length: measure_layers(
            self.measured_stack(prepared), config, max_length=max_length, caches=caches
        )

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return every layer's cost from the catalogue's figures (see ProfiledMethod)."""
        embedding_bytes = 4 * prepared.facts.embedding_parameters
        return from_adapters(
            super().catalogue(prepared, cluster), cluster, embedding_bytes, caches=prepared.options.cache
        )

    def technique(self, prepared: PreparedJob) -> AnalyticTechnique:
        """Return the adapters' sizes (see BackpropagationMethod)."""
        options = prepared.options
        if options.technique == "parallel":
            return AnalyticTechnique("parallel_adapters", TechniqueSizes(reduction=options.reduction))
        return AnalyticTechnique("adapters", TechniqueSizes(bottleneck=options.bottleneck, adapters_per_layer=1))

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        if folder is not None:
            require_room(cluster, demands(prices_of(prepared, profile, cluster), plan))
