"""Prices of inference: seconds and bytes by hand, few layers for many, tiles chosen from link and costs, overlap that
hides."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from inference_algebra import shape

from tests.clusters import cluster_of, with_devices
from tests.plans import inference_plan
from tests.simulated import simulated
from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Value
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.planners import needs
from workbench.methods.galaxy_plus.prices import SequencePrice, choose_tiles, smallest_tile, tune
from workbench.methods.galaxy_plus.schedules import InferenceLayout, inference_costs, inference_schedule
from workbench.planners import Problem

HOMOGENEOUS, HETEROGENEOUS = (8.8, 8.8, 8.8, 8.8), (15.7, 15.7, 8.8, 4.3)
"""GFLOP/s of Raspberry Pis at 825 MHz, and of two at 1.47 GHz, one at 825 and one at 403 MHz (Galaxy+ Table IV)."""
MESSAGE_S = 1e-4


def transformer(layers: int, hidden: int = 768, units: int = 12) -> StackShape:
    """Return a stack of BERT's proportions."""
    return shape(
        layers,
        units,
        4 * hidden,
        hidden_size=hidden,
        unit_bytes=16 * hidden * hidden // units,
        column_bytes=8 * hidden,
        hidden_bytes=4 * hidden,
    )


def profile_of(speeds: tuple[float, ...], stack: StackShape, fixed_s: float = 1e-4) -> InferenceProfile:
    """Return what a layer's operations take at the given GFLOP/s."""

    def piece(flops: float, speed: float) -> PieceCost:
        return PieceCost(fixed_s=fixed_s, token_unit_s=flops / speed / 1e9)

    hidden, head = stack.hidden_size, stack.hidden_size // stack.num_units
    flops = {
        "QKV": 6 * hidden * head,
        "OUT": 2 * hidden * head,
        "ATT": 4 * head,
        "UP": 2 * hidden,
        "DOWN": 2 * hidden,
        "CONN": 20 * hidden,
    }
    costs = tuple(
        (StackTimes(pieces={kind: piece(number, speed) for kind, number in flops.items()}),) for speed in speeds
    )
    return InferenceProfile(
        model="test",
        source="analytic",
        stacks=(stack,),
        costs=costs,
        first_bytes=7000,
        last_bytes=500,
        working_bytes_per_token=10,
    )


def switched(speeds: tuple[float, ...], mbit_per_s: float) -> Cluster:
    """Return devices on a switch, 0.1 ms a hop."""
    flops_per_s = [speed * 1e9 for speed in speeds]
    return cluster_of(
        len(speeds), flops_per_s=flops_per_s, memory_bytes=10**10, bytes_per_s=mbit_per_s * 125_000, latency_s=1e-4
    )


def hybrid(speeds: tuple[float, ...], stack: StackShape, schemes: tuple[int, ...], **given) -> InferencePlan:
    """Return the split in proportion to speed."""
    return inference_plan(
        units=proportional_parts(stack.num_units, speeds),
        columns=proportional_parts(stack.columns, speeds),
        shares=speeds,
        schemes=schemes,
        **{"overlap": True} | given,
    )


def prices(speeds: tuple[float, ...], mbit_per_s: float, stack: StackShape, length: int = 284) -> SequencePrice:
    """Return the prices of plans on a cluster."""
    problem = Problem(profile_of(speeds, stack), switched(speeds, mbit_per_s), sequence_length=length)
    return SequencePrice(problem, message_s=MESSAGE_S)


def test_seconds_by_hand() -> None:
    """Tokens times the rank's units; pairs for attention; latency, bytes and the message for a transfer."""
    stack = transformer(2)
    plan = hybrid(HETEROGENEOUS, stack, (1, 2))
    layout = InferenceLayout.build(plan, (stack,), 100)
    profile, cluster = profile_of(HETEROGENEOUS, stack), switched(HETEROGENEOUS, 500)
    costs = inference_costs(profile, cluster, layout, message_s=MESSAGE_S)
    ops = {
        (rank, op.kind, op.stage, op.part): op
        for rank, listed in enumerate(inference_schedule(layout).ops)
        for op in listed
    }
    assert plan.units == (4, 4, 3, 1) and plan.tokens(100) == (35, 35, 20, 10)
    assert costs.seconds(3, ops[3, "QKV", 2, 1]) == pytest.approx(1e-4 + 35 * 1 * 6 * 768 * 64 / 4.3e9)
    assert costs.seconds(0, ops[0, "ATT", 0, 3]) == pytest.approx(1e-4 + 10 * 100 * 4 * 4 * 64 / 15.7e9)
    assert costs.seconds(2, ops[2, "DOWN", 3, 2]) == pytest.approx(
        1e-4 + 20 * 3072 * 2 * 768 / 8.8e9
    )  # scheme 2: own tokens, all columns
    assert costs.seconds(2, ops[2, "UP", 1, 0]) == pytest.approx(1e-4 + 35 * plan.columns[2] * 2 * 768 / 8.8e9)
    assert costs.seconds(0, ops[0, "SEND", 1, 0]) == pytest.approx(2e-4 + 35 * 3072 / 62.5e6 + MESSAGE_S)
    assert costs.spec(Value("sum", 1, 0, 2)).nbytes == 20 * 3072
    assert costs.spec(Value("out", 4)).nbytes == 100 * 3072 and costs.spec(Value("act", 1, -1, 0)).nbytes == 0


def test_resident_bytes_by_hand() -> None:
    """Units and columns of scheme 1, all columns in scheme 2 where there are tokens, the ends on the first device,
    working memory."""
    stack = shape(3, 4, 10, layer_bytes=5)
    plan = inference_plan(
        ranks=(2, 0, 1), units=(3, 1, 0), columns=(6, 4, 0), shares=(1.0, 0.0, 1.0), schemes=(1, 2, 2)
    )
    layout = InferenceLayout.build(plan, (stack,), 8)
    costs = inference_costs(profile_of((1.0,) * 4, stack), switched((1.0,) * 4, 100), layout)
    assert costs.resident_bytes(2) == 3 * 3 * 1000 + (6 + 10 + 10) * 100 + 3 * 5 + 7500 + 80
    assert costs.resident_bytes(0) == 3 * 1000 + 3 * 4 * 100 + 3 * 5 + 80
    assert costs.resident_bytes(1) == (0 + 10 + 10) * 100 + 3 * 5 + 80
    assert costs.resident_bytes(3) == 0
    reference = InferenceLayout.build(replace(plan, paradigm="pipeline", layers=(1, 2, 0)), (stack,), 8)
    assert (
        inference_costs(profile_of((1.0,) * 4, stack), switched((1.0,) * 4, 100), reference).resident_bytes(0)
        == 2 * 5005 + 80
    )


def test_few_layers_price_many() -> None:
    """Any mixture of schemes on any devices: the same as the whole simulation where the ring goes one way, a few
    percent off both ways."""
    for seed in range(6):
        chance = random.Random(seed)
        speeds = tuple(chance.choice(HETEROGENEOUS) for _ in range(chance.randint(2, 5)))
        first = chance.choice((0, 5, 12))
        stack = transformer(12)
        plan = hybrid(
            speeds,
            stack,
            (1,) * first + (2,) * (12 - first),
            both_ways=bool(seed % 2),
            tile_tokens=chance.choice((0, 48)),
        )
        priced = prices(speeds, chance.choice((125, 1000)), stack)
        error = abs(priced(plan) / priced.timeline(plan).makespan_s - 1)
        assert error < (0.05 if plan.both_ways else 1e-9), (seed, plan)
    tensor = inference_plan("tensor", units=(6, 6), columns=(1536, 1536))
    alone = inference_plan("pipeline", layers=(12,))
    spread = inference_plan("sequence", shares=(1.0, 1.0))
    priced = prices((8.8, 8.8), 500, transformer(12))
    for plan in (tensor, alone, spread):
        assert priced(plan) == pytest.approx(priced.timeline(plan).makespan_s, rel=1e-9)


@pytest.mark.parametrize(
    ("speeds", "mbit_per_s"), [(HETEROGENEOUS, 125), (HOMOGENEOUS, 250), (HETEROGENEOUS, 1000)], ids=str
)
def test_overlap_hides_what_is_shorter(speeds: tuple[float, ...], mbit_per_s: float) -> None:
    """A layer of scheme 1 takes at most 1.10 of the longer of computation and communication alone, with the tiles that
    are chosen."""
    stack = transformer(4)
    priced = prices(speeds, mbit_per_s, stack)
    plan = choose_tiles(hybrid(speeds, stack, (1,) * 4), priced)
    both, computation, communication = (
        _layer_s(priced, plan, kinds) for kinds in ("both", "computation", "communication")
    )
    assert both <= 1.10 * max(computation, communication)
    waiting = priced(replace(plan, overlap=False, tile_tokens=0, both_ways=False))
    assert priced(plan) < 0.95 * waiting


def _layer_s(priced: SequencePrice, plan: InferencePlan, kinds: str) -> float:
    """Return the seconds that a further layer takes, with one side free of cost or none."""
    layout = InferenceLayout.build(plan, priced.profile.stacks, priced.lengths)
    costs = inference_costs(priced.profile, priced.cluster, layout, message_s=priced.message_s)
    if kinds == "computation":
        costs = replace(costs, cluster=None)
    elif kinds == "communication":
        costs = replace(costs, seconds_by_kind={})
    timeline = simulated(inference_schedule(layout), costs)
    ends = [
        max(span.end_s for span in timeline.spans if span.op.kind == "CONN" and span.op.stage == 2 * layer + 1)
        for layer in range(4)
    ]
    return (ends[3] - ends[1]) / 2


def test_tiles_follow_link_and_costs() -> None:
    """48 KB at 1000 Mbit/s, less on slower links; a large tile beside a small one is cut where the link is slow, none
    on a fast one."""
    stack = transformer(4)
    fast, slow = prices(HETEROGENEOUS, 1000, stack), prices(HETEROGENEOUS, 125, stack)
    assert smallest_tile(fast, range(4)) * stack.hidden_bytes == pytest.approx(50_000, rel=0.05)
    plan = hybrid(HETEROGENEOUS, stack, (2,) * 4)
    chosen = {name: choose_tiles(plan, priced) for name, priced in (("fast", fast), ("slow", slow))}
    assert chosen["fast"].tile_tokens == 0 and 0 < chosen["slow"].tile_tokens < 100
    assert slow(chosen["slow"]) < 0.95 * slow(plan)
    dear = choose_tiles(plan, replace(slow, message_s=0.1))
    assert dear.tile_tokens == 0 and not dear.both_ways  # no piece is worth such a message


def test_tuning_shifts_what_the_formulas_do_not_see() -> None:
    """From a bad split towards a good one, never to one that does not fit, never to a slower one; a single device has
    nothing to tune."""
    stack = transformer(4)
    priced = prices(HETEROGENEOUS, 500, stack)
    bad = replace(hybrid(HETEROGENEOUS, stack, (2,) * 4), units=(3, 3, 3, 3), shares=(1.0,) * 4)

    def tuned(**memory: int) -> InferencePlan:
        cluster = with_devices(priced.cluster, memory_bytes=lambda one: memory.get(one.name, 10**10))
        problem = replace(priced.problem, cluster=cluster)
        return tune(problem, [bad], priced, schemes=2, tries=30)

    free = tuned()
    assert free.units[free.ranks.index(3)] < 3 and sum(free.units) == 12 and sum(free.tokens(284)) == 284
    assert priced(free) < 0.75 * priced(bad)
    request = priced.problem
    needed = needs(request, bad)
    room = {device.name: needed[rank].total_bytes for rank, device in enumerate(priced.cluster.devices)}
    bound = tuned(**room)
    assert priced(free) < priced(bound) < priced(bad)
    kept = needs(request, bound)
    assert all(need.total_bytes <= room[f"d{rank}"] for rank, need in kept.items())
    assert any(need.total_bytes > room[f"d{rank}"] for rank, need in needs(request, free).items())
    alone = inference_plan("pipeline", layers=(4,))
    assert replace(tune(request, [alone], priced), predicted_s=0.0) == alone


def test_many_devices() -> None:
    """A GPT-2-large-sized layer on 20 devices at 1000 Mbit/s, weak scaling: no slower than its links allow, no
    faster."""
    count = 20
    speeds, stack = (8.8,) * count, transformer(2, hidden=1280, units=20)
    priced = prices(speeds, 1000, stack, length=count * 96)
    timeline = priced.timeline(hybrid(speeds, stack, (2, 2)))
    tile_s = 2e-4 + 96 * 5120 / 125e6 + MESSAGE_S
    computation_s = sum(
        span.end_s - span.start_s for span in timeline.spans if span.rank == 7 and not span.op.is_communication
    )
    rings_s = (
        2 * (count - 1) * tile_s
    )  # a reduce-scatter, an all-gather, and another reduce-scatter; the embedded tiles come before
    assert max(computation_s, rings_s) < timeline.makespan_s < computation_s + 2.5 * rings_s
