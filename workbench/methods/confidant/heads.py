"""Allocate a layer's attention heads to a device's processors: Algorithm 1 as printed, and the optimum (Confidant,
section 3.3).

Algorithm 1 bisects the time.  At each value every processor gets the number of heads whose time is closest to it, or
none if that time is more than epsilon away.  A value is valid if the processors get K heads or more.  The paper gives
neither epsilon nor sigma a value.
Text and pseudo-code disagree on the lower bound.  With the text's l = mid - sigma the search never ends once a value is
not valid and r - l is 2 sigma, because l then does not change.  We follow the pseudo-code, l = mid + sigma.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from workbench.core.cluster import Device, Processor
from workbench.core.errors import ConfigError, PlanError
from workbench.core.profile import LayerProfile, Profile
from workbench.core.units import counted
from workbench.methods.confidant.options import AllocationName
from workbench.planners.shares import smallest_maximum
from workbench.schedules.division import PARTS, Direction, Division, measured_at, part_s

EPSILON_STEPS = 0.5
SIGMA_SHARE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProfile:
    """The profile of section 3.3: seconds[j][k - 1] is P_j^k, the time of k heads on processor j with its fastest
    compute library.

    Raises PlanError if times are not positive, have different K per processor, or fall with an additional head.
    """

    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        request = f"Heads over {len(self.seconds)} processors were asked for."
        if not self.seconds or not self.seconds[0] or len({len(row) for row in self.seconds}) > 1:
            problem = f"Their profile has {', '.join(str(len(row)) for row in self.seconds) or 'no'} numbers of heads."
            raise PlanError(request, problem, "Measure 1 to K heads on every processor.")
        for processor, row in enumerate(self.seconds):
            for heads, (fewer, more) in enumerate(pairwise((0.0, *row)), start=1):
                if not 0 < more < float("inf"):
                    raise PlanError(
                        request, f"{heads} heads on processor {processor} take {more} s.", "Times must be above 0."
                    )
                if more < fewer:
                    raise PlanError(
                        request,
                        f"On processor {processor} {heads} heads take {more:.6g} s, less than the {fewer:.6g} s "
                        f"of {heads - 1}.",
                        "Measure again with more repetitions.",
                    )

    @property
    def num_heads(self) -> int:
        """Return K."""
        return len(self.seconds[0])

    @property
    def largest_step_s(self) -> float:
        """Return the largest increase by one more head on a processor, the first head included."""
        return max(more - fewer for row in self.seconds for fewer, more in pairwise((0.0, *row)))

    def time_s(self, counts: Sequence[int]) -> float:
        """Return the time of the slowest processor if processor j computes counts[j] heads, all at the same time."""
        return max((row[count - 1] for row, count in zip(self.seconds, counts, strict=True) if count), default=0.0)


def allocate_as_printed(profile: HeadProfile, *, epsilon_s: float | None = None) -> tuple[int, ...] | None:
    """Return each processor's heads by Algorithm 1, which may be more than K together; None if it returns an empty S.

    epsilon_s: by default half the largest step of the profile, so that no processor is skipped between two of its
    times.
    Sigma is a millionth of the first upper bound, which ends the search after about 20 values.  Raises ConfigError for
    a negative epsilon.
    """
    times, heads = np.array(profile.seconds), profile.num_heads
    low, high = 0.0, float(times[:, -1].min())
    epsilon = EPSILON_STEPS * profile.largest_step_s if epsilon_s is None else epsilon_s
    sigma = SIGMA_SHARE * high
    if epsilon < 0:
        raise ConfigError(
            f"Algorithm 1 with epsilon = {epsilon} s was asked for.", "Epsilon must be 0 or more.", "Leave it out."
        )
    best = None
    while low <= high:
        middle = (low + high) / 2
        distances = np.abs(times - middle)
        closest = distances.argmin(axis=1)
        counts = np.where(distances[np.arange(len(times)), closest] > epsilon, 0, closest + 1)
        if counts.sum() >= heads:
            best, high = tuple(map(int, counts)), middle - sigma
        else:
            low = middle + sigma
    return best


def without_surplus(profile: HeadProfile, counts: Sequence[int]) -> tuple[int, ...]:
    """Reduce an allocation to K heads: take each surplus head from the processor that is currently the slowest."""
    remaining = list(counts)
    while sum(remaining) > profile.num_heads:
        slowest = max(
            range(len(remaining)),
            key=lambda processor: profile.seconds[processor][remaining[processor] - 1] if remaining[processor] else 0.0,
        )
        remaining[slowest] -= 1
    return tuple(remaining)


def best_allocation(profile: HeadProfile) -> tuple[int, ...]:
    """Return the fastest allocation of all K heads."""
    counts = smallest_maximum([(0.0, *row) for row in profile.seconds], profile.num_heads)
    assert counts is not None, "one processor can compute all heads"
    return tuple(counts)


def processors_in_order(device: Device, *, cores_first: bool) -> list[Processor]:
    """Return a device's processors, the fastest first.

    cores_first: whether groups of cores, as a real device names them, come before accelerators.
    """
    return sorted(
        device.processors,
        key=lambda processor: (cores_first and not processor.name.startswith("cores "), -processor.flops_per_s),
    )


def divide(
    layer: LayerProfile, device: Device, *, heads: int, columns: int, samples: int, length: int, by: AllocationName
) -> Division | None:
    """Return how a device's processors share its layers; None if one of them should compute everything.

    layer: the layer's profile on the device's first processor, with the kinds of schedules.division.  The other
    processors have separate kinds (on a real device), or are slower in proportion to their flops_per_s.
    heads: number of groups of heads that share keys and values and are not split.  columns: number of groups of
    feed-forward columns; 0: not divided.
    P_j^k is the time of forward and backward.  Raises ConfigError for more processors than groups of heads, PlanError
    for a profile whose times decrease with more heads.
    """
    is_measured = bool(measured_at(1, layer, "HF"))
    processors = processors_in_order(device, cores_first=is_measured)
    if len(processors) < 2:
        return None
    if len(processors) > heads:
        raise ConfigError(
            f"The heads of a layer over the {len(processors)} processors of '{device.name}' were asked for.",
            f"The model has {counted(heads, 'head')} (or groups that share keys and values) to divide.",
            "Describe fewer processors, or choose --option split=none.",
        )
    slower = tuple(
        1.0 if is_measured else processors[0].flops_per_s / processor.flops_per_s for processor in processors
    )

    def counts(kind: str, groups: int) -> tuple[int, ...]:
        if not groups:
            return ()

        def seconds(processor: int, count: int) -> float:
            return slower[processor] * sum(
                part_s(layer, kind + way, count, groups, samples, length, processor=processor) for way in "FB"
            )

        every = range(len(processors))
        profile = HeadProfile(
            seconds=tuple(tuple(seconds(processor, count) for count in range(1, groups + 1)) for processor in every)
        )
        allocation = best_allocation(profile) if by == "optimal" else allocate_as_printed(profile)
        return (groups, *(0,) * (len(slower) - 1)) if allocation is None else without_surplus(profile, allocation)

    division = Division(
        heads=counts("H", heads),
        columns=counts("C", columns),
        slower=slower,
        names=tuple(processor.name for processor in processors),
    )
    return division if any(count for kind in PARTS for count in division.groups(kind)[1:]) else None


def quickened(profile: Profile, divisions: Mapping[int, Division], *, samples: int, length: int) -> Profile:
    """Return the profile with the layer times of devices whose processors share the layers, as Eq. 3 needs it."""

    def quick(layer: LayerProfile, rank: int, number: int) -> LayerProfile:
        if (division := divisions.get(rank)) is None:
            return layer
        ways: tuple[Direction, ...] = ("F", "B")
        shares = {
            way: division.layer_s(layer, way, samples, length) / (layer.seconds(way, samples, length) or 1.0)
            for way in ways
        }
        return layer.with_times({way: layer.times[way].scaled(share) for way, share in shares.items()})

    return profile.with_layers(quick)


HEADS, PROCESSORS = (12, 16, 32), (2, 3, 4)
EPSILONS = (0.125, 0.25, EPSILON_STEPS, 1.0, 1e9)
"""Shares of a profile's largest step that are tried as Algorithm 1's epsilon; the last one is no limit."""


def random_profile(draw: random.Random) -> HeadProfile:
    """Return times of 2 to 4 processors for 12, 16 or 32 heads (Table 3).

    A head takes 1 to 8 ms by processor, each step .2 to 1.8 of that; starting costs up to three heads' time.
    """
    heads, rows = draw.choice(HEADS), []
    for _ in range(draw.choice(PROCESSORS)):
        head_s = 1e-3 * 8 ** draw.random()
        steps = [head_s * draw.uniform(0.2, 1.8) for _ in range(heads)]
        rows.append(tuple(accumulate([steps[0] + head_s * draw.uniform(0, 3), *steps[1:]])))
    return HeadProfile(seconds=tuple(rows))


def epsilon_name(steps: float) -> str:
    """Return an epsilon of EPSILONS in words."""
    return "no limit" if steps == EPSILONS[-1] else f"{steps:g}"
