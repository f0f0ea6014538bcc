"""What the attention of one request needs beside hidden states: masks, positions, and the keys and values of tokens before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.sharding.slices import Ranges


class KeyValueCache:
    """Keys and values of a device's own units, block by block (Galaxy+ stops at the latency of a token; this makes text of them).

    count: samples.  capacity: tokens of the prompt and the answer, at most.  length: tokens held now, the padding among them.
    lengths: (n,) real tokens of each prompt, None if none is padded.  memory_padding: of what the encoder read, as in Run.
    """

    def __init__(self, count: int, capacity: int) -> None:
        if count < 1 or capacity < 1:
            raise ConfigError(
                f"A cache for {count} samples of {capacity} tokens was asked for.", "Neither can be below 1.", "Give the prompt room."
            )
        self.count, self.capacity, self.length = count, capacity, 0
        self.lengths: Tensor | None = None
        self.prompt_length = 0
        self.memory_padding: Tensor | None = None
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._blocks.values())

    def begin(self, length: int, mask: Tensor | None) -> None:
        """Start with prompts of `length` tokens; mask: (n, t), 1 for real tokens, None for all."""
        if length > self.capacity:
            raise ConfigError(
                f"A cache for {self.capacity} tokens was asked for.",
                f"The prompt has {length}.",
                "Make room for the prompt and the answer.",
            )
        self._blocks.clear()
        self.length = self.prompt_length = length
        self.lengths = None if mask is None else mask.long().sum(1)

    def keep(self, number: int, keys: Tensor, values: Tensor, *, grows: bool) -> None:
        """Keep a block's keys and values (n, units, t, head size); grows: with room for more tokens, as a cross-attention needs none."""
        room = self.capacity - keys.shape[2] if grows else 0
        self._blocks[number] = F.pad(keys, (0, 0, 0, room)).contiguous(), F.pad(values, (0, 0, 0, room)).contiguous()

    def extend(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a token's (n, units, 1, head size) behind the last, and return all up to it."""
        all_keys, all_values = self._blocks[number]
        at = self.length
        all_keys[:, :, at : at + 1], all_values[:, :, at : at + 1] = keys, values
        return all_keys[:, :, : at + 1], all_values[:, :, : at + 1]

    def whole(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a cross-attention."""
        return self._blocks[number]

    def advance(self) -> None:
        """Count the token that every block has added."""
        self.length += 1


@dataclass(slots=True, kw_only=True)
class Run:
    """One request.  lengths: tokens in each stack.  mask: (n, t) bool of the first stack, None if all tokens are real.

    padding: the same as what is added to scores, (n, 1, 1, t), 0 or -inf, which attention takes as it is, block by block.
    rotary: cosines and sines, (1, t, 1, head size) each.  cache: keys and values are kept there.  masks: what attention adds or
    hides, by stack and units, made once.  projected: a block's number with its queries, keys and values, while parts of it are asked for.
    """

    count: int
    lengths: tuple[int, ...]
    mask: Tensor | None
    padding: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    cache: KeyValueCache | None = None
    masks: dict[tuple[int, Ranges], Tensor] = field(default_factory=dict)
    projected: tuple[int, tuple[Tensor, ...]] | None = None


@dataclass(slots=True, kw_only=True)
class Step:
    """One further token of each sample.  positions: (n,) of the token.  mask: (n, 1, 1, tokens so far) bool, None if all are real.

    biases: T5's, by units.
    """

    cache: KeyValueCache
    positions: Tensor
    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    biases: dict[Ranges, Tensor] = field(default_factory=dict)


def real_tokens(mask: Tensor | None, count: int, length: int) -> Tensor | None:
    """Return a request's mask as (n, t) bool, None if all tokens are real.

    mask: (n, t), 1 for real tokens, padding on the right.  Raises ConfigError for another one.
    """
    if mask is None:
        return None
    real = mask.bool()
    if real.shape != (count, length) or bool((real[:, 1:] & ~real[:, :-1]).any()) or not bool(real[:, 0].all()):
        raise ConfigError(
            f"A mask of shape {tuple(real.shape)} for {count} samples of {length} tokens was given.",
            "It has another shape, is padded on the left, or has a sample without tokens.",
            "Pad on the right: 1 for each real token, then 0.",
        )
    return None if bool(real.all()) else real
