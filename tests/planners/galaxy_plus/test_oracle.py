import itertools
from dataclasses import replace
from typing import get_args

import pytest
from galaxy_plus_builders import check_inference, inference_needs, instance, sequence, shape, unequal

from tests.clusters import with_devices
from workbench.core.errors import ConfigError
from workbench.core.medium import Medium
from workbench.methods.galaxy_plus.planners import oracle
from workbench.methods.galaxy_plus.planners.equation9 import Cut
from workbench.methods.galaxy_plus.planners.programme import hybrid_plan
from workbench_studies.papers.galaxy_plus.printed_times import price_plan
from workbench_studies.papers.galaxy_plus.testbed import as_printed

TINY = replace(shape(2, 3, unit_width=4, columns=4), layer_bytes=0)


def brute_force(profile, cluster, *, length):
    """Every partition and number of scheme-2 layers tried: the seconds of the fastest that fits, None if none does."""
    count, stack = cluster.world_size, profile.stacks[0]
    cuts = [
        [one for one in itertools.product(range(total + 1), repeat=count) if sum(one) == total]
        for total in (3, stack.columns, length)
    ]
    results = []
    for second in range(stack.num_layers + 1):
        for parts in itertools.product(*cuts):
            plan = hybrid_plan("hand", profile, Cut(tuple(range(count)), *parts, (second,)))
            needs = inference_needs(plan, profile)
            if all(need.total_bytes <= cluster.devices[rank].memory_bytes for rank, need in needs.items()):
                results.append(price_plan(plan, profile, cluster).layers_s)
    return min(results, default=None)


@pytest.mark.parametrize("medium", get_args(Medium))
@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_trying_everything_finds(seed, medium):
    profile, cluster, _ = unequal(seed, world_size=2 + seed % 2, stack=TINY)
    cluster = replace(cluster, medium=medium)
    profile, cluster = as_printed(profile, cluster)
    profile = replace(profile, full_everywhere=bool(seed % 3))
    best = oracle(sequence(profile, cluster, length=4))
    tried = brute_force(profile, cluster, length=4)
    if tried is None:
        assert best is None
        return
    assert best.value_s == pytest.approx(tried, rel=2e-4)
    assert best.bound_s <= tried * (1 + 1e-9)
    assert best.value_s == pytest.approx(price_plan(best.plan, profile, cluster).layers_s)
    check_inference(best.plan, profile, cluster)


def test_two_stacks_that_are_cut_alike():
    profile, cluster = instance([2e9, 1e9], (shape(2, 4, unit_width=8), shape(2, 4, unit_width=8, cross=True)))
    best = oracle(sequence(profile, cluster, length=12))
    assert best is not None
    assert len(best.plan.schemes) == 4
    with pytest.raises(ConfigError, match="differ"):
        oracle(sequence(profile, cluster, length=12, decoder_length=3))


def test_what_it_cannot_do_is_refused():
    profile, cluster = instance([1e9] * 4, (shape(2, 12),))
    small = with_devices(cluster, memory_bytes=10)
    assert oracle(sequence(profile, small, length=100)) is None
