"""What is asked of the devices, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.timeline import MemorySample, Span
from workbench.models.sharding import ModelLayout, What


class Request(NamedTuple):
    """One sequence.  length, decoder_length: tokens of each stack, known to every device.

    ids: (1, t) token ids or (1, t, values) patches of a picture; decoder_ids: (1, s): only the plan's first device reads them.
    what: final hidden states, or logits.
    """

    length: int
    ids: Tensor | None = None
    decoder_length: int = 0
    decoder_ids: Tensor | None = None
    what: What = "hidden"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each stack."""
        return (self.length, self.decoder_length) if self.decoder_length else (self.length,)


class Answer(NamedTuple):
    """What a device did for a request, in seconds of the device's monotonic clock.  output: on the plan's first device alone.

    start_s, end_s: of its own computing (equal on a device that computed nothing).
    """

    output: Tensor | None
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()
    memory: tuple[MemorySample, ...] = ()

    @property
    def busy_s(self) -> float:
        """Return the seconds for which this device computed."""
        return sum(span.end_s - span.start_s for span in self.spans if not span.op.is_communication)


class Generated(NamedTuple):
    """What a device did for a text.  tokens: the new ones, on the plan's first device alone.  prefill: the first step's answer.

    token_s: seconds of every further token.
    """

    tokens: tuple[int, ...]
    prefill: Answer
    token_s: tuple[float, ...]
    steps: tuple[Answer, ...] = ()


def check_request(request: Request, layout: ModelLayout) -> None:
    """Raise ConfigError for a request that the model cannot read, alike on every device: nobody waits for one that has refused."""
    asked, text, targets = f"A request of {request.length} tokens was given to '{layout.name}'.", request.length, request.decoder_length
    if text < 1 or targets < 0:
        raise ConfigError(asked, "There is nothing to compute.", "Give at least one token.")
    if layout.has_decoder != bool(targets):
        found = "Its decoder is given none." if layout.has_decoder else f"It has no decoder, but is given {targets} tokens for one."
        raise ConfigError(asked, found, "Give decoder_length and decoder_ids to an encoder-decoder, and to no other model.")
    if layout.family.reads_images:
        tokens, values = shape_of_picture(layout)
        if text != tokens or (request.ids is not None and tuple(request.ids.shape) != (1, tokens, values)):
            side = layout.config.image_size
            given = "" if request.ids is None else f", given as {tuple(request.ids.shape)}"
            found = f"Its pictures are {side} x {side} pixels: {tokens} tokens of {values} values{given}."
            raise ConfigError(asked, found, "Scale the picture, as the model's tokenizer does.")
        return
    if layout.max_length and max(text, targets) > layout.max_length:
        raise ConfigError(asked, f"The model knows {layout.max_length} positions.", "Shorten the text.")
    for ids, length in ((request.ids, text), (request.decoder_ids, targets)):
        if ids is not None and tuple(ids.shape) != (1, length):
            raise ConfigError(asked, f"Its numbers have the shape {tuple(ids.shape)}.", f"Give one sequence: (1, {length}).")


def shape_of_picture(layout: ModelLayout) -> tuple[int, int]:
    """Return a picture's tokens, the class token among them, and the values of each."""
    config = layout.config
    grid = config.image_size // config.patch_size
    return grid * grid + 1, config.num_channels * config.patch_size**2


def random_requests(layout: ModelLayout, length: int, count: int = 16, *, seed: int = 0) -> tuple[Request, ...]:
    """Return sequences of random tokens, all of one length (of an encoder-decoder half as many go to the decoder).

    Raises ConfigError for a length that the model cannot read, and for a model that reads pictures, whose length is fixed.
    """
    asked = f"Requests of {length} tokens to '{layout.family_name}' were asked for."
    if layout.family.reads_images:
        raise ConfigError(asked, "It reads pictures.", "Serve a text model.")
    if not 1 <= length <= layout.max_length:
        raise ConfigError(asked, f"It reads 1 to {layout.max_length}.", "Choose such a length.")
    draws = torch.Generator().manual_seed(seed)
    decoder_length = max(1, length // 2) if layout.has_decoder else 0

    def tokens(number: int) -> Tensor:
        return torch.randint(0, int(layout.config.vocab_size), (1, number), generator=draws)

    return tuple(Request(length, tokens(length), decoder_length, tokens(decoder_length) if decoder_length else None) for _ in range(count))
