"""The picture of an executed run: a step as simulated over the same step as measured, from the run's report.

`python -m workbench_labs.pictures.executed REPORT.json OUT.svg`
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.core.errors import ConfigError
from workbench.core.report import Report
from workbench.core.schedule import Op
from workbench.core.timeline import Timeline
from workbench.core.units import with_capital
from workbench.plots import style
from workbench_labs.pictures import shapes

KINDS = {"first epoch": "a step of the first epoch", "cached epoch": "a step from the cache"}
"""The timelines of a report that are drawn side by side, and their names."""
CALLED = {
    "side forward": "side network, forward",
    "side backward": "side network, backward",
    "load from cache": "from the cache",
    "optimizer": "update",
    "send": "on the link",
}
"""How the legend calls classes of operations; others by their names."""
LEFT, TOP, GAP, LANE = 92.0, 76.0, 40.0, 22.0


def executed_run(report: Report) -> str:
    """Return the picture: simulated above, measured below, both kinds of steps at one scale.

    Raises ConfigError if the report lacks a measured timeline, or was measured on a host that did not keep pace.
    """
    pairs = {
        words: tuple(report.timelines[f"{kind}, {how}"] for how in ("predicted", "measured"))
        for kind, words in KINDS.items()
        if f"{kind}, measured" in report.timelines
    }
    if not pairs or not report.valid:
        problem = "It was not executed." if not pairs else "The host was too busy, so its times mean little."
        raise ConfigError("A picture of an executed run was asked for.", problem, "Run again on a quiet machine.")
    ranks = sorted({span.rank for pair in pairs.values() for timeline in pair for span in timeline.spans})
    longest = [max(timeline.makespan_s for timeline in pair) for pair in pairs.values()]
    scale = (shapes.WIDTH - LEFT - shapes.MARGIN - GAP * (len(pairs) - 1)) / sum(longest)
    pitch, parts, x = LANE + 8 + 7, [], LEFT
    below = TOP + len(ranks) * pitch + 42
    for (words, pair), whole_s in zip(pairs.items(), longest, strict=True):
        parts.append(shapes.words(x, TOP - 40, words, anchor="start", size=14.5))
        for timeline, y, how in zip(pair, (TOP, below), ("simulated", "measured"), strict=True):
            names = [timeline.device_names[rank] for rank in ranks] if x == LEFT else [""] * len(ranks)
            parts.append(shapes.heading(x, y - 12, f"{how}: {_ms(timeline.makespan_s)}"))
            shown = _only(timeline, ranks)
            width = scale * whole_s
            parts.append(
                shapes.lanes(shown, x, y, width, names=names, label=_number, whole_s=whole_s, height=LANE, network=True)
            )
        x += scale * whole_s + GAP
    drawn = {kind for pair in pairs.values() for timeline in pair for kind in _drawn(timeline)}
    legend = shapes.legend(
        below + len(ranks) * pitch + 30,
        *((shapes.BOX, colour, CALLED.get(kind, kind)) for kind, colour in style.COLOURS.items() if kind in drawn),
    )
    text = "; ".join(
        f"{words} takes {_ms(predicted.makespan_s)} simulated and {_ms(measured.makespan_s)} measured"
        for words, (predicted, measured) in pairs.items()
    )
    description = f"Bars show over time what each device computes and sends. {with_capital(text)}."
    return shapes.card(
        "A run, simulated and measured", description, *parts, legend, height=below + len(ranks) * pitch + 46
    )


def _drawn(timeline: Timeline) -> set[str]:
    """Return the classes of operations that lanes of a timeline show."""
    classes = {
        (style.class_of(span.op), span.op.is_communication) for span in timeline.spans if span.end_s > span.start_s
    }
    return {name for name, is_communication in classes if not is_communication or name == "send"}


def _number(op: Op) -> str:
    """Return the number of a micro-batch on its widest bar."""
    return style.number_of(op) if op.kind == "F" else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _only(timeline: Timeline, ranks: list[int]) -> Timeline:
    """Return the timeline of some devices, which are then the first ones."""
    spans = tuple(span._replace(rank=ranks.index(span.rank)) for span in timeline.spans)
    names = tuple(timeline.device_names[rank] for rank in ranks)
    return Timeline(source=timeline.source, fidelity=timeline.fidelity, device_names=names, spans=spans)


if __name__ == "__main__":
    source, out = sys.argv[1:]
    Path(out).write_text(executed_run(Report.read(source)), encoding="utf-8")
