"""Schematics that are drawn from schedules in virtual time: pipelines, weight stashing, and all-reduce on a ring."""

from __future__ import annotations

from typing import Any

from workbench.core.costs import TableCosts
from workbench.core.program import Program
from workbench.core.schedule import SEND, Op, Schedule
from workbench.core.timeline import Timeline
from workbench.plots import style, svg
from workbench.schedules.published import SECONDS, build_published
from workbench.simulator import simulate
from workbench.simulator.memory import live_counts
from workbench_labs.pictures import shapes
from workbench_labs.pictures.shapes import (
    BACKWARD,
    BOX,
    FORWARD,
    MARGIN,
    OLDER,
    TRAINED,
    Pictures,
    card,
    heading,
    lanes,
    muted,
    words,
)


def timeline_of(schedule: Schedule, **seconds: float) -> Timeline:
    """Return the schedule in virtual time; a backward pass takes as long as two forward passes."""
    costs = TableCosts(seconds_by_kind={**SECONDS, **seconds}, bytes_by_name={})
    return simulate(Program(schedule=schedule, costs=costs, devices=devices(schedule.world_size)), memory=False)


def devices(count: int) -> tuple[str, ...]:
    """Return names for lanes."""
    return tuple(f"device {rank + 1}" for rank in range(count))


def counted_from_1(op: Op) -> str:
    """Return the number of an operation's micro-batch, counted from 1."""
    return str(op.microbatch + 1) if op.microbatch >= 0 else ""


PASSES = ((BOX, FORWARD, "forward pass"), (BOX, BACKWARD, "backward pass"), (BOX, svg.TRACK, "idle"))


def pipeline() -> str:
    """Draw GPipe and 1F1B."""
    parts, y = [], 34.0
    for name, caption, rest in (
        ("gpipe", "GPipe", "all forward passes, then all backward passes"),
        ("1f1b", "1F1B", "as soon as it can, a device goes back: one forward, one backward"),
    ):
        schedule = build_published(name, {"ranks": 3, "micro_batches": 6})
        timeline = timeline_of(schedule)
        parts += [
            heading(MARGIN, y, caption, rest),
            lanes(timeline, 112, y + 16, 556, names=devices(3), label=counted_from_1),
        ]
        parts += [
            words(724, y + 32 + rank * 32, str(count), font_weight="bold")
            for rank, count in enumerate(live_counts(schedule, timeline.spans, "ctx"))
        ]
        parts.append(muted(724, y, "activations kept"))
        y += 142
    return card(
        "Pipeline: GPipe and 1F1B",
        "Three devices each hold a part of the model; six micro-batches pass through. Both orders take equally "
        "long. GPipe keeps the activations of all six micro-batches, 1F1B those of at most three.",
        *parts,
        height=y + 34,
        entries=PASSES,
    )


def weight_stashing() -> str:
    """Draw Confidant's pipeline with the version of the weights that each pass uses."""
    schedule = build_published("asynchronous_1f1b", {"ranks": 3, "micro_batches": 7})
    timeline = timeline_of(schedule)
    x, width, y = 112.0, 656.0, 50.0
    scale = width / timeline.makespan_s
    parts = [
        heading(MARGIN, 34, "A pipeline that never drains", "a device updates its weights after every backward pass"),
        lanes(timeline, x, y, width, names=devices(3), label=_versioned, height=36),
    ]
    lifetimes = [_lifetime(timeline, version) for version in range(4)]
    y += 168
    parts.append(
        heading(MARGIN, y, "Versions of the weights on device 1", "kept until the last backward pass needs them")
    )
    for number, (begin_s, end_s, used_s) in enumerate(lifetimes):
        top = y + 16 + number * 24
        parts.append(words(x - 12, top + 13, f"w_{number}", anchor="end"))
        parts.append(svg.box(x + begin_s * scale, top, (end_s - begin_s) * scale, 18, TRAINED, rx=3))
        parts.append(svg.box(x + end_s * scale, top, (used_s - end_s) * scale, 18, OLDER, rx=3))
    y += 16 + 4 * 24
    return card(
        "Weight stashing",
        "Mini-batches follow each other through three devices without a pause. Each pass is marked with the mini-"
        "batch and with the version of the weights that it uses: a backward pass uses the version of its forward "
        "pass, so device 1 keeps up to three versions.",
        *parts,
        height=y + 48,
        entries=(
            *PASSES[:2],
            (BOX, TRAINED, "newest weights"),
            (BOX, OLDER, "older weights, stashed"),
        ),
    )


def _versioned(op: Op) -> str:
    version = [value.part for value in op.reads if value.name == "weight"]
    return f"{counted_from_1(op)}\nw_{version[0]}" if version and op.kind in ("F", "B") else counted_from_1(op)


def _lifetime(timeline: Timeline, version: int) -> tuple[float, float, float]:
    """Return when a version of the first device's weights is made, when it is replaced, and when it is last used."""
    spans = [span for span in timeline.spans if span.rank == 0]

    def update_end_s(number: int) -> float:
        return max((span.end_s for span in spans if any(_is(value, number) for value in span.op.writes)), default=0.0)

    ends_s = [
        span.end_s for span in spans if span.op.kind == "B" and any(_is(value, version) for value in span.op.reads)
    ]
    replaced_s = update_end_s(version + 1)
    return update_end_s(version), replaced_s, max([replaced_s, *ends_s])


def _is(value: object, version: int) -> bool:
    return getattr(value, "name", "") == "weight" and getattr(value, "part", -1) == version


def all_reduce() -> str:
    """Draw a sum over four devices on a ring: reduce-scatter, then all-gather."""
    ranks, side, gap = 4, 15.0, 2.0
    colours = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE)
    x, y, pitch, wide = 122.0, 92.0, 42.0, 4 * (side + gap)
    columns = _ring_states(ranks)
    step_width = (shapes.WIDTH - MARGIN - x - wide) / (len(columns) - 1)
    parts = [
        muted(x + (number + 0.5) * step_width + wide / 2 - step_width / 2, 68, str(number) if number else "begin")
        for number in range(len(columns))
    ]
    for first, last, name in ((1, 3, "reduce-scatter: add"), (4, 6, "all-gather: copy")):
        left, right = x + first * step_width - 6, x + last * step_width + wide + 6
        parts.append(words((left + right) / 2, 34, name, font_weight="bold", size=14))
        parts.append(svg.path([(left, 44), (right, 44)], svg.MUTED, stroke_width=1.25))
    for rank, name in enumerate(devices(ranks)):
        top = y + rank * pitch
        parts.append(words(x - 28, top + side - 2, name, anchor="end"))
    parts.append(_ring(x - 16, y, pitch, ranks))
    for number, (state, arrived) in enumerate(columns):
        left = x + number * step_width
        for rank in range(ranks):
            for part in range(ranks):
                corner = (left + part * (side + gap), y + rank * pitch - 3)
                terms, is_new = state[rank][part], (rank, part) in arrived
                parts.append(_cell(*corner, side, colours[part], terms, ranks, is_new=is_new))
    bottom = y + ranks * pitch
    return card(
        "All-reduce on a ring",
        "Four devices each have four pieces of a gradient. In three steps every device sends a piece to the next "
        "one, which adds it to its own: then each has the sum of one piece. In three more steps the sums go round. "
        "Each device sends six pieces, whatever the number of devices: less than twice its gradient.",
        *parts,
        muted(
            shapes.WIDTH / 2, bottom + 14, "Number: how many devices' terms a piece has. Framed: what has just arrived."
        ),
        height=bottom + 36,
    )


def _cell(x: float, y: float, side: float, colour: str, terms: int, all_terms: int, *, is_new: bool) -> str:
    rim: dict[str, Any] = {"stroke": svg.INK, "stroke_width": 2} if is_new else {}
    full = svg.box(x, y, side, side + 6, colour, rx=2, fill_opacity=1 if terms == all_terms else 0.2 * terms, **rim)
    ink = style.text_on(colour) if terms == all_terms else ""
    return full + words(x + side / 2, y + 15, str(terms), colour=ink)


def _ring(x: float, y: float, pitch: float, ranks: int) -> str:
    """Return arrows from each lane to the next, and from the last to the first."""
    down = [
        shapes.arrow(shapes.MESSAGE, (x, y + rank * pitch + 17), (x, y + (rank + 1) * pitch - 4))
        for rank in range(ranks - 1)
    ]
    top, bottom = y + 8, y + (ranks - 1) * pitch + 26
    back = shapes.arrow(shapes.MESSAGE, (x, bottom - 9), (x, bottom), (18, bottom), (18, top), (32, top))
    return "".join([*down, back])


def _ring_states(ranks: int) -> list[tuple[list[list[int]], set[tuple[int, int]]]]:
    """Return how many terms each piece on each device has at the beginning and after each step of the ring, and the
    (rank, piece) that just arrived: first the sums, then the copies, by the schedules' messages.
    """
    state = [[1] * ranks for _ in range(ranks)]
    states: list[tuple[list[list[int]], set[tuple[int, int]]]] = [([row[:] for row in state], set())]
    adding = build_published("ring_gemm_reducescatter", {"ranks": ranks, "overlapped": 1})
    copying = build_published("ring_allgather_gemm", {"ranks": ranks, "overlapped": 1})
    for schedule, adds in ((adding, True), (copying, False)):
        sends = [[op for op in ops if op.kind == SEND] for ops in schedule.ops]
        for step in range(ranks - 1):
            arrived = {(op.ranks[1], op.part): op.ranks[0] for op in (rank_sends[step] for rank_sends in sends)}
            before = [row[:] for row in state]
            for (rank, part), source in arrived.items():
                state[rank][part] = before[source][part] + (1 if adds else 0)
            states.append(([row[:] for row in state], set(arrived)))
    return states


SCHEDULES: Pictures = {
    "pipeline": pipeline,
    "weight_stashing": weight_stashing,
    "all_reduce": all_reduce,
}
