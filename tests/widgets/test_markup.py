"""No name, option, metric or error becomes markup in a notebook: whatever reaches HTML is shown letter by letter."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipywidgets
import pytest
from hostile import NAME, renamed, shown_by, texts_of
from made_up_report import report
from plotly.graph_objects import FigureWidget

import workbench_labs
from workbench import widgets
from workbench.core.catalogue import load_cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.profile import Bytes, Grid, LayerProfile, Profile
from workbench.methods.base import DeviceState, Event
from workbench.planners import Problem
from workbench.trainings import queries
from workbench.widgets.controls import Html, Message
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.tables import report_table
from workbench_labs.course.verdict import Verdict

MODULES = [
    importlib.import_module(module.name) for module in pkgutil.iter_modules(workbench_labs.__path__, "workbench_labs.")
]
labs = SimpleNamespace(
    **{name: item for module in MODULES for name, item in vars(module).items() if not name.startswith("_")}
)
JOB = Job(model=NAME, task=NAME)
LAPTOP = renamed(load_cluster("laptop"), "laptop", "alpha", "beta", "gamma", "delta")
REPORT = replace(renamed(report(valid=False), "fast", "slow", "pair", "a step", "accuracy", "[6]"), notes=(NAME,))
TIMELINE = REPORT.timelines["first epoch, predicted"]


def _run_panel() -> Any:
    def run(*_: Any, progress: Callable[[Event], None], **__: Any) -> Any:
        progress(Event("note", message=NAME))
        return REPORT

    panel = widgets.RunPanel(widgets.JobForm(), widgets.ClusterForm(LAPTOP), runner=run)
    panel.run_button.click()
    panel.wait()
    assert NAME in shown_by(panel.result.value)
    return panel


def _history() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, reduction in (("one", 4), ("other", 8)):
            (Path(folder) / name).mkdir()
            job = replace(REPORT.job, model=NAME, options={"reduction": reduction, "text": NAME})
            replace(REPORT, job=job).write(Path(folder) / name / "report.json")
        history = widgets.RunHistory([folder])
        history.choose("one", "other")
        return history


def _live() -> Any:
    live = widgets.LiveProgress(JOB, LAPTOP)
    timeline = replace(TIMELINE, device_names=tuple(device.name for device in LAPTOP.devices[: TIMELINE.world_size]))
    live.update(Event("phase", message=NAME))
    live.update(Event("note", message=NAME))
    live.update(Event("plan", step=0, plan=REPORT.plan, timelines={NAME: timeline}))
    live.update(Event("device", 0, 0, 0, 9, device=DeviceState(NAME, 1.0, 0.5, 9, NAME)))
    live.update(Event("step", epoch=0, step=0, num_steps=9, loss=0.7))
    live.update(Event("scores", epoch=0, metrics={NAME: 0.5}))
    with live:
        pass
    assert all(part.count("&lt;img") for part in (live.view.map, live.view.devices, live.view.step, live.view.more))
    return live


def _planning() -> Any:
    return labs.paper_problem("BART-Large", renamed(load_cluster("pac-env-b"), "pac-env-b", "nano-h", "tx2-h"))


def _inference() -> Any:
    cluster = load_cluster("galaxy-env-b")
    return labs.described_problem(
        "DistilBERT", renamed(cluster, cluster.name, *(device.name for device in cluster.devices)), length=60
    )


def _queries() -> Any:
    grids = {
        kind: Grid(batch_sizes=(1, 2), sequence_lengths=(1, 2), seconds=((1.0, 1.0), (2.0, 2.0)))
        for kind in ("F", "STEP")
    }
    layer = LayerProfile(name=NAME, times=grids, frozen_bytes=9, trainable_bytes=9, output_bytes=Bytes(9))
    profile = Profile(model=NAME, method="p_rge", source="measured", layers=((layer,),) * LAPTOP.world_size)
    return Problem(profile, LAPTOP, queries=8, sequence_length=1)


def _adviser() -> Any:
    job = Job(model="tiny-bert", epochs=1, train_samples=32)
    adviser = widgets.Adviser(LAPTOP.part([0, 1]), job, computed=True)
    adviser.controls["purpose"].value = "stay"
    adviser.ask()
    adviser.wait()
    assert adviser.advice is not None
    return adviser


SHOWN: dict[str, Callable[[], Any]] = {
    "Adviser": _adviser,
    "BowlLab": lambda: labs.BowlLab(labs.Bowl()),
    "ClusterForm": lambda: widgets.ClusterForm(LAPTOP),
    "EngineRun": lambda: labs.EngineRun(scores=((NAME, 0.5),)),
    "InferenceExplorer": lambda: labs.InferenceExplorer(_inference(), planners=("Algorithm 1",)),
    "JobForm": lambda: widgets.JobForm(replace(JOB, options={"reduction": 8})),
    "LayerCutter": lambda: labs.LayerCutter(_inference().profile.stacks[0], _inference().cluster, length=60),
    "LiveProgress": _live,
    "PartitionLab": lambda: labs.PartitionLab("BERT-Base", _planning().cluster, batch_size=16, tokens=128),
    "PlannerExplorer": lambda: labs.PlannerExplorer(_planning()),
    "QueryDivider": lambda: labs.QueryDivider(_queries()),
    "RooflineExplorer": lambda: labs.RooflineExplorer({NAME: next(iter(labs.paper_machines().values()))}),
    "RunHistory": _history,
    "RunPanel": _run_panel,
    "SchedulePlayer": lambda: widgets.SchedulePlayer({NAME: TIMELINE}),
    "SchemeEditor": lambda: labs.SchemeEditor(_inference(), planner="Algorithm 1"),
    "SplitEditor": lambda: labs.SplitEditor(_planning()),
    "StragglerLab": lambda: labs.StragglerLab(_inference(), num_requests=40),
    "Table": lambda: report_table(REPORT),
    "Verdict": lambda: Verdict(False, NAME),
    "TrainingPanel": lambda: labs.TrainingPanel(queries.Trial(model=NAME, method="P-RGE", task=NAME), 1),
}
WITHOUT_NAMES = {"HeadsLab", "LearningLab", "RingLab", "StaleLab"}
ALSO: dict[str, Callable[[], Any]] = {
    "a run in an engine that was not made": lambda: labs.EngineRun(why=NAME),
    "a table's every part": lambda: widgets.Table((NAME,), [(NAME,)], title=NAME, note=NAME),
    "a plan's table": lambda: widgets.plan_table(REPORT.plan, REPORT.cluster),
    "a figure's title": lambda: FigureBox(
        widgets.lines({NAME: [(1.0, 1.0)]}, title=NAME, label=NAME, x_title=NAME, y_title=NAME)
    ),
    "a plain string as HTML": lambda: Html(NAME),
}


def texts(shown: Any) -> str:
    """Return all that a notebook's cell shows of a value as text, having checked that nothing of it came from a name as
    markup."""
    if isinstance(shown, FigureWidget):
        return texts_of(shown)
    if isinstance(shown, ipywidgets.Widget):
        assert not getattr(shown, "description_allow_html", False)
        own = [shown_by(shown.value)] if isinstance(shown, ipywidgets.HTML) else []
        return "\n".join([*own, *map(texts, getattr(shown, "children", ()))])
    bundle = shown._repr_mimebundle_() if hasattr(shown, "_repr_mimebundle_") else {"text/html": shown._repr_html_()}
    return shown_by(bundle["text/html"])


def test_everything_that_a_notebook_shows_is_in_the_table() -> None:
    of_labs = {
        name: item for name, item in vars(labs).items() if getattr(item, "__module__", "").startswith("workbench_labs")
    }
    of_widgets = {name: getattr(widgets, name) for name in dir(widgets)}
    public = {name: item for name, item in (of_widgets | of_labs).items() if inspect.isclass(item)}
    shows = ("_repr_html_", "_repr_mimebundle_")
    assert {
        name for name, one in public.items() if any(hasattr(one, way) for way in shows)
    } == SHOWN.keys() | WITHOUT_NAMES


@pytest.mark.parametrize("name", [*SHOWN, *ALSO])
def test_a_hostile_name_stays_text(name: str) -> None:
    shown = {**SHOWN, **ALSO}[name]()
    for error in (ConfigError(NAME), RuntimeError(NAME)):
        if isinstance(message := getattr(shown, "message", None), Message):
            message.show_exception(error)
            assert texts(message).count(NAME) >= 1
            message.say(NAME)
    assert NAME in texts(shown)
