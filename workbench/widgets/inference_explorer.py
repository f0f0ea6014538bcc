"""Move a device's speed, memory or link, or the sequence's length, and watch what the planners make of it (Galaxy+, section III-C)."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.plots import gantt, layer_cut, needs
from workbench.plots.style import time_unit
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import BIG_FIRST, WIDE, FigureBox, Html, Message
from workbench.widgets.inference_problem import InferenceComparison, InferenceProblem, compare_inference
from workbench.widgets.inference_tables import inference_table
from workbench.widgets.latest import Latest

SHOWN = ("Galaxy+", "Algorithm 1", "Megatron-LM", "sequence parallel", "EdgeShard")


class InferenceExplorer(widgets.VBox):
    """Sliders for the devices and the sequence; what every planner makes of it as a table, the first planner's plan drawn.

    compared: what is shown.  planners: of PLANNERS, the first is the one that is drawn.
    """

    def __init__(self, problem: InferenceProblem, *, planners: Sequence[str] = SHOWN) -> None:
        self._origin, self._planners = problem, tuple(planners)
        self.form = ClusterForm(problem.cluster, choice=False, overview=False, continuous=True)
        self.length = widgets.IntSlider(
            value=problem.length,
            min=problem.cluster.world_size,
            max=max(1024, problem.length),
            description="Tokens",
            tooltip="Tokens of the sequence",
            style=WIDE,
            layout=widgets.Layout(width="34em"),
        )
        self.message, self.headline, self.table = Message(), Html(), Html()
        titles = ["One layer", "Memory", "When (Gantt chart)"]
        self.tabs = widgets.Tab([FigureBox() for _ in titles], titles=titles)
        self.compared: tuple[InferenceComparison, ...] = ()
        self._shown, self._first_s = problem, 0.0
        self._latest: Latest[InferenceProblem | ConfigError] = Latest(self._work)
        self.form.on_change(lambda _: self._ask())
        self.length.observe(lambda _: self._ask(), names="value")
        self.tabs.observe(lambda _: self._draw(), names="selected_index")
        super().__init__([self.form, self.length, self.headline, self.message, self.table, self.tabs])
        self._work(problem)

    @property
    def cluster(self) -> Cluster:
        """Return the cluster as the sliders have it."""
        return self.form.cluster

    @property
    def problem(self) -> InferenceProblem:
        """Return the problem as the controls have it.  Raises ConfigError for what cannot be meant."""
        return self._origin.on(self.form.cluster).of_length(self.length.value)

    def wait(self) -> None:
        """Wait until what is shown belongs to what the controls say."""
        self._latest.wait()

    def _ask(self) -> None:
        try:
            self._latest.ask(self.problem)
        except ConfigError as error:
            self._latest.ask(error)  # after what is being planned, which would clear it

    def _work(self, problem: InferenceProblem | ConfigError) -> None:
        try:
            if isinstance(problem, ConfigError):
                raise problem
            self._show(problem)
        except Exception as error:  # a thread's error would be seen by nobody
            self.message.show_exception(error)

    def _show(self, problem: InferenceProblem) -> None:
        self.compared, self._shown = compare_inference(problem, self._planners), problem
        first = self.compared[0]
        self._first_s = self._first_s or first.seconds
        self.table.value = inference_table(self.compared, problem)._repr_html_()
        if first.plan is None:
            self.message.error(first.why)
            self.headline.value = BIG_FIRST.format("No plan fits.", "")
        else:
            self.message.clear()
            change = f" ({first.seconds / self._first_s - 1:+.0%} against the beginning)" if first.seconds != self._first_s else ""
            configuration = "[{}, {}]".format(*first.plan.configuration)
            words = f"{first.planner} {configuration} on {first.plan.num_positions} devices (simulated)"
            self.headline.value = BIG_FIRST.format(f"{time_unit(first.seconds).text(first.seconds)} a sequence{change}", words)
        self._draw()

    def _draw(self) -> None:
        """Draw the tab in sight only: a figure costs more than the plan."""
        made, problem, at = self.compared[0].plan, self._shown, self.tabs.selected_index or 0
        box = self.tabs.children[at]
        box.layout.visibility = "hidden" if made is None else "visible"
        if made is None:
            return
        if at == 0:
            names = [device.name for device in problem.cluster.devices]
            box.show(layer_cut(made, problem.profile.stacks[0], names, length=problem.length, scheme=made.schemes[0]))
        elif at == 1:
            box.show(needs(problem.need_parts(made), problem.cluster, title="What each device holds"))
        else:
            box.show(gantt(problem.simulated(made)))
