"""The medium that joins a cluster's devices: a switch, or the shared air of a Wi-Fi network.

A switch gives each device a private full-duplex wire.  What several send to one device at once shares its wire equally;
the switch holds what has to wait.  Wi-Fi is one half-duplex medium: the time on air is divided equally among all that
send at once (airtime fairness; Hoiland-Jorgensen et al., "Ending the Anomaly", USENIX ATC 2017,
which is how Linux access points schedule).  An access point repeats each frame between two stations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from workbench.core.ranges import Latency, Rate, require_range

Medium = Literal["switch", "wifi"]
"""How devices are joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Air:
    """The air of a Wi-Fi network.  bytes_per_s: each station's rate to and from the access point, by rank.

    pairs: rates of stations that talk directly, without the access point, by 'rank>rank'.  jitter_s: mean of a
    message's additional delay, which is distributed exponentially.
    Raises ConfigError for a rate or a delay out of range.
    """

    bytes_per_s: tuple[float, ...]
    pairs: dict[str, float] = field(default_factory=dict)
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        for rate in (*self.bytes_per_s, *self.pairs.values()):
            require_range(rate, Rate, "The air", "bytes_per_s")
        require_range(self.jitter_s, Latency, "The air", "jitter_s")

    def transfer_s(self, source: int, destination: int, nbytes: float) -> float:
        """Return the seconds on air of a message between two ranks, with the access point's repetition."""
        direct = self.pairs.get(f"{source}>{destination}")
        return nbytes / (direct or relayed(self.bytes_per_s[source], self.bytes_per_s[destination]))

    @property
    def most_bytes_per_s(self) -> float:
        """Return the rate between the two stations whose bytes need the least time on air."""
        ranks = range(len(self.bytes_per_s))
        least_s = min((self.transfer_s(a, b, 1) for a in ranks for b in ranks if a != b), default=1.0)
        return 1 / least_s

    def times_on_air(self, source: int, destination: int) -> float:
        """Return how many times as long a byte between two ranks needs the air as one at `most_bytes_per_s`."""
        return self.transfer_s(source, destination, 1) * self.most_bytes_per_s

    def delay_s(self, source: int, destination: int, number: int) -> float:
        """Return the additional delay of a message by its number in the channel of two ranks.  It is always the same.

        So a simulation and an execution draw the same delays.
        """
        if not self.jitter_s:
            return 0.0
        digest = blake2b(f"{source}>{destination} {number}".encode(), digest_size=8).digest()
        return -self.jitter_s * math.log1p(-int.from_bytes(digest, "big") / 2**64)


def relayed(sender: float, receiver: float) -> float:
    """Return the rate between two stations: each byte takes the sender's time on air, then the receiver's."""
    return 1 / (1 / sender + 1 / receiver)
