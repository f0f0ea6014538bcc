"""Forms for jobs and clusters, live progress and a schedule player: what the notebooks show and bind to their parameters."""

from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.job_form import JobForm
from workbench.widgets.live import LiveProgress
from workbench.widgets.run_panel import RunPanel
from workbench.widgets.schedule_player import SchedulePlayer
from workbench.widgets.settings import tiny
from workbench.widgets.tables import plan_table, report_table, sweep_table

__all__ = [
    "ClusterForm",
    "JobForm",
    "LiveProgress",
    "RunPanel",
    "SchedulePlayer",
    "plan_table",
    "report_table",
    "sweep_table",
    "tiny",
]
