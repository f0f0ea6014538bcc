"""Requests to serve, and the local model's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.methods.galaxy_plus.local import local_hidden
from workbench.methods.galaxy_plus.requests import Request
from workbench.models.loading import load_model
from workbench.models.sharding import ModelLayout

TOLERANCE = 1e-4
"""An answer is right if no number of it is further from the local model's than this part of the largest."""


def random_requests(layout: ModelLayout, length: int, count: int = 16, *, seed: int = 0) -> tuple[Request, ...]:
    """Return sequences of random tokens, all of one length (of an encoder-decoder half as many go to the decoder).

    Raises ConfigError for a length that the model cannot read, and for a model that reads pictures, whose length is fixed.
    """
    asked = f"Requests of {length} tokens to '{layout.family_name}' were asked for."
    if layout.family.task == "image" if hasattr(layout.family, "task") else False:
        raise ConfigError(asked, "It reads pictures.", "Serve a text model.")
    if not 1 <= length <= layout.max_length:
        raise ConfigError(asked, f"It reads 1 to {layout.max_length}.", "Choose such a length.")
    draws = torch.Generator().manual_seed(seed)
    decoder_length = max(1, length // 2) if layout.has_decoder else 0

    def tokens(number: int) -> Tensor:
        return torch.randint(0, int(layout.config.vocab_size), (1, number), generator=draws)

    return tuple(Request(length, tokens(length), decoder_length, tokens(decoder_length) if decoder_length else None) for _ in range(count))


def local_answers(model: str, layout: ModelLayout, requests: Sequence[Request]) -> list[np.ndarray]:
    """Return what the model computes whole, in this process: final hidden states (1, t, d), of an encoder-decoder its decoder's."""
    if layout.has_decoder or layout.family.reads_images:
        return [found.numpy() for found in local_hidden(model, list(requests))]
    local = load_model(model)
    base = getattr(local, local.base_model_prefix, local)
    with torch.inference_mode():
        return [base(input_ids=request.ids).last_hidden_state.numpy() for request in requests]


def is_right(found: Any, wanted: np.ndarray) -> bool:
    """Return whether an answer equals the local model's to float tolerance."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max())
