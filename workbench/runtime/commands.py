"""What a coordinator tells devices, and what they tell it, whatever the method."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

End = Literal["finished", "paused", "lost"]
"""How a device's part of a generation ended: all work is done; it paused as it was told; or another device was lost."""

# From the coordinator.


class Train(NamedTuple):
    """Form a group with the other members and do a job; a device's rank in it is its place among the members."""

    generation: int
    members: tuple[int, ...]
    job: Any


class Prepare(NamedTuple):
    """Make ready for such a job, alone, while others (or it itself) still work: a generation with this device follows."""

    job: Any
    place: int


class Pause(NamedTuple):
    """End a generation's job before step `before`, or, if the devices agree on another among themselves, after the one under way."""

    generation: int
    before: int


class Abort(NamedTuple):
    """Give up what is under way in a generation: a member of it has gone."""

    generation: int


class Slow(NamedTuple):
    """From the next operation on be `factor` times slower than you are (an injected fault)."""

    factor: float


class Probe(NamedTuple):
    """Measure your pace, alone.  detail: what the method needs for it."""

    detail: Any = None


class Ping(NamedTuple):
    """Give a sign of life, whatever you are at."""


class Leave(NamedTuple):
    """Announce that you leave (an injected fault)."""


class Stop(NamedTuple):
    """End."""


# From a device.


class Ready(NamedTuple):
    """It takes commands."""


class Prepared(NamedTuple):
    """It is ready for the job that it was told to prepare for."""


class Pong(NamedTuple):
    """A sign of life."""


class Leaving(NamedTuple):
    """It leaves as soon as its generation has paused."""


class Probed(NamedTuple):
    """What a probe took, over what it takes the device by its profile."""

    slowness: float


class StepDone(NamedTuple):
    """Told after every step by every member.  content: of the method's own, such as the step's record.

    busy_s: spent computing, without the lateness of a host that is too busy to keep an emulated device's deadlines; 0: unknown.
    """

    step: int
    busy_s: float
    content: Any = None


class Ended(NamedTuple):
    """What a device did of a generation's job.  part: of the method's own; None if it did not come to its first step."""

    generation: int
    end: End
    part: Any = None
