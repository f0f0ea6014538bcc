"""Put the reports of a period together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence


def means(reports: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return each block's mean seconds over a device's reports of a period, each of which may be of some blocks only."""
    found: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        for block, seconds in report.items():
            found[block].append(seconds)
    return {block: sum(seconds) / len(seconds) for block, seconds in found.items()}
