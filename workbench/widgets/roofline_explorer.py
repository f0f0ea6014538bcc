"""Choose a machine, a model and a step, and see where its passes lie under the roof and what each execution takes (P-RGE, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import ipywidgets as widgets

from workbench.plots.style import time_unit
from workbench.plots.zeroth_order_roofline import Pass, roofline
from workbench.profiler.descriptions import describe
from workbench.profiler.zeroth_order import Execution, Machine, matrix_params, parts_at_once, pass_flops, pass_s, step_s
from workbench.reproduce.p_rge.testbed import load_constants
from workbench.widgets.controls import BIG_FIRST, Html, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.tables import Table

EXECUTIONS: tuple[Execution, ...] = ("sequential", "outer", "inner", "both")
MODELS = ("SmolLM2-135M", "TinyLlama-1.1B", "Llama2-7B")
POWERS = (1, 2, 4, 8, 16)


class Choice(NamedTuple):
    """A machine, and the bytes in which it keeps a weight."""

    machine: Machine
    weight_bytes: float


class ExecutionCost(NamedTuple):
    """One execution of a step.  passes: of it; parts: of each pass."""

    execution: str
    passes: int
    parts: int
    one_pass: Pass
    step_s: float


def paper_machines() -> dict[str, Choice]:
    """Return the paper's machines, with what was fitted on its tables."""
    known = load_constants()
    return {
        "A100, fp16 (Table 13)": Choice(known.a100(), 2.0),
        "A100, NF4 (Fig. 6)": Choice(known.a100("nf4"), known.nf4_bytes),
        "Jetson Orin Nano, NF4 (Table 4)": Choice(known.jetson(), known.nf4_bytes),
        "OnePlus 12, fp16 (Table 5)": Choice(known.oneplus(), 2.0),
    }


def execution_costs(model: str, choice: Choice, *, queries: int, batch_size: int, tokens: int) -> tuple[ExecutionCost, ...]:
    """Return what a step takes by each execution, simulated.  Raises ConfigError for an unknown model or q below 1."""
    described, (machine, weight_bytes) = describe(model), choice
    found = []
    for execution in EXECUTIONS:
        parts = parts_at_once(execution, queries)
        size = {"rows": float(parts * batch_size), "sequence_length": float(tokens)}
        seconds = pass_s(described, machine, weight_bytes=weight_bytes, targets=1, **size)  # type: ignore[arg-type]
        flops = pass_flops(described, targets=1, **size)  # type: ignore[arg-type]
        whole_s = step_s(
            described,
            machine,
            batch_size=batch_size,
            sequence_length=tokens,
            queries=queries,
            execution=execution,
            weight_bytes=weight_bytes,
            targets=1,
        )
        one = Pass(parts, flops, weight_bytes * matrix_params(described), seconds)
        found.append(ExecutionCost(execution, 2 * queries // parts, parts, one, whole_s))
    return tuple(found)


class RooflineExplorer(Explorer):
    """A machine, a model, q, E and tokens; the roofline with the pass of each execution, and the step's time.

    costs: what is shown.  machines: those of paper_machines() and more; the first is chosen.
    """

    def __init__(self, machines: Mapping[str, Choice] | None = None, *, model: str = "TinyLlama-1.1B") -> None:
        self._machines = dict(machines or paper_machines())
        dropdown, slider = widgets.Dropdown, widgets.SelectionSlider
        self.machine = described(dropdown, "Machine", "Whose rates are taken", width="30em", options=tuple(self._machines))
        self.model = described(dropdown, "Model", "Whose forward passes these are", width="30em", options=MODELS, value=model)
        self.queries = described(slider, "Queries q", "Random directions of a step", options=POWERS, value=4)
        self.batch_size = described(slider, "Samples E", "Samples of each query", options=POWERS, value=1)
        self.tokens = described(slider, "Tokens", "Tokens of each sample, padding included", options=(8, 16, 32, 64, 128, 256), value=64)
        self.table = Html()
        self.costs: tuple[ExecutionCost, ...] = ()
        columns = [[self.machine, self.model], [self.queries, self.batch_size, self.tokens]]
        controls = [control for column in columns for control in column]
        row = widgets.HBox([widgets.VBox(column) for column in columns], layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([row], controls, lambda: [control.value for control in controls], lambda at: self._cost(*at), below=[self.table])

    def _cost(self, machine: str, model: str, q: int, each: int, tokens: int) -> None:
        choice = self._machines[machine]
        self.costs = execution_costs(model, choice, queries=q, batch_size=each, tokens=tokens)
        first, best = self.costs[0], min(self.costs, key=lambda one: one.step_s)
        unit = time_unit(first.step_s)
        gain = first.step_s / best.step_s
        said = f"all in one pass is {first.step_s / self.costs[-1].step_s:.2f} times as fast as one after the other"
        worth = (
            "Bound by arithmetic already: little to gain." if gain < 1.1 else "Weights and launches are shared: further parts cost little."
        )
        self.headline.value = BIG_FIRST.format(said, f"{worth} (simulated)")
        rows = [
            (
                one.execution,
                f"{one.passes}",
                f"{one.parts * each}",
                unit.text(one.one_pass.seconds),
                unit.text(one.step_s),
                f"{first.step_s / one.step_s:.2f}",
            )
            for one in self.costs
        ]
        columns = ("execution", "passes", "rows of each", "one pass", "a step", "times as fast")
        self.table.value = Table(columns, rows)._repr_html_()
        self.show(
            lambda: roofline(
                {one.execution: [one.one_pass] for one in self.costs},
                flops_per_s=choice.machine.flops_per_s,
                bytes_per_s=choice.machine.memory_bytes_per_s,
                label="simulated",
                title="Where the passes lie",
                subtitle=f"{model} on {machine}, q = {q}, E = {each}, {tokens} tokens",
            )
        )
