"""What the notebooks show and bind to their parameters: forms, live progress, a schedule player, the planner to play with."""

from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.job_form import JobForm
from workbench.widgets.lines import lines
from workbench.widgets.live import LiveProgress
from workbench.widgets.planner_explorer import PlannerExplorer
from workbench.widgets.planning import PlanningProblem, compare, paper_problem, scaling
from workbench.widgets.run_panel import RunPanel
from workbench.widgets.schedule_player import SchedulePlayer
from workbench.widgets.settings import output_folder, tiny
from workbench.widgets.split_editor import SplitEditor
from workbench.widgets.tables import (
    Table,
    comparison_table,
    grouping_table,
    needs_table,
    orders_table,
    phases_table,
    plan_table,
    report_table,
    sweep_table,
)
from workbench.widgets.variations import with_bandwidth, with_memory

__all__ = [
    "ClusterForm",
    "JobForm",
    "LiveProgress",
    "PlannerExplorer",
    "PlanningProblem",
    "RunPanel",
    "SchedulePlayer",
    "SplitEditor",
    "Table",
    "compare",
    "comparison_table",
    "grouping_table",
    "lines",
    "needs_table",
    "orders_table",
    "output_folder",
    "paper_problem",
    "phases_table",
    "plan_table",
    "report_table",
    "scaling",
    "sweep_table",
    "tiny",
    "with_bandwidth",
    "with_memory",
]
