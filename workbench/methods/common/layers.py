"""What some layers of a profile take together, and at which sizes layers are measured."""

from __future__ import annotations

from workbench.core.profile import LayerProfile

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SEQUENCE_LENGTHS = (8, 16, 32, 64)


def layers_seconds(layers: tuple[LayerProfile, ...], kind: str, batch: int, sequence_length: int) -> float:
    """Return the seconds of an operation kind over some layers."""
    return sum(layer.seconds(kind, batch, sequence_length) for layer in layers)


def context_bytes(layers: tuple[LayerProfile, ...], batch: int, sequence_length: int) -> int:
    """Return the bytes that the side network's backward pass needs of its forward pass, taps left out."""
    return sum(layer.context_bytes(batch, sequence_length) for layer in layers)
