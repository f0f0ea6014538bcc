"""Galaxy+: ring all-gather and reduce-scatter in tiles, overlapped with the GEMMs at the ends of a block (section III-D, Fig. 9 and 10).

Rank i holds tile i of the sequence and its own columns of the weights.  Operations: GEMM on one tile (part = tile), ADD the ReduceSum of
a tile; tile-sized SEND and RECV between neighbours of the ring.
Values: tile:l._.j a tile of the block's input; out:l._.j the rank's columns of GEMM1 on tile j; product:l._.j the rank's term of GEMM2 on
tile j; partial:l.k.j the sum of k + 1 ranks' terms of tile j.

Confidant: the attention heads of a layer divided among the processors of one device (section 3.3).
Processor j is a compute stream of the rank: "compute", "compute1", "compute2", ...  Operations, with the layer as stage and the processor
as part: ATTN attention of the processor's heads, MLP joins them and finishes the layer (on the first processor); MLPB and ATTNB backward.
Values: hidden:l.m the input of layer l; heads:l.m.j a processor's heads, hctx:l.m.j their context, ctx:l.m the rest's;
ghidden:l.m the gradient with respect to the top's output, gheads:l.m.j to a processor's heads; gpart:l.m and gpart:l.m.j the terms of the
gradient with respect to layer l's input (past the attention, and through each processor).
"""

from __future__ import annotations

from collections.abc import Sequence

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


def stream_of(processor: int) -> str:
    """Return the name of a processor's compute stream."""
    return f"compute{processor}" if processor else "compute"


def split_heads(heads_per_processor: Sequence[int], *, num_layers: int = 1, backward: bool = True, micro_batch: int = 0) -> Schedule:
    """Return forward (and backward) of `num_layers` layers on one rank; a processor with 0 heads takes no part in the attention."""
    processors = [processor for processor, heads in enumerate(heads_per_processor) if heads > 0]
    if not processors or num_layers < 1 or min(heads_per_processor) < 0:
        asked = f"{num_layers} layers with heads divided as {tuple(heads_per_processor)} were asked for."
        raise ScheduleError(asked, "That is none.", "Give it a layer and a head.")
    m = micro_batch
    ops: list[Op] = []
    for layer in range(num_layers):
        for part in processors:
            writes = (Value("heads", layer, m, part), *((Value("hctx", layer, m, part),) if backward else ()))
            ops.append(Op("ATTN", layer, m, part, (Value("hidden", layer, m),), writes, (), stream_of(part)))
        # The residual connection reads the layer's input once more.
        reads = (Value("hidden", layer, m), *(Value("heads", layer, m, part) for part in processors))
        ops.append(Op("MLP", layer, m, NONE, reads, (Value("hidden", layer + 1, m), *((Value("ctx", layer, m),) if backward else ()))))
    for layer in reversed(range(num_layers if backward else 0)):
        # On the residual connection the gradient goes past the attention, into the sum that the layer below reads.
        past = Value("gpart", layer, m)
        reads = (Value("ctx", layer, m), *_gradients(layer + 1, m, processors, num_layers))
        ops.append(Op("MLPB", layer, m, NONE, reads, (past, *(Value("gheads", layer, m, part) for part in processors))))
        for part in processors:
            reads = (Value("hctx", layer, m, part), Value("gheads", layer, m, part))
            ops.append(Op("ATTNB", layer, m, part, reads, (Value("gpart", layer, m, part),), (), stream_of(part)))
    inputs = (Value("hidden", 0, m), *((Value("ghidden", num_layers, m),) if backward else ()))
    outputs = (Value("hidden", num_layers, m), *(_gradients(0, m, processors, num_layers) if backward else ()))
    return Schedule(ops=(tuple(ops),), inputs=(inputs,), outputs=(outputs,))


def _gradients(layer: int, m: int, processors: Sequence[int], num_layers: int) -> tuple[Value, ...]:
    """Return the terms whose sum is the gradient with respect to a layer's input (at the top: the one that is given)."""
    if layer == num_layers:
        return (Value("ghidden", layer, m),)
    return (Value("gpart", layer, m), *(Value("gpart", layer, m, part) for part in processors))
