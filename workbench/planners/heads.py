"""Allocate a layer's attention heads to a device's processors: Algorithm 1 as printed, and the optimum (Confidant, section 3.3).

Algorithm 1 bisects the time: at each value every processor takes the number of heads whose time is closest to it, or none if that is
further away than epsilon.  A value is valid if the processors take K heads or more.  The paper gives neither epsilon nor sigma a value.
Text and pseudo-code disagree on the lower bound: with the text's l = mid - sigma the search never ends once a value is not valid and
r - l is 2 sigma, because l then stays where it is.  We follow the pseudo-code, l = mid + sigma.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from workbench.core.errors import ConfigError, PlanError

EPSILON_STEPS = 0.5
SIGMA_SHARE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProfile:
    """The profile of section 3.3: seconds[j][k - 1] is P_j^k, the time of k heads on processor j with its fastest compute library.

    Raises PlanError for times that are not positive, not of the same K on each processor, or that fall with a further head.
    """

    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        asked = f"Heads over {len(self.seconds)} processors were asked for."
        if not self.seconds or not self.seconds[0] or len({len(row) for row in self.seconds}) > 1:
            found = f"Their profile has {', '.join(str(len(row)) for row in self.seconds) or 'no'} numbers of heads."
            raise PlanError(asked, found, "Measure 1 to K heads on every processor.")
        for processor, row in enumerate(self.seconds):
            for heads, (fewer, more) in enumerate(pairwise((0.0, *row)), start=1):
                if not 0 < more < float("inf"):
                    raise PlanError(asked, f"{heads} heads on processor {processor} take {more} s.", "Times must be above 0.")
                if more < fewer:
                    raise PlanError(
                        asked,
                        f"On processor {processor} {heads} heads take {more:.6g} s, less than the {fewer:.6g} s of {heads - 1}.",
                        "Measure again with more repetitions, or smooth the times with workbench.profiler.timing.monotone.",
                    )

    @property
    def num_heads(self) -> int:
        """Return K."""
        return len(self.seconds[0])

    @property
    def largest_step_s(self) -> float:
        """Return the most that one further head costs on a processor, the first one included."""
        return max(more - fewer for row in self.seconds for fewer, more in pairwise((0.0, *row)))

    def time_s(self, counts: Sequence[int]) -> float:
        """Return the time of the slowest processor if processor j computes counts[j] heads at the same time as the others."""
        return max((row[count - 1] for row, count in zip(self.seconds, counts, strict=True) if count), default=0.0)


def allocate_as_printed(profile: HeadProfile, *, epsilon_s: float | None = None, sigma_s: float | None = None) -> tuple[int, ...] | None:
    """Return each processor's heads by Algorithm 1, which may be more than K together; None where it returns an empty S.

    epsilon_s: if not given half the largest step of the profile, so that no processor is skipped between two of its times.
    sigma_s: if not given a millionth of the first upper bound, which ends the search after about 20 values.
    Raises ConfigError for a negative epsilon or a sigma of 0 or less.
    """
    times, heads = np.array(profile.seconds), profile.num_heads
    low, high = 0.0, float(times[:, -1].min())
    epsilon = EPSILON_STEPS * profile.largest_step_s if epsilon_s is None else epsilon_s
    sigma = SIGMA_SHARE * high if sigma_s is None else sigma_s
    if epsilon < 0 or sigma <= 0:
        asked = f"Algorithm 1 with epsilon = {epsilon} s and sigma = {sigma} s was asked for."
        raise ConfigError(asked, "Epsilon must be 0 or more, and sigma above 0, or the search does not end.", "Leave them out.")
    found = None
    while low <= high:
        middle = (low + high) / 2
        away = np.abs(times - middle)
        closest = away.argmin(axis=1)
        counts = np.where(away[np.arange(len(times)), closest] > epsilon, 0, closest + 1)
        if counts.sum() >= heads:
            found, high = tuple(map(int, counts)), middle - sigma
        else:
            low = middle + sigma
    return found


def without_surplus(profile: HeadProfile, counts: Sequence[int]) -> tuple[int, ...]:
    """Return an allocation of K heads: each head too many is taken from the processor that is slowest with its own."""
    left = list(counts)
    while sum(left) > profile.num_heads:
        slowest = max(range(len(left)), key=lambda one: profile.seconds[one][left[one] - 1] if left[one] else 0.0)
        left[slowest] -= 1
    return tuple(left)


def best_allocation(profile: HeadProfile) -> tuple[int, ...]:
    """Return an allocation of all K heads in the least time.

    The least time is one of the profile's.  Within a time each processor computes the most heads that it can, a number that rises with
    the time, so bisection over the sorted times finds the first within which all K are computed.
    """
    times = np.array(profile.seconds)
    values = np.unique(times)
    first = bisect_left(values, profile.num_heads, key=lambda value: int((times <= value).sum()))
    return without_surplus(profile, [int(count) for count in (times <= values[first]).sum(axis=1)])
