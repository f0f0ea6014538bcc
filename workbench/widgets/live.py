"""Show a run in progress: a map of its devices, losses, work, memory, and a measured step over the predicted one.

Python draws every part as SVG or HTML; the page replaces those that changed.  So the last state can stay in a
notebook as it is, without a kernel.
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.timeline import Timeline
from workbench.core.units import size_words, three_figures
from workbench.plots import live_charts, style, svg
from workbench.plots.topology import Node, Traffic, holds_of, speed_of, topology, traffic_of
from workbench.runs.course import GONE, Course, Energy
from workbench.runs.progress import DeviceRow, EpochRow, PhaseRow, Snapshot
from workbench.widgets.tables import Table

HERE = Path(__file__)
BOARD = ("map", "loss", "devices", "step")
TOGETHER = ("head", *BOARD, "notes", "more")
"""The parts from top to bottom; those of the board are next to each other where there is room."""


class LiveView(anywidget.AnyWidget):
    """A drawing in parts, each SVG or HTML in which names are escaped.

    time_s: the moment whose messages are shown on the map; below 0: none.
    """

    head = traitlets.Unicode().tag(sync=True)
    map = traitlets.Unicode().tag(sync=True)
    loss = traitlets.Unicode().tag(sync=True)
    devices = traitlets.Unicode().tag(sync=True)
    step = traitlets.Unicode().tag(sync=True)
    notes = traitlets.Unicode().tag(sync=True)
    more = traitlets.Unicode().tag(sync=True)
    time_s = traitlets.Float(-1.0).tag(sync=True)
    _esm = HERE.with_suffix(".js")
    _css = HERE.with_suffix(".css")

    def show(self, parts: dict[str, str]) -> None:
        """Show some parts; the others are empty.  Only what changed is sent."""
        with self.hold_sync():
            for name in TOGETHER:
                setattr(self, name, str(parts.get(name, "")))

    @property
    def still(self) -> Markup:
        """Return the present state as HTML that needs no kernel and no script."""
        return still({name: getattr(self, name) for name in TOGETHER})


def still(parts: dict[str, str]) -> Markup:
    """Return parts as HTML that needs no kernel and no script."""
    drawn = {name: svg.tag("div", part, class_=f"workbench-live-{name}") for name, part in parts.items() if part}
    board = "".join(drawn.get(name, "") for name in BOARD)
    page = drawn.get("head", "") + (svg.tag("div", board, class_="workbench-board") if board else "")
    page += drawn.get("notes", "") + drawn.get("more", "")
    sheet = f"<style>{HERE.with_suffix('.css').read_text(encoding='utf-8')}</style>" if page else ""
    return Markup(sheet + svg.tag("div", svg.as_images(page), class_="workbench-live"))


def parts_of(now: Snapshot, course: Course, cluster: Cluster) -> dict[str, str]:
    """Return the parts that show a run's state; before there is a plan, only the phase and the notes."""
    words = {"head": head_of(now), "notes": _notes(now)}
    if course.plan is None:
        return words
    shown = course.measured or course.predicted
    traffic = traffic_of(shown, _ranks(shown, cluster))
    nodes = [_node(rank, row, course, cluster) for rank, row in enumerate(now.devices)]
    parts = words | {"map": topology(nodes, traffic, caption=_caption(course), unit=course.unit)}
    if now.trains and any(row.busy_share is not None or row.is_lost for row in now.devices):
        health = [row.health or row.phase for row in now.devices]
        energy = ["" if energy_j is None else _joules(energy_j) for energy_j in course.energy]
        parts["devices"] = live_charts.device_chart(nodes, course.busy, health, energy, unit=course.unit)
    if course.losses:
        parts["loss"] = live_charts.loss_chart(
            course.losses,
            num_steps=course.num_steps,
            scores=course.scores,
            metric=course.metric,
            marks=course.marks,
        )
    elif course.requests:
        parts["loss"] = live_charts.request_chart(course.requests, course.predicted_requests)
    if shown is not None:
        parts["step"] = live_charts.step_chart(
            course.measured,
            course.predicted,
            measured_step=course.measured_step,
            expected_s=course.expected_s,
            unit=course.unit,
        )
    return parts | {"more": _tables(now, nodes, traffic, course.unit)}


def _joules(energy: Energy) -> str:
    return f"{three_figures(energy.joules)} J {'measured' if energy.is_measured else 'modelled'}"


def head_of(now: Snapshot) -> str:
    """Return the phase, or how the run ended, and a bar for each epoch."""
    colour = svg.ALERT if now.outcome in ("stopped", "failed") else "inherit"
    headline = svg.tag("div", svg.escape(now.headline), role="status", style=f"color:{colour};font-weight:bold")
    return headline + svg.tag("div", "".join(map(_bar, now.bars)), class_="workbench-bars")


def _bar(epoch: EpochRow | PhaseRow) -> str:
    per_cent = 100 * epoch.share
    bar = svg.tag(
        "div",
        svg.tag("i", style=f"background:{style.BLUE};width:{per_cent:.1f}%"),
        role="progressbar",
        aria_label=epoch.name,
        aria_valuenow=round(per_cent),
        aria_valuemin=0,
        aria_valuemax=100,
    )
    return svg.tag("span", svg.escape(epoch.name)) + bar + svg.tag("span", svg.escape(epoch.words))


def _notes(now: Snapshot) -> str:
    """Return the notes, and the time of each phase, a line each."""
    lines = [*now.notes]
    if len(now.phases) > 1:
        ends = [begin_s for _, begin_s in now.phases[1:]] + [now.elapsed_s]
        took = [f"{name} {end_s - begin_s:.1f} s" for (name, begin_s), end_s in zip(now.phases, ends, strict=True)]
        lines.append("; ".join(took))
    return "".join(svg.tag("div", svg.escape(line), class_="workbench-small") for line in lines)


def _caption(course: Course) -> str:
    plan = course.plan
    assert plan is not None
    label = "New plan" if course.is_replanned else "Plan"
    if course.cached:
        return f"{label}: every device trains on its own samples from the cache"
    return f"{label}: {plan.where()}" + (f", {plan.cut}" if course.unit == "step" else "")


def _ranks(timeline: Timeline | None, cluster: Cluster) -> list[int]:
    """Return the ranks in the cluster of a timeline's devices."""
    ranks = {device.name: rank for rank, device in enumerate(cluster.devices)}
    return [ranks[name] for name in timeline.device_names] if timeline is not None else []


def _node(rank: int, row: DeviceRow, course: Course, cluster: Cluster) -> Node:
    assert course.plan is not None
    return Node(
        name=row.name,
        speed=speed_of(cluster.devices[rank]),
        holds=holds_of(course.plan, rank, cached=course.cached),
        away=row.phase if row.phase in GONE else "",
        busy_share=row.busy_share,
        used_bytes=row.used_bytes,
        budget_bytes=row.budget_bytes,
        health=row.health,
    )


def _tables(now: Snapshot, nodes: list[Node], traffic: list[Traffic], unit: str) -> str:
    """Return what the drawings show as tables, folded."""
    pairs = zip(now.devices, nodes, strict=True)
    devices = [(*row.cells[:2], node.holds or "no part", *row.cells[2:]) for row, node in pairs]
    tables = Table(("device", "doing", "holds", "computing", "memory of the job"), devices)._repr_html_()
    if traffic:
        rows = [
            (
                nodes[flow.source].name,
                nodes[flow.target].name,
                ", ".join(flow.what),
                size_words(flow.nbytes),
                len(flow.times),
            )
            for flow in traffic
        ]
        columns = ("from", "to", "what", f"bytes in a {unit}", f"messages in a {unit}")
        tables += Table(columns, rows)._repr_html_()
    return f"<details><summary>As tables</summary>{tables}</details>"
