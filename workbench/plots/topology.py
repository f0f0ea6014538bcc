"""Draw a cluster as a map: devices with what they hold and do, links with what travels in a step.

Whatever is lost or left is red, whatever the plan does not use is dashed.  A link carries the times of its messages, by
which a page moves packets.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.cluster import Device
from workbench.core.plan import Plan
from workbench.core.schedule import ALLGATHER, ALLREDUCE, BROADCAST, COLLECTIVES, REDUCESCATTER, SEND, Op
from workbench.core.timeline import Timeline
from workbench.core.units import counted, size_words, three_figures
from workbench.plots import style, svg

WIDTH, HEIGHT, FLAT = 480, 300, 150
"""Size of the map; one or two devices are in one row, which needs less height."""
FULL, SMALL, DOT = (152, 70), (84, 24), (12, 12)
"""Sizes of a node: with all words, with its name, and without."""
FULL_DEVICES, SMALL_DEVICES = 6, 16
"""Up to so many devices there is room for nodes of these sizes."""
SPREAD = 9
"""Distance of the two directions of a link, in pixels."""
ARROW = 7

Place = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A device on the map.  speed: a small line below.  holds: its layers and share, or what it does now, in words; ''
    if the plan does not use it.

    away: how it is gone, such as 'lost', '' if it is not.  busy_share: share of its last step in which it was busy,
    None if unknown.
    used_bytes, health: see runs.progress.DeviceRow.
    """

    name: str
    speed: str
    holds: str = ""
    away: str = ""
    busy_share: float | None = None
    used_bytes: int | None = None
    budget_bytes: int = 0
    health: str = ""

    @property
    def words(self) -> str:
        """Describe it in words."""
        parts = [part for part in (self.speed, self.holds or "no part in the plan", self.health) if part]
        if self.busy_share is not None:
            parts.append(f"computes {self.busy_share:.0%} of a step")
        if self.memory:
            parts.append(f"uses {self.memory}")
        return f"{self.name}: {self.away or ', '.join(parts)}"

    @property
    def memory(self) -> str:
        """Describe its memory in words; '' if unknown."""
        if self.used_bytes is None:
            return ""
        return f"{size_words(self.used_bytes)} of {size_words(self.budget_bytes)}"

    @property
    def used_share(self) -> float | None:
        """Return the used share of its memory; None if unknown."""
        return None if self.used_bytes is None or not self.budget_bytes else self.used_bytes / self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The messages from one device to another in a step.  what: the kinds of values.  times: (start, end) of each
    message, in seconds.
    """

    source: int
    target: int
    what: tuple[str, ...]
    nbytes: int
    times: tuple[tuple[float, float], ...]
    is_collective: bool = False


def speed_of(device: Device) -> str:
    """Return a device's speed in words."""
    words = f"{three_figures(device.flops_per_s / 1e9)} GFLOP/s"
    return f"{words} ({device.host_share:g} core)" if device.host_share else words


_PARTS = {"samples": "sample", "queries": "query", "heads": "head", "tokens": "token"}


def holds_of(plan: Plan, rank: int, *, cached: bool = False) -> str:
    """Return a device's part of a plan in words; '' if it has none.  cached: in epochs from the cache."""
    stages = (plan.cached,) if cached and plan.cached else plan.stages
    for stage in stages:
        for share in stage.shares:
            if share.rank == rank:
                # The devices that divide the heads or tokens of a sample all have that sample.
                divides = share.heads or share.tokens
                portions = [
                    f"{count} {singular if count == 1 else name}"
                    for name, singular in _PARTS.items()
                    if (count := getattr(share, name)) and not (divides and name == "samples")
                ]
                return ", ".join([f"{stage.layers_in_words}", *portions])
    return ""


def traffic_of(timeline: Timeline | None, ranks: Sequence[int]) -> list[Traffic]:
    """Return what travels in a timeline; a collective goes round its members.  ranks: its devices' ranks in the
    cluster.
    """
    messages: dict[tuple[int, int, bool], list[tuple[str, int, float, float]]] = defaultdict(list)
    for span in timeline.spans if timeline is not None else ():
        if span.op.kind == SEND:
            pair, kind = span.op.ranks, _value_of(span.op)
        elif span.op.kind in COLLECTIVES:
            place = span.op.ranks.index(span.rank)
            pair, kind = (span.rank, span.op.ranks[(place + 1) % len(span.op.ranks)]), _COLLECTIVE[span.op.kind]
        else:
            continue
        key = (ranks[pair[0]], ranks[pair[1]], span.op.kind in COLLECTIVES)
        messages[key].append((kind, span.nbytes, span.start_s, span.end_s))
    return [
        Traffic(
            source=source,
            target=target,
            what=tuple(dict.fromkeys(what for what, *_ in sent)),
            nbytes=sum(nbytes for _, nbytes, *_ in sent),
            times=tuple((start_s, end_s) for *_, start_s, end_s in sent),
            is_collective=is_collective,
        )
        for (source, target, is_collective), sent in sorted(messages.items())
        if source != target
    ]


_COLLECTIVE = {
    ALLREDUCE: "all-reduce",
    ALLGATHER: "all-gather",
    REDUCESCATTER: "reduce-scatter",
    BROADCAST: "broadcast",
}


def _value_of(op: Op) -> str:
    [value] = op.reads or op.writes
    name = str((style.OPERATIONS["tile_values"] | style.OPERATIONS["training_values"]).get(value.name, value.name))
    if " " in name or (name.endswith("s") and not name.endswith("ss")):
        return name  # several already, such as "tokens"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def topology(nodes: Sequence[Node], traffic: Sequence[Traffic], *, caption: str = "", unit: str = "step") -> str:
    """Return the map as SVG.  nodes: all devices, by rank.  caption: a line above it.  unit: what the traffic is summed
    over, 'step' or 'request'.
    """
    places = _places(len(nodes))
    size = FULL if len(nodes) <= FULL_DEVICES else SMALL if len(nodes) <= SMALL_DEVICES else DOT
    pairs = {(flow.source, flow.target) for flow in traffic}
    links = "".join(
        _link(
            flow, places, size, both=(flow.target, flow.source) in pairs, is_named=size == FULL and len(traffic) <= 12
        )
        for flow in traffic
    )
    drawn = "".join(
        _node(node, place, size, rank) for rank, (node, place) in enumerate(zip(nodes, places, strict=True))
    )
    messages = ", ".join(
        f"{nodes[flow.source].name} to {nodes[flow.target].name} {size_words(flow.nbytes)} of {' and '.join(flow.what)}"
        for flow in traffic
    )
    node_texts = ". ".join(node.words for node in nodes)
    label = f"Map of {counted(len(nodes), 'device')}. {node_texts}. In a {unit}: {messages or 'nothing'}."
    title = svg.text(8, 16, svg.shortened(caption, WIDTH - 16), colour=svg.MUTED) if caption else ""
    return svg.drawing(title + links + drawn, label=label, height=_height(len(nodes)), width=WIDTH)


def _height(count: int) -> int:
    return FLAT if count <= 2 else HEIGHT


def _places(count: int) -> list[Place]:
    """Return the centres of nodes, clockwise from the left."""
    middle, radii = (WIDTH / 2, _height(count) / 2 + 8), (WIDTH / 2 - FULL[0] / 2 - 4, HEIGHT / 2 - 50)
    if count == 1:
        return [middle]
    if count == 4:  # corners leave the most room between them
        return [(middle[0] + x * radii[0], middle[1] + y * radii[1]) for x, y in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    angles = [math.pi + 2 * math.pi * number / count for number in range(count)]
    return [(middle[0] + radii[0] * math.cos(angle), middle[1] + radii[1] * math.sin(angle)) for angle in angles]


def _edge(start: Place, end: Place, size: tuple[int, int], gap: float) -> Place:
    """Return where the line from `start` to `end` leaves the node at `start`, `gap` outside of it."""
    over, down = end[0] - start[0], end[1] - start[1]
    half = (size[0] / 2 + gap, size[1] / 2 + gap)
    share = min(half[0] / abs(over) if over else math.inf, half[1] / abs(down) if down else math.inf)
    return start[0] + over * share, start[1] + down * share


def _link(flow: Traffic, places: Sequence[Place], size: tuple[int, int], *, both: bool, is_named: bool) -> str:
    source, target = places[flow.source], places[flow.target]
    length = math.dist(source, target) or 1.0
    aside = SPREAD / 2 if both else 0.0
    shift = (-(target[1] - source[1]) / length * aside, (target[0] - source[0]) / length * aside)
    start, end = _edge(source, target, size, 2), _edge(target, source, size, 2)
    start, end = (start[0] + shift[0], start[1] + shift[1]), (end[0] + shift[0], end[1] + shift[1])
    colour = svg.themed(style.COLOURS["collective" if flow.is_collective else "send"])
    times = " ".join(f"{begin_s:.6g}:{end_s:.6g}" for begin_s, end_s in flow.times)
    line = svg.arrow(
        [start, end],
        colour,
        head=ARROW,
        stroke_width=2,
        stroke_dasharray="5 3" if flow.is_collective else None,
        class_="workbench-link",
        data_times=times,
        data_source=flow.source,
        data_target=flow.target,
    )
    turn = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    if not is_named:
        return line
    # The words of the two directions stand on the two sides of the pair, turned with the line but never upside down.
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    upright = turn if -90 < turn <= 90 else turn + 180
    below = upright == turn
    room = 0.85 * math.dist(start, end)  # some systems' letters are wider than those that were measured
    words = svg.shortened(f"{size_words(flow.nbytes)} {' and '.join(flow.what)}", room, 10.5)
    name = svg.text(
        0,
        14 if below else -6,
        words,
        size=10.5,
        text_anchor="middle",
        transform=f"translate({middle[0]:.1f} {middle[1]:.1f}) rotate({upright:.1f})",
        class_="workbench-halo",
    )
    return line + name


def _node(node: Node, place: Place, size: tuple[int, int], rank: int) -> str:
    (x, y), (width, height) = place, size
    left, top = x - width / 2, y - height / 2
    rim = svg.ALERT if node.away else svg.INK
    frame = svg.box(
        left,
        top,
        width,
        height,
        svg.PAPER,
        title=node.words,
        rx=6,
        stroke=rim,
        stroke_width=2.5 if node.away else 1.25,
        stroke_dasharray="4 3" if node.away or not node.holds else None,
        class_="workbench-node",
        data_rank=rank,
    )
    if size == DOT:
        return frame
    name = svg.text(
        x if size == SMALL else left + 8,
        top + 16,
        svg.shortened(node.name, width - 12),
        font_weight="bold",
        colour=rim,
        text_anchor="middle" if size == SMALL else "start",
    )
    if size == SMALL:
        return frame + name
    room = width - 14
    second = node.away or node.holds or "no part"
    lines = svg.text(left + 8, top + 31, svg.shortened(second, room, 11), size=11, colour=rim if node.away else svg.INK)
    third = node.health or node.speed
    lines += svg.text(left + 8, top + 45, svg.shortened(third, room, 10), size=10, colour=svg.MUTED)
    if node.away:
        return frame + name + lines
    busy = meter(left + 8, top + 52, room, node.busy_share, style.COLOURS["forward"], "computes")
    return frame + name + lines + busy + meter(left + 8, top + 59, room, node.used_share, style.ORANGE, "memory")


def meter(x: float, y: float, width: float, share: float | None, colour: str, what: str, *, height: float = 4) -> str:
    """Return a bar of which a share is full; '' if the share is unknown."""
    if share is None:
        return ""
    title = f"{what}: {share:.0%}"
    full = svg.box(x, y, width * min(1.0, share), height, colour if share <= 1 else style.VERMILLION, title=title)
    return svg.box(x, y, width, height, svg.TRACK, title=title) + full
