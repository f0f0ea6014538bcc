"""Figures from timelines, reports and clusters; every title says what is simulated, emulated or real."""

from workbench.plots.bandwidths import latencies, speedups
from workbench.plots.breakdown import breakdown, time_by_class
from workbench.plots.comparison import compared_bars, compared_losses
from workbench.plots.device_samples import device_samples
from workbench.plots.devices import cluster
from workbench.plots.export import browser_path, write_figures
from workbench.plots.gantt import gantt
from workbench.plots.layer_cut import layer_cut
from workbench.plots.memory import memory
from workbench.plots.overlapping import OverlapCell, overlap
from workbench.plots.placement import needs, placement
from workbench.plots.predicted import predicted_against_measured
from workbench.plots.scaling import scaling
from workbench.plots.serving import request_latencies, serving
from workbench.plots.stacked import stacked_bars
from workbench.plots.training import curves, epoch_times

__all__ = [
    "OverlapCell",
    "breakdown",
    "browser_path",
    "cluster",
    "compared_bars",
    "compared_losses",
    "curves",
    "device_samples",
    "epoch_times",
    "gantt",
    "latencies",
    "layer_cut",
    "memory",
    "needs",
    "overlap",
    "placement",
    "predicted_against_measured",
    "request_latencies",
    "scaling",
    "serving",
    "speedups",
    "stacked_bars",
    "time_by_class",
    "write_figures",
]
