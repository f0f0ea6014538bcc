"""Run one collective on one rank over gloo: all-reduce, broadcast, all-gather, reduce-scatter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.costs import sent_bytes
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER, Op
from workbench.core.timeline import Span
from workbench.runtime.pacing import PacedLinks

_TAG = (1 << 30) + 1
"""Message tags for ring transfers, above the tags of a Transport."""


def run_collective(
    op: Op,
    content: torch.Tensor,
    rows: Sequence[int],
    group: torch.distributed.ProcessGroup,
    rank: int,
    paced_links: PacedLinks | None,
) -> tuple[torch.Tensor, Span]:
    """Run a collective; return the result on this rank and the time span.

    content: this rank's contribution.  ALLREDUCE sums it in place.  BROADCAST overwrites it in place with the content of op.ranks[0].
    ALLGATHER returns the contents of all members, joined along dimension 0 in the order of op.ranks.  REDUCESCATTER returns this
    rank's block of the sum; the blocks lie along dimension 0 in the order of op.ranks.
    rows: size of each member's part along dimension 0 (ALLGATHER, REDUCESCATTER).  group: the process group of op.ranks.
    Raises DeviceLostError if a member died or became silent.
    """
    start = time.monotonic()
    position = op.ranks.index(rank)
    whole = content
    try:
        if op.kind == ALLREDUCE:
            group.allreduce([content]).wait()
            result = content
        elif op.kind == BROADCAST:
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.rootTensor = _number(op, op.ranks[0]), 0
            group.broadcast([content], options).wait()
            result = content
        elif op.kind == ALLGATHER:
            result = whole = _all_gather(op, content, rows, group, position)
        else:
            assert op.kind == REDUCESCATTER, f"{op.kind} is not a collective"
            result = _reduce_scatter(op, content, rows, group, position)
    except RuntimeError as error:
        members = ", ".join(map(str, op.ranks))
        raise DeviceLostError(
            f"{op.kind} of ranks {members} was in progress.",
            f"It failed: {str(error).splitlines()[0]}.",
            "See the first device that failed.",
        ) from error
    nbytes = whole.numel() * whole.element_size()
    if paced_links is not None:
        # All members leave a collective at the same time, so each can wait out the link time locally.
        time.sleep(paced_links.collective_s(op.kind, op.ranks, nbytes))
    return result, Span(rank, op, start, time.monotonic(), sent_bytes(op.kind, len(op.ranks), nbytes, is_root=position == 0))


def _number(op: Op, rank: int) -> int:
    """Return a member's rank within its group.  Groups number their members in ascending order."""
    return sorted(op.ranks).index(rank)


def _all_gather(op: Op, own: torch.Tensor, rows: Sequence[int], group: Any, position: int) -> torch.Tensor:
    whole = torch.empty((sum(rows), *own.shape[1:]), dtype=own.dtype)
    blocks = list(whole.split(list(rows)))
    blocks[position].copy_(own)
    size = len(rows)
    for step in range(size - 1):
        _pass_on(op, group, position, blocks[(position - step) % size], blocks[(position - step - 1) % size])
    return whole


def _reduce_scatter(op: Op, whole: torch.Tensor, rows: Sequence[int], group: Any, position: int) -> torch.Tensor:
    blocks, size = list(whole.split(list(rows))), len(rows)
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
    works = [group.recv([theirs], former, _TAG), group.send([mine.contiguous()], following, _TAG)]
    for work in works:
        work.wait()
