"""A number from one device to others beside any schedule: which request comes next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError

_TAG = 1 << 30
"""Above the numbers of a Transport's messages."""


class ControlChannel:
    """One rank's end.  Numbers between two ranks arrive in the order in which they were sent.

    peers: the group's number of each device.  Both raise DeviceLostError if the other device has gone.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, peers: dict[int, int]) -> None:
        self._group, self._rank, self._peers = group, rank, peers

    def tell(self, ranks: Sequence[int], number: int) -> None:
        """Send a number to some devices, and return when it has left."""
        message = torch.tensor([number], dtype=torch.int64)
        try:
            for work in [self._group.send([message], self._peers[rank], _TAG) for rank in ranks if rank != self._rank]:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def listen(self, rank: int, timeout_s: float) -> int:
        """Return the next number from a device; one that is silent for timeout_s counts as gone."""
        message = torch.empty(1, dtype=torch.int64)
        try:
            self._group.recv([message], self._peers[rank], _TAG).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise _lost(error) from error
        return int(message)


def _lost(error: RuntimeError) -> DeviceLostError:
    found = f"It failed: {str(error).splitlines()[0]}."
    return DeviceLostError("A message to or from another device was under way.", found, "See the first device that failed.")
