"""Fine-tuning techniques that backpropagate through the backbone (PAC+, section II, Fig. 2; section VI-A).

Full fine-tuning, LoRA, Adapters (Houlsby et al.), serial adapters (RingAda, section II-A).  And Parallel Adapters
(PAC+, section IV-A), whose gradient does not pass through the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbench.core.errors import ConfigError
from workbench.core.names import Technique
from workbench.core.once import once
from workbench.core.ranges import Count, Dropout, Positive, Width, require_ranges
from workbench.models.adapter_config import ParallelAdapterConfig, check_labels
from workbench.models.configuration import ModelFacts, is_tiny, model_on_meta
from workbench.models.evaluation import BatchLike, Predictions, answer_scores
from workbench.models.facts_cache import cached_facts
from workbench.models.initialization import HEAD_DEVIATION, seeded_generator
from workbench.models.lora import (
    ADAPTER_ROLES,
    DEVIATION,
    ROLES,
    inject_adapters,
    inject_lora,
    inject_serial_adapters,
    norms_in,
)
from workbench.models.matmul import Head
from workbench.models.parallel_adapter import ParallelAdapterStage, answered
from workbench.models.side_layers import TOKEN_KINDS, DropoutHead, pooling_matrix, token_logits
from workbench.models.stack import BackboneStage, LayerStack


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueConfig:
    """The configuration from which a technique's model can be rebuilt.

    hidden_size, num_layers: the backbone's d and L.
    lora_rank, lora_alpha: r and alpha, the update is alpha / r B A.  lora_dropout: rate of the dropout before A.  Each
    device draws its own masks, so that with a value above 0 a distributed run differs from one process.
    bottleneck: width of an adapter.  reduction: r of Parallel Adapters, whose inputs are not standardised here (as if
    never calibrated).
    dropout: rate for the pooled features.  seed: seed of the initial weights and that dropout.
    label_mean, label_std: mean and standard deviation of a regression's training labels.  The head learns standardised
    labels and predicts in the original units.
    """

    technique: Technique
    hidden_size: int
    num_layers: int
    kind: str = "classification"
    num_outputs: Count = 2
    lora_rank: Width = 8
    lora_alpha: Positive = 16.0
    lora_dropout: Dropout = 0.0
    bottleneck: Count = 64
    reduction: Width = 8
    dropout: Dropout = 0.1
    seed: int = 0
    label_mean: float = 0.0
    label_std: float = 1.0

    def __post_init__(self) -> None:
        require_ranges(self, "A fine-tuned model")
        if self.kind == "sequence_to_sequence":
            raise ConfigError(
                f"Fine-tuning ({self.technique}) for {self.kind} was asked for.",
                "Its head gives classes, numbers, the spans and classes of tokens, and the next word of one "
                "stack of layers.",
                "Choose such a task, or the method pac_plus.",
            )
        if self.kind == "text_generation" and self.technique == "full":
            raise ConfigError(
                "Full fine-tuning for text generation was asked for.",
                "The head is usually the word embedding, which another device trains; here it stays frozen.",
                "Choose another one, such as technique = 'lora'.",
            )
        check_labels(self)
        if self.technique == "parallel":
            ParallelAdapterConfig(hidden_size=self.hidden_size, num_layers=self.num_layers, reduction=self.reduction)

    @property
    def side_width(self) -> int:
        """Return the width d / r of Parallel Adapters' state, which follows the hidden state in a message; 0 for other
        techniques.
        """
        return self.hidden_size // self.reduction if self.technique == "parallel" else 0


class _LookUp(torch.autograd.Function):
    """The rows of an embedding's table.  The backward pass adds to their gradients only.

    torch makes a gradient of the whole table in each backward pass: for 30,522 words of width 384 this is 47 MB, and
    takes 30 ms for 4,096 tokens on one core instead of 3.
    """

    @staticmethod
    def forward(ctx: Any, table: nn.Parameter, ids: Tensor, padding: int | None) -> Tensor:
        ctx.table, ctx.padding = table, padding
        ctx.save_for_backward(ids)
        return functional.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        rows, gradient = ctx.saved_tensors[0].flatten(), gradient.flatten(0, -2)
        if ctx.padding is not None:
            gradient = gradient * (rows != ctx.padding)[:, None]
        if ctx.table.grad is None:
            ctx.table.grad = torch.zeros_like(ctx.table)
        ctx.table.grad.index_add_(0, rows, gradient)
        return None, None, None


class _TrainedEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return _LookUp.apply(self.weight, ids, self.padding_idx) if torch.is_grad_enabled() else super().forward(ids)


class TaskHead(DropoutHead):
    """Mean over the tokens (every token separately for spans and tags), dropout, one matrix; a regression uses its
    labels' units.

    words: the backbone's own frozen head, which text generation uses instead of that matrix and the dropout.
    """

    def __init__(self, config: TechniqueConfig, words: Head | None = None) -> None:
        super().__init__(config)
        self.output: nn.Module = (
            nn.Linear(config.hidden_size, config.num_outputs) if words is None else words.requires_grad_(False)
        )

    def forward(
        self, hidden: Tensor, attention_mask: Tensor, sample_ids: Tensor, epoch: int, rows: Tensor | None = None
    ) -> Tensor:
        """Return logits (n, num_outputs), for spans and tags (n, t, num_outputs), for words (n, t, V), or (N, V) for
        `rows` only.

        hidden: (n, t, d).  attention_mask: (n, t).  rows: see `answered`.
        """
        if self.kind == "text_generation":
            return self.output(hidden if rows is None else hidden[rows])
        per_token = self.kind in TOKEN_KINDS
        features = hidden if per_token else torch.bmm(pooling_matrix(attention_mask, hidden.dtype), hidden).squeeze(1)
        logits = self.output(self.dropped(features, sample_ids, epoch)) * self.label_std + self.label_mean
        return token_logits(logits, attention_mask, self.kind) if per_token else logits


class TechniqueStage(nn.Module):
    """Layers [start, stop) of a backbone with their trainable parts, and the head if they include the last layer.

    backbone: it is modified.  Trainable parts stay in its layers, so two TechniqueStages must not share layers.
    Trainable parameters are named by global layer index, so the union of all stages' is the whole model's.  Initial
    weights depend only on config.seed and the name.  The backbone's own dropout stays off, even in training.
    """

    def __init__(self, backbone: BackboneStage, config: TechniqueConfig, *, has_head: bool = False) -> None:
        """has_head: whether to add a head even if the stage does not include the last layer."""
        super().__init__()
        self.config = config
        has_head = has_head or backbone.stop == backbone.num_layers
        words = backbone.language_model_head if has_head and config.kind == "text_generation" else None
        assert config.kind != "text_generation" or not has_head or words is not None, "a backbone without its head"
        backbone.requires_grad_(False)
        self.adapters: nn.Module = nn.ModuleDict()
        if config.technique == "full":
            backbone.requires_grad_(True)
            for module in backbone.modules():
                if type(module) is nn.Embedding:
                    module.__class__ = _TrainedEmbedding
        elif config.technique == "lora":
            inject_lora(backbone, rank=config.lora_rank, alpha=config.lora_alpha, dropout=config.lora_dropout)
        elif config.technique == "serial":
            self.adapters = inject_serial_adapters(backbone, config.bottleneck)
        elif config.technique == "parallel":
            side = _side(config, backbone.num_encoder_layers, is_causal=backbone.family.is_causal)
            self.adapters = ParallelAdapterStage(side, backbone.start, backbone.stop, has_head=has_head)
            if words is not None:
                self.adapters.attach(words)
        else:
            self.adapters = inject_adapters(backbone, config.bottleneck)
        # Registered first, so that a parameter shared by several stages has the same name in all of them.
        self.shared = nn.ParameterDict(backbone.shared_parameters() if config.technique == "full" else {})
        self.backbone = backbone
        self.head = TaskHead(config, words) if has_head and not config.side_width else None
        with torch.no_grad():
            for name, parameter in (
                () if config.side_width else self.trained().items()
            ):  # Parallel Adapters initialize themselves
                _initialize(name, parameter, config.seed)
        self.train()

    def train(self, mode: bool = True) -> TechniqueStage:
        """Switch the head's dropout, and LoRA's if there is one.  The backbone stays in evaluation mode."""
        super().train(mode)
        self.backbone.eval()
        for name, module in self.backbone.named_modules():
            if name.endswith(".lora_dropout"):
                module.train(mode)
        return self

    def forward(
        self, hidden_or_ids: Tensor, attention_mask: Tensor, decoder_ids: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the stage's output for the next stage, and the last layer's output, (n, t, d) or a decoder's (n, s,
        d), for `logits`.

        Arguments as in BackboneStage.forward.  With Parallel Adapters input and output are (n, t, d + d / r), the
        hidden state without gradient, then the side network's; the last stage returns only the latter, and `logits`
        takes it together with the last layer's output.
        """
        if not isinstance(self.adapters, ParallelAdapterStage):
            output, taps = self.backbone(hidden_or_ids, attention_mask, decoder_ids)
            return output, taps[-1]
        width, side = self.config.hidden_size, None
        if self.backbone.start:
            hidden_or_ids, side = hidden_or_ids[..., :width].detach(), hidden_or_ids[..., width:]
        with torch.no_grad():
            output, taps = self.backbone(hidden_or_ids, attention_mask, decoder_ids)
        side = self.adapters(side, taps, attention_mask)
        is_last = self.backbone.stop == self.backbone.num_layers
        return side if is_last else torch.cat([output, side], dim=2), (side, taps[-1])

    def logits(
        self, last_hidden: Any, attention_mask: Tensor, sample_ids: Tensor, epoch: int, rows: Tensor | None = None
    ) -> Tensor:
        """Return the head's logits for the last layer's output from `forward`; for a decoder those of its first state.
        Only the last stage has a head.

        rows: see `answered`.
        """
        if isinstance(self.adapters, ParallelAdapterStage):
            side, hidden = last_hidden
            return self.adapters.head(side, hidden, attention_mask, sample_ids, epoch, rows)
        assert self.head is not None, f"stage [{self.backbone.start}, {self.backbone.stop}) has no head"
        if self.backbone.num_encoder_layers is not None:
            last_hidden, attention_mask = last_hidden[:, :1], attention_mask.new_ones(len(last_hidden), 1)
        return self.head(last_hidden, attention_mask, sample_ids, epoch, rows)

    def batch_logits(self, batch: BatchLike, epoch: int = 0) -> Tensor:
        """Return a complete model's logits for a mini-batch; for text generation only those of the answers.

        epoch: selects the head's dropout.
        """
        rows = answered(batch.labels, self.config.kind)
        return self.logits(
            self(batch.input_ids, batch.attention_mask)[1], batch.attention_mask, batch.sample_ids, epoch, rows
        )

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def predict(model: TechniqueStage, batches: Iterable[BatchLike]) -> Predictions:
    """Return a whole model's predictions.  The model is put into evaluation mode."""
    logits, labels, sample_ids = [], [], []
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            outputs = model.batch_logits(batch)
            logits.append(
                answer_scores(outputs, batch.labels) if model.config.kind == "text_generation" else outputs.float()
            )
            labels.append(batch.labels)
            sample_ids.append(batch.sample_ids)
    return Predictions(logits, labels, sample_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCounts:
    """Numbers of a model's weights, as far as techniques train them or add to them.

    backbone: all that full fine-tuning trains, without a head.  norms: the weights of the layers' norms.
    lora_per_rank: weights that LoRA adds for each rank.
    """

    backbone: int
    norms: int
    lora_per_rank: int


@once
def weight_counts(model: str) -> WeightCounts:
    """Return a model's counts, without loading its weights."""

    def count() -> WeightCounts:
        stack = LayerStack(model_on_meta(model))
        norms, lora_per_rank = 0, 0
        for index, layer in enumerate(stack.layers):
            norms += _number(parameter for norm in norms_in(layer) for parameter in norm.parameters(recurse=False))
            paths = stack.layer_paths(index)
            # A rank has a vector of a projection's inputs and one of its outputs.
            lora_per_rank += sum(sum(layer.get_submodule(paths[role]).weight.shape) for role in ROLES if role in paths)
        backbone = _number(stack.stage(0, stack.num_layers).parameters())
        return WeightCounts(backbone=backbone, norms=norms, lora_per_rank=lora_per_rank)

    return count() if is_tiny(model) else cached_facts(model, WeightCounts, count)


def num_trained(config: TechniqueConfig, facts: ModelFacts) -> int:
    """Return the number of weights that a technique trains in a whole model, its head included."""
    if config.technique == "parallel":
        return _side(config, facts.num_encoder_layers, is_causal=facts.is_causal).num_parameters
    head = 0 if config.kind == "text_generation" else (config.hidden_size + 1) * config.num_outputs
    matrices = 2 * config.hidden_size * config.bottleneck
    if config.technique == "serial":
        return config.num_layers * matrices + head
    counts = weight_counts(facts.name)
    if config.technique == "adapters":
        adapter = matrices + config.bottleneck + config.hidden_size
        return config.num_layers * len(ADAPTER_ROLES) * adapter + counts.norms + head
    return (config.lora_rank * counts.lora_per_rank if config.technique == "lora" else counts.backbone) + head


def _number(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _side(config: TechniqueConfig, border: int | None, *, is_causal: bool) -> ParallelAdapterConfig:
    """Return the shape of a backbone's Parallel Adapters.  border: its encoder's layers, None for a single stack."""
    common: dict[str, Any] = {
        field.name: getattr(config, field.name)
        for field in fields(ParallelAdapterConfig)
        if hasattr(config, field.name)
    }
    common |= {
        "num_encoder_layers": border,
        "target_length": int(border is not None),
    }  # a class or number needs one token
    return ParallelAdapterConfig(is_causal=is_causal, **common)


def _initialize(name: str, parameter: Tensor, seed: int) -> None:
    """Initialize a parameter added by a technique.  Pretrained weights do not change."""
    is_added = name.startswith(("adapters.", "head."))
    if ".lora_B." in name or (is_added and parameter.ndim < 2):
        parameter.zero_()
        return
    generator = seeded_generator(seed, name)
    if ".lora_A." in name:
        bound = parameter.shape[1] ** -0.5  # Kaiming's uniform distribution, as in peft
        parameter.uniform_(-bound, bound, generator=generator)
    elif name.startswith("adapters."):
        nn.init.trunc_normal_(parameter, std=DEVIATION, a=-2 * DEVIATION, b=2 * DEVIATION, generator=generator)
    elif is_added:
        parameter.normal_(std=HEAD_DEVIATION, generator=generator)
