"""What the attention of one request needs beside hidden states: masks, positions, and the keys and values of tokens before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
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

    def keep(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Keep a prompt's keys and values (n, units, t, head size) with room for more tokens."""
        count, units, length, width = keys.shape
        for_keys, for_values = (torch.empty(count, units, self.capacity, width, dtype=keys.dtype) for _ in range(2))
        for_keys[:, :, :length], for_values[:, :, :length] = keys, values
        self._blocks[number] = for_keys, for_values

    def keep_whole(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Keep the keys and values of a cross-attention, to which no token is added."""
        self._blocks[number] = keys.contiguous(), values.contiguous()

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

    memory_padding: what cross-attention adds to its scores, (n, 1, 1, t); None for nothing.  biases: T5's, by units.
    """

    cache: KeyValueCache
    positions: Tensor
    mask: Tensor | None
    memory_padding: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    biases: dict[Ranges, Tensor] = field(default_factory=dict)


def begin_run(
    length: int,
    *,
    mask: Tensor | None,
    target_length: int,
    count: int,
    num_stacks: int,
    cache: KeyValueCache | None,
    rotary: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Run:
    """Return a request's state.  mask: (n, t), 1 for real tokens, padding on the right.  Raises ConfigError for another one."""
    if length < 1 or (num_stacks == 2 and target_length < 1):
        raise ConfigError(
            f"A sequence of {length} tokens was given.", "Nothing can be computed of it.", "Give at least one token to each stack."
        )
    real = None if mask is None else mask.bool()
    if real is not None:
        is_shaped = real.shape == (count, length)
        if not is_shaped or bool((real[:, 1:] & ~real[:, :-1]).any()) or not bool(real[:, 0].all()):
            raise ConfigError(
                f"A mask of shape {tuple(real.shape)} for {count} samples of {length} tokens was given.",
                "It has another shape, is padded on the left, or has a sample without tokens.",
                "Pad on the right: 1 for each real token, then 0.",
            )
        real = None if bool(real.all()) else real
    padding = None if real is None else torch.zeros(real.shape, dtype=dtype).masked_fill_(~real, -torch.inf)[:, None, None, :]
    if cache is not None:
        cache.begin(target_length if num_stacks == 2 else length, None if num_stacks == 2 else real)
        cache.memory_padding = padding if num_stacks == 2 else None
    lengths = (length, target_length) if num_stacks == 2 else (length,)
    return Run(count=count, lengths=lengths, mask=real, padding=padding, rotary=rotary, cache=cache)
