"""Activation functions by the names that transformers gives them, each as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

_TANH = partial(F.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _TANH,
    "gelu_fast": _TANH,
    "gelu_pytorch_tanh": _TANH,
    "silu": F.silu,
    "swish": F.silu,
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation function; those that have no kernel of their own as transformers has them."""
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import get_activation

    return get_activation(name)
