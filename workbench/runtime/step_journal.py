"""A memory-mapped record of an optimizer's last two steps, so that a killed run goes on from the last completed one.

What is written to a shared memory map belongs to the kernel at once: it outlives the process, whatever kills it.  Two slots are
written in turn, because devices of one run are at most one step apart: the last step that all of them completed is in one of theirs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workbench.runtime.flat_optimizer import FlatAdamW

_HEADER = 4
"""int64 words of a slot: steps taken (set to -1 while the slot is written), number of values, checksum, and one spare."""


class StepJournal:
    """Two slots of one optimizer's parameters and moments in a file of fixed size."""

    def __init__(self, path: Path, optimizer: FlatAdamW, *, writable: bool) -> None:
        """Open or make the file.  writable: False only reads, and never makes it."""
        self._vectors, self._optimizer = optimizer.state_vectors(), optimizer
        self._values = sum(vector.numel() for vector in self._vectors)
        self._words = 2 * _HEADER + self._values  # int32 words of a slot; a header word takes two
        self._words += self._words % 2  # keeps the second slot's int64 header aligned
        self._data: Tensor | None = None
        size = 2 * 4 * self._words
        found = path.stat().st_size if path.is_file() else -1
        if writable and found != size:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(bytes(size))  # takes the space: a map of a sparse file ends in SIGBUS on a full disk
            found = size
        if found == size:
            self._data = torch.from_file(str(path), shared=True, size=2 * self._words, dtype=torch.int32)

    def write(self) -> None:
        """Keep the optimizer as it is now, in place of the step before the last."""
        header, values = self._slot(self._optimizer.num_steps % 2)
        header[0] = -1
        at = 0
        for vector in self._vectors:
            values[at : at + vector.numel()].copy_(vector)
            at += vector.numel()
        header[1], header[2] = self._values, _checksum(values)
        header[0] = self._optimizer.num_steps

    def kept_steps(self) -> tuple[int, ...]:
        """Return after how many steps there is a whole record."""
        if self._data is None:
            return ()
        kept = []
        for index in (0, 1):
            header, values = self._slot(index)
            steps = int(header[0])
            if steps > 0 and steps % 2 == index and int(header[1]) == self._values and int(header[2]) == _checksum(values):
                kept.append(steps)
        return tuple(sorted(kept))

    def restore(self, num_steps: int) -> None:
        """Set the optimizer to what it was after so many steps, one of kept_steps."""
        assert num_steps in self.kept_steps(), f"no record after {num_steps} steps"
        _, values = self._slot(num_steps % 2)
        at = 0
        for vector in self._vectors:
            vector.copy_(values[at : at + vector.numel()])
            at += vector.numel()
        self._optimizer.set_num_steps(num_steps)

    def _slot(self, index: int) -> tuple[Tensor, Tensor]:
        assert self._data is not None, "the journal was opened to be read and is not there"
        slot = self._data[index * self._words : (index + 1) * self._words]
        return slot[: 2 * _HEADER].view(torch.int64), slot[2 * _HEADER : 2 * _HEADER + self._values].view(torch.float32)


def _checksum(values: Tensor) -> int:
    # A sum notices what a crash of the whole machine does, pages that never reached the disk; it costs a tenth of a CRC.
    return int(values.view(torch.int32).sum(dtype=torch.int64))
