"""Rooflines of forward passes: this machine's, measured, and those of chosen machines, simulated (P-RGE, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import ipywidgets as widgets
import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.methods.p_rge.analytic import (
    Execution,
    Machine,
    matrix_params,
    parts_at_once,
    pass_flops,
    pass_s,
    step_s,
)
from workbench.methods.p_rge.published import load_constants
from workbench.methods.p_rge.zeroth_order import CausalModel, PromptLike
from workbench.models.matmul import linear
from workbench.plots.style import time_unit
from workbench.profiler.descriptions import describe
from workbench.profiler.host import gemm_rate, memory_rate
from workbench.profiler.timing import time_calls
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench.widgets.tables import Table
from workbench_labs.plots.zeroth_order import Pass, roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoofline:
    """One thread of this machine.  flops_per_s: the rate of a large product.  bytes_per_s: the rate of memory.  passes:
    one model's, by rising parts.
    """

    flops_per_s: float
    bytes_per_s: float
    passes: tuple[Pass, ...]

    def machine(self, num_layers: int) -> Machine:
        """Return the rates for the time model.  The smallest pass's time above its roof is taken as a fixed cost of its
        layers.
        """
        [first, *_] = self.passes
        roof_s = max(first.flops / self.flops_per_s, first.weight_bytes / self.bytes_per_s)
        return Machine(
            flops_per_s=self.flops_per_s,
            memory_bytes_per_s=self.bytes_per_s,
            layer_s=max(0.0, first.seconds - roof_s) / num_layers,
            is_asynchronous=False,
        )


def measure_roofline(
    model: CausalModel, batch: PromptLike, parts: Sequence[int], *, seconds: float = 1.0, pass_budget_s: float = 20.0
) -> HostRoofline:
    """Return this machine's two rates and the time of passes with several parts of `batch`, all timed in turn on one
    thread.

    seconds: time for each rate.  pass_budget_s: time for all passes together; every number of parts is timed at least
    once.
    """
    counts = sorted(set(parts))

    def run(count: int) -> None:
        with torch.inference_mode():
            model.part_losses(batch, count)

    weight_bytes = float(_weight_bytes(model))
    flat = model.trainables.flat
    assert flat is not None, "full parameters have no parts"
    flops = {}
    try:
        for count in counts:
            model.trainables.bind(flat.repeat(count, 1))
            with FlopCounterMode(display=False) as counter:
                run(count)
            flops[count] = float(counter.get_total_flops())
        copies = {count: flat.repeat(count, 1) for count in counts}

        def bind(count: int) -> int:
            model.trainables.bind(copies[count])
            return count

        timings = time_calls(
            {count: (partial(bind, count), run) for count in counts}, repeats=5, budget_s=pass_budget_s
        )
    finally:
        model.trainables.bind(None)
    rate = gemm_rate(seconds=seconds, product=torch.inference_mode()(linear))  # the matrix product that the passes use
    passes = tuple(Pass(count, flops[count], weight_bytes, timings[count]) for count in counts)
    return HostRoofline(flops_per_s=rate, bytes_per_s=memory_rate(seconds=seconds), passes=passes)


def one_by_one(passes: Sequence[Pass]) -> dict[str, list[tuple[float, float]]]:
    """Return milliseconds over the number of parts: in one pass, and in as many passes of the smallest kind."""
    first = passes[0]
    return {
        "one after the other": [(single.parts, 1e3 * first.seconds * single.parts / first.parts) for single in passes],
        "in one pass": [(single.parts, 1e3 * single.seconds) for single in passes],
    }


def _weight_bytes(model: CausalModel) -> int:
    """Return the bytes of all matrices that a pass multiplies with: the layers' and the head's, without the embedding
    table.
    """
    matrices = [
        parameter
        for parameter in model.backbone.layers.parameters()
        if parameter.dim() == 2 and not parameter.requires_grad
    ]
    weight = getattr(model.head, "weight", None)
    total = sum(matrix.nbytes for matrix in matrices)
    return total + (weight.nbytes if isinstance(weight, torch.Tensor) else 0)


EXECUTIONS: tuple[Execution, ...] = ("sequential", "outer", "inner", "both")


class Choice(NamedTuple):
    """A machine, and the number of bytes in which it stores a weight."""

    machine: Machine
    weight_bytes: float


class ExecutionCost(NamedTuple):
    """One execution of a step.  passes: their number.  parts: number of parts in each pass."""

    execution: str
    passes: int
    parts: int
    one_pass: Pass
    step_s: float


def paper_machines() -> dict[str, Choice]:
    """Return the paper's machines, with the values fitted to its tables."""
    constants = load_constants()
    return {
        "A100, fp16 (Table 13)": Choice(constants.a100(), 2.0),
        "A100, NF4 (Fig. 6)": Choice(constants.a100("nf4"), constants.nf4_bytes),
        "Jetson Orin Nano, NF4 (Table 4)": Choice(constants.jetson(), constants.nf4_bytes),
        "OnePlus 12, fp16 (Table 5)": Choice(constants.oneplus(), 2.0),
    }


def execution_costs(
    model: str, choice: Choice, *, queries: int, batch_size: int, tokens: int
) -> tuple[ExecutionCost, ...]:
    """Return the simulated time of a step by each execution.  Raises ConfigError for an unknown model or q below 1."""
    described, (machine, weight_bytes) = describe(model), choice
    costs = []
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
        each_pass = Pass(parts, flops, weight_bytes * matrix_params(described), seconds)
        costs.append(ExecutionCost(execution, 2 * queries // parts, parts, each_pass, whole_s))
    return tuple(costs)


class RooflineExplorer(Explorer):
    """A machine, a model, q, E and tokens; the roofline with the pass of each execution, and the step's time.

    costs: the results shown.  machines: those of paper_machines() and more; the first is chosen.
    """

    def __init__(self, machines: Mapping[str, Choice] | None = None, *, model: str = "TinyLlama-1.1B") -> None:
        self._machines = dict(machines or paper_machines())
        controls = lab_controls("roofline", {"machine": tuple(self._machines)}, model=model)
        self.machine, self.model, self.queries, self.batch_size, self.tokens = controls
        self.costs: tuple[ExecutionCost, ...] = ()
        row = widgets.HBox(
            [widgets.VBox(controls[:2]), widgets.VBox(controls[2:])], layout=widgets.Layout(flex_flow="row wrap")
        )
        super().__init__(
            [row],
            controls,
            lambda: [control.value for control in controls],
            lambda request: self._cost(*request),
        )

    def _cost(self, machine: str, model: str, q: int, each: int, tokens: int) -> None:
        choice = self._machines[machine]
        self.costs = execution_costs(model, choice, queries=q, batch_size=each, tokens=tokens)
        first, best = self.costs[0], min(self.costs, key=lambda one: one.step_s)
        unit = time_unit(first.step_s)
        gain = first.step_s / best.step_s
        text = f"all in one pass is {first.step_s / self.costs[-1].step_s:.2f} times as fast as one after the other"
        worth = (
            "Bound by arithmetic already: little to gain."
            if gain < 1.1
            else "Weights and launches are shared: further parts cost little."
        )
        self.headline.say(text, f"{worth} (simulated)")
        rows = [
            (
                cost.execution,
                f"{cost.passes}",
                f"{cost.parts * each}",
                unit.text(cost.one_pass.seconds),
                unit.text(cost.step_s),
                f"{first.step_s / cost.step_s:.2f}",
            )
            for cost in self.costs
        ]
        columns = ("execution", "passes", "rows of each", "one pass", "a step", "times as fast")
        self.tabulate(Table(columns, rows))
        self.show(
            lambda: roofline(
                {cost.execution: [cost.one_pass] for cost in self.costs},
                flops_per_s=choice.machine.flops_per_s,
                bytes_per_s=choice.machine.memory_bytes_per_s,
                label="simulated",
                title="Where the passes lie",
                subtitle=f"{model} on {machine}, q = {q}, E = {each}, {tokens} tokens",
            )
        )
