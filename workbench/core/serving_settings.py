"""What a service is asked to do: a stream of requests, how to re-schedule, and faults on purpose (Galaxy+, sections III-E and IV-F)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.errors import ConfigError
from workbench.core.ranges import Count, Interval, Seconds, Seed, Slowness, Tokens, require_ranges

Reaction = Literal["none", "exclude", "rebalance", "best"]
"""What is done about a straggler: nothing; leave it out (the paper's); a smaller share; whichever of the two is predicted faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Requests that arrive.  rate_per_s: of a Poisson process; 0: back to back, the next arrives when one was answered.

    num_requests: how many.  length: tokens of one; 0 takes what the task gives.
    """

    num_requests: Annotated[int, Meta(ge=1, le=10**7)] = 100
    rate_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    seed: Seed = 0
    length: Tokens = 0

    def __post_init__(self) -> None:
        require_ranges(self, "A stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReschedulingSettings:
    """How stragglers are found and taken back.

    reaction: see Reaction.  report_every_s: a device tells the latency of its blocks so often.
    A block of a device is slow when it took `slow_factor` times longer, against what the plan expects of the device, than on the
    median of the others; a device is a straggler when most of its blocks were slow in `repeats` of its last `window` reports.
    An excluded device computes a layer's work every probe_every_s; after good_probes in a row below recovered_factor (which is less than
    slow_factor: hysteresis) it is taken back.  A device that straggles again within calm_s of that waits back_off times longer, up to
    longest_probe_s, before its next probe; after calm_s without trouble the wait is the first again.
    min_gain: a new plan must be predicted to be faster by this share ('rebalance' and 'best').
    silence_s: a device that answers no sign of life for so long is lost.  request_timeout_s: a request without an answer after this
    long is repeated by a new group.
    """

    reaction: Reaction = "exclude"
    report_every_s: Interval = 0.5
    slow_factor: Slowness = 1.5
    window: Count = 5
    repeats: Count = 3
    recovered_factor: Slowness = 1.2
    good_probes: Count = 3
    probe_every_s: Interval = 0.5
    back_off: Slowness = 2.0
    longest_probe_s: Interval = 30.0
    calm_s: Seconds = 10.0
    min_gain: Annotated[float, Meta(ge=0, le=1e3)] = 0.05
    silence_s: Interval = 5.0
    request_timeout_s: Interval = 20.0

    def __post_init__(self) -> None:
        require_ranges(self, "Re-scheduling")
        asked = "Re-scheduling was asked for with "
        if not self.recovered_factor < self.slow_factor:
            raise ConfigError(
                f"{asked}slow_factor {self.slow_factor:g} and recovered_factor {self.recovered_factor:g}.",
                "A device must be clearly better to be taken back than it was to be left out, or it goes in and out.",
                "Set 1 <= recovered_factor < slow_factor.",
            )
        if self.repeats > self.window:
            raise ConfigError(
                f"{asked}repeats {self.repeats} and window {self.window}.",
                "A straggler is found by `repeats` of the last `window` reports.",
                "Set repeats <= window.",
            )
