"""Parts of a parallel adapter: projections of taps, narrow layers, heads, stateless dropout (PAC+, section IV-A, Fig.
6).

Stateless dropout: a mask depends only on seed, epoch, sample and feature, not on the device or time of its computation.
The masks are therefore the same however a mini-batch is divided, and when an epoch is resumed or runs from the cache.
Packing: a batch's tokens without padding, with matching indices for the rows of attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.adapter_config import ParallelAdapterConfig

# Odd multipliers of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers: torch's int64 wraps around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def keep_mask(sample_ids: Tensor, num_features: int, *, rate: float, seed: int, epoch: int) -> Tensor:
    """Return (n, num_features) bool, False with probability `rate`; sample_ids: (n,) int64."""
    stream = _mix(_mix(torch.tensor(seed) + _GOLDEN) + epoch)
    samples = _mix(stream + sample_ids.long() * _GOLDEN)
    features = torch.arange(1, num_features + 1, device=sample_ids.device) * _GOLDEN
    bits = _mix(samples[:, None] + features) >> 40 & 0xFFFFFF
    return bits >= round(rate * 0x1000000)


def stateless_dropout(inputs: Tensor, sample_ids: Tensor, *, rate: float, seed: int, epoch: int) -> Tensor:
    """Return inputs (n, ...) with features dropped at `rate` and the others scaled by 1 / (1 - rate)."""
    if rate == 0:
        return inputs
    keep = keep_mask(sample_ids, inputs[0].numel(), rate=rate, seed=seed, epoch=epoch).view(inputs.shape)
    return inputs * keep.to(inputs.dtype).mul_(1 / (1 - rate))


def ids_of_texts(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (n,) int64 sample ids computed from the tokens, for data whose samples have no ids.

    input_ids, attention_mask: (n, t).  Padding and other samples have no influence: the same text has the same id.
    """
    positions = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device) * _GOLDEN
    return _mix((_mix(input_ids.long() + positions) * attention_mask.long()).sum(dim=1))


def _mix(value: Tensor) -> Tensor:
    # torch's >> keeps the sign, but the mixer needs zeros shifted in from the left: mask them.
    value = (value ^ (value >> 30 & 0x3FFFFFFFF)) * _FIRST
    value = (value ^ (value >> 27 & 0x1FFFFFFFFF)) * _SECOND
    return value ^ (value >> 31 & 0x1FFFFFFFF)


TOKEN_KINDS = ("question_answering", "token_classification")
"""Tasks whose head reads every token: it has 2 outputs (first and last token of the answer), or one per class."""
WORD_KINDS = ("sequence_to_sequence", "text_generation")
"""Tasks whose answers are words: the backbone's own head, frozen, reads every token (of an encoder-decoder's
target)."""
LAMBDA = 0.5
"""Initial value of lambda_i (PAC+, section IV-A)."""


class TapProjection(nn.Module):
    """W_down of one tap: standardise each channel of a backbone activation, then project it from d to d / r.

    mean, inverse_std: (d,) constants from calibration (`set_statistics`).  They are folded into weight and bias, which
    is cheaper than standardising the activations.
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden_size))
        self.bias = nn.Parameter(torch.empty(width))
        self.register_buffer("mean", torch.zeros(hidden_size))
        self.register_buffer("inverse_std", torch.ones(hidden_size))

    def forward(self, tap: Tensor) -> Tensor:
        """Project a tap (n, t, d) to (n, t, d / r)."""
        weight = self.weight * self.inverse_std
        return F.linear(tap.to(weight.dtype), weight, self.bias - weight @ self.mean)


class CrossAttention(nn.Module):
    """Attention of a decoder's adapter to the output of the side network's encoder."""

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm = nn.LayerNorm(width)
        self.memory_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Return the update for hidden (n, s, d / r).  memory: (n, t, d / r).  mask: (n, 1, 1, t) bool or None."""
        count, length, width = hidden.shape
        query = self.query(self.norm(hidden)).view(count, length, self.heads, -1).transpose(1, 2)
        fused = self.key_value(self.memory_norm(memory)).view(count, memory.shape[1], 2, self.heads, -1)
        key, value = fused.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(attended.transpose(1, 2).reshape(count, length, width))


class SideLayer(nn.Module):
    """One adapter: the mix of Fig. 6 and a pre-norm transformer layer of width d / r; in a decoder causal, with
    cross-attention.
    """

    def __init__(self, config: ParallelAdapterConfig, *, in_decoder: bool = False) -> None:
        super().__init__()
        width = config.width
        self.heads, self.is_causal = config.heads, config.is_causal or in_decoder
        self.down = TapProjection(config.hidden_size, width)
        self.mix = nn.Parameter(torch.empty(()))  # lambda_i
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.cross = CrossAttention(config) if in_decoder else None
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, config.feed_forward_factor * width)
        self.contract = nn.Linear(config.feed_forward_factor * width, width)

    def forward(
        self,
        side: Tensor,
        tap: Tensor,
        mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """Return a_{i+1} (n, t, d / r), given a_i and b_{i+1} (n, t, d).

        mask: from padding_mask.  memory, memory_mask: the side encoder's output (n, t, d / r) and (n, 1, 1, t), in a
        decoder.
        """
        hidden = torch.lerp(side, self.down(tap), self.mix)
        count, length, width = hidden.shape
        fused = self.query_key_value(self.attention_norm(hidden))
        query, key, value = fused.view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.is_causal and mask is None
        )
        hidden = hidden + self.attention_output(attended.transpose(1, 2).reshape(count, length, width))
        if self.cross is not None:
            assert memory is not None, "an adapter of a decoder got no memory"
            hidden = hidden + self.cross(hidden, memory, memory_mask)
        return hidden + self.contract(F.gelu(self.expand(self.feed_forward_norm(hidden))))


class DropoutHead(nn.Module):
    """A head in front of which features are dropped while it is trained.

    kind: what its task predicts.  label_mean, label_std: see ParallelAdapterConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rate, self.seed, self.kind = config.dropout, config.seed, config.kind
        self.label_mean, self.label_std = config.label_mean, config.label_std

    def dropped(self, features: Tensor, sample_ids: Tensor, epoch: int) -> Tensor:
        """Return features (n, ...), of which some are dropped in training (see stateless_dropout)."""
        if not self.training:
            return features
        return stateless_dropout(features, sample_ids, rate=self.rate, seed=self.seed, epoch=epoch)


class SideHead(DropoutHead):
    """W_up, the sum with the backbone's last activation, mean pooling and the task's head; for spans and tags without
    pooling.

    The pooling mean commutes with W_up, and pooling first makes the up-projection t times cheaper.
    """

    mean: Tensor
    inverse_std: Tensor

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.num_outputs)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("inverse_std", torch.ones(config.hidden_size))

    def forward(
        self, side: Tensor, last_hidden: Tensor, attention_mask: Tensor, sample_ids: Tensor, epoch: int
    ) -> Tensor:
        """Return the logits, (n, num_outputs), for spans and tags (n, t, num_outputs).

        side: a_L (n, t, d / r).  last_hidden: b_L (n, t, d).  attention_mask: (n, t).  sample_ids: (n,) int64, for the
        dropout.
        """
        if self.kind in TOKEN_KINDS:
            last = (last_hidden.to(side.dtype) - self.mean) * self.inverse_std
            return token_logits(self.finish(self.norm(side), last, sample_ids, epoch), attention_mask, self.kind)
        share = pooling_matrix(attention_mask, side.dtype)
        last = (torch.bmm(share, last_hidden.to(side.dtype)).squeeze(1) - self.mean) * self.inverse_std
        return self.finish(torch.bmm(share, self.norm(side)).squeeze(1), last, sample_ids, epoch)

    def finish(self, pooled: Tensor, last: Tensor, sample_ids: Tensor, epoch: int) -> Tensor:
        """Return (n, num_outputs) for pooled inputs: normed a_L (n, d / r), standardised b_L (n, d); or (n, t, ...)
        without pooling.
        """
        features = self.dropped(self.up(pooled) + last, sample_ids, epoch)
        return self.output(features) * self.label_std + self.label_mean


class SequenceHead(DropoutHead):
    """W_up and the sum with the backbone's last activation, as input for the backbone's language model head.

    b_L is not standardised here, because the language model head was trained on it as it is.
    """

    def __init__(self, config: ParallelAdapterConfig) -> None:
        super().__init__(config)
        self.norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden_size)

    def forward(self, side: Tensor, last_hidden: Tensor, sample_ids: Tensor, epoch: int) -> Tensor:
        """Return the head's input, (n, s, d), for a_L (n, s, d / r), b_L (n, s, d) and sample ids (n,) int64 for the
        dropout.
        """
        return self.dropped(self.up(self.norm(side)) + last_hidden.to(side.dtype), sample_ids, epoch)


def token_logits(logits: Tensor, attention_mask: Tensor, kind: str) -> Tensor:
    """Return token logits (n, t, num_outputs).  For answer spans, padding gets the lowest number, so that it is never
    chosen.
    """
    if kind != "question_answering":
        return logits
    return logits.masked_fill(attention_mask[:, :, None] == 0, torch.finfo(logits.dtype).min)


def pooling_matrix(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (n, 1, t), whose product with (n, t, d) is the mean over each sample's real tokens.  attention_mask: (n,
    t).
    """
    share = attention_mask.to(dtype)
    return (share / share.sum(dim=1, keepdim=True))[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Indices of the N real tokens in a padded batch (n, t).  All indices are row numbers for index_select.

    tokens: (N,) index of each real token among n * t.  share: (n, N) float32, each row computes the mean over a
    sample's tokens.
    to_heads: (3 * n * h * t,) maps rows (N, 3, h) to (3, n, h, t); padding reads token 0's row.
    to_padded_heads: (n * h * t,) maps rows (N + 1, h) to (n, h, t); padding reads token N's row, which the caller keeps
    zero.
    from_heads: (N * h,) maps rows (n, h, t) to (N, h).  from_all_heads: (N * 3 * h,) maps rows (3, n, h, t) to (N, 3,
    h).
    score_bias: (n * h, 1 or t, t), 0 where a query may attend and -inf elsewhere; None if it may attend everywhere.
    """

    count: int
    length: int
    tokens: Tensor
    share: Tensor
    to_heads: Tensor
    to_padded_heads: Tensor
    from_heads: Tensor
    from_all_heads: Tensor
    score_bias: Tensor | None

    @classmethod
    def of(cls, attention_mask: Tensor, heads: int, *, is_causal: bool) -> Packing:
        """Return the packing of a mask (n, t), 1 for real tokens.

        This uses numpy, whose calls take a fifth of the time of torch's for arrays of this size.
        """
        real = attention_mask.numpy().astype(bool)
        count, length = real.shape
        tokens = np.flatnonzero(real)
        sample, place = np.divmod(tokens, length)
        number = np.zeros(count * length, dtype=np.int64)
        number[tokens] = np.arange(len(tokens))
        number = number.reshape(count, 1, length)  # index of the token at each position, 0 for padding
        head, part = np.arange(heads), np.arange(3)
        in_heads = (sample[:, None] * heads + head) * length + place[:, None]  # (N, h)
        share = np.zeros((count, len(tokens)), dtype=np.float32)
        share[sample, np.arange(len(tokens))] = (1 / real.sum(axis=1, dtype=np.float32))[sample]
        return cls(
            count=count,
            length=length,
            tokens=torch.from_numpy(tokens),
            share=torch.from_numpy(share),
            to_heads=_flat(number * (3 * heads) + part[:, None, None, None] * heads + head[:, None]),
            to_padded_heads=_flat(np.where(real[:, None], number, len(tokens)) * heads + head[:, None]),
            from_heads=_flat(in_heads),
            from_all_heads=_flat(part[:, None] * (count * heads * length) + in_heads[:, None]),
            score_bias=_score_bias(real, heads, is_causal=is_causal),
        )

    @property
    def num_tokens(self) -> int:
        """Return N, the number of real tokens."""
        return len(self.tokens)

    def pack(self, padded: Tensor) -> Tensor:
        """Pack (n, t, c) into (N, c)."""
        return padded.reshape(self.count * self.length, -1).index_select(0, self.tokens)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack (N, c) into (n, t, c), zero where padded."""
        padded = packed.new_zeros(self.count * self.length, packed.shape[1])
        return padded.index_copy_(0, self.tokens, packed).view(self.count, self.length, -1)


def _flat(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.reshape(-1))


def _score_bias(real: np.ndarray, heads: int, *, is_causal: bool) -> Tensor | None:
    if not is_causal and real.all():
        return None
    may_look = real[:, None]  # (n, 1, t)
    if is_causal:
        # Padding is on the right, so every query, even a padded one, may attend to the first token: no row is -inf
        # throughout.
        may_look = may_look & np.tri(real.shape[1], dtype=bool)
    bias = np.where(may_look, np.float32(0), np.float32("-inf"))
    return torch.from_numpy(np.repeat(bias, heads, axis=0))
