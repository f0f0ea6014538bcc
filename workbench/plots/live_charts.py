"""Draw a run as SVG: losses and scores, each device's work and memory, and a measured step over the predicted one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.timeline import Span, Timeline
from workbench.core.units import size_words
from workbench.plots import style, svg

WIDTH, CHART_HEIGHT = 480, 178
LEFT, RIGHT, TOP, BOTTOM = 44, 44, 22, 24
MOST_POINTS = 240
"""Of a line: more cannot be told apart on its width."""
SMOOTHED = 0.9
"""The share of the smoothed loss that each step keeps."""
ROW, LANE, THIN = 44, 18, 8
"""Heights: of a device's row, and of a measured and a predicted lane."""
MOST_SPANS = 600
MOST_LANES = 12
SAME_LENGTH = 0.02
"""Share by which the predictions of two steps may differ that count as equally long."""
LABEL = 15


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
    smooth, last = [], losses[0][1]
    for number, (step, loss) in enumerate(losses):
        weight = min(SMOOTHED, number / (number + 1))
        last = weight * last + (1 - weight) * loss
        smooth.append((step, last))
    values = [loss for _, loss in losses]
    low, high = _padded(min(values), max(values))
    most = max(num_steps, losses[-1][0], 2)

    def x(step: float) -> float:
        return LEFT + (step - 1) / (most - 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (CHART_HEIGHT - TOP - BOTTOM)

    def points(of: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        return [(x(step), y(value)) for step, value in of[:: -(-len(of) // MOST_POINTS)]]

    parts = [svg.text(LEFT, 14, "training loss", colour=svg.MUTED)]
    for tick in svg.ticks(low, high, 3):
        parts.append(svg.path([(LEFT, y(tick)), (WIDTH - RIGHT, y(tick))], svg.TRACK))
        parts.append(svg.text(LEFT - 5, y(tick) + 4, f"{tick:.4g}", size=11, text_anchor="end", colour=svg.MUTED))
    parts += _steps_axis(x, most)
    for step, words in marks:
        parts.append(svg.path([(x(step), TOP), (x(step), CHART_HEIGHT - BOTTOM)], svg.ALERT, stroke_dasharray="3 3"))
        anchor = "end" if x(step) > WIDTH / 2 else "start"
        parts.append(
            svg.text(
                x(step) + (4 if anchor == "start" else -4),
                TOP + 10,
                words,
                size=10,
                text_anchor=anchor,
                class_="workbench-halo",
            )
        )
    parts.append(svg.path(points(losses), style.BLUE, stroke_opacity=0.5))
    parts.append(svg.path([*points(smooth), (x(smooth[-1][0]), y(last))], style.BLUE, stroke_width=2))
    label = (
        f"Training loss: {losses[0][1]:.4g} in step {losses[0][0]}, now {last:.4g} (smoothed) in step {losses[-1][0]}"
    )
    if scores:
        parts.append(_scores(scores, metric, x))
        score_texts = ", ".join(f"{value:.3g} after step {step}" for step, value in scores)
        label += f". {metric.capitalize()} on the validation split: {score_texts}"
    return svg.drawing("".join(parts), label=f"{label}.", height=CHART_HEIGHT, width=WIDTH)


def _scores(scores: Sequence[tuple[int, float]], metric: str, x: Callable[[float], float]) -> str:
    """Return the points of the validation split and their axis at the right."""
    low, high = _padded(min(value for _, value in scores), max(value for _, value in scores))

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (CHART_HEIGHT - TOP - BOTTOM)

    parts = [svg.text(WIDTH - RIGHT, 14, f"validation {metric}", colour=svg.MUTED, text_anchor="end")]
    parts += [
        svg.text(WIDTH - RIGHT + 5, y(tick) + 4, f"{tick:.3g}", size=11, colour=svg.MUTED)
        for tick in svg.ticks(low, high, 3)
    ]
    for step, value in scores:
        title = svg.tag("title", f"{value:.4g}")
        parts.append(svg.tag("circle", title, cx=x(step), cy=y(value), r=4.5, fill=style.GREEN, stroke=svg.PAPER))
    return "".join(parts)


def request_chart(measured: Sequence[tuple[int, float]], predicted: Sequence[tuple[int, float]]) -> str:
    """Return the seconds of each answered request, by number from 1, as dots over the line of the predicted ones."""
    seconds = [second for _, second in (*measured, *predicted)]
    unit, most = style.time_unit(max(seconds)), max(measured[-1][0], len(predicted), 2)
    low, high = 0.0, 1.08 * max(seconds)

    def x(number: float) -> float:
        return LEFT + (number - 1) / (most - 1) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (CHART_HEIGHT - TOP - BOTTOM)

    parts = [svg.text(LEFT, 14, f"{unit.name} of a request: dots measured, line predicted", colour=svg.MUTED)]
    for tick in svg.ticks(low, high * unit.factor, 3):
        height = y(tick / unit.factor)
        parts.append(svg.path([(LEFT, height), (WIDTH - RIGHT, height)], svg.TRACK))
        parts.append(svg.text(LEFT - 5, height + 4, f"{tick:.4g}", size=11, text_anchor="end", colour=svg.MUTED))
    parts += _steps_axis(x, most, "request")
    every = -(-len(predicted) // MOST_POINTS) or 1
    parts.append(svg.path([(x(number), y(value)) for number, value in predicted[::every]], svg.INK, stroke_width=1.5))
    for number, value in measured[:: -(-len(measured) // MOST_POINTS)]:
        title = svg.tag("title", f"request {number}: {unit.text(value)}")
        parts.append(svg.tag("circle", title, cx=x(number), cy=y(value), r=2.5, fill=style.BLUE))
    number, last = measured[-1]
    label = f"Seconds of requests: {unit.text(last)} measured in request {number}"
    if predicted:
        label += f", {unit.text(predicted[min(number, len(predicted)) - 1][1])} predicted"
    return svg.drawing("".join(parts), label=f"{label}.", height=CHART_HEIGHT, width=WIDTH)


def _steps_axis(x: Callable[[float], float], most: int, unit: str = "step") -> list[str]:
    numbers = [int(tick) for tick in svg.ticks(0, most, 5) if tick >= 1 and tick == int(tick)]
    named = [
        svg.text(x(number), CHART_HEIGHT - 8, str(number), size=11, text_anchor="middle", colour=svg.MUTED)
        for number in numbers
        if x(number) < WIDTH - RIGHT - 16
    ]
    return [*named, svg.text(WIDTH, CHART_HEIGHT - 8, unit, size=11, text_anchor="end", colour=svg.MUTED)]


def device_chart(
    names: Sequence[str],
    busy: Sequence[Sequence[float]],
    used: Sequence[int | None],
    budget: Sequence[int],
    words: Sequence[str],
    energy: Sequence[str],
    computing: str = "computing, share of a step",
) -> str:
    """Return a row for each device: the share of its last steps in which it computed, oldest first, and its memory.
    computing: the head above it.

    used, budget: bytes; None if unknown.  words: what it does, or what its sensors say.  energy: how much it used, ''
    if unknown.
    """
    parts, descriptions = [], []
    bars, percent, memory = 130, 322, 336
    for rank, name in enumerate(names):
        top = 20 + rank * ROW
        parts.append(svg.text(6, top + 12, svg.shortened(name, bars - 14), font_weight="bold"))
        parts.append(svg.text(6, top + 26, svg.shortened(words[rank], bars - 14, 10.5), size=10.5, colour=svg.MUTED))
        parts.append(svg.text(6, top + 38, energy[rank], size=10, colour=svg.MUTED))
        parts.append(svg.box(bars, top, percent - bars - 34, 28, svg.TRACK))
        room = (percent - bars - 34) / 40
        for column, share in enumerate(busy[rank][-40:]):
            tall = max(1.0, 28 * min(1.0, share))
            parts.append(svg.box(bars + column * room, top + 28 - tall, max(0.8, room - 0.8), tall, style.BLUE))
        now = f"{busy[rank][-1]:.0%}" if busy[rank] else ""
        parts.append(svg.text(percent, top + 18, now, size=11, text_anchor="end"))
        used_bytes = used[rank]
        share = 0.0 if used_bytes is None or not budget[rank] else used_bytes / budget[rank]
        parts.append(svg.box(memory, top + 4, WIDTH - memory - 6, 9, svg.TRACK))
        colour = style.ORANGE if share <= 1 else style.VERMILLION
        parts.append(svg.box(memory, top + 4, (WIDTH - memory - 6) * min(1.0, share), 9, colour))
        known = "" if used_bytes is None else f"{size_words(used_bytes)} of {size_words(budget[rank])}"
        parts.append(svg.text(memory, top + 26, known, size=10.5, colour=svg.MUTED))
        descriptions.append(
            f"{name} {words[rank]}".strip()
            + f", computes {now or 'not yet'}, memory {known or 'unknown'}{', ' * bool(energy[rank])}{energy[rank]}"
        )
    heads = ((bars, computing), (memory, "memory of the job"))
    parts += [svg.text(x, 13, head, size=11, colour=svg.MUTED) for x, head in heads]
    return svg.drawing(
        "".join(parts), label=f"Devices: {'; '.join(descriptions)}.", height=20 + ROW * len(names), width=WIDTH
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
    known = [timeline for timeline in (measured, predicted) if timeline is not None and timeline.spans]
    if not known:
        return _nothing(f"A {unit}", f"No {unit} was simulated or measured yet.")
    longest_s, scale = (
        max(timeline.makespan_s for timeline in known),
        style.time_unit(max(timeline.makespan_s for timeline in known)),
    )
    names = list(
        dict.fromkeys(timeline.device_names[span.rank] for timeline in reversed(known) for span in timeline.spans)
    )
    order = {name: rank for rank, name in enumerate(known[0].device_names)}
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
    kinds = dict.fromkeys(style.class_of(span.op) for timeline in known for span in timeline.spans)
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
    sent = f", {size_words(span.nbytes)}" if span.nbytes else ""
    return f"{style.class_of(span.op)} {span.op.label}: {style.time_words(took)}{sent}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table, escaped."""
    head = "".join(svg.tag("th", svg.escape(name), scope="col") for name in columns)
    body = "".join(svg.tag("tr", "".join(svg.tag("td", svg.escape(cell)) for cell in row)) for row in rows)
    return svg.tag("table", svg.tag("thead", svg.tag("tr", head)) + svg.tag("tbody", body))


def _nothing(title: str, why: str) -> str:
    words = svg.text(WIDTH / 2, 40, why, text_anchor="middle", colour=svg.MUTED)
    return svg.drawing(words, label=f"{title}: {why}", height=70, width=WIDTH)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low) * 0.08 or max(abs(high), 1e-6) * 0.05
    return low - room, high + room


def _percent(value: float, total: float) -> str:
    return f"{100 * value / total if total else 0:.3f}%"
