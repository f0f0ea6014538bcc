"""Galaxy+: ring all-gather and reduce-scatter in tiles, overlapped with the GEMMs at the ends of a block (section III-D, Fig. 9 and 10).

Rank i holds tile i of the sequence and its own columns of the weights.  Operations: GEMM on one tile (part = tile), ADD the ReduceSum of
a tile; tile-sized SEND and RECV between neighbours of the ring.
Values: tile:l._.j a tile of the block's input; out:l._.j the rank's columns of GEMM1 on tile j; product:l._.j the rank's term of GEMM2 on
tile j; partial:l.k.j the sum of k + 1 ranks' terms of tile j.
"""

from __future__ import annotations

from workbench.core.errors import ScheduleError
from workbench.core.schedule import NONE, Op, Schedule, Value, recv, send
from workbench.schedules.lowering import insert_transfers


def ring_allgather_gemm(num_ranks: int, *, layer: int = 0, overlapped: bool = True) -> Schedule:
    """Return AllGather and GEMM1 of a block on a ring (Eq. 11 and 12), complete with its transfers.

    overlapped: in step k rank i multiplies tile i - k while it sends that tile on.  Otherwise every GEMM waits for all tiles.
    With tile GEMMs of g and tile sends of s <= g seconds it takes N g overlapped, and (N - 1) s + N g otherwise.
    """
    _require_ring(num_ranks)
    ops = []
    for rank in range(num_ranks):
        order = [Value("tile", layer, NONE, (rank - step) % num_ranks) for step in range(num_ranks)]
        listed: list[Op] = []
        for step, tile in enumerate(order):
            if step > 0:
                listed.append(recv(tile, (rank - 1) % num_ranks, rank))
            if step < num_ranks - 1:
                listed.append(send(tile, rank, (rank + 1) % num_ranks))
            if overlapped:
                listed.append(Op("GEMM", layer, NONE, tile.part, (tile,), (Value("out", layer, NONE, tile.part),)))
        if not overlapped:
            listed += [Op("GEMM", layer, NONE, tile.part, tuple(order), (Value("out", layer, NONE, tile.part),)) for tile in order]
        ops.append(tuple(listed))
    tiles = range(num_ranks)
    return Schedule(
        ops=tuple(ops),
        inputs=tuple((Value("tile", layer, NONE, rank),) for rank in range(num_ranks)),
        outputs=(tuple(Value("out", layer, NONE, part) for part in tiles),) * num_ranks,
    )


def ring_gemm_reducescatter(num_ranks: int, *, layer: int = 0, overlapped: bool = True) -> Schedule:
    """Return GEMM2 and ReduceScatter of a block on a ring (Eq. 13 to 15), complete with its transfers.

    overlapped: in step k rank i multiplies tile i - 1 - k while the sum of step k - 1 is under way, then adds the sum that arrives.
    Otherwise the ring begins after the last GEMM.  Rank i ends with the sum of tile i.
    """
    _require_ring(num_ranks)
    last = num_ranks - 1
    ops = []
    for rank in range(num_ranks):
        listed = []
        gemms = []
        for step in range(num_ranks):
            part = (rank - 1 - step) % num_ranks
            product, total = Value("product", layer, NONE, part), Value("partial", layer, step, part)
            gemms.append(Op("GEMM", layer, NONE, part, (Value("out", layer, NONE, part),), (product,)))
            earlier = (Value("partial", layer, step - 1, part),) if step else ()
            add = Op("ADD", layer, step, part, (product, *earlier), (total,))
            listed += [gemms[-1], add] if overlapped else [add]
        ops.append(tuple(listed if overlapped else gemms + listed))
    tiles = range(num_ranks)
    return insert_transfers(
        Schedule(
            ops=tuple(ops),
            inputs=(tuple(Value("out", layer, NONE, part) for part in tiles),) * num_ranks,
            outputs=tuple((Value("partial", layer, last, rank),) for rank in range(num_ranks)),
        )
    )


def _require_ring(num_ranks: int) -> None:
    if num_ranks < 2:
        raise ScheduleError(f"A ring of {num_ranks} ranks was asked for.", "It has no neighbours.", "Use at least 2.")
