from dataclasses import replace

import pytest
from galaxy_plus_builders import instance, shape, unequal

from workbench.core.errors import ConfigError
from workbench.planners.galaxy_plus import PAPER, brute_force, check_inference, oracle, price_plan

TINY = replace(shape(2, 3, unit_width=4, columns=4), layer_bytes=0)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_what_trying_everything_finds(seed):
    profile, cluster, _ = unequal(seed, world_size=2 + seed % 2, stack=TINY)
    memory = PAPER if seed % 3 else replace(PAPER, full_everywhere=False)
    found, tried = (search(profile, cluster, length=4, memory=memory) for search in (oracle, brute_force))
    if tried is None:
        assert found is None
        return
    assert found.value_s == pytest.approx(tried.value_s, rel=2e-4)
    assert found.bound_s <= tried.value_s * (1 + 1e-9)
    assert found.value_s == pytest.approx(price_plan(found.plan, profile, cluster).layers_s)
    check_inference(found.plan, profile, cluster, memory=memory)


def test_two_stacks_that_are_cut_alike():
    profile, cluster = instance([2e9, 1e9], (shape(2, 4, unit_width=8), shape(2, 4, unit_width=8, cross=True)))
    found = oracle(profile, cluster, length=12)
    assert found is not None
    assert len(found.plan.schemes) == 4
    with pytest.raises(ConfigError, match="differ"):
        oracle(profile, cluster, length=12, decoder_length=3)


def test_what_it_cannot_do_is_refused():
    profile, cluster = instance([1e9] * 4, (shape(2, 12),))
    with pytest.raises(ConfigError, match="fewer of everything"):
        brute_force(profile, cluster, length=100)
    small = replace(cluster, devices=tuple(replace(one, memory_bytes=10) for one in cluster.devices))
    assert oracle(profile, small, length=100) is None
