"""A point for the latency of each request of a service."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.core.report import busy_note
from workbench.methods.galaxy_plus.serving.records import ServedRequest, ServingReport
from workbench.plots import style
from workbench.plots.predicted import lines

MAX_POINTS = 4000


def request_latencies(report: ServingReport) -> go.Figure:
    """Return a point for each request, coloured by the plan that answered it, with the percentiles as lines."""
    title, note = "Latency of every request", busy_note(report)
    if not report.requests:
        return style.empty(title=title, label=report.label, why="No request was answered.", note=note)
    chosen = report.requests[:: max(1, len(report.requests) // MAX_POINTS)]
    unit, shares = style.time_unit(report.percentile_s(0.95)), ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))
    by_plan: dict[str, list[ServedRequest]] = {}
    # The legend shows the symbol of a plan's first request: a dot, and no cross, if there is any.
    for request in sorted(chosen, key=lambda request: (request.plan, request.attempts > 1)):
        devices = ", ".join(report.cluster.devices[rank].name for rank in report.plans[request.plan].ranks)
        by_plan.setdefault(f"plan {request.plan}: {devices}", []).append(request)
    words = ", ".join(f"{name} {unit.text(report.percentile_s(share))}{report.mark}" for share, name in shares)
    repeated = f"; {report.num_repeated} repeated (crosses)" if report.num_repeated else ""
    words_of_figure = {"title": title, "label": report.label, "subtitle": f"{words} (dotted){repeated}", "note": note}
    series = {
        name: [(request.arrival_s, request.latency_s * unit.factor) for request in mine]
        for name, mine in by_plan.items()
    }
    figure = lines(
        series, x_title="arrival (s)", y_title=f"from arrival to answer ({unit.name}){report.mark}", **words_of_figure
    )
    for trace, mine in zip(figure.data, by_plan.values(), strict=True):
        trace.update(
            mode="markers", marker_size=6, marker_symbol=["x" if request.attempts > 1 else "circle" for request in mine]
        )
        trace.hovertemplate = [
            f"request {request.number}: {unit.text(request.latency_s)}, of it {unit.text(request.queueing_s)} waiting"
            f"{f', {request.attempts} attempts' if request.attempts > 1 else ''}<extra></extra>"
            for request in mine
        ]
    for share, _ in shares:
        figure.add_hline(y=report.percentile_s(share) * unit.factor, line=style.DOTTED)
    return figure
