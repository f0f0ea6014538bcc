"""What some layers of a profile take together, and at which sizes layers are measured."""

from __future__ import annotations

from workbench.core.profile import LayerProfile

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SEQUENCE_LENGTHS = (8, 16, 32, 64)


def profiled_length(longest: int, most: int) -> int:
    """Return the tokens up to which layers are measured: the next power of two, so that one profile serves data of many lengths.

    longest: tokens that a sample has.  most: tokens that the model reads.  Between the lengths measured, Grid interpolates.
    """
    return max(longest, min(most, 1 << (longest - 1).bit_length()))


def layers_seconds(layers: tuple[LayerProfile, ...], kind: str, batch: int, sequence_length: int) -> float:
    """Return the seconds of an operation kind over some layers."""
    return sum(layer.seconds(kind, batch, sequence_length) for layer in layers)


def context_bytes(layers: tuple[LayerProfile, ...], batch: int, sequence_length: int) -> int:
    """Return the bytes that the side network's backward pass needs of its forward pass, taps left out."""
    return sum(layer.context_bytes(batch, sequence_length) for layer in layers)
