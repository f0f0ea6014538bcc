"""Run collectives over gloo: all-reduce and broadcast are its own; all-gather and reduce-scatter are rings of messages.

gloo's own reduce-scatter costs as much as an all-reduce; a ring takes half.  On emulated links a collective ends when
the last member's device has had its time for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workbench.core.schedule import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER, Op
from workbench.runtime.ingress import Due
from workbench.runtime.pacing import RankLinks, behind, wait_until

_RING_TAG = (1 << 30) + 1
"""Message tags for ring transfers of collectives, above those of channels."""


class Begin(NamedTuple):
    """When a collective began on an emulated device, and on this machine, which may be behind; seconds of the monotonic
    clock.
    """

    device_s: float
    machine_s: float


class LatestBegin:
    """When the last member of a collective began it.  Every member makes one, before the collective itself.

    begin_s: when this member's emulated device began.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, begin_s: float) -> None:
        self._times = torch.tensor([begin_s, time.monotonic()], dtype=torch.float64)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX
        self._work = group.allreduce([self._times], options)

    def wait(self) -> Begin:
        """Return it once all members have begun.  Raises RuntimeError if a member died or became silent."""
        self._work.wait()
        return Begin(*self._times.tolist())


def end_on_links(op: Op, size: int, links: RankLinks, latest: Begin | None) -> tuple[float, float]:
    """Wait until a collective on a tensor of `size` bytes ends on emulated links; return when, and by how much too late
    that is, both in seconds.

    latest: when its last member began; None on shared air.  All members leave at the same time, so each waits alone.
    """
    if latest is None:
        return wait_until(time.monotonic() + links.collective_delay_s(op.kind, op.ranks)), 0.0
    due, done_s = Due(latest.device_s + links.collective_s(op.kind, op.ranks, size)), time.monotonic()
    if done_s < due.end_s:
        end_s = wait_until(due.end_s)
        end_s -= behind(due.end_s, end_s)
    else:
        end_s = done_s - min(behind(latest.device_s, latest.machine_s), due.late_s(done_s))
    return end_s, due.late_s(end_s)


def broadcast(group: torch.distributed.ProcessGroup, root: int, tensor: torch.Tensor) -> None:
    """Overwrite a tensor with that of a rank of the group."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def run_collective(op: Op, content: torch.Tensor, rows: Sequence[int], group: Any, position: int) -> torch.Tensor:
    """Run a collective of a group's members; return the result on this one.  position: its place in op.ranks.

    content: this member's contribution.  ALLREDUCE sums it in place.  BROADCAST overwrites it in place with the content
    of op.ranks[0].
    ALLGATHER returns the contents of all members, joined along dimension 0 in the order of op.ranks.  REDUCESCATTER
    returns this member's block of the sum; the blocks lie along dimension 0 in the order of op.ranks.
    rows: size of each member's part along dimension 0 (ALLGATHER, REDUCESCATTER).
    Raises RuntimeError if a member died or became silent.
    """
    if op.kind == ALLREDUCE:
        group.allreduce([content]).wait()
        return content
    if op.kind == BROADCAST:
        broadcast(group, _number(op, op.ranks[0]), content)
        return content
    if op.kind == ALLGATHER:
        return _all_gather(op, content, rows, group, position)
    assert op.kind == REDUCESCATTER, f"{op.kind} is not a collective"
    return _reduce_scatter(op, content, rows, group, position)


def _number(op: Op, rank: int) -> int:
    """Return a member's rank within its group.  Groups number their members in ascending order."""
    return sorted(op.ranks).index(rank)


def _all_gather(op: Op, block: torch.Tensor, rows: Sequence[int], group: Any, position: int) -> torch.Tensor:
    full = torch.empty((sum(rows), *block.shape[1:]), dtype=block.dtype)
    blocks = list(full.split(list(rows)))
    blocks[position].copy_(block)
    size = len(rows)
    for step in range(size - 1):
        _pass_on(op, group, position, blocks[(position - step) % size], blocks[(position - step - 1) % size])
    return full


def _reduce_scatter(op: Op, full: torch.Tensor, rows: Sequence[int], group: Any, position: int) -> torch.Tensor:
    blocks, size = list(full.split(list(rows))), len(rows)
    total = blocks[(position - 1) % size]
    for step in range(size - 1):
        term = blocks[(position - step - 2) % size]
        came = torch.empty_like(term)
        _pass_on(op, group, position, total, came)
        total = came.add_(term)
    return total.clone() if size == 1 else total


def _pass_on(op: Op, group: Any, position: int, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Send to the next ring member and receive from the previous one, at the same time."""
    size = len(op.ranks)
    following, former = (_number(op, op.ranks[(position + step) % size]) for step in (1, -1))
    works = [group.recv([theirs], former, _RING_TAG), group.send([mine.contiguous()], following, _RING_TAG)]
    for work in works:
        work.wait()
