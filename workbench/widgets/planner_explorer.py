"""Move a device's speed, memory or link and see at once what the planner does about it: plan, Gantt chart, throughput, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.plan import Plan
from workbench.core.timeline import Timeline
from workbench.plots import gantt, needs, placement
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import BIG_FIRST, WIDE, FigureBox, Html, Message
from workbench.widgets.latest import Latest
from workbench.widgets.planning import PLANNERS, PlanningProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a planner makes of a problem.  plan and timeline are None, and `why` says why, if nothing fits."""

    problem: PlanningProblem
    plan: Plan | None
    timeline: Timeline | None
    why: str = ""

    @property
    def samples_per_s(self) -> float:
        """Return the simulated throughput, 0 if nothing fits."""
        return 0.0 if self.plan is None or self.timeline is None else self.plan.mini_batch_size / self.timeline.makespan_s


def answer(problem: PlanningProblem, planner: str) -> Answer:
    """Plan and simulate."""
    try:
        made = problem.planned(planner)
    except (PlanError, ConfigError) as error:
        return Answer(problem=problem, plan=None, timeline=None, why=str(error))
    return Answer(problem=problem, plan=made, timeline=problem.simulated(made))


class PlannerExplorer(widgets.VBox):
    """Plans anew whenever a slider moves, in the background: what is shown belongs to the newest position.

    problem: with the cluster that the sliders begin at.  answer: what is shown.  cluster: as the sliders have it.
    """

    def __init__(self, problem: PlanningProblem, *, planners: Sequence[str] = tuple(PLANNERS)) -> None:
        self._origin = problem
        self.form = ClusterForm(problem.cluster, choice=False, overview=False, continuous=True)
        divisors = [number for number in range(1, problem.batch_size + 1) if problem.batch_size % number == 0]
        self.micro_batches = widgets.SelectionSlider(
            options=divisors,
            value=problem.micro_batches,
            description="Micro-batches",
            tooltip=f"Into how many a mini-batch of {problem.batch_size} samples is cut",
            style=WIDE,
            layout=widgets.Layout(width="24em"),
        )
        self.planner = widgets.Dropdown(
            options=list(planners), value=planners[0], description="Planner", tooltip="Who makes the plan", style=WIDE
        )
        self.message, self.headline = Message(), Html()
        self.answer = answer(problem, self.planner.value)
        self._first = self.answer
        self.tabs = widgets.Tab([FigureBox(), FigureBox(), FigureBox()], titles=["When (Gantt chart)", "Where (layers)", "Memory"])
        self._latest: Latest[tuple[PlanningProblem, str]] = Latest(self._work)
        self.form.on_change(lambda _: self._ask())
        for control in (self.micro_batches, self.planner):
            control.observe(lambda _: self._ask(), names="value")
        self.tabs.observe(lambda _: self._draw(), names="selected_index")
        self._show(self.answer)
        super().__init__([self.form, widgets.HBox([self.micro_batches, self.planner]), self.headline, self.message, self.tabs])

    @property
    def cluster(self) -> Cluster:
        """Return the cluster as the sliders have it."""
        return self.form.cluster

    @property
    def problem(self) -> PlanningProblem:
        """Return the problem as the controls have it.  Raises ConfigError for what cannot be meant."""
        return self._origin.on(self.form.cluster).cut(self.micro_batches.value)

    def wait(self) -> None:
        """Wait until what is shown belongs to what the controls say."""
        self._latest.wait()

    def _ask(self) -> None:
        try:
            self._latest.ask((self.problem, self.planner.value))
        except ConfigError as error:
            self.message.show_exception(error)

    def _work(self, request: tuple[PlanningProblem, str]) -> None:
        try:
            self._show(answer(*request))
        except Exception as error:  # a thread's error would be seen by nobody
            self.message.show_exception(error)

    def _show(self, found: Answer) -> None:
        self.answer = found
        if found.plan is None:
            self.message.error(found.why)
        else:
            self.message.clear()
        self.headline.value = self._headline(found)
        self._draw()

    def _draw(self) -> None:
        """Draw the tab in sight only: a figure costs more than the plan."""
        found, at = self.answer, self.tabs.selected_index or 0
        box = self.tabs.children[at]
        box.layout.visibility = "hidden" if found.plan is None else "visible"
        if found.plan is None or found.timeline is None:
            return
        if at == 0:
            box.show(gantt(found.timeline))
        elif at == 1:
            box.show(placement(found.plan, found.problem.cluster))
        else:
            box.show(needs(found.problem.need_parts(found.plan), found.problem.cluster))

    def _headline(self, found: Answer) -> str:
        if found.plan is None:
            return BIG_FIRST.format("No plan fits.", "")
        change = ""
        if self._first.samples_per_s and found is not self._first:
            change = f" ({found.samples_per_s / self._first.samples_per_s - 1:+.0%} against the beginning)"
        step_ms = found.plan.mini_batch_size / found.samples_per_s * 1e3
        where = f"layers {found.plan.partition()} on device groups {found.plan.grouping()}"
        words = f"{where}; a step of {found.plan.mini_batch_size} samples takes {step_ms:.0f} ms (simulated)"
        return BIG_FIRST.format(f"{found.samples_per_s:.3g} samples/s{change}", words)
