"""Initial weights of Parallel Adapters: structural pruning of the backbone, Gaussian, fan-in or zero (PAC+, section IV-C)."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.pruning import copy_pruned
from workbench.models.side_layers import LAMBDA
from workbench.models.stack import LayerStack

How = Literal["fan_in", "gaussian", "zero", "all_zero", "pruned"]

BRANCH_ENDS = (".attention_output.", ".cross.output.", ".contract.")
"""The last projection of each residual branch of a side layer."""


def initialize(adapter: nn.Module, how: How, *, stack: LayerStack | None = None) -> None:
    """Fill an adapter (or a stage of one) with initial weights, each a function of its config's seed and its own name.

    how: 'fan_in' draws from N(0, 1 / inputs), 'gaussian' from N(0, 0.02^2), 'pruned' slices the backbone `stack` by magnitude.
    'zero' sets the last projection of each residual branch to zero, as LoRA does with B: the branches are silent at first, and learn.
    'all_zero' sets all projections inside the side layers to zero, the paper's words taken literally: no gradient reaches either end of
    a branch, so its projections never change.
    """
    if how not in get_args(How):
        raise ConfigError(f"The initialization '{how}' was asked for.", f"Known are {', '.join(get_args(How))}.", "Choose one of them.")
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            _initialize_one(name, parameter, how, int(adapter.config.seed), predicts_words=adapter.config.kind == "sequence_to_sequence")
    if how == "pruned":
        if stack is None:
            raise ConfigError("A pruned initialization was asked for.", "No backbone was given.", "Pass stack=.")
        copy_pruned(adapter, stack)


def _initialize_one(name: str, parameter: Tensor, how: How, seed: int, *, predicts_words: bool) -> None:
    role = name.rpartition(".")[2]
    if role == "mix":
        parameter.fill_(LAMBDA)
    elif "norm" in name:
        parameter.fill_(1.0 if role == "weight" else 0.0)
    elif role == "bias" or (name.startswith("layers.") and _is_zero(name, how)):
        parameter.zero_()
    else:
        deviation = 0.02 if how == "gaussian" else parameter.shape[1] ** -0.5
        if name.startswith("last.output") or (predicts_words and name.startswith("last.up")):
            # A small head: the first predictions are near the prior, the first loss near ln(classes); or near the backbone's own words.
            deviation = 0.02
        parameter.copy_(torch.randn(parameter.shape, generator=seeded_generator(seed, name)) * deviation)


def _is_zero(name: str, how: How) -> bool:
    return (how == "zero" and any(end in name for end in BRANCH_ENDS)) or (how == "all_zero" and ".down." not in name)


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return random numbers that are a function of a seed and a parameter's name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
