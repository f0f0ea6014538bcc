"""Messages that carry times behind their bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from workbench.core.costs import Spec, opaque
from workbench.runtime.step_values import nbytes


class Stamp(NamedTuple):
    """When a message was sent.

    sent_s: by the emulated device.  behind_s: by how much later this machine sent it, at most GRAIN_S (see pacing).
    """

    sent_s: float
    behind_s: float = 0.0


_TIME_BYTES = 8
_STAMP_BYTES = len(Stamp._fields) * _TIME_BYTES


def stamped(content: torch.Tensor, stamp: Stamp) -> torch.Tensor:
    """Return the bytes of a tensor, followed by a stamp.  It lies at a multiple of a time's size, as torch requires."""
    size = nbytes(content)
    buffer = empty_with_stamp(opaque(size))
    buffer[:size] = content.view(-1).view(torch.uint8)
    buffer[-_STAMP_BYTES:].view(torch.float64)[:] = torch.tensor(stamp, dtype=torch.float64)
    return buffer


def empty_with_stamp(spec: Spec) -> torch.Tensor:
    """Return an uninitialized buffer for a tensor and a stamp."""
    return torch.empty(-(-spec.nbytes // _TIME_BYTES) * _TIME_BYTES + _STAMP_BYTES, dtype=torch.uint8)


def without_stamp(buffer: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, Stamp]:
    """Return the tensor and the stamp in a buffer, without a copy of the tensor."""
    content = buffer[: spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
    return content, Stamp(*buffer[-_STAMP_BYTES:].view(torch.float64).tolist())
