"""Forms for jobs and clusters, live progress and a schedule player: what the notebooks show and bind to their parameters."""

from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.job_form import JobForm
from workbench.widgets.lines import lines
from workbench.widgets.live import LiveProgress
from workbench.widgets.run_panel import RunPanel
from workbench.widgets.schedule_player import SchedulePlayer
from workbench.widgets.settings import output_folder, tiny
from workbench.widgets.tables import Table, needs_table, plan_table, report_table, sweep_table
from workbench.widgets.variations import with_bandwidth, with_memory

__all__ = [
    "ClusterForm",
    "JobForm",
    "LiveProgress",
    "RunPanel",
    "SchedulePlayer",
    "Table",
    "lines",
    "needs_table",
    "output_folder",
    "plan_table",
    "report_table",
    "sweep_table",
    "tiny",
    "with_bandwidth",
    "with_memory",
]
