"""What tells one model from another."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(module: nn.Module) -> str:
    """Return a digest of a module's parameters and buffers: names, types and bytes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
