"""Faults that are injected into a run: 'kill device-1 20; slow device-2 30 4; back device-1 40'."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.ranges import Count, Slowness, require_range
from workbench.core.serial import shown

Kind = Literal["kill", "freeze", "slow", "back"]


class StepFault(NamedTuple):
    """What befalls a device when `step` steps are done: it dies, answers no more, becomes `factor` times slower, or comes back.

    A device that comes back is waited for.
    """

    kind: Kind
    rank: int
    step: int
    factor: float = 1.0


def parse_faults(text: str, cluster: Cluster) -> tuple[StepFault, ...]:
    """Return the faults of 'KIND DEVICE STEP [FACTOR]; ...' in the order of their steps.  Raises ConfigError naming the wrong one."""
    names = [device.name for device in cluster.devices]
    found = []
    for words in (one.split() for one in text.split(";") if one.strip()):
        asked = f"The fault '{shown(' '.join(words))}' was asked for."
        if words[0] not in get_args(Kind) or len(words) != 3 + (words[0] == "slow"):
            raise ConfigError(asked, f"Kinds are {', '.join(get_args(Kind))}.", "Write KIND DEVICE STEP, and for slow a factor behind.")
        if words[1] not in names:
            raise ConfigError(asked, f"The cluster's devices are {', '.join(names)}.", "Name one of them.")
        try:
            step, factor = int(words[2]), float(words[3]) if len(words) > 3 else 1.0
        except ValueError:
            raise ConfigError(asked, "The step is a whole number, the factor a number.", "Change them.") from None
        require_range(step, Count, f"The fault '{shown(' '.join(words))}'", "step")
        if words[0] == "slow":
            require_range(factor, Slowness, f"The fault '{shown(' '.join(words))}'", "factor")
        found.append(StepFault(words[0], names.index(words[1]), step, factor))  # type: ignore[arg-type]
    return tuple(sorted(found, key=lambda fault: fault.step))
