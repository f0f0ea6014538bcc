"""Seconds of a zeroth-order step, counted from a model's sizes: a roofline (P-RGE, sections 3.1-3.2, appendix A and F).

A pass reads every weight once, for any number of rows.  As long as it is bound by reading weights, by kernel launches
or by dequantizing, further rows are free.  This is the gain of running queries and signs in one pass, and the gain ends
when the machine is bound by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from workbench.core.errors import ConfigError, check_choice
from workbench.methods.p_rge.options import Execution
from workbench.methods.p_rge.query_costs import passes
from workbench.profiler.descriptions import ModelDescription

FP16_BYTES = 2


def parts_at_once(execution: Execution, queries: int) -> int:
    """Return how many of a step's 2q passes run as one batch.  Raises ConfigError for an unknown execution or q below
    1.
    """
    check_choice("execution", execution, get_args(Execution))
    if queries < 1:
        raise ConfigError(f"{queries} queries were asked for.", "A step needs at least 1.", "Raise it.")
    return passes(execution, queries)[1]


def adapter_params(model: ModelDescription, rank: int) -> tuple[int, int]:
    """Return the numbers in all A and in all B of LoRA-FA on the query and value projections (P-RGE, appendix D.3)."""
    attentions = sum(2 if model.is_decoder_layer(layer) else 1 for layer in range(model.stack_layers))
    return attentions * rank * 2 * model.hidden, attentions * rank * (model.query_width + model.kv_width)


SWEEPS = 4
"""MeZO updates all trained values in place four times: +, -, restored, updated (Algorithm 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The sustained rates of a device in these passes.

    flops_per_s: rate of a pass bound by arithmetic.  memory_bytes_per_s: rate of reading weights.  layer_s: seconds to
    launch or prepare one layer's kernels.  adapter_layer_s: additional seconds for those of its adapters.
    adapter_share: the relative increase of its arithmetic time with adapters, whose thin products are bound by memory.
    is_asynchronous: whether launches overlap with the arithmetic, so that the longer of the two counts.
    dequantized_per_s: numbers per second, 0 if nothing is dequantized.  sweep_s_per_param: seconds to perturb or update
    one trained value.
    step_s: seconds of the loop around a step.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    layer_s: float = 0.0
    adapter_layer_s: float = 0.0
    adapter_share: float = 0.0
    is_asynchronous: bool = True
    dequantized_per_s: float = 0.0
    sweep_s_per_param: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        others = (
            self.layer_s,
            self.adapter_layer_s,
            self.adapter_share,
            self.dequantized_per_s,
            self.sweep_s_per_param,
            self.step_s,
        )
        if min(self.flops_per_s, self.memory_bytes_per_s) <= 0 or min(others) < 0:
            raise ConfigError(
                "A machine's rates were given.", f"{self}.", "Rates must be above 0, times and overheads 0 or more."
            )


def matrix_params(model: ModelDescription) -> int:
    """Return the number of weights that multiply a token: all layers' matrices, and the output matrix."""
    attentions = sum(2 if model.is_decoder_layer(layer) else 1 for layer in range(model.stack_layers))
    layers = attentions * model.matrices_of_attention + model.stack_layers * model.matrices_of_feed_forward
    return layers + model.vocab * model.hidden


def pass_flops(
    model: ModelDescription,
    *,
    rows: float,
    sequence_length: float,
    rank: int = 16,
    targets: int | None = None,
    adapted: bool = True,
) -> float:
    """Return the FLOPs of one forward pass of `rows` sequences.

    targets: positions with logits, None for all; adapted: whether LoRA-FA is added.
    """
    head = model.vocab * model.hidden
    per_token = 2 * (matrix_params(model) - head) + 4 * model.stack_layers * sequence_length * model.query_width
    if adapted:
        per_token += 2 * sum(adapter_params(model, rank))
    positions = sequence_length if targets is None else targets
    return rows * (sequence_length * per_token + positions * 2 * head)


def pass_s(
    model: ModelDescription,
    machine: Machine,
    *,
    rows: float,
    sequence_length: float,
    weight_bytes: float = FP16_BYTES,
    targets: int | None = None,
    adapted: bool = True,
) -> float:
    """Return the seconds of one forward pass: launch kernels, read and dequantize weights once, compute."""
    flops = pass_flops(model, rows=rows, sequence_length=sequence_length, targets=targets, adapted=adapted)
    weights = matrix_params(model)
    slower = 1 + machine.adapter_share if adapted else 1.0
    work = max(slower * flops / machine.flops_per_s, weight_bytes * weights / machine.memory_bytes_per_s)
    if machine.dequantized_per_s:
        work += (weights - model.vocab * model.hidden) / machine.dequantized_per_s
    launched = launched_s(model, machine, adapted)
    return max(launched, work) if machine.is_asynchronous else launched + work


def step_s(
    model: ModelDescription,
    machine: Machine,
    *,
    batch_size: float,
    sequence_length: float,
    queries: int = 1,
    execution: Execution = "sequential",
    weight_bytes: float = FP16_BYTES,
    targets: int | None = None,
    swept_params: int = 0,
) -> float:
    """Return the seconds of a step of q queries with `batch_size` samples each.

    swept_params: number of values that the sequential estimator updates, SWEEPS times for each query; with all
    parameters, no adapter runs.
    Raises ConfigError for q below 1 or an unknown execution.
    """
    at_once = parts_at_once(execution, queries)
    each = pass_s(
        model,
        machine,
        rows=at_once * batch_size,
        sequence_length=sequence_length,
        weight_bytes=weight_bytes,
        targets=targets,
        adapted=swept_params < model.params,
    )
    return machine.step_s + 2 * queries / at_once * each + SWEEPS * queries * swept_params * machine.sweep_s_per_param


def launched_s(model: ModelDescription, machine: Machine, adapted: bool) -> float:
    """Return the seconds to launch or prepare the kernels of all layers."""
    return (machine.layer_s + (machine.adapter_layer_s if adapted else 0.0)) * model.stack_layers
