"""No name, metric or error becomes markup in a figure or on a page: plotly reads tags in every text that it shows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_up_report
import made_up_serving
import pytest
from hostile import NAME, renamed, shown_by, texts_of

import workbench_labs.plots
from tests.plans import inference_plan
from workbench import plots
from workbench.core.inference import StackShape
from workbench.core.report import Recovery
from workbench.core.spread import Spread
from workbench.methods.galaxy_plus.serving.figures import serving
from workbench.plots import export
from workbench.plots.choices import choices
from workbench.plots.style import empty, not_recorded
from workbench_labs.plots import zeroth_order
from workbench_labs.plots.layer_cut import layer_cut
from workbench_labs.plots.overlapping import OverlapCell, TradePoint, overlap, trade
from workbench_labs.plots.request_latencies import request_latencies
from workbench_studies.papers import Check, Comparison, Result, Table
from workbench_studies.papers.command import write

REPORT = replace(
    renamed(
        made_up_report.report(valid=False), "fast", "slow", "pair", "a step", "accuracy", "first epoch, measured", "[6]"
    ),
    notes=(f"Host too busy: {NAME}", NAME),
    recoveries=(Recovery(what=f"kill {NAME}", step=2, noticed_s=0.1, planned_s=0.1, resumed_s=0.2),),
)
TIMELINE = REPORT.timelines["first epoch, predicted"]
SERVED = renamed(made_up_serving.report(), "alpha", "beta", "gamma", "2 MB read")
SHAPE = StackShape(
    num_layers=1, num_units=6, hidden_size=24, columns=96, unit_bytes=9, column_bytes=9, layer_bytes=7, hidden_bytes=8
)
HYBRID = inference_plan(method="galaxy_plus", units=(6,), columns=(96,), shares=(1.0,), schemes=(1,))
POINT, SAID = Spread.exactly(1.0), {"title": NAME, "label": NAME, "subtitle": NAME}

FIGURES: dict[str, Callable[[], Any]] = {
    "breakdown": lambda: plots.breakdown(REPORT.timelines, note=NAME),
    "cluster": lambda: plots.cluster(REPORT.cluster),
    "compared_bars": lambda: plots.compared_bars({NAME: {NAME: POINT}}, x_title=NAME, unit=NAME, note=NAME, **SAID),
    "curves": lambda: plots.curves(REPORT),
    "device_samples": lambda: plots.device_samples([[0]], [NAME], [NAME], rule=NAME),
    "empty": lambda: empty(title=NAME, label=NAME, why=NAME, note=NAME),
    "epoch_times": lambda: plots.epoch_times(REPORT),
    "gantt": lambda: plots.gantt(TIMELINE, note=NAME),
    "gradient_error": lambda: zeroth_order.gradient_error(
        [zeroth_order.GradientError(NAME, 9, ((1, 1.0),))], label=NAME
    ),
    "layer_cut": lambda: layer_cut(HYBRID, SHAPE, [NAME], length=8),
    "learning": lambda: zeroth_order.learning(
        [(1, 1.0)], [(1, 0.5)], baselines={NAME: 0.5}, metric=NAME, label=NAME, subtitle=NAME
    ),
    "lines": lambda: plots.lines({NAME: [(1.0, 1.0)]}, x_title=NAME, y_title=NAME, **SAID),
    "memory": lambda: plots.memory(TIMELINE, note=NAME),
    "needs": lambda: plots.needs({0: {NAME: 10**12}, 1: {NAME: 1}}, REPORT.cluster, title=NAME),
    "not_recorded": lambda: not_recorded(NAME, NAME),
    "overlap": lambda: overlap([OverlapCell(NAME, POINT, POINT, POINT)], what=NAME, note=NAME, **SAID),
    "choices": lambda: choices([(NAME, 1.0, 2.0, 3, False)], label="simulated"),
    "overlay": lambda: plots.overlay({NAME: [REPORT]}),
    "placement": lambda: plots.placement(REPORT.plan, REPORT.cluster),
    "predicted_against_measured": lambda: plots.predicted_against_measured(REPORT),
    "request_latencies": lambda: request_latencies(SERVED),
    "roofline": lambda: zeroth_order.roofline(
        {NAME: [zeroth_order.Pass(1, 1.0, 1.0, 1.0)]}, flops_per_s=1.0, bytes_per_s=1.0, **SAID
    ),
    "serving": lambda: serving({NAME: SERVED, "": SERVED}, title=NAME),
    "slopes": lambda: zeroth_order.slopes({NAME: [(1.0, 1.0)]}, label=NAME, subtitle=NAME),
    "stacked_bars": lambda: plots.stacked_bars([NAME], {NAME: [1.0]}, x_title=NAME, **SAID),
    "trade": lambda: trade([TradePoint(0, 1.0, 0.5)], TradePoint(0, 1.0, 0.5), subtitle=NAME),
    "traffic": lambda: zeroth_order.traffic({NAME: 10}, subtitle=NAME),
}


def test_every_figure_is_in_the_table() -> None:
    packages = ((plots, "workbench.plots."), (workbench_labs.plots, "workbench_labs.plots."))
    names = [module.name for package, prefix in packages for module in pkgutil.iter_modules(package.__path__, prefix)]
    modules = [importlib.import_module(name) for name in (*names, serving.__module__)]
    public = [function for module in modules for function in vars(module).values() if inspect.isfunction(function)]
    drawing = {
        one.__name__
        for one in public
        if one.__annotations__.get("return") == "go.Figure" and not one.__name__.startswith("_")
    }
    assert drawing == FIGURES.keys() | {"finish", "bowl"}  # all end with the former; the latter shows no name


@pytest.mark.parametrize("name", FIGURES)
def test_a_hostile_name_stays_text_in_a_figure(name: str) -> None:
    assert NAME in texts_of(FIGURES[name]())


def test_pages_of_reports_and_reproductions_show_names_as_text(tmp_path: Path) -> None:
    index, *pages = plots.write_figures(REPORT, tmp_path / "report", png=False)
    assert shown_by(index.read_text(encoding="utf-8")).count(NAME) >= 6
    assert pages and all("<img" not in page.read_text(encoding="utf-8") for page in pages)
    result = Result(
        item="fig1",
        title=NAME,
        paper_section=NAME,
        source="counted",
        label_columns=(NAME,),
        comparisons=(Comparison(labels=(NAME,), paper="OOM", ours=NAME, unit=NAME, note=NAME),),
        explanation=(NAME,),
        checks=(Check(claim=NAME, holds=False, found=NAME),),
        tables=(Table(title=NAME, columns=(NAME,), rows=((NAME,),), note=NAME),),
    )
    item = SimpleNamespace(name="fig1", draw=lambda _: [export.Captioned("fig1", NAME, FIGURES["stacked_bars"]())])
    index = write([(item, result)], tmp_path / "paper", title=NAME, png=False)[0]
    assert shown_by(index.read_text(encoding="utf-8")).count(NAME) >= 14
