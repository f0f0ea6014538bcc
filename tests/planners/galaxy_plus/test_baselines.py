import itertools

import pytest
from galaxy_plus_builders import check_inference, instance, sequence, shape, unequal

from tests.clusters import with_devices
from tests.plans import inference_plan
from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.planners import (
    INFERENCE_SYSTEMS,
    edgeshard,
    galaxy,
    local,
    megatron_lm,
    sequence_parallel,
)
from workbench_studies.papers.galaxy_plus.printed_times import price_plan

STACK = shape(4, 8, unit_width=16)
WHOLE = 4 * (STACK.attention_bytes + STACK.feed_forward_bytes + STACK.layer_bytes)
PARADIGMS = {"megatron_lm": "tensor", "sequence_parallel": "sequence", "edgeshard": "pipeline", "local": "pipeline"}


@pytest.mark.parametrize("name", INFERENCE_SYSTEMS)
@pytest.mark.parametrize("stacks", [(STACK,), (STACK, shape(3, 8, unit_width=16, cross=True))])
def test_every_system_plans_prices_and_fits(name, stacks):
    profile, cluster = instance([4e9, 2e9, 1e9, 1e9], stacks)
    made = INFERENCE_SYSTEMS[name](sequence(profile, cluster, length=32))
    assert (made.method, made.paradigm, made.length) == (name, PARADIGMS.get(name, "hybrid"), 32)
    if made.paradigm == "hybrid":
        assert made.predicted_s == pytest.approx(price_plan(made, profile, cluster).total_s)
    check_inference(made, profile, cluster)
    assert set(INFERENCE_SYSTEMS[name](sequence(profile, cluster, length=32, ranks=(1, 2))).ranks) <= {1, 2}


def test_local_takes_the_fastest_device_that_fits():
    profile, cluster = instance([4e9, 2e9, 1e9], (STACK,), memory_bytes=[WHOLE - 1, WHOLE, 10 * WHOLE])
    assert local(sequence(profile, cluster, length=32)).ranks == (1,)
    assert local(sequence(*instance([4e9, 2e9, 1e9], (STACK,)), length=32)).ranks == (0,)
    with pytest.raises(PlanError, match="'d0'"):
        local(sequence(profile, cluster, length=32, ranks=(0,)))


def test_megatron_cuts_equally_or_not_at_all():
    profile, cluster = instance([4e9, 2e9, 1e9, 1e9], (STACK,), memory_bytes=[WHOLE, WHOLE, WHOLE, WHOLE // 4])
    with pytest.raises(PlanError, match=r"'d3'.*missing"):  # oblivious of memory: out of memory
        megatron_lm(sequence(profile, cluster, length=32))
    made = megatron_lm(sequence(*instance([4e9, 2e9, 1e9, 1e9], (STACK,)), length=32))
    assert (made.units, made.columns) == ((2, 2, 2, 2), (128, 128, 128, 128))
    with pytest.raises(PlanError, match=r"8 units, which 3 does not divide.*Use 2 of the devices"):
        megatron_lm(sequence(profile, cluster, length=32, ranks=(0, 1, 2)))


def test_sequence_parallelism_holds_all_weights_everywhere():
    profile, cluster = instance([4e9, 2e9], (STACK,), memory_bytes=[WHOLE, WHOLE - 1])
    with pytest.raises(PlanError, match="'d1'"):
        sequence_parallel(sequence(profile, cluster, length=32))
    assert sequence_parallel(sequence(*instance([4e9, 2e9], (STACK,)), length=33)).tokens(33) == (17, 16)
    with pytest.raises(PlanError, match="1 tokens on 2 devices"):
        sequence_parallel(sequence(profile, cluster, length=1))


def test_galaxy_has_no_scheme_2():
    profile, cluster = instance([4e9, 2e9], (STACK,))
    made = galaxy(sequence(profile, cluster, length=32))
    assert (made.configuration, made.overlap) == ((4, 0), True)


def every_pipeline(profile, cluster, length):
    for count in range(1, cluster.world_size + 1):
        for ranks in itertools.permutations(range(cluster.world_size), count):
            for cuts in itertools.combinations(range(1, profile.num_layers), count - 1):
                edges = (0, *cuts, profile.num_layers)
                layers = tuple(b - a for a, b in itertools.pairwise(edges))
                yield inference_plan("pipeline", method="edgeshard", ranks=ranks, layers=layers, length=length)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_tight", [False, True])
def test_edgeshard_is_the_best_of_all_pipelines_where_memory_suffices(seed, is_tight):
    stack = shape(5, 8, unit_width=16)
    profile, cluster, length = unequal(seed, world_size=3, stack=stack)
    if not is_tight:
        cluster = with_devices(cluster, memory_bytes=10**12)
    prices = []
    for made in every_pipeline(profile, cluster, length):
        try:
            check_inference(made, profile, cluster)
        except PlanError:
            continue
        prices.append(price_plan(made, profile, cluster).total_s)
    if not prices:
        with pytest.raises(PlanError, match=r"missing|fits"):
            edgeshard(sequence(profile, cluster, length=length))
        return
    found = price_plan(edgeshard(sequence(profile, cluster, length=length)), profile, cluster).total_s
    assert found >= min(prices) * (1 - 1e-9)
    assert is_tight or found == pytest.approx(min(prices))


def test_edgeshard_on_many_devices():
    profile, cluster = instance([1e9] * 10, (shape(12, 8, unit_width=16),), memory_bytes=2 * WHOLE // 4)
    made = edgeshard(sequence(profile, cluster, length=32))
    assert (sum(made.layers), max(made.layers)) == (12, 2)
