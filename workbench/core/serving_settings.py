"""What a service is asked to do: a stream of requests, how to re-schedule, and faults on purpose (Galaxy+, sections III-E and IV-F)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from workbench.core.errors import ConfigError

Reaction = Literal["none", "exclude", "rebalance", "best"]
"""What is done about a straggler: nothing; leave it out (the paper's); a smaller share; whichever of the two is predicted faster."""

FaultKind = Literal["slow", "kill", "freeze"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Requests that arrive.  rate_per_s: of a Poisson process; 0: back to back, the next arrives when one was answered.

    num_requests: how many.  length: tokens of one; 0 takes what the task gives.
    """

    num_requests: int = 100
    rate_per_s: float = 0.0
    seed: int = 0
    length: int = 0

    def __post_init__(self) -> None:
        asked = f"A stream of {self.num_requests} requests at {self.rate_per_s:g} per second was asked for."
        if self.num_requests < 1 or not self.rate_per_s >= 0 or math.isinf(self.rate_per_s) or self.length < 0:
            raise ConfigError(asked, "It needs a request, and a rate of at least 0.", "Raise num_requests; set rate_per_s to 0 or more.")


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
    report_every_s: float = 0.5
    slow_factor: float = 1.5
    window: int = 5
    repeats: int = 3
    recovered_factor: float = 1.2
    good_probes: int = 3
    probe_every_s: float = 0.5
    back_off: float = 2.0
    longest_probe_s: float = 30.0
    calm_s: float = 10.0
    min_gain: float = 0.05
    silence_s: float = 5.0
    request_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        asked = "Re-scheduling was asked for with "
        if self.reaction not in ("none", "exclude", "rebalance", "best"):
            raise ConfigError(f"{asked}reaction '{self.reaction}'.", "There are none, exclude, rebalance and best.", "Choose one.")
        if not 1.0 <= self.recovered_factor < self.slow_factor:
            raise ConfigError(
                f"{asked}slow_factor {self.slow_factor:g} and recovered_factor {self.recovered_factor:g}.",
                "A device must be clearly better to be taken back than it was to be left out, or it goes in and out.",
                "Set 1 <= recovered_factor < slow_factor.",
            )
        if not 1 <= self.repeats <= self.window or self.good_probes < 1:
            raise ConfigError(
                f"{asked}repeats {self.repeats}, window {self.window} and good_probes {self.good_probes}.",
                "A straggler is found by `repeats` of the last `window` reports.",
                "Set 1 <= repeats <= window and good_probes >= 1.",
            )
        positive = (self.report_every_s, self.probe_every_s, self.longest_probe_s, self.silence_s, self.request_timeout_s)
        if min(positive) <= 0 or self.back_off < 1 or self.calm_s < 0 or self.min_gain < 0:
            raise ConfigError(
                f"{asked}times {positive}, back_off {self.back_off:g}, calm_s {self.calm_s:g}, min_gain {self.min_gain:g}.",
                "Times must be above 0, back_off at least 1, the others at least 0.",
                "Raise them.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something done to a device on purpose.  start_s, end_s: seconds of the service; end_s None: to the end.

    kind: 'slow' (it computes `factor` times slower, by the pacer), 'kill' (SIGKILL; a new process from end_s on), 'freeze'
    (SIGSTOP; a new process from end_s on, since the old one is ended when it is found silent).
    """

    kind: FaultKind
    rank: int
    start_s: float
    end_s: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        end = "the end" if self.end_s is None else f"{self.end_s:g} s"
        asked = f"A fault '{self.kind}' of device {self.rank} from {self.start_s:g} s to {end}, factor {self.factor:g}, was asked for."
        if self.kind not in ("slow", "kill", "freeze"):
            raise ConfigError(asked, "There are slow, kill and freeze.", "Choose one.")
        if not 0 <= self.start_s < (math.inf if self.end_s is None else self.end_s) or self.rank < 0:
            raise ConfigError(asked, "It must begin at 0 s or later, and end after that.", "Set 0 <= start_s < end_s.")
        if not (self.factor > 0 and math.isfinite(self.factor)) or (self.kind == "slow" and self.factor == 1.0):
            raise ConfigError(asked, "The factor must be positive and finite, and for 'slow' not 1.", "Give a factor such as 4.")
