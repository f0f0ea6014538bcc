"""Open and close gloo groups: rendezvous in the run's folder for emulated devices, from the environment under torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from workbench.core.errors import GroupNotFormedError
from workbench.runtime.context import RankContext


def open_group(context: RankContext, timeout_s: float = 30.0, *, name: str = "main") -> dist.ProcessGroup:
    """Return a gloo group of all ranks; it is torch.distributed's default group until `close_group`.

    timeout_s: after how long a silent peer is an error.  name: a fresh one for each group that one run opens.
    Raises GroupNotFormedError, a RuntimeSetupError.
    """
    close_group()
    timeout = timedelta(seconds=timeout_s)
    try:
        if context.rendezvous:
            if context.interface:
                os.environ["GLOO_SOCKET_IFNAME"] = context.interface
            folder = Path(context.rendezvous) / name
            folder.mkdir(parents=True, exist_ok=True)
            store = dist.FileStore(str(folder / "store"), context.world_size)
            store.set_timeout(timeout)
            dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size, timeout=timeout)
        else:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            # Keys of its own: those of a former group name addresses at which nobody listens any more.
            store = dist.PrefixStore(f"group/{context.generation}/{name}", store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        close_group()
        raise GroupNotFormedError(
            f"Device '{context.device.name}' (rank {context.rank} of {context.world_size}) tried to join the group '{name}'.",
            f"It did not form within {timeout_s:g} s: {str(error).splitlines()[0]}.",
            "See which device failed first; run again.",
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return group


def close_group(group: dist.ProcessGroup | None = None) -> None:
    """Close the default group (`group` is accepted for symmetry); does nothing when there is none, and never raises."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@contextlib.contextmanager
def group(context: RankContext, timeout_s: float = 30.0, name: str = "main") -> Iterator[dist.ProcessGroup]:
    """Open a group for a `with` block."""
    opened = open_group(context, timeout_s, name=name)
    try:
        yield opened
    finally:
        close_group(opened)
