"""Figures from timelines, reports and clusters; every title says whether it is simulated, emulated or real."""

from workbench.plots.breakdown import breakdown, device_samples, stacked_bars, time_by_class
from workbench.plots.export import browser_path, write_figures
from workbench.plots.gantt import gantt
from workbench.plots.memory import cluster, memory, needs, placement
from workbench.plots.overlay import overlay
from workbench.plots.predicted import compared_bars, lines, predicted_against_measured
from workbench.plots.training import curves, epoch_times
