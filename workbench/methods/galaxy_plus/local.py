"""The answers of one process with the whole model, by transformers' own forward pass: what distributed answers are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.methods.galaxy_plus.requests import Request
from workbench.models.language_model_head import head_scale
from workbench.models.loading import load_model, load_stack

TOLERANCE = 1e-4
"""An answer is right if no number of it is further from the local model's than this part of the largest."""


def local_hidden(name: str, requests: Sequence[Request]) -> list[Tensor]:
    """Return the final hidden states (1, t, d) of each request, of an encoder-decoder the decoder's (1, s, d)."""
    stack = load_stack(name)
    with torch.inference_mode():
        found = []
        for request in requests:
            assert request.ids is not None
            mask = torch.ones(request.ids.shape[:2], dtype=torch.int64)
            found.append(stack(request.ids, mask, request.decoder_ids)[0])
    return found


def is_right(found: Any, expected: Tensor) -> bool:
    """Return whether an answer (an array) equals the local model's to float tolerance."""
    wanted = expected.numpy()
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max())


def local_texts(name: str, requests: list[Request], num_tokens: int) -> list[Tensor]:
    """Return the likeliest next tokens of each request, one after the other, each by a forward pass of the whole text."""
    model: Any = load_model(name)
    has_decoder = model.config.is_encoder_decoder
    with torch.inference_mode():
        found = []
        for request in requests:
            assert request.ids is not None
            ids = request.decoder_ids if has_decoder else request.ids
            for _ in range(num_tokens):
                assert ids is not None
                logits = _logits(model, request.ids, ids) if has_decoder else _logits(model, ids, None)
                ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
            assert ids is not None
            found.append(ids[0, -num_tokens:])
    return found


def _logits(model: Any, ids: Tensor, decoder_ids: Tensor | None) -> Tensor:
    """Return the last token's logits; of a base model (tiny ones have no head) the word embedding stands in."""
    outcome = model(input_ids=ids) if decoder_ids is None else model(input_ids=ids, decoder_input_ids=decoder_ids)
    if hasattr(outcome, "logits"):
        return outcome.logits[:, -1]
    return outcome.last_hidden_state[:, -1] * head_scale(model.config) @ model.get_input_embeddings().weight.T
