"""Profile P-RGE on this host: seconds and bytes of every layer's forward pass and of its noise, by the very calls that a run makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workbench.core.profile import LayerProfile
from workbench.core.schedule import STEP
from workbench.methods.p_rge.compute import load_model
from workbench.models.facts import ModelFacts
from workbench.models.quantization import FloatType
from workbench.models.zeroth_order import CausalModel, StepLog, TrainableConfig
from workbench.planners.adaptive import Precision
from workbench.profiler.stacks import Span, Stacks
from workbench.profiler.timing import Call, time_grids

ROWS = (1, 4, 16)
QUERIES = (1, 4)
SHORT_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUpBatch:
    """A batch of prompts to measure with: one target each, at the end."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    decoder_ids: Tensor | None = None
    choices: None = None

    @classmethod
    def of(cls, ids: Tensor) -> MadeUpBatch:
        """Return a batch that reads these ids (n, t), with some padding."""
        count, length = ids.shape[:2]
        mask = torch.ones(count, length, dtype=torch.int64)
        mask[::2, -max(1, length // 8) :] = 0
        return cls(
            input_ids=ids,
            attention_mask=mask,
            targets=torch.zeros(count, 1, dtype=torch.int64),
            positions=torch.full((count, 1), length - max(1, length // 8) - 1),
            target_mask=torch.ones(count, 1, dtype=torch.bool),
        )


def measure_layers(
    name: str,
    facts: ModelFacts,
    trainable: TrainableConfig,
    precision: Precision,
    *,
    max_length: int,
    compute: FloatType | None = None,
    budget_s: float = 40.0,
) -> tuple[LayerProfile, ...]:
    """Return the profile of every layer on one core of this host at full speed (see profiler.stacks).

    F is over rows (parts x E) and tokens, STEP over the queries whose noise is drawn.
    """
    stacks = Stacks(facts.num_layers, facts.num_encoder_layers)
    models = {span: load_model(name, trainable, precision, None if span == stacks.whole else span, compute) for span in stacks.spans}
    for model in models.values():
        model.packs = False  # measured by rows and tokens
    lengths = (SHORT_LENGTH, max_length) if max_length > SHORT_LENGTH else (max_length,)
    with torch.inference_mode():
        times = stacks.times({span: {"F": _forward(model, facts)} for span, model in models.items()}, ROWS, lengths, budget_s=budget_s)
    whole = [models[stack] for stack in stacks.stacks]
    noise = time_grids({STEP: _noise(whole)}, QUERIES, (1,), budget_s=5.0)[STEP]
    sizes = layer_sizes(whole, facts.num_layers)
    total = sum(map(sum, sizes))
    return tuple(
        LayerProfile(
            name=f"layer {index}",
            times=times[index] | {STEP: noise.scaled(sum(sizes[index]) / total)},
            frozen_bytes=_frozen_bytes(models, next(stack for stack in stacks.stacks if index < stack.stop), index),
            trainable_bytes=4 * sum(sizes[index]),
            context_bytes_per_token=0,
            **scratch_bytes(facts, index),
        )
        for index in range(facts.num_layers)
    )


def layer_sizes(models: list[CausalModel], num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Return of every layer the numbers of values of its trainable parameters; what is trained behind the last counts to it."""
    found: list[list[int]] = [[] for _ in range(num_layers)]
    for model in models:
        for slot in model.trainables.slots:
            found[slot.layer].append(slot.size)  # HEAD, -1, is the last
    return tuple(map(tuple, found))


def scratch_bytes(facts: ModelFacts, index: int) -> dict[str, int]:
    """Return what a layer needs for a row and what it hands on, as LayerProfile's fields."""
    hidden = 4 * facts.hidden_size
    beside = facts.num_encoder_layers is not None and index >= facts.num_encoder_layers
    logits = 4 * facts.vocabulary_size if index == facts.num_layers - 1 else 0
    return {
        "output_bytes_per_token": hidden,
        "output_bytes_per_sample": hidden * beside,
        # Input, queries to output, and the feed-forward's inner states, two of them where it is gated.
        "workspace_bytes_per_token": 4 * hidden + 4 * facts.feed_forward_size * (1 + facts.is_gated),
        "workspace_bytes_per_sample": hidden * beside + logits,
    }


def _frozen_bytes(models: dict[Span, CausalModel], span: Span, index: int) -> int:
    """Return a layer's bytes as a stage has them: the first with the embedding, the last with the head, also where these are one matrix."""
    start, stop = span
    if index in (start, stop - 1):
        end = models[Span(index, index + 1)]
        return _held_bytes(end, end)
    return _held_bytes(models[span], models[span].backbone.layers[str(index)])


def _held_bytes(model: CausalModel, part: nn.Module) -> int:
    own = {id(parameter) for parameter in model.trainables.parameters.values()}
    tensors = {tensor.data_ptr(): tensor for tensor in [*part.parameters(), *part.buffers()] if id(tensor) not in own}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _forward(model: CausalModel, facts: ModelFacts) -> Callable[[int, int], Call]:
    def made(rows: int, length: int) -> Call:
        source, _, _ = model.backbone.make_inputs(rows, length)
        if not model.is_first:
            ids = torch.randint(max(1, facts.vocabulary_size), (rows, length))
            batch, hidden = MadeUpBatch.of(ids), source
        else:
            batch, hidden = MadeUpBatch.of(source), None

        def run() -> Tensor:
            states = model.run(model.start(batch) if hidden is None else hidden, batch)
            return model.finish(states, batch) if model.is_last else states

        return run

    return made


def _noise(models: list[CausalModel]) -> Callable[[int, int], Call]:
    def made(queries: int, length: int) -> Call:
        log = StepLog(step=0, seeds=tuple(range(queries)), gradients=(0.0,) * queries, learning_rate=1.0)

        def run() -> None:
            for model in models:
                model.trainables.apply(log)

        return run

    return made
