"""Seconds of a zeroth-order step from a model's sizes and a machine's rates: a roofline (P-RGE, sections 3.1-3.2, appendix A and F).

A pass reads every weight once, however many rows it has: while it is bound by that, by launching its kernels or by dequantizing, further
rows are free.  That is what running queries and signs in one pass gains, and why the gain ends where the machine is bound by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.errors import ConfigError
from workbench.profiler.descriptions import ModelDescription
from workbench.profiler.zeroth_order import FP16_BYTES, Execution, adapter_params, parts_at_once

SWEEPS = 4
"""MeZO goes over all trained values four times: +, -, restored, updated (Algorithm 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a device sustains in these passes.

    flops_per_s: of a pass bound by arithmetic.  memory_bytes_per_s: reading weights.  layer_s: launching or preparing one layer's
    kernels; adapter_layer_s: those of its adapters besides.  adapter_share: how much longer its arithmetic takes with them, whose thin
    products are bound by memory.  is_asynchronous: the launches run ahead of the arithmetic, so that the longer of the two counts.
    dequantized_per_s: numbers, 0 where nothing is dequantized.  sweep_s_per_param: perturbing or updating one trained value.
    step_s: the loop around a step.
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
        others = (self.layer_s, self.adapter_layer_s, self.adapter_share, self.dequantized_per_s, self.sweep_s_per_param, self.step_s)
        if min(self.flops_per_s, self.memory_bytes_per_s) <= 0 or min(others) < 0:
            raise ConfigError("A machine's rates were given.", f"{self}.", "Rates must be above 0, times and overheads 0 or more.")


def matrix_params(model: ModelDescription) -> int:
    """Return the weights that a token is multiplied with: all layers' matrices, and the output matrix."""
    attentions = sum(2 if model.is_decoder_layer(layer) else 1 for layer in range(model.stack_layers))
    layers = attentions * model.matrices_of_attention + model.stack_layers * model.matrices_of_feed_forward
    return layers + model.vocab * model.hidden


def pass_flops(
    model: ModelDescription, *, rows: float, sequence_length: float, rank: int = 16, targets: int | None = None, adapted: bool = True
) -> float:
    """Return the FLOPs of one forward pass of `rows` sequences.  targets: positions with logits, None for all; adapted: with LoRA-FA."""
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
    """Return the seconds of one forward pass: kernels launched, weights read and dequantized once, the arithmetic."""
    flops = pass_flops(model, rows=rows, sequence_length=sequence_length, targets=targets, adapted=adapted)
    weights = matrix_params(model)
    slower = 1 + machine.adapter_share if adapted else 1.0
    work = max(slower * flops / machine.flops_per_s, weight_bytes * weights / machine.memory_bytes_per_s)
    if machine.dequantized_per_s:
        work += (weights - model.vocab * model.hidden) / machine.dequantized_per_s
    launched = _launched_s(model, machine, adapted)
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

    swept_params: values that the sequential estimator goes over, SWEEPS times for each query; with all parameters, no adapter runs.
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


def first_order_step_s(
    model: ModelDescription, machine: Machine, *, batch_size: float, sequence_length: float, updated_params: int, backward: float = 2.0
) -> float:
    """Return the seconds of a first-order step: forward, `backward` times as much backward, one sweep over what is updated."""
    each = pass_s(model, machine, rows=batch_size, sequence_length=sequence_length, adapted=updated_params < model.params)
    return machine.step_s + (1 + backward) * each + updated_params * machine.sweep_s_per_param


def free_rows(model: ModelDescription, machine: Machine, *, sequence_length: float, weight_bytes: float = FP16_BYTES) -> float:
    """Return how many sequences a pass holds before arithmetic bounds it: below, a further part of a step costs nothing."""
    per_row = (1 + machine.adapter_share) * pass_flops(model, rows=1, sequence_length=sequence_length) / machine.flops_per_s
    reading = weight_bytes * matrix_params(model) / machine.memory_bytes_per_s
    return max(reading, _launched_s(model, machine, True) if machine.is_asynchronous else 0.0) / per_row


def _launched_s(model: ModelDescription, machine: Machine, adapted: bool) -> float:
    return (machine.layer_s + (machine.adapter_layer_s if adapted else 0.0)) * model.stack_layers
