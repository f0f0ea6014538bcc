"""A model that computes the losses of several perturbed copies of its trainable values in one pass (P-RGE, section 3;
Appendix D.2).

The loss is the cross-entropy at the positions of the label words, over the whole vocabulary.  If a batch has `choices`,
it is only over the label words, as in MeZO for classification (Malladi et al., NeurIPS 2023).
P-RGE's batches are drawn regardless of length, so half of a batch of 16 is padding (Appendix C): decoders compute
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.packing import pack_length, packs_of
from workbench.methods.p_rge.zeroth_order.adapted import PooledHead, inject, own_parameters
from workbench.methods.p_rge.zeroth_order.trainables import Binding, TrainableConfig
from workbench.models.families import generating_families
from workbench.models.layer_inputs import Contexts, call_layer, contexts_of, decoder_contexts, embed_words, near_mask
from workbench.models.matmul import ForwardLinear, filled_length, use_fastest
from workbench.models.quantization import QuantizedLinear
from workbench.models.stack import BackboneStage

Enter = Callable[[int], None]
"""(layer or HEAD) -> None: binds the copies with which a pass computes the layer."""


class CausalModel(nn.Module):
    """A frozen backbone, or a pipeline stage of one, with its trainable values, and the head if it includes the last
    layer.

    backbone: it is modified, because its projections are replaced.  head: the language model head; None for stages
    before the last and for models without a vocabulary (encoders, images), whose last stage gets a linear head with
    config.num_outputs outputs.
    A batch has E rows; passes have P parts of E rows each, part p computed with the p-th copy of the trainable values.
    trainables: the trainable values.  packs: whether a decoder-only model computes batches with much padding without
    it, by concatenating a part's rows: hidden states are then (P*R, N, d), R packs of N tokens, instead of (P*E, t, d).
    Set it to False if shapes must be those of a batch.
    Raises ConfigError for a family without the projections, and if the head is missing.
    """

    def __init__(self, backbone: BackboneStage, head: nn.Module | None, config: TrainableConfig) -> None:
        super().__init__()
        self.config, self.binding, self.packs = config, Binding(), True
        self.predicts_words = backbone.family.generates
        self.is_first, self.is_last = backbone.start == 0, backbone.stop == backbone.num_layers
        backbone.requires_grad_(False)
        self.backbone = backbone
        self.head: Any = head if self.is_last and self.predicts_words else None
        self.pooled: PooledHead | None = None
        if self.is_last and not self.predicts_words:
            if config.num_outputs < 1:
                raise ConfigError(
                    "Training by forward passes was asked for.",
                    f"{type(next(iter(backbone.layers.values()))).__name__} predicts no words, and no number of "
                    "outputs was given.",
                    f"Give num_outputs, or choose a model that generates ({generating_families()}).",
                )
            self.pooled = PooledHead(backbone.hidden_size, config.num_outputs, config.seed, self.binding)
        elif self.is_last and head is None:
            raise ConfigError(
                "A model that ends in words was asked for.", "It has no language model head.", "Give its head."
            )
        if config.technique == "full":
            self.trainables = own_parameters(self, self.binding)
        else:
            self.trainables = inject(backbone, config, self.pooled, self.binding)
        use_fastest(self)
        multiplies = any(isinstance(module, ForwardLinear | QuantizedLinear) for module in backbone.layers.modules())
        self._fills = backbone.family.is_causal and multiplies
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype of the layers."""
        for parameter in self.backbone.layers.parameters():
            if (
                not any(parameter is trained for trained in self.trainables.parameters.values())
                or self.trainables.flat is None
            ):
                return parameter.dtype
        return torch.float32

    def part_losses(self, batch: PromptLike, num_parts: int = 1) -> Tensor:
        """Return the loss (P,) float32 of each part, computed with the bound copies (theta itself if none
        are bound).
        """
        return self.finish(self.run(self.start(batch, num_parts), batch, num_parts), batch, num_parts)

    def start(self, batch: PromptLike, num_parts: int = 1) -> Tensor:
        """Return b_0 (P*E, t, d), or packed, embedded once for all parts.  Only for the first stage."""
        assert self.backbone.embedding is not None, "not the first stage"
        stage = self.backbone
        hidden = stage.embed(batch.input_ids, batch.attention_mask)
        packing = self.packing(batch)
        return _replicated(hidden if packing is None else packing.pack(hidden), num_parts)

    def packing(self, batch: PromptLike) -> Packing | None:
        """Return the packing with which a batch is computed.  None if it is computed with its padding."""
        if not (self.packs and self.backbone.family.is_causal):
            return None
        return Packing.of(batch.attention_mask, self.backbone.hidden_size)

    def run(self, hidden: Tensor, batch: PromptLike, num_parts: int = 1) -> Tensor:
        """Run this stage's layers on (P*E, t, d) with the bound copies; return the hidden states.

        After the first decoder layer hidden states are (P*E, t + s, d), with the encoder's first.  `finish` applies the
        final norm.
        """
        states = [hidden]
        del hidden  # otherwise it would stay in memory until the last layer
        return self.run_passes(states, batch, num_parts, [lambda layer: None])[0]

    def run_passes(
        self, states: list[Tensor], batch: PromptLike, num_parts: int, enters: Sequence[Enter]
    ) -> list[Tensor]:
        """Run several passes of P parts each through this stage, layer by layer, with all passes in each layer.

        A layer's weights are read and dequantized once for all passes.
        states: hidden states of each pass, (P*E, t, d); the list is consumed.  enters: one function for each pass,
        called before each of its layers.
        """
        stage = self.backbone
        mask = _replicated(batch.attention_mask, num_parts)
        border = stage.num_layers if stage.num_encoder_layers is None else stage.num_encoder_layers
        if stage.start < border:
            length, packing = self._fill(states, self.packing(batch))
            contexts = self._contexts(mask, states[0], packing, num_parts)
            self._layers(range(stage.start, min(stage.stop, border)), states, [contexts] * len(states), enters)
            if states[0].shape[1] > length:
                states = [hidden[:, :length].contiguous() for hidden in states]
            if stage.encoder_final is not None:
                states = [stage.encoder_final(hidden) for hidden in states]
        if stage.stop <= border:
            return states
        length = mask.shape[1]
        memories = [hidden[:, :length] for hidden in states]
        if stage.decoder_embedding is not None:
            assert batch.decoder_ids is not None, "a batch for a model without a decoder"
            first = embed_words(stage.decoder_embedding, batch.decoder_ids)
            states = [_replicated(first, num_parts) for _ in states]
        else:
            states = [hidden[:, length:] for hidden in states]
        decoders = [
            decoder_contexts(mask, hidden, memory, stage.decoder_position_bias)
            for hidden, memory in zip(states, memories, strict=True)
        ]
        self._layers(range(max(stage.start, border), stage.stop), states, decoders, enters)
        if self.is_last:
            return states
        return [torch.cat([memory, hidden], dim=1) for memory, hidden in zip(memories, states, strict=True)]

    def finish(self, hidden: Tensor, batch: PromptLike, num_parts: int = 1) -> Tensor:
        """Return the loss (P,) float32 of each part, given the result of `run` on the last stage."""
        if self.pooled is not None:
            logits = self._pooled_logits(hidden, batch)
            losses = F.cross_entropy(logits.flatten(0, 1), batch.targets[:, 0].repeat(len(logits)), reduction="none")
            return losses.view(len(logits), -1).mean(dim=1)
        assert self.head is not None, "not the last stage"
        return word_losses(hidden, batch, num_parts, self._norm, self.head, self.packing(batch))

    def logits_at(self, batch: PromptLike) -> Tensor:
        """Return logits (n, k, V) float32 at the batch's positions, for a decoder at its states; for an encoder (n, 1,
        outputs).
        """
        with torch.inference_mode():
            hidden = self.run(self.start(batch), batch)
            if self.pooled is not None:
                return self._pooled_logits(hidden, batch).transpose(0, 1)
            assert self.head is not None, "not the last stage"
            packing = self.packing(batch)
            if packing is None:
                rows = hidden.gather(1, batch.positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
            else:
                rows = hidden.flatten(0, 1)[packing.firsts[:, None] + batch.positions]
            return self.head(self._norm(rows)).float()

    def _fill(self, states: list[Tensor], packing: Packing | None) -> tuple[int, Packing | None]:
        """Pad a decoder's states, in place in the list, to a number of rows that suits matmuls; return the real length.

        The added padding is hidden from all real tokens.  It stays within a stage, because other stages may have other
        processors.
        """
        length = states[0].shape[1]
        filled = filled_length(states[0]) if self._fills else length
        if filled > length:
            states[:] = [F.pad(hidden, (0, 0, 0, filled - length)) for hidden in states]
            packing = None if packing is None else packing.filled(filled)
        return length, packing

    def _layers(
        self,
        indices: range,
        states: list[Tensor],
        contexts: Sequence[Contexts],
        enters: Sequence[Enter],
    ) -> None:
        for index in indices:
            layer, pattern = self.backbone.layers[str(index)], self.backbone.patterns[index]
            with dequantized(layer) if len(states) > 1 else nullcontext():
                for number, enter in enumerate(enters):
                    enter(index)
                    states[number] = call_layer(layer, states[number], contexts[number][pattern])

    def _contexts(self, mask: Tensor, hidden: Tensor, packing: Packing | None, num_parts: int) -> Contexts:
        stage, length, device = self.backbone, hidden.shape[1], hidden.device
        if not stage.family.is_causal:
            return stage.contexts(mask, hidden)
        positions = torch.arange(length, device=device)[None]
        if packing is not None:
            positions = packing.positions
            if len(positions) > 1:  # otherwise the same for all rows
                positions = _replicated(positions, num_parts)

        def mask_of(window: int) -> Tensor | None:
            # Padding is on the right, where causal attention hides it from all real tokens; without a mask the kernels
            # use a faster path.
            if packing is None:
                near = near_mask(length, window, is_causal=True, device=device)
                return None if near is None else near[None, None].expand(len(hidden), 1, -1, -1)
            within = packing.mask(window)
            return within if within is None or len(within) == 1 else _replicated(within, num_parts)

        return contexts_of(stage.config, stage.rotary, hidden, positions, mask_of)

    def _norm(self, hidden: Tensor) -> Tensor:
        return hidden if self.backbone.final is None else self.backbone.final(hidden)

    def _pooled_logits(self, hidden: Tensor, batch: PromptLike) -> Tensor:
        pooled: Any = self.pooled
        return pooled(self._norm(hidden), batch.attention_mask)


def _replicated(tensor: Tensor, num_parts: int) -> Tensor:
    return tensor if num_parts == 1 else tensor.repeat(num_parts, *[1] * (tensor.ndim - 1))


@contextmanager
def dequantized(layer: nn.Module) -> Iterator[None]:
    """Dequantize a layer's weights once for all passes in the block (Appendix F.2, Figure 6); afterwards only the codes
    remain.
    """
    linears = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
    try:
        for linear in linears:
            linear.held = linear.weight.dequantize()
        yield
    finally:
        for linear in linears:
            linear.held = None


MAX_LOGITS = 1 << 22
"""Number of logits computed at a time: 16 MB."""


PromptLike = Any
"""A batch with the fields of tasks.prompts.PromptBatch, except that labels and indices may be missing."""


def word_losses(
    hidden: Tensor,
    batch: PromptLike,
    num_parts: int,
    norm: Callable[[Tensor], Tensor],
    head: Any,
    packing: Packing | None = None,
) -> Tensor:
    """Return (P,) float32: the mean over a part's samples of the mean loss over their target tokens.

    hidden: (P*E, t, d), or (P*R, N, d) with a packing, before the norm, which is applied only to the required rows.
    head: a matmul.Head, or a quantized one.
    """
    count = len(batch.targets)
    sample, column = batch.target_mask.nonzero(as_tuple=True)
    position = batch.positions[sample, column]
    if packing is None:
        rows = hidden.view(num_parts, count, *hidden.shape[1:])[:, sample, position]
    else:
        rows = hidden.view(num_parts, -1, hidden.shape[-1])[:, packing.firsts[sample] + position]
    target = batch.targets[sample, column].repeat(num_parts)
    losses = _cross_entropy(norm(rows).flatten(0, 1), target, head, batch.choices).view(num_parts, -1)
    weight = 1 / (batch.target_mask.sum(dim=1) * count)
    return losses @ weight[sample]


def _cross_entropy(rows: Tensor, target: Tensor, head: Any, choices: Tensor | None) -> Tensor:
    """Return the cross-entropy (m,) float32 for normed hidden states (m, d), computing a few rows of logits at
    a time.
    """
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    if choices is not None:
        target = (target[:, None] == choices).long().argmax(dim=1)

    def loss(states: Tensor, targets: Tensor) -> Tensor:
        logits = head(states) if choices is None else head(states)[:, choices]
        return F.cross_entropy(logits.float(), targets, reduction="none")

    return torch.cat(
        [loss(states, targets) for states, targets in zip(rows.split(size), target.split(size), strict=True)]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The real tokens of E rows, concatenated into R packs of N tokens: a pass has R rows instead of E.

    source: (R, N) int64, each token's index among the E * t padded ones.  row: (R, N) int64, the row it comes from, -1
    for a pack's padding.  positions: (R, N) int64, its position in that row.  firsts: (E,) int64, index of each row's
    first token among the R * N.
    """

    source: Tensor
    row: Tensor
    positions: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, width: int) -> Packing | None:
        """Return the packing of rows (E, t) padded on the right.  None if it does not pay off for a model of this
        width.
        """
        length = attention_mask.shape[1]
        lengths = [int(tokens) for tokens in attention_mask.sum(dim=1)]
        packs = packs_of(lengths, length, width)
        if packs is None:
            return None
        longest = pack_length(packs, lengths)
        shape = len(packs), longest
        source, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        row, firsts = torch.full(shape, -1), torch.zeros(len(lengths), dtype=torch.int64)
        for pack, rows in enumerate(packs):
            start = 0
            for number in rows:
                span, within = slice(start, start + lengths[number]), torch.arange(lengths[number])
                source[pack, span], row[pack, span], positions[pack, span] = number * length + within, number, within
                firsts[number] = pack * longest + start
                start += lengths[number]
        device = attention_mask.device
        return cls(
            source=source.to(device), row=row.to(device), positions=positions.to(device), firsts=firsts.to(device)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Return (R, N), the number of packs and their length."""
        return self.row.shape[0], self.row.shape[1]

    def pack(self, rows: Tensor) -> Tensor:
        """Pack padded rows (E, t, d) into (R, N, d)."""
        return rows.flatten(0, 1)[self.source]

    def filled(self, length: int) -> Packing:
        """Return the packing with packs of `length` tokens, at least N.  The added tokens belong to no row, and
        `firsts` is unchanged.
        """
        more = (0, length - self.row.shape[1])
        return replace(
            self,
            source=F.pad(self.source, more),
            row=F.pad(self.row, more, value=-1),
            positions=F.pad(self.positions, more),
        )

    def mask(self, window: int = 0) -> Tensor | None:
        """Return the attention mask, (R, 1, N, N) bool: a token attends to its own row up to itself, within a window
        (see near_mask).  None if each row has its own pack and no window hides a token.
        """
        length, device = self.row.shape[1], self.row.device
        near = near_mask(length, window, is_causal=True, device=device)
        if len(self.row) == len(self.firsts) and near is None:
            return None
        if near is None:
            near = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return ((self.row[:, :, None] == self.row[:, None]) & near)[:, None]
