"""Queries divided among unequal devices: exact by an exhaustive oracle, memory honoured, chains where no device holds
the model."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import get_args

import pytest

from tests.clusters import cluster_of, device
from tests.plans import query_plan
from tests.profiles import grid
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.medium import Medium
from workbench.core.plan import Plan
from workbench.core.profile import Bytes, LayerProfile, Profile
from workbench.methods.p_rge.options import EstimatorName
from workbench.methods.p_rge.queries import _share_s, _tables, chain_s, chosen_passings, plan_queries
from workbench.methods.p_rge.query_costs import Passing, QueryCosts, full_model_costs, passings
from workbench.methods.p_rge.rank_job import QueryShape, QueryStep
from workbench.planners import Problem
from workbench.planners.shares import smallest_maximum
from workbench.schedules.costs import Crossing
from workbench.simulator import simulate

LENGTH = 16


def layer(fixed_s: float, row_s: float, noise_s: float, frozen_bytes: int) -> LayerProfile:
    """Return a layer whose pass takes fixed_s + rows x row_s and each query's noise noise_s."""
    return LayerProfile(
        name="layer",
        times={
            "F": grid(fixed_s + row_s, fixed_s + 2 * row_s, length=LENGTH),
            "STEP": grid(noise_s, 2 * noise_s),
        },
        frozen_bytes=frozen_bytes,
        trainable_bytes=100,
        output_bytes=Bytes(8),
        workspace_bytes=Bytes(16),
    )


def world(
    seed: int, *, devices: int, layers: int = 3, memory: tuple[int, int] = (10**6, 10**6)
) -> tuple[Profile, Cluster]:
    """Return devices of unequal speed, links and memory."""
    chance = random.Random(seed)
    rows = []
    for _ in range(devices):
        slow = chance.choice((1.0, 1.3, 2.0, 4.0))
        rows.append(
            tuple(
                layer(
                    slow * chance.uniform(0.0, 0.02),
                    slow * chance.uniform(0.005, 0.01),
                    slow * 1e-3,
                    chance.randrange(500, 2000),
                )
                for _ in range(layers)
            )
        )
    boards = (
        device(
            f"d{rank}",
            memory_bytes=chance.randint(*memory),
            bytes_per_s=1e6,
            latency_s=chance.choice((0.0, 1e-3, 2e-2)),
        )
        for rank in range(devices)
    )
    cluster = Cluster(name="random", devices=tuple(boards))
    return Profile(model="toy", method="p_rge", source="measured", layers=tuple(rows)), cluster


def step_of(profile: Profile, cluster: Cluster, queries: int, execution: str = "auto") -> Problem[Profile]:
    return Problem(profile, cluster, queries=queries, batch_size=2, sequence_length=LENGTH, execution=execution)


def step_s(problem: Problem[Profile], plan: Plan) -> float:
    """Return the slowest device's seconds, including sending its losses, and the update's; infinity if a share does not
    fit."""
    costs, shares = full_model_costs(problem), plan.stages[0].shares
    ranks = [share.rank for share in shares]
    slowest = max(_share_s(costs[share.rank], ranks, share.queries) for share in shares)
    return slowest + max(costs[rank].noise_s(problem.queries) for rank in ranks)


@pytest.mark.parametrize("seed", range(12))
def test_no_division_of_the_queries_is_faster(seed: int) -> None:
    """Of all ways to give q queries to any of the devices, with memory for some only."""
    queries, devices = random.Random(seed).randint(1, 6), 3
    profile, cluster = world(seed, devices=devices, memory=(6_000, 14_000))
    problem = step_of(profile, cluster, queries, execution=("auto", "both", "sequential")[seed % 3])
    best = math.inf
    for counts in itertools.product(range(queries + 1), repeat=devices):
        if sum(counts) == queries:
            shares = {rank: count for rank, count in enumerate(counts) if count}
            best = min(best, step_s(problem, query_plan((3, shares))))
    try:
        plan = plan_queries(problem)
    except PlanError:
        assert math.isinf(best)
        return
    if len(plan.stages) == 1:
        assert sum(share.queries for share in plan.stages[0].shares) == queries
        assert step_s(problem, plan) == pytest.approx(best)
        assert plan.total_s == pytest.approx(best)
    else:
        assert plan.total_s < best


@pytest.mark.parametrize("medium", get_args(Medium))
@pytest.mark.parametrize("seed", range(6))
def test_no_chain_is_faster(seed: int, medium: Medium) -> None:
    """Of all orders of the devices and cuts of the layers, where none can hold the model."""
    profile, cluster = world(seed, devices=3, layers=5, memory=(4_000, 7_000))
    cluster = replace(cluster, medium=medium)
    problem = step_of(profile, cluster, 3)
    best = math.inf
    for count in (2, 3):
        for order in itertools.permutations(range(3), count):
            for cuts in itertools.combinations(range(1, 5), count - 1):
                layers = (stop - start for start, stop in itertools.pairwise((0, *cuts, 5)))
                plan = query_plan(*((n, {rank: 3}) for n, rank in zip(layers, order, strict=True)))
                best = min([best, *(chain_s(problem, plan, passing) for passing in passings(problem, 3, cut=True))])
    if math.isinf(best):
        with pytest.raises(PlanError, match=r"has .* need"):
            plan_queries(problem)
        return
    plan = plan_queries(problem)
    assert len(plan.stages) > 1
    assert plan.total_s == pytest.approx(best)
    (passing,) = set(chosen_passings(problem, plan).values())
    assert chain_s(problem, plan, passing) == pytest.approx(best)


@pytest.mark.parametrize("estimator", get_args(EstimatorName))
def test_a_search_for_chains_counts_the_memory_that_a_stage_needs(estimator: EstimatorName) -> None:
    profile, cluster = world(0, devices=3, layers=5, memory=(3_000, 7_000))
    asked = replace(step_of(profile, cluster, 3), estimator=estimator)
    spans = [(start, stop) for start in range(5) for stop in range(start + 1, 6)]
    for passing in passings(asked, 3, cut=True):
        for rank in range(3):
            fits = _tables(asked, rank, passing).fits
            for start, stop in spans:
                stage = QueryCosts(problem=asked, rank=rank, start=start, stop=stop)
                assert fits[start][stop] == stage.fits(passing.parts), (passing, rank, start, stop)


def simulated_s(asked: Problem[Profile], plan: Plan) -> float:
    """Return the simulated seconds of the program that the devices would run."""
    step = QueryStep.build(plan, chosen_passings(asked, plan), asked.cluster.world_size)
    shape = QueryShape.of(asked.batch_size, asked.batch_size, LENGTH)
    return simulate(step.program(asked.profile, asked.cluster, shape, Crossing(hidden_size=2)), memory=False).makespan_s


@pytest.mark.parametrize(
    ("devices", "memory", "least", "most"),
    [
        # The sum of times on one device is exact.
        (1, (10**6, 10**6), 1 - 1e-9, 1 + 1e-9),
        # Losses of earlier groups cross while later ones are computed, which the closed form ignores; a flag of 4 bytes
        # goes with them.
        (3, (10**6, 10**6), 0.97, 1.0001),
        # The closed form takes a chain to be a pipeline of equal groups.
        (3, (4_000, 7_000), 0.98, 1.03),
    ],
    ids=["alone", "shared", "chain"],
)
def test_the_closed_form_is_near_the_simulation(
    devices: int, memory: tuple[int, int], least: float, most: float
) -> None:
    for seed in range(20):
        profile, cluster = world(seed, devices=devices, layers=5, memory=memory)
        problem = step_of(profile, cluster, random.Random(seed).randint(1, 6))
        plan = plan_queries(problem)
        assert len(plan.stages) > 1 or memory[0] == 10**6
        assert least <= simulated_s(problem, plan) / plan.total_s <= most, seed


def test_memory_forces_smaller_passes() -> None:
    """A device that has no room for all parts at once computes them in several passes; a batched pass is chosen where
    it is faster."""
    profile = Profile(model="toy", method="p_rge", source="measured", layers=((layer(0.1, 0.01, 0.0, 100),),))
    problem = step_of(profile, _one(10**9), 4)
    ways = [Passing(4, "both"), Passing(2, "both"), Passing(1, "both"), Passing(1, "sequential")]
    costs = QueryCosts(problem=problem, rank=0, start=0, stop=1)
    needs = {way: costs.need_bytes(way.parts) for way in ways}
    assert list(needs.values()) == sorted(needs.values(), reverse=True)
    for way, need in needs.items():
        tight = replace(problem, cluster=_one(need))
        (chosen,) = chosen_passings(tight, plan_queries(tight)).values()
        assert (chosen.parts, costs.group_s(chosen) * chosen.groups(4)) == (
            way.parts,
            pytest.approx(costs.group_s(way) * way.groups(4)),
        )
    with pytest.raises(PlanError, match="Device 'd0' has"):
        plan_queries(replace(problem, cluster=_one(min(needs.values()) - 1)))
    with pytest.raises(PlanError, match="execution 'auto'"):
        plan_queries(step_of(profile, _one(needs[Passing(2, "both")]), 4, "both"))
    momentum = replace(costs, problem=replace(problem, estimator="low_rank_momentum"))
    trained = profile.layers[0][0].trainable_bytes
    assert trained > 0
    assert momentum.need_bytes(8) - costs.need_bytes(8) == trained  # at most another copy of the trained values
    assert momentum.resident_bytes - costs.resident_bytes == trained


def _one(memory_bytes: int) -> Cluster:
    return cluster_of(1, memory_bytes=memory_bytes)


def test_more_items_than_takers_hold() -> None:
    assert smallest_maximum([[0.0, 1.0], [0.0, 1.0]], 3) is None
    assert smallest_maximum([[0.0, 1.0, math.inf], [0.0, 3.0, 3.0]], 2) == [1, 1]
