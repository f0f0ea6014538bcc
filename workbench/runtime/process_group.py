"""Open and close gloo groups (rendezvous through the leading process), and compare the ranks' programs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from workbench.core.errors import DeviceLostError, GroupNotFormedError
from workbench.core.program import require_same
from workbench.runtime.collectives import broadcast
from workbench.runtime.context import RankContext


def require_one_program(group: torch.distributed.ProcessGroup, program: str) -> None:
    """Check before the first step that all ranks have the same program.  Every rank of the group must call this.

    program: its text.  Raises ScheduleError on every rank, naming the first operation that differs, if a rank's program
    differs from rank 0's.
    """
    text = program.encode()
    own_digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own_digest) for _ in range(group.size())]
    group.allgather([digests], [own_digest]).wait()
    other = next((rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])), None)
    if other is None:
        return
    texts = []
    for root in (0, other):
        length = torch.tensor([len(text)])
        broadcast(group, root, length)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == root:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        broadcast(group, root, content)
        texts.append(bytes(content.tolist()).decode())
    require_same(*texts, ranks=(0, other))


LONGEST_WAIT_S = 24 * 3600.0
"""Time limit for a rank that a plan leaves idle: it waits while the others run whole epochs."""


def open_group(
    context: RankContext, timeout_s: float = 30.0, *, name: str = "main", is_wanted: Callable[[], bool] = lambda: True
) -> dist.ProcessGroup:
    """Open a gloo group of all ranks, which is torch.distributed's default group until `close_group`.

    timeout_s: how long a peer may be silent, in the devices' seconds.  name: must be new for each group that a run
    opens.
    is_wanted: polled while waiting for other ranks; waiting ends when it returns False.
    Raises GroupNotFormedError, a RuntimeSetupError, which names the missing ranks.
    """
    close_group()
    timeout_s *= context.dilation
    timeout = timedelta(seconds=timeout_s)
    request = (
        f"Device '{context.device.name}' (rank {context.rank} of {context.world_size}) tried to join the group "
        f"'{name}'."
    )
    try:
        if context.interface:
            os.environ["GLOO_SOCKET_IFNAME"] = context.interface
        assert context.channel is not None, "only ranks with a leader form groups"
        shared, rank, world_size = context.channel.store(), context.rank, context.world_size
        shared.set_timeout(timeout)
        store = dist.PrefixStore(name, shared)
        missing = _call_the_roll(store, rank, world_size, timeout_s, is_wanted)
        if missing:
            raise GroupNotFormedError(
                request,
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
            request,
            f"It did not form within {timeout_s:g} s: {str(error).splitlines()[0]}.",
            "See which device failed first; run again.",
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return group


def _call_the_roll(
    store: dist.Store, rank: int, world_size: int, timeout_s: float, is_wanted: Callable[[], bool]
) -> list[int]:
    """Wait for all ranks; return those missing after timeout_s, or when the group is no longer wanted.

    gloo's own wait ends only at its time-out and does not say which ranks are missing.
    """
    store.set(f"here/{rank}", "")
    missing, end_s, pause_s = [*range(world_size)], time.monotonic() + timeout_s, 0.001
    while True:
        missing = [other for other in missing if not store.check([f"here/{other}"])]
        if not missing or time.monotonic() > end_s or not is_wanted():
            return missing
        time.sleep(pause_s)
        pause_s = min(0.005, 1.5 * pause_s)


def _forget_failures() -> None:
    """Make torch give the next group the same name as in other processes.

    torch counts groups per process, and a failed group stays counted.  Later groups would then search for their peers
    under wrong keys and never find them (torch 2.13; only destroy_process_group resets the count).
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


def close_group() -> None:
    """Close the default group.  Does nothing if no group is open, and never raises."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class Meeting:
    """A barrier for all ranks of the default group, however long each of them still works.

    The wait ends at once if a rank dies or the leading process gives up, and after LONGEST_WAIT_S if a rank does not
    arrive.
    names: the devices' names, by rank.  given_up: returns why waiting is pointless, or None.
    """

    def __init__(self, names: Sequence[str], given_up: Callable[[], BaseException | None] = lambda: None) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._names, self._given_up = names, given_up
        self._rank, self._number = group.rank(), 0
        self._store = dist.PrefixStore("meeting", group.get_group_store())
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONGEST_WAIT_S))

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place, once all have arrived.  Raises DeviceLostError naming the missing
        ranks.
        """
        self._number += 1
        self._store.set(f"{self._number}/{self._rank}", "")
        work, begin_s, pause_s = self._group.allreduce([tensor]), time.monotonic(), 1e-4
        try:
            while not work.is_completed():
                given_up = self._given_up()
                if given_up is not None:
                    # The pending sum cannot be cancelled, and freeing a gloo group waits for it, so this group is never
                    # freed.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                    raise given_up
                time.sleep(pause_s)
                pause_s = min(0.01, 1.1 * pause_s)  # late by at most a tenth of the wait
            work.wait()
        except RuntimeError as error:
            missing = [
                f"'{name}' (rank {rank})"
                for rank, name in enumerate(self._names)
                if not self._store.check([f"{self._number}/{rank}"])
            ]
            raise DeviceLostError(
                f"Device '{self._names[self._rank]}' (rank {self._rank}) waited for the others at meeting "
                f"{self._number}.",
                f"Device {', '.join(missing) or 'of them'} did not come: {str(error).splitlines()[0]}; "
                f"waited {time.monotonic() - begin_s:.0f} s.",
                "See its own output; run again.",
            ) from error


@contextlib.contextmanager
def group(
    context: RankContext, timeout_s: float = 30.0, name: str = "main", is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[dist.ProcessGroup]:
    """Open a group for a `with` block (see open_group)."""
    try:
        yield open_group(context, timeout_s, name=name, is_wanted=is_wanted)
    finally:
        close_group()
