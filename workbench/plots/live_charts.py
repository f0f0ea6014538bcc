"""Draw a run as SVG: losses and scores, each device's work and memory, and a measured step over the predicted one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.timeline import Span, Timeline
from workbench.core.units import size_words
from workbench.plots import style, svg
from workbench.plots.overlay import smoothed
from workbench.plots.topology import Node, meter

WIDTH, CHART_HEIGHT = 480, 178
LEFT, RIGHT, TOP, BOTTOM = 44, 44, 22, 24
MOST_POINTS = 240
"""Maximum number of points of a line; more cannot be distinguished at this width."""
SMOOTHED = 0.9
"""The share of the smoothed loss that each step keeps."""
ROW, LANE, THIN = 44, 18, 8
"""Heights: of a device's row, and of a measured and a predicted lane."""
MOST_SPANS = 600
MOST_LANES = 12
SAME_LENGTH = 0.02
"""Share by which the predictions of two steps may differ that count as equally long."""
LABEL = 15


class _Axes(NamedTuple):
    """The axes of a chart: steps from 1 to `last`, values from low to high."""

    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        """Return the place of a step."""
        return LEFT + (step - 1) / (self.last - 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value."""
        return TOP + (self.high - value) / (self.high - self.low) * (CHART_HEIGHT - TOP - BOTTOM)

    def points(self, values: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        """Return the places of (step, value), fewer if there are many."""
        return [(self.x(step), self.y(value)) for step, value in values[:: -(-len(values) // MOST_POINTS) or 1]]

    def drawn(self, heading: str, unit: str = "step", factor: float = 1.0) -> list[str]:
        """Return both axes.  unit: what a step is called.  factor: multiplies the values on the axis."""
        parts = [svg.text(LEFT, 14, heading, colour=svg.MUTED)]
        for tick in svg.ticks(self.low * factor, self.high * factor, 3):
            height = self.y(tick / factor)
            parts.append(svg.path([(LEFT, height), (WIDTH - RIGHT, height)], svg.TRACK))
            parts.append(svg.text(LEFT - 5, height + 4, f"{tick:.4g}", size=11, text_anchor="end", colour=svg.MUTED))
        below = CHART_HEIGHT - 8
        for number in svg.ticks(0, self.last, 5):
            x, is_step = self.x(number), number >= 1 and number == int(number)
            if is_step and x < WIDTH - RIGHT - 16:
                parts.append(svg.text(x, below, f"{number:.0f}", size=11, text_anchor="middle", colour=svg.MUTED))
        return [*parts, svg.text(WIDTH, below, unit, size=11, text_anchor="end", colour=svg.MUTED)]


def loss_chart(
    losses: Sequence[tuple[int, float]],
    *,
    num_steps: int,
    scores: Sequence[tuple[int, float]] = (),
    metric: str = "",
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """Return the training loss by step, from 1.  Each step's loss is pale, the smoothed loss strong.

    num_steps: steps of the whole run.  scores: (step, value) of the metric on the validation split, on an axis at the
    right.
    marks: (step, words) of changes of the devices.
    """
    if not losses:
        return _nothing("Loss", "No step is finished yet.")
    steps, values = zip(*losses, strict=True)
    smooth = list(zip(steps, smoothed(values, SMOOTHED), strict=True))
    axes = _Axes(max(num_steps, steps[-1], 2), *_padded(values))
    parts = axes.drawn("training loss")
    for step, words in marks:
        x = axes.x(step)
        anchor, aside = ("end", -4) if x > WIDTH / 2 else ("start", 4)
        parts.append(svg.path([(x, TOP), (x, CHART_HEIGHT - BOTTOM)], svg.ALERT, stroke_dasharray="3 3"))
        parts.append(svg.text(x + aside, TOP + 10, words, size=10, text_anchor=anchor, class_="workbench-halo"))
    parts.append(svg.path(axes.points(losses), style.BLUE, stroke_opacity=0.5))
    parts.append(svg.path([*axes.points(smooth), *axes.points(smooth[-1:])], style.BLUE, stroke_width=2))
    label = f"Training loss: {values[0]:.4g} in step {steps[0]}, now {smooth[-1][1]:.4g} (smoothed) in step {steps[-1]}"
    if scores:
        parts.append(_scores(scores, metric, axes))
        score_texts = ", ".join(f"{value:.3g} after step {step}" for step, value in scores)
        label += f". {metric.capitalize()} on the validation split: {score_texts}"
    return svg.drawing("".join(parts), label=f"{label}.", height=CHART_HEIGHT, width=WIDTH)


def _scores(scores: Sequence[tuple[int, float]], metric: str, left: _Axes) -> str:
    """Return the points of the validation split and their axis at the right.  left: the axes of the losses."""
    axes = _Axes(left.last, *_padded([value for _, value in scores]))
    parts = [svg.text(WIDTH - RIGHT, 14, f"validation {metric}", colour=svg.MUTED, text_anchor="end")]
    parts += [
        svg.text(WIDTH - RIGHT + 5, axes.y(tick) + 4, f"{tick:.3g}", size=11, colour=svg.MUTED)
        for tick in svg.ticks(axes.low, axes.high, 3)
    ]
    for step, value in scores:
        title, place = svg.tag("title", f"{value:.4g}"), {"cx": axes.x(step), "cy": axes.y(value), "r": 4.5}
        parts.append(svg.tag("circle", title, fill=style.GREEN, stroke=svg.PAPER, **place))
    return "".join(parts)


def request_chart(measured: Sequence[tuple[int, float]], predicted: Sequence[tuple[int, float]]) -> str:
    """Return the seconds of each answered request, by number from 1, as dots over the line of the predicted ones."""
    seconds = [second for _, second in (*measured, *predicted)]
    unit = style.time_unit(max(seconds))
    axes = _Axes(max(measured[-1][0], len(predicted), 2), 0.0, 1.08 * max(seconds))
    parts = axes.drawn(f"{unit.name} of a request: dots measured, line predicted", "request", unit.factor)
    parts.append(svg.path(axes.points(predicted), svg.INK, stroke_width=1.5))
    for number, value in measured[:: -(-len(measured) // MOST_POINTS)]:
        title = svg.tag("title", f"request {number}: {unit.text(value)}")
        parts.append(svg.tag("circle", title, cx=axes.x(number), cy=axes.y(value), r=2.5, fill=style.BLUE))
    number, last = measured[-1]
    label = f"Seconds of requests: {unit.text(last)} measured in request {number}"
    if predicted:
        label += f", {unit.text(predicted[min(number, len(predicted)) - 1][1])} predicted"
    return svg.drawing("".join(parts), label=f"{label}.", height=CHART_HEIGHT, width=WIDTH)


def device_chart(
    nodes: Sequence[Node],
    busy: Sequence[Sequence[float]],
    words: Sequence[str],
    energy: Sequence[str],
    *,
    unit: str,
) -> str:
    """Return a row for each device: the share of its last steps in which it computed, oldest first, and its memory.

    words: what it does, or what its sensors say.  energy: how much it used, '' if unknown.  unit: what a step is
    called.
    """
    parts, descriptions = [], []
    bars, percent, memory = 130, 322, 336
    room = (percent - bars - 34) / 40
    for rank, (node, shares, doing, energy_text) in enumerate(zip(nodes, busy, words, energy, strict=True)):
        top = 20 + rank * ROW
        parts.append(svg.text(6, top + 12, svg.shortened(node.name, bars - 14), font_weight="bold"))
        parts.append(svg.text(6, top + 26, svg.shortened(doing, bars - 14, 10.5), size=10.5, colour=svg.MUTED))
        parts.append(svg.text(6, top + 38, energy_text, size=10, colour=svg.MUTED))
        parts.append(svg.box(bars, top, percent - bars - 34, 28, svg.TRACK))
        for column, share in enumerate(shares[-40:]):
            tall = max(1.0, 28 * min(1.0, share))
            parts.append(svg.box(bars + column * room, top + 28 - tall, max(0.8, room - 0.8), tall, style.BLUE))
        now = f"{shares[-1]:.0%}" if shares else ""
        parts.append(svg.text(percent, top + 18, now, size=11, text_anchor="end"))
        width = WIDTH - memory - 6
        parts.append(svg.box(memory, top + 4, width, 9, svg.TRACK))
        parts.append(meter(memory, top + 4, width, node.used_share, style.ORANGE, "memory", height=9))
        parts.append(svg.text(memory, top + 26, node.memory, size=10.5, colour=svg.MUTED))
        facts = [f"{node.name} {doing}".strip(), f"computes {now or 'not yet'}", f"memory {node.memory or 'unknown'}"]
        descriptions.append(", ".join(filter(None, [*facts, energy_text])))
    heads = ((bars, f"computing, share of a {unit}"), (memory, "memory of the job"))
    parts += [svg.text(x, 13, head, size=11, colour=svg.MUTED) for x, head in heads]
    return svg.drawing(
        "".join(parts), label=f"Devices: {'; '.join(descriptions)}.", height=20 + ROW * len(nodes), width=WIDTH
    )


def step_chart(
    measured: Timeline | None,
    predicted: Timeline | None,
    *,
    measured_step: str = "",
    expected_s: float | None = None,
    unit: str = "step",
) -> str:
    """Return the measured step of every device over the predicted one, on one axis of time.  unit: what it is called.

    Devices that do something have a lane each: the upper, thick half is measured, the lower, thin one predicted.
    measured_step: which one, in words, expected_s: its own predicted seconds.  Steps differ in length; the predicted
    one has a typical length.
    """
    timelines = [timeline for timeline in (measured, predicted) if timeline is not None and timeline.spans]
    if not timelines:
        return _nothing(f"A {unit}", f"No {unit} was simulated or measured yet.")
    longest_s = max(timeline.makespan_s for timeline in timelines)
    scale = style.time_unit(longest_s)
    names = list(
        dict.fromkeys(timeline.device_names[span.rank] for timeline in reversed(timelines) for span in timeline.spans)
    )
    order = {name: rank for rank, name in enumerate(timelines[0].device_names)}
    names.sort(key=lambda name: order.get(name, len(order)))
    shown = [names[number] for number in style.evenly_spaced(len(names), MOST_LANES)]
    lane = LABEL + (LANE if measured is not None else 0) + (THIN if predicted is not None else 0) + 5
    parts = []
    for number, name in enumerate(shown):
        top = 4 + number * lane
        parts.append(svg.text(0, top + 10, name, size=11, font_weight="bold"))
        top += LABEL
        for timeline, height in ((measured, LANE), (predicted, THIN)):
            if timeline is not None:
                parts.append(_lane(timeline, name, top, height, longest_s, is_pale=height == THIN and bool(measured)))
                top += height
    bottom = 4 + lane * len(shown)
    for tick in svg.ticks(0, longest_s * scale.factor, 6):
        left = _percent(tick / scale.factor, longest_s)
        anchor = "start" if tick == 0 else "middle"
        if tick / scale.factor < longest_s * 0.97:
            parts.append(
                svg.text(left, bottom + 12, f"{tick:.3g} {scale.name}", size=11, colour=svg.MUTED, text_anchor=anchor)
            )
    lines = []
    typical_s = predicted.makespan_s if predicted is not None and predicted.spans else 0.0
    is_other = expected_s is not None and typical_s > 0 and abs(expected_s / typical_s - 1) > SAME_LENGTH
    if measured is not None and measured.spans:
        which = [measured_step] if measured_step else []
        if expected_s is not None and is_other:
            which.append(f"{scale.text(expected_s)} predicted for its length")
        lines.append(f"measured {scale.text(measured.makespan_s)}" + (f" ({', '.join(which)})" if which else ""))
    if typical_s:
        lines.append(f"predicted {scale.text(typical_s)}" + (" (of typical length)" if is_other else ""))
    label = f"What each device does in a {unit}: {', '.join(lines)}."
    drawn = svg.drawing("".join(parts), label=label, height=bottom + 18)
    heading = svg.tag("div", f"<b>A {unit}</b>: {svg.escape(', '.join(lines))}", class_="workbench-caption")
    kinds = dict.fromkeys(style.class_of(span.op) for timeline in timelines for span in timeline.spans)
    legend = " ".join(
        svg.tag("span", f"{svg.swatch(colour)} {svg.escape(name)}")
        for name, colour in style.COLOURS.items()
        if name in kinds
    )
    return heading + drawn + svg.tag("div", legend, class_="workbench-legend")


def _lane(timeline: Timeline, name: str, top: float, height: float, longest_s: float, *, is_pale: bool) -> str:
    if name not in timeline.device_names:
        return ""
    rank = timeline.device_names.index(name)
    spans = [span for span in timeline.spans if span.rank == rank]
    parts = [svg.box("0%", top, _percent(timeline.makespan_s, longest_s), height - 1, svg.TRACK)]
    # The network first and thin, so that computing stands in front of it.
    for span in sorted(spans, key=lambda span: not span.op.is_communication)[:MOST_SPANS]:
        colour = svg.themed(style.COLOURS[style.class_of(span.op)])
        thick = height - 1 if not span.op.is_communication else max(2.0, (height - 1) / 4)
        parts.append(
            svg.box(
                _percent(span.start_s, longest_s),
                top + height - 1 - thick,
                _percent(max(span.end_s - span.start_s, longest_s / 1000), longest_s),
                thick,
                colour,
                title="" if is_pale else _span_text(span),
            )
        )
    return svg.tag("g", "".join(parts), class_="workbench-predicted" if is_pale else None)


def _span_text(span: Span) -> str:
    took = span.end_s - span.start_s
    size = f", {size_words(span.nbytes)}" if span.nbytes else ""
    return f"{style.class_of(span.op)} {span.op.label}: {style.time_words(took)}{size}"


def _nothing(title: str, why: str) -> str:
    words = svg.text(WIDTH / 2, 40, why, text_anchor="middle", colour=svg.MUTED)
    return svg.drawing(words, label=f"{title}: {why}", height=70, width=WIDTH)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of some values, with room at both ends."""
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or max(abs(high), 1e-6) * 0.05
    return low - room, high + room


def _percent(value: float, total: float) -> str:
    return f"{100 * value / total if total else 0:.3f}%"
