"""Move a device's speed, memory or link, or the sequence's length, and watch what the planners make of it (Galaxy+, section III-C)."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from workbench.plots import gantt, layer_cut, needs
from workbench.plots.style import time_unit
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import BIG_FIRST, Html, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.inference_problem import InferenceComparison, InferenceProblem, compare_inference
from workbench.widgets.inference_tables import inference_table

SHOWN = ("Galaxy+", "Algorithm 1", "Megatron-LM", "sequence parallel", "EdgeShard")


class InferenceExplorer(Explorer):
    """Sliders for the devices and the sequence; what every planner makes of it as a table, the first planner's plan drawn.

    compared: what is shown.  planners: of PLANNERS, the first is the one that is drawn.
    """

    def __init__(self, problem: InferenceProblem, *, planners: Sequence[str] = SHOWN) -> None:
        self._origin, self._planners = problem, tuple(planners)
        self.form = ClusterForm(problem.cluster, choice=False, overview=False, continuous=True)
        self.length = tokens_slider(problem.length, problem.cluster.world_size, 1024)
        self.table = Html()
        self.compared: tuple[InferenceComparison, ...] = ()
        self._first_s = 0.0
        super().__init__(
            [self.form, self.length],
            [self.length],
            lambda: self._origin.on(self.form.cluster).of_length(self.length.value),
            self._compare,
            tabs=("One layer", "Memory", "When (Gantt chart)"),
            below=[self.table],
        )
        self.form.on_change(lambda _: self.changed())

    def _compare(self, problem: InferenceProblem) -> None:
        self.compared = compare_inference(problem, self._planners)
        first = self.compared[0]
        made = first.plan
        self._first_s = self._first_s or first.seconds
        self.table.value = inference_table(self.compared, problem)._repr_html_()
        if made is None:
            self.message.error(first.why)
            self.headline.value = BIG_FIRST.format("No plan fits.", "")
            self.show()
            return
        change = f" ({first.seconds / self._first_s - 1:+.0%} against the beginning)" if first.seconds != self._first_s else ""
        words = "{} [{}, {}] on {} devices (simulated)".format(first.planner, *made.configuration, made.num_positions)
        self.headline.value = BIG_FIRST.format(f"{time_unit(first.seconds).text(first.seconds)} a sequence{change}", words)
        names = [device.name for device in problem.cluster.devices]
        self.show(
            lambda: layer_cut(made, problem.profile.stacks[0], names, length=problem.length, scheme=made.schemes[0]),
            lambda: needs(problem.need_parts(made), problem.cluster, title="What each device holds"),
            lambda: gantt(problem.simulated(made)),
        )


def tokens_slider(length: int, fewest: int, most: int) -> widgets.IntSlider:
    """Return a slider for the tokens of a sequence."""
    return described(widgets.IntSlider, "Tokens", "Tokens of the sequence", width="34em", value=length, min=fewest, max=max(most, length))
