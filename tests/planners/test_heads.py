"""Confidant's Algorithm 1 and the optimum against all allocations."""

from __future__ import annotations

import random
from functools import lru_cache

import numpy as np
import pytest

from workbench.core.errors import ConfigError, PlanError
from workbench.planners.heads import HeadProfile, allocate_as_printed, best_allocation, without_surplus
from workbench.reproduce.confidant.heads import random_profile


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
    assert best_allocation(HeadProfile(seconds=((5.0,),))) == allocate_as_printed(HeadProfile(seconds=((5.0,),))) == (1,)


def test_algorithm_1_by_hand() -> None:
    """l = 0, r = 4: 2 is valid with both processors at 2 heads, 1 is not; at 1.5 the closest of equally close ones is 1 head."""
    equal = HeadProfile(seconds=((1.0, 2.0, 3.0, 4.0),) * 2)
    assert allocate_as_printed(equal, epsilon_s=0.6, sigma_s=0.01) == (2, 2)
    # 10 s is 8 away from 2 s: with a small epsilon the second processor is skipped, and three heads at 2 s are too many for two.
    uneven = HeadProfile(seconds=((1.0, 2.0), (1.9, 10.0)))
    assert allocate_as_printed(uneven, epsilon_s=0.2, sigma_s=0.01) == (2, 1)
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


def test_a_search_that_would_not_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="sigma above 0"):
        allocate_as_printed(HeadProfile(seconds=((1.0, 2.0),)), sigma_s=0.0)
