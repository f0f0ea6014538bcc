import itertools
from dataclasses import replace
from functools import cache

import pytest
from galaxy_plus_builders import check_inference, instance, sequence, shape, unequal

from tests.clusters import device
from tests.plans import inference_plan
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError, PlanError
from workbench.methods.galaxy_plus.costs import analytic_from, end_bytes, stack_sizes
from workbench.methods.galaxy_plus.planners import algorithm_1, check, oracle, plan, plans
from workbench.methods.galaxy_plus.planners.search import Search
from workbench.methods.galaxy_plus.prices import SequencePrice, choose_tiles, tune
from workbench.profiler.descriptions import describe
from workbench_studies.papers.galaxy_plus.printed_times import price_plan


@pytest.mark.parametrize("first", range(0, 12, 3))
def test_never_worse_than_algorithm_1_and_whole_and_fitting(first):
    compared = 0
    for seed in range(first, first + 3):
        profile, cluster, length = unequal(1000 + seed)
        try:
            ours = plan(sequence(profile, cluster, length=length), effort=seed % 3)
        except PlanError:
            with pytest.raises(PlanError):
                algorithm_1(sequence(profile, cluster, length=length))
            continue
        stack = profile.stacks[0]
        assert (sum(ours.units), sum(ours.columns), sum(ours.tokens(length))) == (
            stack.num_units,
            stack.columns,
            length,
        )
        check_inference(ours, profile, cluster)
        try:
            printed = algorithm_1(sequence(profile, cluster, length=length))
        except PlanError:
            continue
        compared += 1
        assert price_plan(ours, profile, cluster).layers_s <= price_plan(printed, profile, cluster).layers_s * (
            1 + 1e-9
        )
    assert compared


@pytest.mark.parametrize("seed", range(6))
def test_within_2_percent_of_the_optimum_of_all_rings(seed):
    stack = shape((2, 4, 6)[seed % 3], (6, 8)[seed % 2], unit_width=16)
    profile, cluster, length = unequal(seed, world_size=2 + seed % 3, stack=stack)
    some = itertools.chain.from_iterable(
        itertools.combinations(range(cluster.world_size), k + 1) for k in range(cluster.world_size)
    )
    rings = [(ranks[0], *rest) for ranks in some for rest in itertools.permutations(ranks[1:])]
    results = [oracle(sequence(profile, cluster, length=length, ranks=ring)) for ring in rings]
    try:
        ours = price_plan(plan(sequence(profile, cluster, length=length)), profile, cluster).layers_s
    except PlanError:
        assert results == [None] * len(rings)
        return
    assert ours <= 1.02 * min(one.value_s for one in results if one is not None)


def test_the_price_decides_and_algorithm_1_is_asked_too():
    profile, cluster = instance([2e10, 1e10, 5e9, 4e9], (shape(6, 12),), memory_bytes=60_000_000)
    printed = algorithm_1(sequence(profile, cluster, length=64))
    requests = []

    def price(one):
        requests.append(one)
        return (
            0.5 if (one.units, one.columns, one.schemes) == (printed.units, printed.columns, printed.schemes) else 1.0
        )

    problem, once = sequence(profile, cluster, length=64), cache(price)
    chosen = tune(problem, plans(problem), once, overlap=None, both_ways=None, tile_tokens=16, tries=0)
    assert chosen.predicted_s == 0.5
    assert (chosen.units, chosen.columns, chosen.schemes) == (printed.units, printed.columns, printed.schemes)
    assert len(requests) <= 12 + 3 * 2
    assert {(one.overlap, one.both_ways) for one in requests} == {(True, False), (True, True), (False, False)}
    assert all(one.tile_tokens == 16 for one in requests)
    cheapest = tune(problem, plans(problem), lambda one: 1.0 + one.overlap, overlap=None, tile_tokens=16)
    assert not cheapest.overlap


def test_steps_follow_the_price_and_stay_within_memory():
    stack = shape(6, 12, unit_width=16)
    total_bytes = 6 * (stack.attention_bytes + stack.feed_forward_bytes)
    profile, cluster = instance([2e10, 1e10, 5e9], (stack,), memory_bytes=[total_bytes, total_bytes, total_bytes // 3])
    requests = []

    def price(one):  # likes tokens on the last position, and scheme 1
        requests.append(one)
        return 10.0 - one.tokens(64)[-1] / 64 + sum(one.schemes) + one.units[0] / 12

    problem, total_bytes = sequence(profile, cluster, length=64), {"both_ways": False, "tile_tokens": 0}
    start = tune(problem, plans(problem), cache(price), tries=0, **total_bytes)
    count = len(requests)
    plan = tune(problem, plans(problem), cache(price), tries=25, **total_bytes)
    assert len(requests) - count <= count + 50
    assert plan.predicted_s == price(plan) < start.predicted_s
    for one in requests:
        check_inference(one, profile, cluster)
        assert (sum(one.units), sum(one.columns), sum(one.tokens(64))) == (12, stack.columns, 64)
    fixed = tune(problem, plans(problem, schemes=2, portal=2), price, schemes=2, portal=2, tries=15, **total_bytes)
    assert (fixed.ranks[0], fixed.configuration) == (2, (0, 6))


def test_candidates_differ_in_schemes_rings_and_tokens():
    profile, cluster = instance([2e11, 1e11, 5e10, 4e10], (shape(12, 12),), mbit_per_s=125.0)
    result = plans(sequence(profile, cluster, length=128))
    assert {(0, 12), (12, 0)} <= {one.configuration for one in result}
    assert len({one.shares for one in result}) > 3
    seconds = [price_plan(one, profile, cluster).layers_s for one in result]
    assert seconds == sorted(seconds)
    assert len(result) == len(set(result)) <= 12


def test_devices_that_do_not_help_are_left_out():
    profile, cluster = instance([1e10, 1e10, 1e6], (shape(4, 8),), mbit_per_s=[1000.0, 1000.0, 1.0])
    assert set(plan(sequence(profile, cluster, length=64)).ranks) == {0, 1}
    profile, cluster = instance([1e12] * 3, (shape(4, 8),), mbit_per_s=0.01)
    single = plan(sequence(profile, cluster, length=64))
    assert (single.num_positions, single.overlap) == (1, False)
    # A price is asked about one device alone, whatever Eq. 9 thinks of it.
    profile, cluster = instance([1e9] * 3, (shape(4, 8),))
    assert plan(sequence(profile, cluster, length=64)).num_positions == 3
    problem = sequence(profile, cluster, length=64)
    assert (
        tune(
            problem, plans(problem), lambda one: float(one.num_positions), both_ways=False, tile_tokens=0
        ).num_positions
        == 1
    )


def test_of_plans_that_take_equally_long_the_first_is_chosen():
    profile, cluster = instance([1e11, 1e11], (shape(4, 8),))
    problem = sequence(profile, cluster, length=64)
    one = next(one for one in plans(problem) if one.num_positions == 2)
    for ranks in ((0, 1), (1, 0)):
        results = [replace(one, ranks=own) for own in (ranks, ranks[::-1])]
        assert tune(problem, results, lambda one: 1.0, tries=0, both_ways=False, tile_tokens=0).ranks == ranks


def test_a_device_too_small_for_a_whole_network_works_without_tokens():
    stack = shape(8, 8)
    total_bytes = 8 * (stack.attention_bytes + stack.feed_forward_bytes)
    profile, cluster = instance(
        [1e11] * 3,
        (stack,),
        memory_bytes=[int(0.9 * total_bytes), int(0.9 * total_bytes), int(0.3 * total_bytes)],
        mbit_per_s=20.0,
    )
    result = plan(sequence(profile, cluster, length=256))
    assert result.configuration[1] > 0
    assert (
        price_plan(result, profile, cluster).layers_s
        <= price_plan(algorithm_1(sequence(profile, cluster, length=256)), profile, cluster).layers_s
    )
    printed = plan(sequence(profile, cluster, length=256, is_printed=True))
    check_inference(printed, profile, cluster, is_printed=True)


def test_the_ring_avoids_slow_pairs():
    pairs = {
        f"d{a}>d{b}": Link(bytes_per_s=1e4) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3))
    }
    profile, cluster = instance([1e10] * 4, (shape(4, 8),), pairs=pairs)
    ring = plan(sequence(profile, cluster, length=64)).ranks
    hops = {(a, b) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
    # Only (0, 2) and (1, 3) are quick: no ring of four is, so two devices remain.
    assert hops in ({(0, 2), (2, 0)}, {(1, 3), (3, 1)})


@pytest.mark.parametrize(("units", "devices", "length"), [(3, 8, 40), (8, 5, 2), (1, 3, 1)])
def test_more_devices_than_heads_or_tokens_is_no_error(units, devices, length):
    profile, cluster = instance([1e9] * devices, (shape(2, units),))
    result = plan(sequence(profile, cluster, length=length))
    assert sum(result.units) == units
    assert sum(result.tokens(length)) == length
    assert algorithm_1(sequence(profile, cluster, length=length)).units.count(0) == max(0, devices - units)


def test_what_is_missing_is_said_in_all_and_by_device():
    stack = shape(4, 4)
    profile, cluster = instance([1e9] * 2, (stack,), memory_bytes=[3_000_000, 2_000_000])
    with pytest.raises(PlanError, match=r"room for 'd0' 3.0 MB, 'd1' 2.0 MB: 7.6 MB are missing in all") as caught:
        plan(sequence(profile, cluster, length=16))
    assert "need 12.6 MB" in str(caught.value)
    profile, cluster = instance([1e9] * 2, (stack,), memory_bytes=8_000_000, first_bytes=9_000_000)
    with pytest.raises(PlanError, match=r"missing in all|must stand on one device"):
        plan(sequence(profile, cluster, length=16))


def test_scheme_2_everywhere_may_be_what_does_not_fit():
    stack = shape(4, 4)
    profile, cluster = instance(
        [1e9] * 2, (stack,), memory_bytes=4 * (stack.attention_bytes + stack.feed_forward_bytes) * 6 // 10
    )
    assert plan(sequence(profile, cluster, length=16), schemes=1).num_positions == 2
    with pytest.raises(PlanError, match="each device needs all feed-forward networks"):
        plan(sequence(profile, cluster, length=16), schemes=2)


def test_portal_ranks_and_schemes_are_kept():
    profile, cluster = instance([1e10, 2e10, 3e10, 4e10], (shape(4, 8),))
    assert plan(sequence(profile, cluster, length=64), portal=2).ranks[0] == 2
    assert set(plan(sequence(profile, cluster, length=64, ranks=(0, 3))).ranks) <= {0, 3}
    assert plan(sequence(profile, cluster, length=64), schemes=1).configuration == (4, 0)
    assert plan(sequence(profile, cluster, length=64), schemes=2).configuration == (0, 4)
    with pytest.raises(ConfigError, match="portal"):
        plan(sequence(profile, cluster, length=64, ranks=(0, 1)), portal=3)
    with pytest.raises(ConfigError, match="Scheme 3"):
        plan(sequence(profile, cluster, length=64), schemes=3)
    with pytest.raises(ConfigError, match="each once"):
        plan(sequence(profile, cluster, length=64, ranks=(0, 0)))


def test_both_stacks_are_cut_in_proportion():
    stacks = (shape(4, 8, unit_width=16), shape(3, 6, unit_width=16, cross=True))
    profile, cluster = instance([2e9, 1e9, 5e8], stacks, memory_bytes=2_000_000)
    result = plan(sequence(profile, cluster, length=40, decoder_length=7))
    check_inference(result, profile, cluster, decoder_length=7)
    assert len(result.schemes) == 7
    assert result.cut(stacks[1])[0] == tuple(sorted(result.cut(stacks[1])[0], reverse=True)) or result.ranks != (
        0,
        1,
        2,
    )
    printed = algorithm_1(sequence(profile, cluster, length=40, decoder_length=7))
    seconds = [price_plan(one, profile, cluster, decoder_length=7).layers_s for one in (result, printed)]
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


def test_sixty_four_devices():
    profile, cluster = instance([1e10, 2e10, 4e10, 4e10] * 16, (shape(2, 16),), mbit_per_s=1000.0)
    result = plan(sequence(profile, cluster, length=512), effort=1)
    assert result.predicted_s <= algorithm_1(sequence(profile, cluster, length=512)).predicted_s * (1 + 1e-9)


@pytest.mark.parametrize("memory_bytes", [10**12, 10**6])
def test_a_slow_device_may_join_for_its_part_of_the_feed_forward_networks(memory_bytes):
    profile, cluster = instance([2e10, 1.9e10, 3e9], (shape(4, 3),), memory_bytes=[10**12, 10**12, memory_bytes])
    parts = {"units": (2, 1), "columns": (400, 368), "shares": (48.0, 48.0), "schemes": (2,) * 4}
    start = inference_plan(method="galaxy_plus", length=96, **parts)
    requests = []

    def price(one):
        requests.append(one)
        return 0.9 - 0.01 * one.tokens(96)[one.ranks.index(2)] if 2 in one.ranks else 1.0

    settings = {"method": "galaxy_plus", "portal": None, "schemes": None}
    search = Search(sequence(profile, cluster, length=96, ranks=(0, 1, 2)), **settings)
    result, seconds = search.climb(start, price, most=30)
    if memory_bytes < 10**9:
        assert sorted(result.ranks) == [0, 1]
        return
    assert seconds < 0.9 and 2 in result.ranks
    first = next(one for one in requests if 2 in one.ranks)
    assert first.units[first.position_of(2)] == 0 < first.columns[first.position_of(2)]
    assert (sum(first.units), sum(first.columns), sum(first.tokens(96))) == (3, 768, 96)


def test_a_cluster_on_which_the_order_of_devices_and_the_split_must_change_together():
    """OPT-1.3B, 32 tokens: a local search by Eq. 9 beats the closed form; after tuning by simulation ours is faster."""
    of_devices = ((3.5, 403, 44, 1e-4), (6.2, 2539, 62, 1e-3), (96, 3834, 69, 0.0), (4.5, 2039, 60, 1e-4))
    devices = tuple(
        device(
            f"d{rank}",
            flops_per_s=gflops * 1e9,
            memory_bytes=megabytes * 10**6,
            bytes_per_s=mbit * 125_000,
            latency_s=latency_s,
        )
        for rank, (gflops, megabytes, mbit, latency_s) in enumerate(of_devices)
    )
    cluster, described = Cluster(name="unlike", devices=devices), describe("OPT-1.3B")
    first, last = end_bytes(described)
    profile = analytic_from("OPT-1.3B", stack_sizes(described), cluster, first_bytes=first, last_bytes=last)
    problem = sequence(profile, cluster, length=32)
    price = SequencePrice(problem)
    by_hand = inference_plan(
        method="galaxy_plus",
        ranks=(1, 2, 3),
        units=(1, 30, 1),
        columns=(1338, 5884, 970),
        shares=(11, 10, 11),
        schemes=(1,) * 24,
        length=32,
    )
    by_hand = choose_tiles(by_hand, price)
    plan = tune(problem, plans(problem), price)
    check(problem, plan)
    assert price(plan) <= price(by_hand)


def test_on_slow_air_fewer_devices_share_a_sequence_and_the_plan_is_near_the_best_of_all_rings():
    """Against the optimum of every ring by Eq. 9, all tuned and simulated."""
    counts = {}
    for mbit_per_s in (20_000.0, 2_000.0, 60.0):
        profile, cluster = instance([2e10, 2e10, 1e10], (shape(4, 8, unit_width=32),), mbit_per_s=mbit_per_s)
        cluster = replace(cluster, medium="wifi")
        problem = sequence(profile, cluster, length=128)
        price = SequencePrice(problem)
        ours = tune(problem, plans(problem), price)
        every = (ring for count in (1, 2, 3) for ring in itertools.permutations(range(3), count))
        rings = [ring for ring in every if ring[0] == min(ring)]
        best_s = min(price(choose_tiles(oracle(replace(problem, ranks=ring)).plan, price)) for ring in rings)
        assert price(ours) <= 1.02 * best_s
        counts[mbit_per_s] = ours.num_positions
    assert counts[20_000.0] == 3 > counts[60.0] == 1, counts
