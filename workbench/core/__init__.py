"""The data types that all other packages share: devices, plans, schedules, costs, timelines, reports."""

from workbench.core.cluster import Cluster, Device, Link, Processor
from workbench.core.costs import Costs
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.core.report import EpochRecord, Report, StepRecord, SweepPoint
from workbench.core.schedule import Op, Schedule, Value
from workbench.core.timeline import MemorySample, Span, Timeline
