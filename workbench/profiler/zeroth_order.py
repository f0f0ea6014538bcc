"""Memory of a zeroth-order step beside a first-order one's, counted from a model's sizes (P-RGE, section 4.2, Table 3, Tables 17-18).

A forward pass forgets a layer's activations when the next one has run: what stands beside the weights is the largest output of the pass.
With the loss over every position that is the logits; with the hidden states gathered at the label words, a layer's own scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from workbench.core.errors import ConfigError
from workbench.profiler.descriptions import FP32_BYTES, ModelDescription

Execution = Literal["sequential", "outer", "inner", "both"]
FirstOrder = Literal["full", "lora_fa"]
FP16_BYTES = 2
PROBABILITY_BYTES = FP32_BYTES + FP16_BYTES
"""Of one query-key pair and head in eager attention: the softmax in fp32 and its copy in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What bytes a pass needs for each thing.

    weight_bytes: of a backbone's number, 2 in fp16, 0.53 in NF4 with its scales.  logit_bytes: of each logit at the peak of a forward
    pass; first_order_logit_bytes: of a pass that is followed by a backward pass.  activation_bytes: of each number of a layer's scratch
    and of LoRA-FA.  copy_bytes: of each number in a further copy of B.
    workspace_bytes: of the matrix library.  kept_share: the share of the counted activations that are there at full fine-tuning's peak;
    full_bytes: what it takes besides.  rank: of LoRA-FA, on query and value.
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


def parts_at_once(execution: Execution, queries: int) -> int:
    """Return how many of a step's 2q passes run as one batch.  Raises ConfigError for an unknown execution or q below 1."""
    if execution not in get_args(Execution):
        raise ConfigError(
            f"The execution '{execution}' was asked for.", f"There are {', '.join(get_args(Execution))}.", "Choose one of them."
        )
    if queries < 1:
        raise ConfigError(f"{queries} queries were asked for.", "A step needs at least 1.", "Raise it.")
    return {"sequential": 1, "inner": 2, "outer": queries, "both": 2 * queries}[execution]


def adapter_params(model: ModelDescription, rank: int) -> tuple[int, int]:
    """Return the numbers in all A and in all B of LoRA-FA on the query and value projections (P-RGE, appendix D.3)."""
    attentions = sum(2 if model.is_decoder_layer(layer) else 1 for layer in range(model.stack_layers))
    return attentions * rank * 2 * model.hidden, attentions * rank * (model.query_width + model.kv_width)


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

    rows: sequences in the pass, all parts' together.  sequence_length: padded; may be a mean.  copies: of B.
    targets: positions of a sequence whose logits are made, None for all of them.  adapted: with LoRA-FA; else the plain model.
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
    """Return the numbers for each token that stand together within one layer's forward pass, the larger of its two halves.

    Attention, fused, so that no scores stand: residual, normed input, q, k, v, result.  Feed-forward: residual, normed input, its width
    once for each matrix into it and once for their product.
    """
    attention = 2 * model.hidden + 2 * model.query_width + 2 * model.kv_width
    feed_forward = 2 * model.hidden + (3 if model.gated else 2) * model.feed_forward
    return max(attention, feed_forward)


def first_order_memory(
    model: ModelDescription, rule: MemoryRule, space: FirstOrder, *, rows: int, sequence_length: float
) -> dict[str, float]:
    """Return the bytes at the peak of a mixed-precision step of SGD, by part.

    full: weights and gradients in fp32 and the fp16 copies that autocast keeps until the step's end.  lora_fa: frozen fp32 weights.
    """
    tokens = rows * sequence_length
    frozen, trained = adapter_params(model, rule.rank)
    logits = rule.first_order_logit_bytes * model.vocab
    kept = model.stack_layers * _kept_per_token(model, space, sequence_length) + logits
    share = rule.kept_share if space == "full" else 1.0
    parts = {"weights": FP32_BYTES * model.params, "workspace": rule.workspace_bytes, "activations": share * kept * tokens}
    if space == "full":
        return parts | {"gradients": (FP32_BYTES + FP16_BYTES) * model.params, "besides": rule.full_bytes}
    return parts | {"adapters": FP32_BYTES * (frozen + trained), "gradients": FP32_BYTES * trained}


def _kept_per_token(model: ModelDescription, space: FirstOrder, sequence_length: float) -> float:
    """Return the bytes that one layer's backward pass needs of one token under autocast in fp16.

    Keys and values count at the queries' width: grouped ones are repeated before the product.
    lora_fa, with fused attention: inputs of both norms (fp32); q, k, v and the attention's result (fp16); the gated feed-forward's two
    inputs and its activation.  A frozen matrix keeps no input.
    full: besides, the norms' own results and every matrix's input, and the eager attention's probabilities.
    """
    hidden, width, inner = model.hidden, model.query_width, model.feed_forward
    gates = 3 if model.gated else 2
    through = 2 * FP32_BYTES * hidden + 4 * FP16_BYTES * width + FP16_BYTES * gates * inner
    if space == "lora_fa":
        return through
    norms, inputs = 2 * FP32_BYTES * hidden, FP16_BYTES * (3 * hidden + 2 * hidden + inner)
    return through + norms + inputs + PROBABILITY_BYTES * model.heads * sequence_length
