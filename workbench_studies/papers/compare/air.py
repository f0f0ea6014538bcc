"""Which methods still pay if the boards share the air of a Wi-Fi network?  Two and four boards over one, simulated.

Next to each point on Wi-Fi stands the same point on a switch, whose wires have the same rate and latency.  So the
medium is the only difference.  Costs are computed from sizes and the catalogue's figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import experiment
from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.medium import Medium
from workbench.core.once import shared_results
from workbench.core.report import Report
from workbench.core.schedule import paused_collector
from workbench.plots.style import DARK_GREY, GREY, ORANGE, SKY_BLUE, VERMILLION, finish
from workbench_studies.papers.compare.boards import boards
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Progress, Record, Result, Row, Settings

MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M", "shape:gpt2-medium")
MBIT_PER_S = (20, 60, 200)
COUNTS = (2, 4)
MEDIA: tuple[Medium, ...] = ("wifi", "switch")
TRAINING = Job(train_samples=256, validation_samples=1, test_samples=1, epochs=2)
ANSWERING = Job(test_samples=8)
LORA = {"technique": "lora"}
PAYS = 1.02
"""Several boards pay if they are faster than one by this factor."""
ONE_IS_ENOUGH = ("PAC+, from the cache", "Galaxy+")
RATE_COLOURS = {20: VERMILLION, 60: ORANGE, 200: SKY_BLUE}
COUNT_WORDS = {2: "two boards", 4: "four boards"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A method's epoch or answer.

    alone: method and options on one board, where they differ.  epoch: which of the two counts; -1 the last.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: tuple[str, Mapping[str, Any]] | None = None
    epoch: int = -1


WAYS = {
    "P-RGE": Way(method="p_rge"),
    "PAC+, first epoch": Way(method="pac_plus", epoch=0),
    "PAC+, from the cache": Way(method="pac_plus"),
    "Confidant": Way(
        method="confidant",
        options={**LORA, "partition": "any_order"},
        alone=("fine_tuning", {**LORA, "paradigm": "standalone"}),
    ),
    "RingAda": Way(method="ringada"),
    "Galaxy+": Way(method="galaxy_plus"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """seconds: time of an epoch, or of a mean answer, on `count` boards.  alone_s: on one.  in_use: boards that
    compute.
    """

    model: str
    way: str
    count: int
    in_use: int
    mbit_per_s: int
    medium: Medium
    seconds: float
    alone_s: float

    @property
    def speedup(self) -> float:
        """Return the seconds on one board over those on several."""
        return self.alone_s / self.seconds


def points(notify: Progress, models: Sequence[str] = MODELS) -> Iterator[Point]:
    """Yield every point of the figure."""
    with shared_results(), paused_collector():
        for model, way in product(models, WAYS):
            notify(f"{model}: {way}")
            for count, rate, medium in product(COUNTS, MBIT_PER_S, MEDIA):
                yield point(model, way, count, rate, medium)


def point(model: str, name: str, count: int, mbit_per_s: int, medium: Medium) -> Point:
    """Return a way on several boards, over one."""
    way = WAYS[name]
    cluster = replace(boards(count, mbit_per_s), medium=medium)
    report = _simulated(model, way.method, way.options, cluster)
    return Point(
        model=model,
        way=name,
        count=count,
        in_use=_in_use(report, way),
        mbit_per_s=mbit_per_s,
        medium=medium,
        seconds=_seconds(report, way),
        alone_s=_alone_s(model, name),
    )


@lru_cache
def _alone_s(model: str, name: str) -> float:
    way = WAYS[name]
    one_board = _simulated(model, *(way.alone or (way.method, way.options)), boards(1, MBIT_PER_S[-1]))
    return _seconds(one_board, way)


def _simulated(model: str, method: str, options: Mapping[str, Any], cluster: Cluster) -> Report:
    shape = ANSWERING if method == "galaxy_plus" else TRAINING
    job = replace(shape, model=model, method=method, options=dict(options))
    return experiment.run(job, cluster, "simulate")


def _seconds(report: Report, way: Way) -> float:
    if report.epochs:
        return report.epochs[way.epoch].seconds
    return report.predicted_s / len(report.steps)


def _in_use(report: Report, way: Way) -> int:
    is_cached = way.method == "pac_plus" and way.epoch
    if is_cached and report.plan.cached is not None:
        return len(report.plan.cached.ranks)
    return len(report.plan.busy_ranks)


def air(item: Item, settings: Settings) -> Result:
    """Simulate every point."""
    shown = list(points(settings.progress, MODELS[:1] if settings.quick else MODELS))
    paying = {
        (way, rate, medium): sum(
            point.speedup >= PAYS
            for point in shown
            if (point.way, point.mbit_per_s, point.medium) == (way, rate, medium)
        )
        for way, rate, medium in product(WAYS, MBIT_PER_S, MEDIA)
    }
    slow = {point.way: point for point in shown if point.model == shown[0].model and _is_slow(point)}
    heavy = {point.way: point for point in shown if point.model == shown[-1].model and _is_slow(point)}
    settings_count = len({(point.model, point.count) for point in shown})
    best = max((point for way, point in slow.items() if way != "P-RGE"), key=lambda point: point.speedup)
    alone = sum(point.in_use == 1 for point in shown if point.way in ONE_IS_ENOUGH)
    return item.result(
        tables={
            "paying": [
                (way, *(float(paying[way, rate, medium]) for rate, medium in product(MBIT_PER_S, MEDIA)))
                for way in WAYS
            ],
            "points": [_row(point) for point in shown],
        },
        holds={
            "forward": all(paying["P-RGE", rate, medium] == settings_count for rate in MBIT_PER_S for medium in MEDIA),
            "small": best.speedup < PAYS,
            "large": heavy["Confidant"].speedup >= PAYS,
            "enough": alone == sum(point.way in ONE_IS_ENOUGH for point in shown),
        },
        settings=settings_count,
        pays=PAYS,
        least=min(point.speedup / point.count for point in shown if point.way == "P-RGE"),
        best=best,
        confidant=heavy["Confidant"],
        alone=alone,
    )


def _is_slow(point: Point) -> bool:
    """Return whether it is one of two boards on the slowest air."""
    return (point.count, point.mbit_per_s, point.medium) == (COUNTS[0], MBIT_PER_S[0], "wifi")


def _row(point: Point) -> Row:
    numbers = (point.seconds, point.alone_s, point.speedup)
    rate = float(point.mbit_per_s)
    return (point.model, point.way, float(point.count), float(point.in_use), rate, point.medium, *numbers)


def draw_air(result: Result) -> go.Figure:
    """Return a panel for each model and number of boards."""
    rows = result.tables[1].records
    models = list(dict.fromkeys(row["model"] for row in rows))
    panels = list(product(models, COUNTS))
    drawn = make_subplots(
        rows=len(models),
        cols=len(COUNTS),
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.07,
        subplot_titles=[f"{model.removeprefix('shape:')}, {COUNT_WORDS[count]}" for model, count in panels],
    )
    ways = list(reversed(dict.fromkeys(row["way"] for row in rows)))
    for number, (model, count) in enumerate(panels):
        panel_rows = [row for row in rows if (row["model"], row["boards"]) == (model, count)]
        place: Any = {"row": number // len(COUNTS) + 1, "col": number % len(COUNTS) + 1}
        for rate, medium in product(MBIT_PER_S, MEDIA):
            some = [row for row in panel_rows if (row["Mbit/s"], row["medium"]) == (rate, medium)]
            drawn.add_trace(_marks(some, ways, rate, medium, is_first=number == 0), **place)
        drawn.add_vline(x=1, line={"color": DARK_GREY, "width": 1.5}, **place)
    ticks = {"tickvals": [0.05, 0.1, 0.25, 0.5, 1, 2, 4], "ticktext": ["1/20", "1/10", "¼", "½", "1", "2", "4"]}
    drawn.update_xaxes(type="log", range=[-1.65, 0.72], tickangle=0, **ticks)
    drawn.update_xaxes(title_text="times as fast as one board", row=len(models))
    drawn.update_yaxes(tickvals=list(range(len(ways))), ticktext=ways, range=[-0.6, len(ways) - 0.4])
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="Which methods still pay on shared air?",
        label="simulated",
        subtitle="Seconds of an epoch (Galaxy+: of an answer) on one Raspberry Pi 5 over those on several.<br>"
        "Filled: Wi-Fi, whose air all share. Open: a switch with wires of the same rate. Line: break-even.",
        height=190 + 210 * len(models),
        margin={"l": 20, "r": 20, "t": 130, "b": 100},
    )


def _marks(rows: Sequence[Record], ways: Sequence[str], rate: int, medium: Medium, *, is_first: bool) -> go.Scatter:
    """Return the marks of one rate and medium, a line of them for each way."""
    is_shared = medium == "wifi"
    place = (1 - MBIT_PER_S.index(rate)) * 0.24
    return go.Scatter(
        x=[row["speedup"] for row in rows],
        y=[ways.index(row["way"]) + place for row in rows],
        mode="markers",
        marker={
            "symbol": "circle" if is_shared else "circle-open",
            "size": 9,
            "color": RATE_COLOURS[rate],
            "line": {"width": 1 if is_shared else 2, "color": GREY if is_shared else RATE_COLOURS[rate]},
        },
        name=f"{rate} Mbit/s, {'Wi-Fi' if is_shared else 'switch'}",
        showlegend=is_first,
        legendgroup=f"{rate} {medium}",
        hovertext=[
            f"{row['way']}, {rate} Mbit/s, {medium}: {row['s']:.3g} s on {row['in use']:.0f} of {row['boards']:.0f} "
            f"boards, {row['s on one board']:.3g} s on one"
            for row in rows
        ],
    )
