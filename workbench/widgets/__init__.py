"""The notebooks' widgets, bound to their parameters: forms, live progress, a schedule player, tables.

Each is imported when it is first used: commands and devices make tables, too, without what a notebook shows them with.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.plots import lines
    from workbench.profiler.timing import tiny
    from workbench.widgets.adviser import Adviser
    from workbench.widgets.cluster_form import ClusterForm
    from workbench.widgets.history import RunHistory
    from workbench.widgets.job_form import JobForm
    from workbench.widgets.notebook_files import output_folder, passages_folder
    from workbench.widgets.run_panel import LiveProgress, RunPanel, bar
    from workbench.widgets.schedule_player import SchedulePlayer
    from workbench.widgets.tables import Table, plan_table, report_table, sweep_table

_NAMES = {
    "workbench.plots": ("lines",),
    "workbench.profiler.timing": ("tiny",),
    "workbench.widgets.adviser": ("Adviser",),
    "workbench.widgets.cluster_form": ("ClusterForm",),
    "workbench.widgets.history": ("RunHistory",),
    "workbench.widgets.job_form": ("JobForm",),
    "workbench.widgets.notebook_files": ("output_folder", "passages_folder"),
    "workbench.widgets.run_panel": ("LiveProgress", "RunPanel", "bar"),
    "workbench.widgets.schedule_player": ("SchedulePlayer",),
    "workbench.widgets.tables": ("Table", "plan_table", "report_table", "sweep_table"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
