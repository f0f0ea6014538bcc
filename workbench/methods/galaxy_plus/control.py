"""Small messages of numbers beside any schedule: which request comes next, by which plan, how long it is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError

WIDTH = 32
"""Numbers in one message, the first is how many follow; more go in a second one."""
_TAG = 1 << 30
"""Above the numbers of a Transport's messages."""


class ControlChannel:
    """One rank's end.  Messages between two ranks arrive in the order in which they were sent.

    peers: the group's number of each device.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, peers: dict[int, int]) -> None:
        self._group, self._rank, self._peers = group, rank, peers

    def tell(self, ranks: Sequence[int], numbers: Sequence[int]) -> None:
        """Send numbers to some devices, and return when they have left."""
        message = torch.zeros(WIDTH, dtype=torch.int64)
        message[0] = len(numbers)
        message[1 : 1 + min(len(numbers), WIDTH - 1)] = torch.tensor(numbers[: WIDTH - 1], dtype=torch.int64)
        parts = [message]
        if len(numbers) >= WIDTH:
            parts.append(torch.tensor(numbers[WIDTH - 1 :], dtype=torch.int64))
        try:
            works = [self._group.send([part], self._peers[rank], _TAG) for rank in ranks if rank != self._rank for part in parts]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def listen(self, rank: int, timeout_s: float = 30.0) -> list[int]:
        """Return the next numbers from a device.  Raises DeviceLostError if it has gone or is silent for timeout_s."""
        message = torch.empty(WIDTH, dtype=torch.int64)
        try:
            self._group.recv([message], self._peers[rank], _TAG).wait(timedelta(seconds=timeout_s))
            count = int(message[0])
            numbers = message[1 : 1 + min(count, WIDTH - 1)].tolist()
            if count >= WIDTH:
                rest = torch.empty(count - (WIDTH - 1), dtype=torch.int64)
                self._group.recv([rest], self._peers[rank], _TAG).wait(timedelta(seconds=timeout_s))
                numbers += rest.tolist()
        except RuntimeError as error:
            raise _lost(error) from error
        return numbers


def _lost(error: RuntimeError) -> DeviceLostError:
    found = f"It failed: {str(error).splitlines()[0]}."
    return DeviceLostError("A message to or from another device was under way.", found, "See the first device that failed.")
