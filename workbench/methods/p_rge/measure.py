"""The costs of every layer's forward pass and noise: measured on this host, with the same calls as in a run, or from
the catalogue.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.names import FP32_BYTES, FloatType
from workbench.core.profile import Bytes, Grid, LayerProfile, Layers, Profile
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import describe_facts, number_format
from workbench.methods.p_rge.options import METHOD
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.worker import load_model
from workbench.methods.p_rge.zeroth_order import CausalModel, StepLog
from workbench.models.configuration import ModelFacts
from workbench.models.parallel_adapter import made_up_mask
from workbench.models.quantization import held_bytes
from workbench.profiler.analytic import NumberFormat, analytic_profile
from workbench.profiler.layers import BUDGET_S, Stacks, profile_layers
from workbench.profiler.timing import Call, Maker
from workbench.tasks.prompts import PromptBatch

ROWS = (1, 4, 16)
QUERIES = (1, 4)
_UNUSED = ("context_bytes", "gradient_bytes", "tap_bytes")
"""Needed only by backpropagation."""
SHORT_LENGTH = 16
NORMAL_FLOPS = 20
"""Operations to draw and add one normal value: two logarithms, roots and cosines for two values, plus the generator."""


def made_up_batch(ids: Tensor, *, has_decoder: bool = False) -> PromptBatch:
    """Return a batch with these ids (n, t), some padding and one target each, at the end; a decoder reads one token,
    and predicts there.
    """
    count, length = ids.shape[:2]
    return PromptBatch(
        input_ids=ids,
        attention_mask=made_up_mask(count, length),
        targets=torch.zeros(count, 1, dtype=torch.int64),
        positions=torch.full((count, 1), 0 if has_decoder else length - max(1, length // 8) - 1),
        target_mask=torch.ones(count, 1, dtype=torch.bool),
        labels=torch.zeros(count, dtype=torch.int64),
        indices=tuple(range(count)),
        decoder_ids=torch.zeros(count, 1, dtype=torch.int64) if has_decoder else None,
    )


def measure_layers(prepared: PreparedJob, *, max_length: int, budget_s: float = BUDGET_S) -> Layers:
    """Return the profile of every layer on one core of this host at full speed (see profiler.layers).

    F is measured over rows (parts x E) and tokens, STEP over the queries whose noise is drawn.
    """
    facts = prepared.facts
    stacks = Stacks(facts.num_layers, facts.num_encoder_layers)
    models = {span: load_model(prepared, span) for span in stacks.spans}
    for model in models.values():
        model.trainables.preceding = ()  # the whole model draws no layer's noise twice
    ends = {layer for stack in stacks.stacks for layer in (stack.start, stack.stop - 1)}

    def nbytes(layer: int) -> dict[str, Any]:
        model = models[stacks.span_of(layer)]
        trained = FP32_BYTES * sum(slot.size for slot in model.trainables.slots)
        # The first with the embedding, the last with the head, even if these share one matrix.
        part = model if layer in ends else model.backbone.layers[str(layer)]
        frozen = held_bytes(part, without=model.trainables.parameters.values())
        return {"frozen_bytes": frozen, "trainable_bytes": trained} | scratch_bytes(
            facts, layer, prepared.activation_type
        )

    with torch.inference_mode():
        return profile_layers(
            stacks,
            {span: _Bench(model, facts) for span, model in models.items()},
            ROWS,
            (SHORT_LENGTH, max_length) if max_length > SHORT_LENGTH else (max_length,),
            budget_s=budget_s,
            layer_bytes=nbytes,
            update={STEP: _noise(list(models.values()))},
            update_counts=QUERIES,
        )


def scratch_bytes(facts: ModelFacts, index: int, compute: FloatType) -> dict[str, Bytes]:
    """Return a layer's scratch and output for a row, as fields of LayerProfile.  compute: dtype of the activations."""
    itemsize = 4 if compute == "float32" else 2
    hidden = itemsize * facts.hidden_size
    is_decoder = facts.num_encoder_layers is not None and index >= facts.num_encoder_layers
    logits = 4 * facts.vocabulary_size if index == facts.num_layers - 1 else 0
    return {
        "output_bytes": Bytes(hidden, hidden * is_decoder),
        # Input, queries to output, and the feed-forward's inner states, two of them if it is gated.
        "workspace_bytes": Bytes(
            4 * hidden + itemsize * facts.feed_forward_size * (1 + facts.is_gated), hidden * is_decoder + logits
        ),
    }


class _Bench:
    """Calls of one stage on made-up prompts of any size."""

    def __init__(self, model: CausalModel, facts: ModelFacts) -> None:
        model.packs = False  # measured by rows and tokens
        self._model, self._facts = model, facts

    @property
    def calls(self) -> dict[str, Maker]:
        """Return the calls to time, by kind of operation."""
        return {"F": self.forward}

    def context_bytes(self) -> Bytes:
        """Return nothing, because there is no backward pass."""
        return Bytes()

    def forward(self, rows: int, length: int) -> Call:
        """Return the forward pass of the stage."""
        model = self._model
        source, _, _ = model.backbone.make_inputs(rows, length)
        ids = source if model.is_first else torch.randint(max(1, self._facts.vocabulary_size), (rows, length))
        batch = made_up_batch(ids, has_decoder=self._facts.num_encoder_layers is not None)
        # The stage's first parameter may be a trained one, which is float32 whatever the activations are.
        hidden = None if model.is_first else source.to(model.dtype)

        def run() -> Tensor:
            states = model.run(model.start(batch) if hidden is None else hidden, batch)
            return model.finish(states, batch) if model.is_last else states

        return run


def _noise(models: list[CausalModel]) -> Maker:
    def make_step(queries: int, length: int) -> Call:
        log = StepLog(step=0, seeds=tuple(range(queries)), gradients=(0.0,) * queries, learning_rate=1.0)

        def run() -> None:
            for model in models:
                model.trainables.apply(log)

        return run

    return make_step


def numbers_of(prepared: PreparedJob) -> NumberFormat:
    """Return the number format of the job's weights and activations."""
    return number_format(prepared.facts, prepared.activation_type, prepared.quantization)


def catalogue_profile(prepared: PreparedJob, cluster: Cluster) -> Profile:
    """Return a profile computed from sizes and each device's flops_per_s: a forward pass's FLOPs, and noise for every
    trained value.
    """
    lengths = sorted({8, prepared.typical_length, 2 * prepared.typical_length, prepared.longest})
    described = describe_facts(prepared.facts)
    analytic = analytic_profile(
        described, cluster, technique="frozen", sequence_lengths=tuple(lengths), numbers=numbers_of(prepared)
    )
    values = trained_values(prepared)
    profile = analytic.with_layers(
        lambda layer, rank, index: _forward_only(prepared, layer, index, values, cluster.devices[rank].flops_per_s)
    )
    return replace(profile, model=prepared.job.model, method=METHOD)


def trained_values(prepared: PreparedJob) -> int:
    """Return the number of trained values in a layer: next to its query and value projections, or to all."""
    facts = prepared.facts
    wide, inner = facts.hidden_size, facts.feed_forward_size
    narrow = wide * facts.num_key_value_heads // facts.num_heads
    sizes = [(wide, wide), (wide, narrow)]  # query and value
    if prepared.trainable.projections == "all":
        sizes += [(wide, narrow), (wide, wide), *[(wide, inner)] * (1 + facts.is_gated), (inner, wide)]
    shapes = (prepared.trainable.shapes(*size) for size in sizes)
    return sum(math.prod(shape) for each in shapes for shape in each)


def _forward_only(
    prepared: PreparedJob, layer: LayerProfile, index: int, values: int, flops_per_s: float
) -> LayerProfile:
    noise_s = values * NORMAL_FLOPS / flops_per_s
    nbytes: dict[str, Any] = dict.fromkeys(_UNUSED, Bytes()) | scratch_bytes(
        prepared.facts, index, prepared.activation_type
    )
    return replace(
        layer,
        times={
            "F": layer.times["F"],
            STEP: Grid(batch_sizes=(1, 2), sequence_lengths=(1,), seconds=((noise_s,), (2 * noise_s,))),
        },
        trainable_bytes=FP32_BYTES * values,
        **nbytes,
    )
