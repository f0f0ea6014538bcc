"""Messages between the coordinator and a serving device (Galaxy+, section III-E): a job, and reports on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.prepare import Request
from workbench.models.generation import Sampling
from workbench.models.sharding import ShardSpec
from workbench.runtime.commands import ShownSpans

TokenId = Annotated[int, Meta(ge=0, le=10**9)]


class TextOrder(NamedTuple):
    """A text to write, or the rest of it.

    ids: the prompt's ids, with the tokens that were written before (for a decoder: decoder_ids with them).  prompt: how
    many of them were given.  num_tokens: how many the whole text has at most; 0: the text is no longer wanted.
    """

    number: int
    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...]
    prompt: int
    num_tokens: int
    ends: tuple[int, ...]
    sampling: Sampling


class TextToken(NamedTuple):
    """A token of a text.  place: how many came before it.  is_first: whether it is the first of its pass.  is_right:
    whether it had been guessed, None if none was.
    """

    number: Annotated[int, Meta(ge=0, le=10**9)]
    place: Annotated[int, Meta(ge=0, le=10**9)]
    token: TokenId
    is_first: bool = True
    is_right: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceJob:
    """A generation's job: answer the requests from number `first_step` on under a plan.

    index: index of the plan in the report.  members: the devices, by rank; those outside the plan only wait.  specs:
    the weights of every device of the plan.  requests: the requests, served in turn.  arrivals_s: arrival times in
    seconds of the service; empty: each arrives when the one before was answered.
    begin_s: begin of the service on the coordinator's clock; None: it begins once the devices have warmed up.  cluster:
    all devices.
    timeout_s: time-out for forming a group, and for a message in it.  generate: number of new tokens for each request,
    0 for hidden states.
    shown: number of the request whose spans are stored, together with those of its second new token if there is one.
    num_outputs: number of answers, from the first request on, that the plan's first device returns; None: all.
    writes_texts: whether the requests only warm the devices up, and texts are ordered while the job is under way.
    texts: those that were ordered before.  draft_rank: the device that guesses their tokens: the plan's first, or one
    that it leaves out; None if none does.
    """

    index: int
    plan: InferencePlan
    members: Ranks
    specs: Mapping[int, ShardSpec] = field(repr=False)
    requests: tuple[Request, ...] = field(repr=False)
    arrivals_s: tuple[float, ...] = field(repr=False)
    first_step: int
    last_step: int
    begin_s: float | None
    cluster: Cluster
    timeout_s: float
    generate: int = 0
    shown: int = -1
    num_outputs: int | None = None
    writes_texts: bool = False
    texts: tuple[TextOrder, ...] = ()
    draft_rank: int | None = None


class Loaded(NamedTuple):
    """A plan's slices are loaded.  read_bytes: bytes read from the disk.  error: why loading failed."""

    plan: int
    seconds: float
    read_bytes: int
    error: str = ""


class ServiceBegun(NamedTuple):
    """The plan's devices serve from now on.  begin_s: begin of the service on the coordinator's clock."""

    plan: int
    begin_s: float


WHOLE = 0
"""The only block in reports on texts, of which the lengths and numbers change: its seconds are those per expected
second.
"""


class BlockReport(NamedTuple):
    """A device's report of a request, or of a part of it: seconds of computation by block (Galaxy+, section III-E1)."""

    plan: int
    blocks: dict[int, float]


class Served(NamedTuple):
    """A device's work on a request.

    output: the answer, on the plan's first device (numpy).

    since_s, until_s: begin and end of the request on this device.  start_s, end_s: begin and end of its computation,
    with busy_s seconds of computing.  All are on the coordinator's clock.  late_s, paced_s: the pacer's totals in this
    request.  sent_bytes: bytes sent to other devices.  token_s: seconds of each further token.
    used_bytes: memory in use, if known.  spans: the spans of the request's text, for a run that is shown; () for most
    requests.
    """

    output: np.ndarray | None
    since_s: float
    until_s: float
    start_s: float
    end_s: float
    busy_s: float
    late_s: float
    paced_s: float
    sent_bytes: int = 0
    token_s: tuple[float, ...] = ()
    used_bytes: int | None = None
    spans: ShownSpans = ()


class Failed(NamedTuple):
    """A request failed because of this device."""

    number: int
    error: str


class UnderWay(NamedTuple):
    """The plan's first device begins to answer a request.

    since_s: time on the coordinator's clock.

    It is sent at once, so that the coordinator knows of this attempt even if a device is lost afterwards.
    """

    number: int
    since_s: float
