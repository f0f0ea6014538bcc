"""Memory of a zeroth-order and a first-order step, and seconds of the latter, counted from a model's sizes (P-RGE, 4.2,
Tables 3, 17-18).

A forward pass frees a layer's activations when the next one has run, so the peak besides the weights is the largest
output of the pass.
With the loss over every position this is the logits; with the hidden states gathered at the label words, a layer's
temporary memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.core.names import FP32_BYTES
from workbench.methods.p_rge.analytic import (
    FP16_BYTES,
    Machine,
    adapter_params,
    launched_s,
    matrix_params,
    pass_flops,
    pass_s,
)
from workbench.profiler.descriptions import ModelDescription

FirstOrder = Literal["full", "lora_fa"]
PROBABILITY_BYTES = FP32_BYTES + FP16_BYTES
"""For one query-key pair and head in eager attention: the softmax in fp32 and its copy in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """The bytes that a pass needs per item.

    weight_bytes: a backbone's number, 2 in fp16, 0.53 in NF4 with its scales.  logit_bytes: each logit at the peak of a
    forward pass; first_order_logit_bytes: in a pass that is followed by a backward pass.  activation_bytes: each number
    of a layer's temporary memory and of LoRA-FA.  copy_bytes: each number in a further copy of B.
    workspace_bytes: workspace of the matrix library.  kept_share: the share of the counted activations in memory at
    full fine-tuning's peak; full_bytes: its additional memory.  rank: the rank of LoRA-FA, on query and value.
    """

    weight_bytes: float = FP16_BYTES
    logit_bytes: float = 8.0
    first_order_logit_bytes: float = 14.0
    activation_bytes: float = FP16_BYTES
    copy_bytes: float = 10.0
    workspace_bytes: float = 0.0
    kept_share: float = 1.0
    full_bytes: float = 0.0
    rank: int = 16


def forward_memory(
    model: ModelDescription,
    rule: MemoryRule,
    *,
    rows: int,
    sequence_length: float,
    copies: int = 1,
    targets: int | None = None,
    adapted: bool = True,
) -> dict[str, float]:
    """Return the bytes at the peak of a forward pass, by part.

    rows: sequences in the pass, over all parts.  sequence_length: padded; may be a mean.  copies: copies of B.
    targets: positions of a sequence with logits, None for all.  adapted: with LoRA-FA; else the plain model.
    """
    frozen, trained = adapter_params(model, rule.rank) if adapted else (0, 0)
    positions = sequence_length if targets is None else targets
    logits = rule.logit_bytes * model.vocab * rows * positions
    return {
        "weights": rule.weight_bytes * model.params,
        "adapters": rule.activation_bytes * (frozen + trained),
        "copies of B": rule.copy_bytes * trained * (copies - 1),
        "workspace": rule.workspace_bytes,
        "largest output": max(logits, rule.activation_bytes * layer_scratch(model) * rows * sequence_length),
    }


def layer_scratch(model: ModelDescription) -> int:
    """Return the peak numbers per token within one layer's forward pass, the larger of its two halves.

    Attention, fused, without scores in memory: residual, normed input, q, k, v, result.  Feed-forward: residual, normed
    input, its width once for each matrix into it and once for their product.
    """
    attention = 2 * model.hidden + 2 * model.query_width + 2 * model.kv_width
    feed_forward = 2 * model.hidden + (3 if model.gated else 2) * model.feed_forward
    return max(attention, feed_forward)


def first_order_memory(
    model: ModelDescription, rule: MemoryRule, space: FirstOrder, *, rows: int, sequence_length: float
) -> dict[str, float]:
    """Return the bytes at the peak of a mixed-precision step of SGD, by part.

    full: weights and gradients in fp32 and the fp16 copies that autocast keeps until the step's end.  lora_fa: frozen
    fp32 weights.
    """
    tokens = rows * sequence_length
    frozen, trained = adapter_params(model, rule.rank)
    logits = rule.first_order_logit_bytes * model.vocab
    kept_values = model.stack_layers * _kept_per_token(model, space, sequence_length) + logits
    share = rule.kept_share if space == "full" else 1.0
    parts = {
        "weights": FP32_BYTES * model.params,
        "workspace": rule.workspace_bytes,
        "activations": share * kept_values * tokens,
    }
    if space == "full":
        return parts | {"gradients": (FP32_BYTES + FP16_BYTES) * model.params, "besides": rule.full_bytes}
    return parts | {"adapters": FP32_BYTES * (frozen + trained), "gradients": FP32_BYTES * trained}


def _kept_per_token(model: ModelDescription, space: FirstOrder, sequence_length: float) -> float:
    """Return the bytes that one layer's backward pass needs of one token under autocast in fp16.

    Keys and values count at the queries' width: grouped ones are repeated before the product.
    lora_fa, with fused attention: inputs of both norms (fp32); q, k, v and the attention's result (fp16); the gated
    feed-forward's two inputs and its activation.  A frozen matrix keeps no input.
    full: also the norms' results, every matrix's input, and the eager attention's probabilities.
    """
    hidden, width, inner = model.hidden, model.query_width, model.feed_forward
    gates = 3 if model.gated else 2
    through = 2 * FP32_BYTES * hidden + 4 * FP16_BYTES * width + FP16_BYTES * gates * inner
    if space == "lora_fa":
        return through
    norms, inputs = 2 * FP32_BYTES * hidden, FP16_BYTES * (3 * hidden + 2 * hidden + inner)
    return through + norms + inputs + PROBABILITY_BYTES * model.heads * sequence_length


def first_order_step_s(
    model: ModelDescription,
    machine: Machine,
    *,
    batch_size: float,
    sequence_length: float,
    updated_params: int,
) -> float:
    """Return the seconds of a first-order step: forward, twice as much backward, one sweep over the updated values."""
    each = pass_s(
        model, machine, rows=batch_size, sequence_length=sequence_length, adapted=updated_params < model.params
    )
    return machine.step_s + 3 * each + updated_params * machine.sweep_s_per_param


def free_rows(model: ModelDescription, machine: Machine, *, sequence_length: float) -> float:
    """Return the number of sequences in a pass at which arithmetic becomes the bound; below it, a further part of a
    step costs nothing.
    """
    per_row = (
        (1 + machine.adapter_share) * pass_flops(model, rows=1, sequence_length=sequence_length) / machine.flops_per_s
    )
    reading = FP16_BYTES * matrix_params(model) / machine.memory_bytes_per_s
    return max(reading, launched_s(model, machine, True) if machine.is_asynchronous else 0.0) / per_row
