"""Split a model among devices by hand or by the planner, and see at once the time of a step and whether the memory
suffices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.plan import Plan
from workbench.core.proportions import proportional_parts, proportional_ranges
from workbench.planners import TrainingProblem
from workbench.planners.memory import by_purpose
from workbench.plots import gantt, needs, placement
from workbench.simulator.steps import simulated_step, step_s
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import Html, button, described, slider
from workbench.widgets.explorer import Explorer
from workbench_labs.planning import PLANNERS, Comparison, by_hand, compare, needs_of, on, refusals


class PlannerExplorer(Explorer):
    """Re-plans whenever a value of the cluster changes.

    problem: with the cluster at first.  answer: the result shown, for the controls' current problem.
    """

    def __init__(self, problem: TrainingProblem) -> None:
        self._origin = problem
        self.form = ClusterForm(problem.cluster, choice=False)
        divisors = [number for number in range(1, problem.batch_size + 1) if problem.batch_size % number == 0]
        tooltip = f"Into how many a mini-batch of {problem.batch_size} samples is cut"
        self.micro_batches = described(
            widgets.SelectionSlider, "Micro-batches", tooltip, options=divisors, value=problem.micro_batches
        )
        self.planner = described(widgets.Dropdown, "Planner", "Who makes the plan", options=list(PLANNERS))
        self.answer: Comparison | None = None
        self._first: Comparison | None = None
        controls = (self.micro_batches, self.planner)
        super().__init__(
            [self.form, widgets.HBox(controls)],
            controls,
            lambda: (self.problem, self.planner.value),
            lambda request: self._plan(*request),
            tabs=("When (Gantt chart)", "Where (layers)", "Memory"),
        )
        self.form.on_change(lambda _: self.changed())
        self.form.reset.on_click(lambda _: self.reset())

    @property
    def problem(self) -> TrainingProblem:
        """Return the problem with the controls' settings.  Raises ConfigError for invalid settings."""
        return replace(on(self._origin, self.form.cluster), micro_batches=self.micro_batches.value)

    def _plan(self, problem: TrainingProblem, planner: str) -> None:
        [answer] = compare(problem, (planner,))
        self.answer, first = answer, self._first
        self._first = first or answer
        plan = answer.plan
        if plan is None:
            return self.refuse("No plan fits.", answer.why)
        change = (
            f" ({answer.samples_per_s / first.samples_per_s - 1:+.0%} against the beginning)"
            if first is not None and first.samples_per_s
            else ""
        )
        where = plan.where()
        words = f"{where}; a step of {plan.mini_batch_size} samples takes {answer.seconds * 1e3:.0f} ms (simulated)"
        self.headline.say(f"{answer.samples_per_s:.3g} samples/s{change}", words)
        self.show(
            lambda: gantt(simulated_step(problem, plan)),
            lambda: placement(plan, problem.cluster),
            lambda: needs(by_purpose(needs_of(problem, plan)), problem.cluster),
        )


IDLE = "idle"
DISPATCH = {"by Eq. 4": "best", "by speed": "speed", "equally": "equal"}


class SplitEditor(Explorer):
    """Sliders for the ends of the stages, and for each device the stage for which it works.

    plan: the controls' plan, whether it fits or not; reading it raises ConfigError for an invalid plan (a stage without
    a device).
    planned: the planner's plan, with which yours is compared.  layers, groups: initial values, the planner's if not
    given.
    """

    def __init__(
        self,
        problem: TrainingProblem,
        *,
        layers: Sequence[int] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.problem = problem
        self.planned: Plan = PLANNERS["Algorithm 1"](problem)
        self._planned_s = step_s(problem, self.planned)
        self._paused = True
        devices = problem.cluster.devices
        most = min(len(devices), problem.profile.num_layers)
        self.num_stages = slider("Stages", "How many stages the layers are cut into", 1, 1, most, width="21em")
        tooltip = "How a group divides the samples of a micro-batch"
        self.dispatch = described(widgets.Dropdown, "Samples", tooltip, width="21em", options=list(DISPATCH))
        self.ends = widgets.VBox()
        self.devices = tuple(widgets.ToggleButtons(style={"button_width": "5.5em"}) for _ in devices)
        self.take_plan = button("Planner's plan", "Set everything as the planner has it", "magic", self._take_plan)
        self.even = button(
            "Even", "Equal stages, devices in turn", "align-justify", lambda: self._restage(self.num_stages.value)
        )
        if layers is None or groups is None:
            self._arrange(*_shape(self.planned))
        else:
            by_hand(problem, layers, groups)  # refuses an invalid plan
            self._arrange(layers, groups)
        names = [
            Html(Markup("<b>{}</b>").format(device.name), layout=widgets.Layout(width="9em")) for device in devices
        ]
        rows = [widgets.HBox([name, choice]) for name, choice in zip(names, self.devices, strict=True)]
        super().__init__(
            [widgets.HBox([self.num_stages, self.dispatch, self.take_plan, self.even]), self.ends, *rows],
            [self.dispatch, *self.devices],
            lambda: self.plan,
            self._price,
            tabs=("Where (layers)", "When (Gantt chart)", "Memory"),
        )
        self.num_stages.observe(lambda change: self._restage(change["new"]), names="value")

    @property
    def layers(self) -> list[int]:
        """Return the number of layers of each stage."""
        ends = [0, *(end.value for end in self.ends.children), self.problem.profile.num_layers]
        return [stop - start for start, stop in itertools.pairwise(ends)]

    @property
    def groups(self) -> list[list[int]]:
        """Return the ranks of each stage."""
        return [
            [rank for rank, choice in enumerate(self.devices) if choice.value == stage]
            for stage in range(self.num_stages.value)
        ]

    @property
    def plan(self) -> Plan:
        """Return the plan that the controls describe.  Raises ConfigError if they describe none."""
        return by_hand(self.problem, self.layers, self.groups, dispatch=DISPATCH[self.dispatch.value])  # type: ignore[arg-type]

    def _take_plan(self) -> None:
        with self.setting():
            self.dispatch.value = "by Eq. 4"
            self._arrange(*_shape(self.planned))

    def _restage(self, count: int) -> None:
        """Cut evenly into `count` stages, with the devices in turn."""
        if self._paused:
            return
        num_layers, world_size = self.problem.profile.num_layers, self.problem.cluster.world_size
        layers = proportional_parts(num_layers, (1,) * count)
        with self.setting():
            self._arrange(layers, [range(first, end) for first, end in proportional_ranges(world_size, (1,) * count)])

    def _arrange(self, layers: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Set every control."""
        self.num_stages.value = len(layers)
        self.ends.children = [self._end(index, sum(layers[: index + 1])) for index in range(len(layers) - 1)]
        options = [(IDLE, -1)] + [(f"stage {stage}", stage) for stage in range(len(layers))]
        for rank, choice in enumerate(self.devices):
            choice.options = options
            name = self.problem.cluster.devices[rank].name
            choice.tooltips = [
                f"{name} does nothing" if stage < 0 else f"{name} works for stage {stage}" for _, stage in options
            ]
            choice.value = next((stage for stage, group in enumerate(groups) if rank in group), -1)

    def _end(self, index: int, value: int) -> widgets.IntSlider:
        described_as, tooltip = f"Stage {index} ends", f"Stage {index} has the layers before this one"
        most = self.problem.profile.num_layers - 1
        control = slider(described_as, tooltip, value, 1, most, width="40em")
        control.observe(lambda change: self._moved(index, change["new"]), names="value")
        return control

    def _moved(self, index: int, value: int) -> None:
        """Push the other ends along, so that no stage becomes empty."""
        if self._paused:
            return
        with self.setting():
            sliders, num_layers = self.ends.children, self.problem.profile.num_layers
            sliders[index].value = min(max(value, index + 1), num_layers - (len(sliders) - index))
            for other in range(index + 1, len(sliders)):
                sliders[other].value = max(sliders[other].value, sliders[other - 1].value + 1)
            for other in range(index - 1, -1, -1):
                sliders[other].value = min(sliders[other].value, sliders[other + 1].value - 1)

    def _price(self, plan: Plan) -> None:
        problem, errors = self.problem, refusals(self.problem, plan)
        timeline = simulated_step(problem, plan, title="One mini-batch, as you split it")
        if errors:
            self.message.error(" ".join(str(error) for error in errors))
        self.headline.say(*self._headline(timeline.makespan_s, fits=not errors, made=plan))
        self.show(
            lambda: placement(plan, problem.cluster),
            lambda: gantt(timeline),
            lambda: needs(by_purpose(needs_of(problem, plan)), problem.cluster),
        )

    def _headline(self, step_s: float, *, fits: bool, made: Plan) -> tuple[str, str]:
        theirs = (
            f"the planner's {self.planned.partition()} on {self.planned.grouping()} takes "
            f"{self._planned_s * 1e3:.0f} ms"
        )
        if not fits:
            words, details = "Out of memory", f"a step would take {step_s * 1e3:.0f} ms if it did fit; {theirs}"
        else:
            words = f"{step_s * 1e3:.0f} ms a step ({step_s / self._planned_s - 1:+.1%} against the planner)"
            details = f"yours: {made.where()}; {theirs} (simulated)"
        return words, details


def _shape(plan: Plan) -> tuple[list[int], list[tuple[int, ...]]]:
    return [stage.num_layers for stage in plan.stages], [stage.ranks for stage in plan.stages]
