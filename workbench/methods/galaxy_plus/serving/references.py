"""Requests to serve, and the local model's answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.requests import Request
from workbench.models.loading import load_model
from workbench.models.sharding import ModelLayout, load_shard, run_plan, shard_spec, weights_of

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

    return tuple(
        Request(length, tokens(length), None, decoder_length, tokens(decoder_length) if decoder_length else None) for _ in range(count)
    )


def local_answers(model: str, layout: ModelLayout, requests: Sequence[Request]) -> list[np.ndarray]:
    """Return what the model computes whole, in this process: final hidden states (1, t, d), of an encoder-decoder its decoder's."""
    local = load_model(model)
    with torch.inference_mode():
        answers = [_answer(local, layout, request) for request in requests]
    return answers


def is_right(found: Any, wanted: np.ndarray) -> bool:
    """Return whether an answer equals the local model's to float tolerance."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max())


def _answer(local: Any, layout: ModelLayout, request: Request) -> np.ndarray:
    assert request.ids is not None
    if request.ids.dim() == 2 and not layout.has_decoder:
        base = getattr(local, local.base_model_prefix, local)
        return base(input_ids=request.ids, attention_mask=request.mask).last_hidden_state.numpy()
    # Pictures come as patches, and models with a head hide their decoder: one shard of everything is the model, too.
    plan = InferencePlan(method="local", paradigm="pipeline", ranks=(0,), layers=(layout.num_layers,))
    shard = load_shard(layout, shard_spec(plan, 0, layout.stacks), weights_of(local))
    return run_plan(plan, [shard], request.ids, request.mask, request.decoder_ids).numpy()
