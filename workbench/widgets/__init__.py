"""What the notebooks show and bind to their parameters: forms, live progress, a schedule player, the planner to play with."""

from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.inference_explorer import InferenceExplorer
from workbench.widgets.inference_form import InferenceForm
from workbench.widgets.inference_problem import (
    InferenceProblem,
    compare_inference,
    described_problem,
    measured_problem,
    runnable,
)
from workbench.widgets.inference_tables import inference_plan_table, inference_table
from workbench.widgets.job_form import JobForm
from workbench.widgets.layer_cutter import LayerCutter
from workbench.widgets.lines import lines
from workbench.widgets.live import LiveProgress
from workbench.widgets.overlapped import overlap_cells
from workbench.widgets.passages import passages_folder
from workbench.widgets.planner_explorer import PlannerExplorer
from workbench.widgets.planning import PlanningProblem, compare, paper_problem, scaling
from workbench.widgets.run_panel import RunPanel
from workbench.widgets.schedule_player import SchedulePlayer
from workbench.widgets.scheme_editor import SchemeEditor
from workbench.widgets.settings import output_folder, tiny
from workbench.widgets.split_editor import SplitEditor
from workbench.widgets.straggler_lab import StragglerLab, serve_here, settings_for
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
    "InferenceExplorer",
    "InferenceForm",
    "InferenceProblem",
    "JobForm",
    "LayerCutter",
    "LiveProgress",
    "PlannerExplorer",
    "PlanningProblem",
    "RunPanel",
    "SchedulePlayer",
    "SchemeEditor",
    "SplitEditor",
    "StragglerLab",
    "Table",
    "compare",
    "compare_inference",
    "comparison_table",
    "described_problem",
    "grouping_table",
    "inference_plan_table",
    "inference_table",
    "lines",
    "needs_table",
    "orders_table",
    "output_folder",
    "overlap_cells",
    "paper_problem",
    "passages_folder",
    "phases_table",
    "plan_table",
    "report_table",
    "scaling",
    "settings_for",
    "sweep_table",
    "tiny",
    "with_bandwidth",
    "with_memory",
    "measured_problem",
    "runnable",
    "serve_here",
]
