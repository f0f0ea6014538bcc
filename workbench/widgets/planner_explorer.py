"""Move a device's speed, memory or link and see at once what the planner does about it: plan, Gantt chart, throughput, memory."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from workbench.plots import gantt, needs, placement
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import BIG_FIRST, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.planning import PLANNERS, Comparison, PlanningProblem, compare


class PlannerExplorer(Explorer):
    """Plans again whenever a slider moves.

    problem: with the cluster that the sliders begin at.  answer: what is shown, of the problem as the controls have it.
    """

    def __init__(self, problem: PlanningProblem, *, planners: Sequence[str] = tuple(PLANNERS)) -> None:
        self._origin = problem
        self.form = ClusterForm(problem.cluster, choice=False, overview=False, continuous=True)
        divisors = [number for number in range(1, problem.batch_size + 1) if problem.batch_size % number == 0]
        told = f"Into how many a mini-batch of {problem.batch_size} samples is cut"
        self.micro_batches = described(widgets.SelectionSlider, "Micro-batches", told, options=divisors, value=problem.micro_batches)
        self.planner = described(widgets.Dropdown, "Planner", "Who makes the plan", options=list(planners), value=planners[0])
        self.answer: Comparison | None = None
        self._first: Comparison | None = None
        controls = (self.micro_batches, self.planner)
        super().__init__(
            [self.form, widgets.HBox(controls)],
            controls,
            lambda: (self.problem, self.planner.value),
            lambda asked: self._plan(*asked),
            tabs=("When (Gantt chart)", "Where (layers)", "Memory"),
        )
        self.form.on_change(lambda _: self.changed())

    @property
    def problem(self) -> PlanningProblem:
        """Return the problem as the controls have it.  Raises ConfigError for what cannot be meant."""
        return self._origin.on(self.form.cluster).cut(self.micro_batches.value)

    def _plan(self, problem: PlanningProblem, planner: str) -> None:
        [found] = compare(problem, (planner,))
        self.answer, first = found, self._first
        self._first = first or found
        made = found.plan
        if made is None:
            self.message.error(found.why)
            self.headline.value = BIG_FIRST.format("No plan fits.", "")
            self.show()
            return
        change = (
            f" ({found.samples_per_s / first.samples_per_s - 1:+.0%} against the beginning)"
            if first is not None and first.samples_per_s
            else ""
        )
        where = made.where()
        step_ms = made.mini_batch_size / found.samples_per_s * 1e3
        words = f"{where}; a step of {made.mini_batch_size} samples takes {step_ms:.0f} ms (simulated)"
        self.headline.value = BIG_FIRST.format(f"{found.samples_per_s:.3g} samples/s{change}", words)
        self.show(
            lambda: gantt(problem.simulated(made)),
            lambda: placement(made, problem.cluster),
            lambda: needs(problem.need_parts(made), problem.cluster),
        )
