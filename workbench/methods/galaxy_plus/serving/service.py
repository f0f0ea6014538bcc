"""What serving needs to know of plans: which one for the devices that are left, and what a request costs under it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.methods.galaxy_plus.planning import prices_of
from workbench.methods.galaxy_plus.programs import Programs
from workbench.methods.galaxy_plus.serving.rescheduler import BlockTimes, Planner, Times
from workbench.planners.galaxy_plus import plan as make_plan
from workbench.planners.galaxy_plus import replan, slowed
from workbench.schedules.inference import InferencePrices
from workbench.simulator import simulate


def planner_of(
    profile: InferenceProfile,
    cluster: Cluster,
    lengths: tuple[int, ...],
    *,
    first: InferencePlan | None = None,
    is_priced: bool = True,
    left_out: Collection[int] = (),
) -> Planner:
    """Return the planner for some of the cluster's devices, each as slow as it was found to be.

    lengths: tokens in each stack.  first: the plan of all devices at their own speed; another method's is planned anew by its own planner.
    is_priced: candidates are compared by simulation, else by Eq. 9.  left_out: devices that are never used.
    """
    everybody = frozenset(range(cluster.world_size))
    decoder_length = lengths[1] if len(lengths) > 1 else None

    def prices(seen: InferenceProfile) -> InferencePrices | None:
        return prices_of(seen, cluster, lengths) if is_priced else None

    if first is None:
        first = make_plan(profile, cluster, length=lengths[0], decoder_length=decoder_length, price=prices(profile))
    chosen = first

    def planner(ranks: tuple[int, ...], slow_downs: Mapping[int, float]) -> InferencePlan:
        ranks = tuple(rank for rank in ranks if rank not in left_out)
        if everybody == set(ranks) and not slow_downs:
            return chosen
        return replan(
            chosen,
            profile,
            cluster,
            length=lengths[0],
            decoder_length=decoder_length,
            excluded=everybody - set(ranks),
            slowdowns=slow_downs,
            price=prices(slowed(profile, slow_downs)),
        )

    return planner


def simulated_times(profile: InferenceProfile, cluster: Cluster, lengths: tuple[int, ...]) -> Times:
    """Return what a request costs by simulation of the plan's schedule; each plan and state of the devices is simulated once."""
    known: dict[tuple[InferencePlan, tuple[tuple[int, float], ...]], BlockTimes] = {}

    def times(plan: InferencePlan, slow_downs: Mapping[int, float]) -> BlockTimes:
        own = {rank: factor for rank, factor in slow_downs.items() if rank in plan.ranks and factor != 1.0}
        key = (plan, tuple(sorted(own.items())))
        if key not in known:
            if len(known) > 256:
                known.clear()
            known[key] = _simulated(plan, slowed(profile, own), cluster, lengths)
        return known[key]

    return times


def _simulated(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, lengths: tuple[int, ...]) -> BlockTimes:
    timeline = simulate(Programs(cluster, profile.stacks, profile).sequence(plan, lengths).program, memory=False)
    blocks: dict[int, dict[int, float]] = {}
    for span in timeline.spans:
        if not span.op.is_communication:
            own = blocks.setdefault(span.rank, {})
            own[span.op.stage] = own.get(span.op.stage, 0.0) + span.end_s - span.start_s
    return BlockTimes(timeline.makespan_s, blocks)
