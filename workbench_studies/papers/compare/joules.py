"""Joules for each point of accuracy: executed learning curves over the modelled joules of one board (item `joules`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

import plotly.graph_objects as go

from workbench.core.catalogue import data_folder, load_device
from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.serial import from_json, to_json
from workbench.core.summary import energy_j
from workbench.plots.style import CYCLE, DARK_GREY, SYMBOLS, finish
from workbench.runs.curves import curves_in
from workbench_studies.papers.compare.runs import Ways, report_of
from workbench_studies.papers.drawing import pareto
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, shipped_result

BOARD = "rpi-4b-l"
SMALL, DECODER = "all-MiniLM-L6-v2", "SmolLM2-135M"
ALONE = {"paradigm": "standalone"}
NAMES: Ways = {
    "LoRA": ("fine_tuning", {"technique": "lora"}),
    "adapters": ("fine_tuning", {"technique": "adapters"}),
    "all weights": ("fine_tuning", {"technique": "full"}),
    "LoRA, int8 backbone": ("fine_tuning", {"technique": "lora", "backbone_dtype": "int8"}),
    "Parallel Adapters, cached": ("pac_plus", {}),
}
"""Executed curves of data/curves.json, by method and options."""
AGAIN = "LoRA, recomputed"
"""It learns what LoRA learns, and computes every layer's forward pass twice."""
FORWARD_ONLY = {"P-RGE (q=4)": ("table2-long", 4, 4), "MeZO (q=1)": ("table2", 1, 16)}
"""Executed curves of the decoder by forward passes alone: result, queries and samples of a step."""
SERIES = {"P-RGE (q=4)": "P-RGE (q=4)", "MeZO (q=1)": "MeZO (LoRA-FA)"}
REFERENCE = "LoRA, no curve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The energy and the accuracy of a way to train.  points: percentage points of accuracy above the most frequent
    label; None without a curve.
    """

    way: str
    model: str
    steps: int
    joules: float
    accuracy: float | None
    points: float | None

    @property
    def per_point(self) -> float | None:
        """Return the joules for each point above the most frequent label; None if there are none."""
        return self.joules / self.points if self.points and self.points > 0 else None


def joules_of(job: Job) -> tuple[float, int]:
    """Return a job's modelled joules on one board, and its steps."""
    return _joules_of(to_json(job))


@lru_cache
def _joules_of(text: str) -> tuple[float, int]:
    job = from_json(text, Job, source="the job")
    cluster = Cluster(name="one board", devices=(load_device(BOARD, name="board"),))
    report = report_of(job, cluster, "simulate")
    return sum(energy_j(report).values()), len(report.steps)


def reached() -> Iterator[Reached]:
    """Yield every point of every curve."""
    curves = curves_in(data_folder() / "curves.json")
    for name, (method, options) in {**NAMES, AGAIN: NAMES["LoRA"]}.items():
        [curve] = [
            curve
            for curve in curves
            if (curve.model, curve.task, curve.method, curve.options) == (SMALL, "sentiment", method, options)
        ]
        activations = {"activations": "recompute" if name == AGAIN else "memory"} if method == "fine_tuning" else {}
        for epoch, score in enumerate(curve.scores[1:], 1):
            job = Job(
                method=method,
                model=SMALL,
                epochs=epoch,
                batch_size=curve.batch_size,
                train_samples=curve.train_samples,
                options={**options, **ALONE, **activations},
            )
            spent_j, steps = joules_of(job)
            points = 100 * (score - curve.scores[0])
            yield Reached(way=name, model=SMALL, steps=steps, joules=spent_j, accuracy=100 * score, points=points)
    for name, (result, queries, samples) in FORWARD_ONLY.items():
        shipped = shipped_result("p_rge", result)
        assert shipped is not None
        (_, untrained), *points_of = shipped.series[SERIES[name]]
        options = {"queries": queries, "steps": 1}
        step_j, _ = joules_of(Job(method="p_rge", model=DECODER, batch_size=samples, options=options))
        for reached_at, score in points_of:
            yield Reached(
                way=name,
                model=DECODER,
                steps=round(reached_at),
                joules=reached_at * step_j,
                accuracy=score,
                points=score - untrained,
            )
    job = Job(method="fine_tuning", model=DECODER, epochs=1, train_samples=1000, options={**NAMES["LoRA"][1], **ALONE})
    spent_j, steps = joules_of(job)
    yield Reached(way=REFERENCE, model=DECODER, steps=steps, joules=spent_j, accuracy=None, points=None)


def front(points: Sequence[Reached]) -> list[Reached]:
    """Return those that no other reaches with at most as many joules, by joules."""
    scored = [point for point in points if point.accuracy is not None]
    return pareto(scored, cost=lambda point: point.joules, score=lambda point: point.accuracy or 0.0)


def joules(item: Item) -> Result:
    """Simulate the joules of each executed curve."""
    points = list(reached())
    ends = {point.way: point for point in points}
    best = front(points)
    cached, lora, again, forward = (ends[name] for name in ("Parallel Adapters, cached", "LoRA", AGAIN, "P-RGE (q=4)"))
    reference = ends[REFERENCE]
    like_forward = next(
        point for point in points if point.way == "LoRA" and (point.accuracy or 0) >= (forward.accuracy or 0)
    )
    rows: list[Row] = [
        (point.way, point.model, float(point.steps), point.joules, point.accuracy, point.per_point) for point in points
    ]
    return item.result(
        tables={
            "points": rows,
            "front": [(point.way, point.joules, point.accuracy, point.per_point) for point in best],
        },
        holds={
            "cached": min(points, key=lambda point: point.per_point or float("inf")).way == cached.way,
            "third": again.joules <= lora.joules * 4 / 3,
            "forward": forward.joules <= like_forward.joules,
        },
        cached=cached.per_point,
        lora=lora.per_point,
        again=again.joules / lora.joules,
        forward=forward.joules / like_forward.joules,
        score=forward.accuracy,
        size=(reference.joules / reference.steps) / (lora.joules / lora.steps),
        steps=forward.steps / like_forward.steps,
        step=forward.joules / forward.steps / (reference.joules / reference.steps),
    )


def draw_joules(result: Result) -> go.Figure:
    """Return the accuracy by joules, and the front."""
    points = [row for row in result.tables[0].records if row["accuracy, %"] is not None]
    drawn, ways = go.Figure(), list(dict.fromkeys((point["way"], point["model"]) for point in points))
    best = pareto(points, cost=itemgetter("J"), score=itemgetter("accuracy, %"))
    line = {"color": DARK_GREY, "width": 7, "shape": "hv"}
    drawn.add_scatter(
        x=[point["J"] for point in best],
        y=[point["accuracy, %"] for point in best],
        mode="lines",
        line=line,
        opacity=0.3,
        name="Pareto front",
        hoverinfo="skip",
    )
    for index, (way, model) in enumerate(ways):
        way_points = [point for point in points if point["way"] == way]
        drawn.add_scatter(
            x=[point["J"] for point in way_points],
            y=[point["accuracy, %"] for point in way_points],
            mode="lines+markers",
            line={"color": (*CYCLE, DARK_GREY)[index], "dash": "solid" if model == SMALL else "dash"},
            marker={"symbol": (*SYMBOLS, "diamond")[index], "size": 8},
            name=way if model == SMALL else f"{way}, {model}",
            hovertext=[
                f"{way}: {point['steps']:.0f} steps, {point['J']:,.0f} J, {point['accuracy, %']:.1f} %"
                for point in way_points
            ],
        )
    drawn.update_xaxes(type="log", title="J", tickvals=[300, 1000, 3000, 10_000, 30_000], tickformat=",")
    drawn.update_yaxes(title="validation accuracy, %", rangemode="normal")
    return finish(
        drawn,
        title="Joules for accuracy",
        label="accuracy executed, joules modelled",
        subtitle="Movie-review sentences, on one Raspberry Pi 4B of 6.4 W. A marker is an epoch of 1,000 sentences, or "
        "100 steps of forward passes alone.",
        height=520,
    )
