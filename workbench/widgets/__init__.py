"""The notebooks' widgets, bound to their parameters: forms, live progress, a schedule player, tables."""

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
