"""Open and close gloo groups: rendezvous in the run's folder for emulated devices, from the environment under torchrun."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from workbench.core.errors import GroupNotFormedError
from workbench.runtime.context import RankContext


def open_group(
    context: RankContext, timeout_s: float = 30.0, *, name: str = "main", is_wanted: Callable[[], bool] = lambda: True
) -> dist.ProcessGroup:
    """Return a gloo group of all ranks; it is torch.distributed's default group until `close_group`.

    timeout_s: after how long a silent peer is an error.  name: a fresh one for each group that one run opens.
    is_wanted: asked while others are waited for; once it says no, waiting ends.
    Raises GroupNotFormedError, a RuntimeSetupError, which names the ranks that did not come.
    """
    close_group()
    timeout = timedelta(seconds=timeout_s)
    asked = f"Device '{context.device.name}' (rank {context.rank} of {context.world_size}) tried to join the group '{name}'."
    try:
        if context.rendezvous:
            if context.interface:
                os.environ["GLOO_SOCKET_IFNAME"] = context.interface
            folder = Path(context.rendezvous) / name
            folder.mkdir(parents=True, exist_ok=True)
            store, rank, world_size = dist.FileStore(str(folder / "store"), context.world_size), context.rank, context.world_size
            store.set_timeout(timeout)
        else:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            # Keys of its own: those of a former group name addresses at which nobody listens any more.
            store = dist.PrefixStore(f"group/{context.generation}/{name}", store)
        missing = _call_the_roll(store, rank, world_size, timeout_s, is_wanted)
        if missing:
            raise GroupNotFormedError(
                asked,
                f"It was given up: another group is wanted. Not there yet: {missing}."
                if not is_wanted()
                else f"It did not form within {timeout_s:g} s: rank {', '.join(map(str, missing))} did not come.",
                "See which device failed first; run again.",
            )
        _forget_failures()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        close_group()
        raise GroupNotFormedError(
            asked,
            f"It did not form within {timeout_s:g} s: {str(error).splitlines()[0]}.",
            "See which device failed first; run again.",
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return group


def _call_the_roll(store: dist.Store, rank: int, world_size: int, timeout_s: float, is_wanted: Callable[[], bool]) -> list[int]:
    """Wait until all ranks are there; return those that are not after timeout_s, or when the group is no longer wanted.

    gloo's own waiting can be ended by nothing but its timeout, and does not tell who was missing.
    """
    store.set(f"here/{rank}", "")
    missing, end_s, pause_s = [*range(world_size)], time.monotonic() + timeout_s, 0.001
    while True:
        missing = [other for other in missing if not store.check([f"here/{other}"])]
        if not missing or time.monotonic() > end_s or not is_wanted():
            return missing
        time.sleep(pause_s)
        pause_s = min(0.02, 1.5 * pause_s)


def _forget_failures() -> None:
    """Let torch name the next group as other processes name it.

    It counts groups by process, and a group that could not be made stays counted: later ones would look for their peers under other
    keys than these use, and never find them (torch 2.13; the count is put back by destroy_process_group alone).
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


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
