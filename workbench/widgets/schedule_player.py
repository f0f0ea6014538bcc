"""Step through a timeline: a slider over time, a map with packets on its links, the Gantt chart with a cursor, and what
each device does at that moment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import ipywidgets as widgets
import plotly.graph_objects as go
from markupsafe import Markup

from workbench.core.schedule import COLLECTIVES, NONE, RECV, SEND, Op
from workbench.core.timeline import Timeline
from workbench.core.units import size_words
from workbench.plots import gantt
from workbench.plots.live_charts import step_chart
from workbench.plots.style import OPERATIONS, class_of, number_of, time_unit
from workbench.plots.topology import Node, topology, traffic_of
from workbench.plots.trace import chrome_trace
from workbench.widgets.controls import Html, Panel, button, described, slider
from workbench.widgets.download import trace_button
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.live import LiveView, still
from workbench.widgets.tables import Table

TICKS = 400


Cell = Callable[[Timeline, int, float], str]


class Moment(NamedTuple):
    """A device's activity at one time.  computes, network: labels of operations; nbytes: memory in use, None if not
    recorded.
    """

    device: str
    computes: tuple[str, ...]
    network: tuple[str, ...]
    nbytes: int | None

    @property
    def does(self) -> str:
        """Return what it does, in words."""
        return ", ".join(self.computes) or ("waits for data" if self.network else "is idle")


def moments(timeline: Timeline, time_s: float) -> list[Moment]:
    """Return every device's activity at time_s."""
    computes: list[list[str]] = [[] for _ in timeline.device_names]
    network: list[list[str]] = [[] for _ in timeline.device_names]
    for span in timeline.spans:
        if span.start_s <= time_s < span.end_s:
            (network if span.op.is_communication else computes)[span.rank].append(_words(span.op, timeline))
    shown = []
    for rank, name in enumerate(timeline.device_names):
        samples = timeline.memory[rank] if rank < len(timeline.memory) else ()
        past = [sample.nbytes for sample in samples if sample.time_s <= time_s]
        shown.append(Moment(name, tuple(computes[rank]), tuple(network[rank]), past[-1] if past else None))
    return shown


def _words(op: Op, timeline: Timeline) -> str:
    name = f"{class_of(op)} {op.label}"
    if op.kind in (SEND, RECV):
        [value] = op.reads or op.writes
        tiles, training = OPERATIONS["tile_values"], OPERATIONS["training_values"]
        if value.name in tiles and value.part != NONE:
            name = f"{class_of(op)} {tiles[value.name]} {value.part}"
        elif value.name in training:
            name = f"{class_of(op)} {training[value.name]} {value.microbatch}"
    if op.kind == SEND:
        return f"{name} to {timeline.device_names[op.ranks[1]]}"
    if op.kind == RECV:
        return f"{name} from {timeline.device_names[op.ranks[0]]}"
    if did := OPERATIONS["tile_words"].get(op.kind):
        return f"{op.label}: {did}{' of tile ' * (op.part != NONE)}{number_of(op) if op.part != NONE else ''}"
    return f"{op.kind.lower()} with {len(op.ranks) - 1} others" if op.kind in COLLECTIVES else name


def _node(moment: Moment, timeline: Timeline) -> Node:
    """Return a device on the map, with what it does and its memory at one moment."""
    rank = timeline.device_names.index(moment.device)
    return Node(
        name=moment.device,
        speed=", ".join(moment.network),
        holds=moment.does,
        used_bytes=moment.nbytes,
        budget_bytes=timeline.budget_bytes[rank] if timeline.budget_bytes else 0,
    )


class SchedulePlayer(Panel):
    """Plays one of several timelines.  Controls above, outputs below; the arrow keys move the slider, two buttons step
    by operations.

    columns: further columns of the table, by name; a function of timeline, rank and time in seconds returns a device's
    cell.
    """

    def __init__(
        self, timelines: Timeline | Mapping[str, Timeline], *, columns: Mapping[str, Cell] | None = None
    ) -> None:
        self._columns = columns or {}
        self._timelines = (
            {timelines.title or "timeline": timelines} if isinstance(timelines, Timeline) else dict(timelines)
        )
        names = list(self._timelines)
        self.choice = described(widgets.Dropdown, "Timeline", "Which timeline", width="34em", options=names)
        self.slider = slider("Time", "The moment that is shown", 0, 0, TICKS, readout=False)
        narrow = {"layout": widgets.Layout(width="3em")}
        self.back = button("", "To where the operation before begins", "step-backward", lambda: self.step(-1), **narrow)
        self.forth = button("", "To where the next operation begins", "step-forward", lambda: self.step(1), **narrow)
        self.play = widgets.Play(min=0, max=TICKS, step=2, interval=120, show_repeat=False, tooltip="Play")
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.clock, self.table, self.map = Html(), Html(), LiveView()
        self.figure = FigureBox(self._drawn())
        self.choice.observe(lambda _: self._load(), names="value")
        self.slider.observe(lambda _: self._show(), names="value")
        self.trace = trace_button(self._trace)
        moving = widgets.HBox([self.slider, self.clock, self.back, self.forth, self.play])
        controls = widgets.VBox([widgets.HBox([self.choice, self.trace]), moving])
        super().__init__([controls, self.map, self.figure, self.table])
        self._load()

    @property
    def timeline(self) -> Timeline:
        """Return the timeline shown."""
        return self._timelines[self.choice.value]

    @property
    def time_s(self) -> float:
        """Return the time shown, in seconds."""
        return self.slider.value / TICKS * self.timeline.makespan_s

    def _trace(self) -> tuple[str, str]:
        """Return the file's name and text of all timelines."""
        return "timelines-trace.json", json.dumps(chrome_trace(self._timelines))

    def step(self, direction: int) -> None:
        """Go to the next start of an operation (1) or to the previous one (-1); stay at either end."""
        longest = self.timeline.makespan_s
        ticks = (
            sorted({math.ceil(span.start_s / longest * TICKS - 1e-9) for span in self.timeline.spans})
            if longest
            else []
        )
        ahead = [tick for tick in ticks if (tick > self.slider.value if direction > 0 else tick < self.slider.value)]
        if ahead:
            self.slider.value = ahead[0] if direction > 0 else ahead[-1]

    def _drawn(self) -> go.Figure:
        figure = gantt(self.timeline)
        figure.add_vline(x=0.0, line={"color": "black", "width": 2, "dash": "dot"})
        return figure

    def _load(self) -> None:
        self.figure.show(self._drawn())
        self._traffic = traffic_of(self.timeline, range(self.timeline.world_size))
        self._show()
        step = step_chart(*((None, self.timeline) if self.timeline.source == "simulated" else (self.timeline, None)))
        self.keep(still({"map": self.map.map, "step": step}))

    def _show(self) -> None:
        now = moments(self.timeline, self.time_s)
        if self._traffic:
            self.map.time_s = self.time_s
            self.map.show({"map": topology([_node(moment, self.timeline) for moment in now], self._traffic)})
        unit = time_unit(self.timeline.makespan_s)
        place = self.time_s * unit.factor
        self.figure.shown.layout.shapes[0].update(x0=place, x1=place)
        self.clock.value = Markup("<b>{}</b>").format(unit.text(self.time_s))
        self.table.value = _table(self.timeline, self.time_s, self._columns, now)


def _table(timeline: Timeline, time_s: float, columns: Mapping[str, Cell], now: Sequence[Moment]) -> Markup:
    rows = []
    for rank, moment in enumerate(now):
        memory = ""
        if moment.nbytes is not None:
            memory = size_words(moment.nbytes)
            if timeline.budget_bytes:
                memory += f" of {size_words(timeline.budget_bytes[rank])}"
        does = moment.does
        further = (cell(timeline, rank, time_s) for cell in columns.values())
        rows.append((moment.device, does, ", ".join(moment.network), *([memory] if timeline.memory else []), *further))
    table = Table(("device", "computes", "network", *(["memory"] if timeline.memory else []), *columns), rows)
    return Markup("<div aria-live='polite'>{}</div>").format(table._repr_html_())
