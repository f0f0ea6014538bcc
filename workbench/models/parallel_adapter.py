"""Parallel Adapters: a narrow trainable network next to a frozen backbone, fed by its activations (PAC+, section IV-A,
Fig. 6).

Adapter i reads lambda_i W_down b_{i+1} + (1 - lambda_i) a_i and outputs a_{i+1}; a_0 = W_down b_0.  The head reads W_up
a_L + b_L.
For an encoder-decoder the side network is also one: its decoder begins with W_down of the decoder's embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.initialization import initialize
from workbench.models.layer_inputs import padding_mask
from workbench.models.matmul import Head
from workbench.models.side_layers import TOKEN_KINDS, WORD_KINDS, SequenceHead, SideHead, SideLayer, TapProjection

IGNORED = -100
"""The label of padding in a target, which losses ignore."""


class ParallelAdapterStage(nn.Module):
    """Adapters [start, stop): the trainable part of a pipeline stage.

    Parameter names contain the global layer index, so the union of all stages' state_dicts is the whole adapter's.
    Initial weights depend on config.seed and the parameter's name, not on how the adapter is divided.
    """

    def __init__(self, config: ParallelAdapterConfig, start: int, stop: int, *, has_head: bool = False) -> None:
        """has_head: whether to add a head even if the stage does not include the last layer."""
        super().__init__()
        if not 0 <= start < stop <= config.num_layers:
            raise ConfigError(
                f"Adapters [{start}, {stop}) were asked for.", f"There are {config.num_layers}.", "Change the stage."
            )
        self.config, self.start, self.stop = config, start, stop
        border = config.border
        self.first = TapProjection(config.hidden_size, config.width) if start == 0 else None
        self.layers = nn.ModuleDict(
            {str(index): SideLayer(config, in_decoder=index >= border) for index in range(start, stop)}
        )
        # Named by its layer, so that a stage's parameters can be distinguished by name.
        has_embedding = start <= border < stop
        self.decoder_first = nn.ModuleDict(
            {str(border): TapProjection(config.hidden_size, config.width)} if has_embedding else {}
        )
        self.last: SideHead | SequenceHead | None = None
        if has_head or stop == config.num_layers:
            self.last = SequenceHead(config) if config.kind in WORD_KINDS else SideHead(config)
        # In a tuple, so that the backbone's head does not become a parameter of this module.
        self._language_model_head: tuple[Head, ...] = ()
        initialize(self, "fan_in")

    @property
    def num_taps(self) -> int:
        """Return the number of taps that forward takes, which its backbone stage outputs."""
        return self.stop - self.start + (self.first is not None) + len(self.decoder_first)

    @property
    def has_language_model_head(self) -> bool:
        """Return whether `attach` was called."""
        return bool(self._language_model_head)

    def attach(self, head: Head) -> None:
        """Attach the backbone's frozen head to the last stage, for tasks of words.  It is not saved with
        the adapter.
        """
        self._language_model_head = (head,)

    def forward(self, side: Tensor | None, taps: Sequence[Tensor] | Tensor, attention_mask: Tensor) -> Tensor:
        """Return the side output: (n, t, d / r) for encoder layers, (n, t + s, d / r) after a decoder layer.

        side: the previous stage's side output, None in the first stage.  attention_mask: (n, t), 1 for real tokens.
        taps: from BackboneStage, (n, t, d) each (or stacked): b_0 first in the first stage, then one per layer; a
        decoder's are (n, s, d), and its embedding's comes before its first layer's.
        """
        if (side is None) != (self.first is not None) or len(taps) != self.num_taps:
            raise ValueError(
                f"stage [{self.start}, {self.stop}) got {len(taps)} taps and {'no' if side is None else 'a'} side input"
            )
        tap, border = 0, self.config.border
        if self.first is not None:
            side, tap = self.first(taps[0]), 1
        assert side is not None
        if self.start < border:
            mask = padding_mask(attention_mask, is_causal=self.config.is_causal)
            side = self._run(self.start, min(self.stop, border), side, taps[tap:], mask)
            tap += min(self.stop, border) - self.start
        if self.stop <= border:
            return side
        length = attention_mask.shape[1]
        memory, states = side[:, :length], side[:, length:]
        for project in self.decoder_first.values():
            states, tap = project(taps[tap]), tap + 1
        memory_mask = padding_mask(attention_mask, is_causal=False)
        states = self._run(max(self.start, border), self.stop, states, taps[tap:], None, memory, memory_mask)
        return torch.cat([memory, states], dim=1)

    def _run(
        self,
        start: int,
        stop: int,
        side: Tensor,
        taps: Sequence[Tensor] | Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        for index in range(start, stop):
            side = self.layers[str(index)](side, taps[index - start], mask, memory, memory_mask)
        return side

    def part(self, start: int, stop: int) -> ParallelAdapterStage:
        """Return adapters [start, stop) of this stage.  Modules are shared with it."""
        part = copy.copy(self)
        part._modules, part.start, part.stop = dict(self._modules), start, stop
        part.first = self.first if start == 0 else None
        part.layers = nn.ModuleDict({str(index): self.layers[str(index)] for index in range(start, stop)})
        part.decoder_first = self.decoder_first if start <= self.config.border < stop else nn.ModuleDict()
        return part

    def head(
        self,
        side: Tensor,
        last_hidden: Tensor,
        attention_mask: Tensor,
        sample_ids: Tensor,
        epoch: int,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits.  Only the last stage has a head.

        last_hidden: b_L, the last tap.  Returns (n, num_outputs), from the first decoder state if there is a decoder;
        for sequence-to-sequence (n, s, V), for text generation (n, t, V), or (N, V) for `rows` only.  rows: see
        `answered`.
        Raises ConfigError for words without `attach`.
        """
        assert self.last is not None, f"stage [{self.start}, {self.stop}) has no head"
        if self.config.num_encoder_layers is not None:
            side = side[:, attention_mask.shape[1] :]
        if isinstance(self.last, SequenceHead):
            if not self._language_model_head:
                raise ConfigError(
                    "Logits over the backbone's vocabulary were asked for.",
                    "The adapter has no language model head.",
                    "Call attach(load_language_model_head(model)) first.",
                )
            hidden = self.last(side, last_hidden, sample_ids, epoch)
            return self._language_model_head[0](hidden if rows is None else hidden[rows])
        if self.config.num_encoder_layers is not None:
            side, last_hidden, attention_mask = side[:, :1], last_hidden[:, :1], attention_mask.new_ones(len(side), 1)
        return self.last(side, last_hidden, attention_mask, sample_ids, epoch)


class ParallelAdapter(ParallelAdapterStage):
    """The whole adapter on one device."""

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__(config, 0, config.num_layers)

    def predict(
        self,
        taps: Sequence[Tensor] | Tensor,
        attention_mask: Tensor,
        sample_ids: Tensor,
        epoch: int = 0,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (n, num_outputs) for all taps b_0 ... b_L (see head).  Sample ids and epoch only matter in
        training mode.
        """
        return self.head(self(None, taps, attention_mask), taps[-1], attention_mask, sample_ids, epoch, rows)


def answered(labels: Tensor, kind: str) -> Tensor | None:
    """Return the tokens (n, t) bool whose logits text generation needs, because all tokens' logits would fill the
    memory.  None for other tasks.
    """
    return labels.ne(IGNORED) if kind == "text_generation" else None


def made_up_mask(batch: int, length: int) -> Tensor:
    """Return a mask (batch, length) with some padding.  Without padding, attention takes a faster path than with real
    batches.
    """
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[::2, -max(1, length // 8) :] = 0
    return mask


def task_loss(logits: Tensor, labels: Tensor, kind: str, *, reduction: str = "mean", label_std: float = 1.0) -> Tensor:
    """Return cross-entropy (classification, labels (n,) int64) or squared error (regression, labels (n,) float).

    For words and tagged tokens (labels (n, s) int64, IGNORED where padded) a sample's loss is the mean over its tokens;
    for spans (logits (n, t, 2), labels (n, 2) int64) the mean of the cross-entropies of its first and last token.  Text
    generation also takes the logits (N, V) of the labelled tokens alone.
    reduction: 'mean', 'sum' when devices share a mini-batch and each divides by its total size, or 'none', (n,).
    label_std: the unit of a regression's errors (see ParallelAdapterConfig).
    """
    if kind == "text_generation":
        rows = labels.ne(IGNORED)
        tokens = F.cross_entropy((logits if logits.ndim == 2 else logits[rows]).float(), labels[rows], reduction="none")
        samples = tokens.new_zeros(len(labels)).index_add(0, rows.nonzero()[:, 0], tokens) / rows.sum(dim=1).clamp(
            min=1
        )
    elif kind == "sequence_to_sequence" or kind in TOKEN_KINDS:
        classes = (
            logits if kind == "question_answering" else logits.transpose(1, 2)
        )  # a span's classes are the positions
        tokens = F.cross_entropy(classes.float(), labels, ignore_index=IGNORED, reduction="none")  # (n, s)
        samples = tokens.sum(dim=1) / labels.ne(IGNORED).sum(dim=1).clamp(min=1)
    elif kind == "regression":
        return F.mse_loss(logits.squeeze(1), labels.to(logits.dtype), reduction=reduction) / label_std**2
    else:
        return F.cross_entropy(logits, labels, reduction=reduction)
    return samples if reduction == "none" else samples.mean() if reduction == "mean" else samples.sum()
