"""What the coordinator tells the devices of a run, and what they tell it beside their progress."""

from __future__ import annotations

from typing import NamedTuple

from workbench.methods.p_rge.session import RankJob, RankPart

# From the coordinator.


class Train(NamedTuple):
    """Form a group with the other members and do a job; a device's rank in it is its place among the members."""

    generation: int
    members: tuple[int, ...]
    job: RankJob


class Pause(NamedTuple):
    """End a generation's job after the step under way, together with all others."""

    generation: int


class Abort(NamedTuple):
    """Give the step under way up: a member of the generation has gone."""

    generation: int


class Slow(NamedTuple):
    """From the next operation on be `factor` times slower than you are (an injected fault)."""

    factor: float


class Probe(NamedTuple):
    """Compute one query's losses, alone, and tell how long that takes."""


class Stop(NamedTuple):
    """End."""


# From a device.


class Ready(NamedTuple):
    """It takes commands."""


class Probed(NamedTuple):
    """What a probe took, over what it takes the device by its profile."""

    slowness: float


class Ended(NamedTuple):
    """What it did of a generation's job."""

    generation: int
    part: RankPart
