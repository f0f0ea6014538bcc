"""What the portal tells the devices, and what they tell it, besides the commands of runtime.commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.requests import Request

# From the portal.


class Load(NamedTuple):
    """Read the weights of a plan in the background.  specs: what every device of the plan keeps (ShardSpec).

    in_place: what is held is given up block by block, for nothing is served meanwhile; else it is kept until `Keep`.

    lengths: of the sequences to come, for which the schedule is made ready, too.
    """

    plan: int
    made: InferencePlan
    specs: Mapping[int, Any]
    lengths: tuple[int, ...]
    in_place: bool = False


class Join(NamedTuple):
    """Form a group with the other members, and forget the one before."""

    epoch: int
    members: tuple[int, ...]


class Serve(NamedTuple):
    """Answer a request under a plan, together with the plan's other devices."""

    number: int
    attempt: int
    plan: int
    epoch: int
    request: Request


class Keep(NamedTuple):
    """Forget the weights of all plans but these."""

    plans: tuple[int, ...]


class Abort(NamedTuple):
    """Give the request in service up: a device of the group has gone."""

    epoch: int


# From a device.


class Loaded(NamedTuple):
    """The weights of a plan are there.  read_bytes: from the disk; held_bytes: now; error: why they are not.

    program: the text of a sequence's program, of Load's lengths: the same on every device of the plan.
    """

    plan: int
    seconds: float
    read_bytes: int
    held_bytes: int
    error: str = ""
    program: str = ""


class Joined(NamedTuple):
    """The group has formed, or not."""

    epoch: int
    error: str = ""


class BlockReport(NamedTuple):
    """A device's report of a request, or of a part of it: seconds of computation by block (Galaxy+, section III-E1)."""

    number: int
    plan: int
    blocks: dict[int, float]


class Served(NamedTuple):
    """A request was answered.  output: on the plan's first device (numpy).

    start_s, end_s: of this device's computing, on the devices' monotonic clock, of which it computed busy_s.
    late_s, paced_s: of the pacer, in this request.
    """

    number: int
    attempt: int
    plan: int
    output: Any
    busy_s: float
    start_s: float
    end_s: float
    late_s: float
    paced_s: float


class Failed(NamedTuple):
    """A request was not answered.  is_peers: since another device has gone; else `error` is this device's own."""

    number: int
    attempt: int
    epoch: int
    error: str
    is_peers: bool
