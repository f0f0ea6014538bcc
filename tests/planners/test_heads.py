"""Confidant's Algorithm 1 and the optimum against all allocations."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from tests.clusters import devices
from tests.profiles import grid
from workbench.core import Device, Processor
from workbench.core.errors import ConfigError, PlanError
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.confidant.heads import (
    HeadProfile,
    allocate_as_printed,
    best_allocation,
    divide,
    quickened,
    random_profile,
    without_surplus,
)
from workbench.schedules.division import part_s

NO_BYTES = dict.fromkeys(("frozen_bytes", "trainable_bytes"), 0)


@lru_cache
def all_allocations(processors: int, heads: int) -> np.ndarray:
    """Return every way of giving all heads to processors, (ways, processors)."""
    if processors == 1:
        return np.array([[heads]])
    parts = [(first, all_allocations(processors - 1, heads - first)) for first in range(heads + 1)]
    return np.concatenate([np.insert(rest, 0, first, axis=1) for first, rest in parts])


def test_the_optimum_is_that_of_all_allocations_on_1000_profiles() -> None:
    draw = random.Random(7)
    for _ in range(1000):
        profile = random_profile(draw)
        counts = best_allocation(profile)
        ways = all_allocations(len(profile.seconds), profile.num_heads)
        table = np.insert(np.array(profile.seconds), 0, 0.0, axis=1)
        least = table[np.arange(len(table)), ways].max(axis=1).min()
        assert sum(counts) == profile.num_heads and profile.time_s(counts) == least
        printed = allocate_as_printed(profile)
        if printed is not None:
            assert sum(printed) >= profile.num_heads
            trimmed = without_surplus(profile, printed)
            assert sum(trimmed) == profile.num_heads and least <= profile.time_s(trimmed) <= profile.time_s(printed)


def test_equal_and_flat_times() -> None:
    equal = HeadProfile(seconds=((1.0, 2.0, 3.0, 4.0),) * 2)
    assert best_allocation(equal) == allocate_as_printed(equal) == (2, 2)
    flat = HeadProfile(seconds=((3.0, 3.0, 3.0), (1.0, 1.0, 2.0)))  # equal times are no falling ones
    assert flat.time_s(best_allocation(flat)) == 2.0
    assert (
        best_allocation(HeadProfile(seconds=((5.0,),))) == allocate_as_printed(HeadProfile(seconds=((5.0,),))) == (1,)
    )


def test_the_time_of_groups_lies_between_one_and_all() -> None:
    times = {"F": 10.0, "B": 20.0, "HF": 4.0, "HF1": 1.0, "HB": 8.0, "HB1": 2.0, "CF": 5.0, "CB": 10.0}
    layer = LayerProfile(name="layer", times={kind: grid(one) for kind, one in times.items()}, **NO_BYTES)
    assert [part_s(layer, "HF", count, 4, 1, 8) for count in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert part_s(layer, "CF", 2, 4, 1, 8) == 2.5  # in proportion, without a time of one alone
    [device] = made_up_devices(2.0, 1.0)
    division = divide(layer, device, heads=4, columns=0, samples=1, length=8, by="optimal")
    assert (
        division is not None and division.heads == (3, 1) and division.columns == () and division.slower == (1.0, 2.0)
    )
    # Forward: 3 of the heads by the first, 1 x 2 by the second, and 6 of the rest; backward twice that.
    assert division.layer_s(layer, "F", 1, 8) == 9.0 and division.layer_s(layer, "B", 1, 8) == 18.0
    profile = Profile(model="m", method="m", source="scaled", layers=((layer,),))
    [[quick]] = quickened(profile, {0: division}, samples=1, length=8).layers
    assert (quick.forward_s(1, 8), quick.backward_s(1, 8)) == (9.0, 18.0)
    both = divide(layer, device, heads=4, columns=4, samples=1, length=8, by="optimal")
    assert both is not None and both.columns == (3, 1) and both.layer_s(layer, "F", 1, 8) == 1.0 + 3.0 + 3.75
    [slow] = made_up_devices(100.0, 1.0)
    assert divide(layer, slow, heads=4, columns=4, samples=1, length=8, by="optimal") is None


def test_a_processor_with_times_of_its_own_is_not_scaled() -> None:
    """A real device: groups of cores first, and an accelerator by what it has measured, however many FLOP/s it has."""
    times = {"F": grid(10.0), "B": grid(10.0), "HF": grid(4.0), "HB": grid(4.0), "HF@1": grid(12.0), "HB@1": grid(12.0)}
    layer = LayerProfile(name="layer", times=times, **NO_BYTES)
    processors = (Processor(name="cuda:0", flops_per_s=1e13), Processor(name="cores 0-3", flops_per_s=1e9))
    [device] = made_up_devices(1.0)
    division = divide(
        layer, replace(device, processors=processors), heads=4, columns=0, samples=1, length=8, by="optimal"
    )
    assert division is not None and (division.names, division.heads, division.slower) == (
        ("cores 0-3", "cuda:0"),
        (3, 1),
        (1.0, 1.0),
    )
    assert division.layer_s(layer, "F", 1, 8) == 6.0 + 3.0


def made_up_devices(*gflops: float) -> tuple[Device, ...]:
    processors = tuple(Processor(name=f"p{number}", flops_per_s=1e9 * gflop) for number, gflop in enumerate(gflops))
    return devices("d", bytes_per_s=1e8, processors=processors)


def test_algorithm_1_by_hand() -> None:
    """l = 0, r = 4: 2 is valid with both processors at 2 heads, 1 is not; at 1.5 the closest of equally close ones is 1
    head."""
    equal = HeadProfile(seconds=((1.0, 2.0, 3.0, 4.0),) * 2)
    assert allocate_as_printed(equal, epsilon_s=0.6) == (2, 2)
    # 10 s is 8 away from 2 s: with a small epsilon the second processor is skipped, and three heads at 2 s are too many
    # for two.
    uneven = HeadProfile(seconds=((1.0, 2.0), (1.9, 10.0)))
    assert allocate_as_printed(uneven, epsilon_s=0.2) == (2, 1)
    assert without_surplus(uneven, (2, 1)) == (1, 1) == best_allocation(uneven)


def test_with_an_epsilon_of_0_no_middle_value_is_a_time() -> None:
    assert allocate_as_printed(HeadProfile(seconds=((1.1, 2.3), (1.7, 3.1))), epsilon_s=0.0) is None


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ((), "no numbers of heads"),
        (((1.0, 2.0), (1.0,)), "has 2, 1 numbers of heads"),
        (((1.0, 2.0), (1.0, 0.0)), "2 heads on processor 1 take 0.0 s"),
        (((1.0, float("nan")),), "2 heads on processor 0 take nan s"),
        (((1.0, 3.0, 2.0),), "On processor 0 3 heads take 2 s, less than the 3 s of 2.*more repetitions"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(seconds: tuple[tuple[float, ...], ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        HeadProfile(seconds=seconds)


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(ConfigError, match="Epsilon must be 0 or more"):
        allocate_as_printed(HeadProfile(seconds=((1.0, 2.0),)), epsilon_s=-1.0)
