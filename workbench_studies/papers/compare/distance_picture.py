"""The item and the picture of distance.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median, quantiles

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import BLACK, BLUE, DOTTED, GREEN, VERMILLION, finish
from workbench_studies.papers.compare.distance import (
    METHODS,
    SAMPLES,
    SHARED,
    SYNCHRONOUS,
    TOKENS,
    Distance,
    random_problem,
)
from workbench_studies.papers.compare.distance import (
    distance as of_cluster,
)
from workbench_studies.papers.compare.lower_bound import FIRST, placements
from workbench_studies.papers.items import COMPARE, Item
from workbench_studies.papers.result import Result, Row, Settings, shipped_result

CLASSES = {"CP-SAT's": (SYNCHRONOUS, BLUE), "busiest part": (("Confidant",), GREEN), "all busy": (SHARED, VERMILLION)}
"""What a method is measured by: who is, and the colour."""


def distance(item: Item, settings: Settings) -> Result:
    """Simulate the methods on every cluster, and bound them.  A finished cluster's result is stored."""
    distances = []
    for seed in range(settings.draws):
        file = f"distance/{seed}-{settings.limit_s:g}s.json"
        distances.append(settings.remember(file, Distance, partial(of_cluster, seed, settings.limit_s)))
        if (seed + 1) % 10 == 0:
            settings.progress(f"{seed + 1} of {settings.draws} clusters")
    return compared(item, distances, settings.limit_s)


def compared(item: Item, distances: Sequence[Distance], limit_s: float) -> Result:
    """Return the comparison of some clusters."""
    over_least = {name: [distance.seconds[name] / distance.least_s(name) for distance in distances] for name in METHODS}
    yard = {name: [distance.seconds[name] / distance.bound.seconds for distance in distances] for name in METHODS}
    medians, yards = ({name: median(values) for name, values in table.items()} for table in (over_least, yard))
    gaps = {distance.seed: 100 * (distance.bound.best_s / distance.bound.seconds - 1) for distance in distances}
    proven, unproven = (
        [gaps[distance.seed] for distance in distances if distance.bound.is_proven == is_proven]
        for is_proven in (True, False)
    )
    problem = random_problem(0)
    wins = sum(distance.seconds["ZB-H1"] < distance.seconds["1F1B"] for distance in distances)
    closest = min(min(over_least[name]) for name in SYNCHRONOUS)
    rows: list[Row] = [
        (
            float(distance.seed),
            distance.bound.seconds,
            distance.bound.best_s,
            "yes" if distance.bound.is_proven else "no",
            distance.pace_s,
            distance.busy_s,
            *(distance.seconds[name] for name in METHODS),
        )
        for distance in distances
    ]
    return item.result(
        tables={"methods": [_row(name, over_least[name], yard[name]) for name in METHODS], "clusters": rows},
        columns={"clusters": [f"{name}, s" for name in METHODS]},
        holds={
            "zero_bubble": 2 * wins > len(distances),
            "flush": medians["1F1B"] <= medians["GPipe"],
            "drain": yards["Confidant"] < 1,
            "groups": yards["PAC+"] < yards["1F1B"],
        },
        clusters=len(distances),
        placements=sum(1 for _ in placements(problem.profile, problem.cluster, samples=SAMPLES, tokens=TOKENS)),
        limit=limit_s,
        proven=len(proven),
        first=FIRST,
        typical=median(proven) if proven else 0.0,
        gap=max(proven, default=0.0),
        others=f"; in the others the best schedule known is at most {max(unproven):.1f} % longer than the bound"
        if unproven
        else "",
        closest=closest,
        zb_wins=wins,
        over={name: 100 * (value - 1) for name, value in medians.items()},
        against=median(distance.seconds["Confidant"] / distance.seconds["1F1B"] for distance in distances),
        median=medians,
        yard=yards,
    )


def _row(name: str, over_least: Sequence[float], yard: Sequence[float]) -> Row:
    measure = next(measure for measure, (members, _) in CLASSES.items() if name in members)
    return (name, measure, median(over_least), *_tenths(over_least), max(over_least), median(yard), *_tenths(yard))


def _tenths(values: Sequence[float]) -> tuple[float, float]:
    """Return the 10 % and 90 % quantiles."""
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def draw_distance(result: Result) -> go.Figure:
    """Return two panels of boxes, a row for each method, with the emulated mini-batches if their result ships."""
    rows = result.tables[1].records
    executed = shipped_result(COMPARE, "distance-executed")
    titles = ["over the bound of its own", "over the optimal synchronous pipeline's"]
    drawn = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=titles)
    least = dict(zip(CLASSES, ("bound, s", "pace, s", "all busy, s"), strict=True))
    for column, is_own in ((1, True), (2, False)):
        for measure, (members, colour) in CLASSES.items():
            under = least[measure] if is_own else "bound, s"
            for name in members:
                drawn.add_trace(
                    go.Box(
                        x=[row[f"{name}, s"] / row[under] for row in rows],
                        name=name,
                        orientation="h",
                        boxpoints="outliers",
                        marker={"color": colour, "size": 3},
                        line={"width": 1.5},
                        hoverinfo="x+name",
                        showlegend=False,
                    ),
                    row=1,
                    col=column,
                )
        in_pace = [] if executed is None else [row for row in executed.tables[0].records if row["in pace"] == "yes"]
        markers = go.Scatter(
            x=[row["over the bound, executed"] for row in in_pace],
            y=[row["method"] for row in in_pace],
            mode="markers",
            marker={"color": BLACK, "symbol": "circle-open", "size": 7},
            name="emulated",
            hovertext=[f"cluster {row['cluster']:g}, emulated: {row['s, executed']:.2f} s" for row in in_pace],
            showlegend=False,
        )
        drawn.add_trace(markers, row=1, col=column)
        drawn.add_vline(x=1, line=DOTTED, row=1, col=column)
    drawn.update_xaxes(
        type="log", title="times", tickvals=[0.5, 1, 1.5, 2, 3, 5, 10, 20, 50], range=[-0.2, 1.9], minor={"ticks": ""}
    )
    drawn.update_yaxes(autorange="reversed")
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="How far are methods from optimal?",
        label="simulated; open markers emulated" if executed else "simulated",
        subtitle=f"Seconds of a mini-batch over lower bounds, {len(rows)} random clusters of four devices, BERT-Base, "
        f"{TOKENS} tokens. Blue: CP-SAT's bound of all synchronous pipelines. Green: the busiest device or link. "
        "Orange: all devices always busy.",
        height=480,
        margin={"l": 20, "r": 20, "t": 150, "b": 50},
    )
