"""Which device has how many samples of each label, before a run on data that stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.plots.breakdown import PART_COLOURS, stacked_bars

NUM_RANGES = 5  # of numbers that are no classes
OTHERS = "others"


def device_samples(
    shares: Sequence[Sequence[int]],
    labels: Sequence[int | float | str],
    names: Sequence[str],
    *,
    class_names: Sequence[str] = (),
    rule: str = "",
) -> go.Figure:
    """Return a bar for each device: its samples by label.

    shares: indices into labels, one sequence for each device, as tasks.device_split.split_samples gives them.
    labels: classes, numbers (shown in five ranges of equal width), or names such as topics.  names: of the devices.
    class_names: of the classes; none: they are numbers.  Labels beyond the five most frequent are one part, 'others'.
    """
    named = _ranges(labels) if isinstance(labels[0], float) else [str(class_names[int(one)] if class_names else one) for one in labels]
    order = list(dict.fromkeys(named)) if isinstance(labels[0], str) else [name for _, name in sorted(set(zip(labels, named, strict=True)))]
    counts = Counter(named)
    if len(counts) > len(PART_COLOURS):
        kept = {name for name, _ in counts.most_common(len(PART_COLOURS) - 1)}
        named = [name if name in kept else OTHERS for name in named]
        order = [name for name in order if name in kept] + [OTHERS]
    by_device = [Counter(named[index] for index in share) for share in shares]
    parts = {name: [own[name] for own in by_device] for name in dict.fromkeys(order)}
    title = f"Where the {sum(map(len, shares)):,} training samples lie"
    return stacked_bars(
        [f"{name} ({len(share):,})" for name, share in zip(names, shares, strict=True)],
        parts,
        title=title,
        label="",
        x_title="samples",
        subtitle=f"split by {rule}" if rule else "",
    )


def _ranges(numbers: Sequence[int | float | str]) -> list[str]:
    values = [float(number) for number in numbers]
    low, width = min(values), (max(values) - min(values)) / NUM_RANGES or 1.0
    found = []
    for value in values:
        at = min(int((value - low) / width), NUM_RANGES - 1)
        found.append(f"{low + at * width:.3g} to {low + (at + 1) * width:.3g}")
    return found
