"""Messages that carry a time behind their bytes."""

from __future__ import annotations

import torch

from workbench.core.costs import Spec, opaque
from workbench.runtime.step_values import nbytes

_STAMP_BYTES = 8


def stamped(content: torch.Tensor, time_s: float) -> torch.Tensor:
    """Return the bytes of a tensor, followed by a time.  The time lies at a multiple of its size, as torch requires."""
    size = nbytes(content)
    buffer = empty_with_stamp(opaque(size))
    buffer[:size] = content.view(-1).view(torch.uint8)
    buffer[-_STAMP_BYTES:].view(torch.float64)[0] = time_s
    return buffer


def empty_with_stamp(spec: Spec) -> torch.Tensor:
    """Return an uninitialized buffer for a tensor and a time."""
    return torch.empty(-(-spec.nbytes // _STAMP_BYTES) * _STAMP_BYTES + _STAMP_BYTES, dtype=torch.uint8)


def without_stamp(buffer: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, float]:
    """Return the tensor and the time in a buffer, without a copy."""
    content = buffer[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    return content, buffer[-_STAMP_BYTES:].view(torch.float64).item()
