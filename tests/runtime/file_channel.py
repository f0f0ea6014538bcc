"""A rank's channel whose store is a file, for ranks that a test starts itself."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from workbench.runtime.context import Channel


class FileChannel(Channel):
    """The ranks of one folder meet."""

    def __init__(self, folder: str | Path, world_size: int) -> None:
        self._store = dist.FileStore(f"{folder}/store", world_size)

    def store(self) -> dist.Store:
        return self._store
