"""The notebooks' widgets, bound to their parameters: forms, live progress, a schedule player, interactive planners."""

from workbench.plots import lines
from workbench.profiler.timing import tiny
from workbench.widgets.bowl import Bowl, BowlLab, descents, epsilon_curve, exact_gradient, plane_error, study_slopes
from workbench.widgets.confidant_lab import (
    HeadsLab,
    PartitionLab,
    StaleLab,
    head_profile,
    stashed,
    version_table,
    version_words,
)
from workbench.widgets.controls import output_folder, passages_folder
from workbench.widgets.forms import ClusterForm, JobForm
from workbench.widgets.inference_explorer import InferenceExplorer, LayerCutter, SchemeEditor
from workbench.widgets.inference_problem import (
    InferenceProblem,
    StragglerLab,
    compare_inference,
    described_problem,
    measured_problem,
    overlap_cells,
    runnable,
    serve_here,
    settings_for,
)
from workbench.widgets.lab_parameters import check_parameters
from workbench.widgets.planning import (
    PlanningProblem,
    QueryDivider,
    QueryProblem,
    compare,
    paper_problem,
    query_problem,
    scaling,
    with_bandwidth,
    with_memory,
)
from workbench.widgets.ring_lab import LearningLab, RingLab, Tried, policy_seconds, ring_table, ring_timeline
from workbench.widgets.rooflines import Choice, RooflineExplorer, measure_roofline, one_by_one, paper_machines
from workbench.widgets.run_panel import LiveProgress, RunPanel, bar
from workbench.widgets.schedule_player import SchedulePlayer
from workbench.widgets.split_editor import PlannerExplorer, SplitEditor
from workbench.widgets.tables import (
    Table,
    comparison_table,
    grouping_table,
    inference_plan_table,
    inference_table,
    orders_table,
    phases_table,
    plan_table,
    recovery_table,
    report_table,
    sweep_table,
)
from workbench.widgets.training_panel import (
    EngineRun,
    QueryTraining,
    TrainingPanel,
    Trial,
    continue_in_engine,
    figure_of,
    frozen_and_trained,
)
