"""Galaxy+: ring all-gather and reduce-scatter in tiles, overlapped with the GEMMs at the ends of a block (section
III-D, Fig. 9 and 10).

Rank i has tile i of the sequence and its own columns of the weights.  Operations: GEMM on one tile (part = tile), ADD
the ReduceSum of a tile; tile-sized SEND and RECV between neighbours of the ring.
Values: tile:l._.j a tile of the block's input; out:l._.j the rank's columns of GEMM1 on tile j; product:l._.j the
rank's term of GEMM2 on tile j; partial:l.k.j the sum of k + 1 ranks' terms of tile j.

Confidant: the attention heads of a layer divided among the processors of one device (section 3.3).
Processor j is a compute stream of the rank: "compute", "compute1", "compute2", ...  Operations have the layer as stage
and the processor as part: ATTN attention of the processor's heads; MLP joins them and finishes the layer (on the first
processor); MLPB and ATTNB backward.
If the columns of the feed-forward part are divided too (our extension): JOIN joins the heads, COLS computes a
processor's columns, and MLP joins those.
In a pipeline (divide_layers) BEGIN is the part before a stage's layers, such as an embedding, and END the part after
them.
Values: hidden:l.m the input of layer l; heads:l.m.j a processor's heads, hctx:l.m.j their context, lctx:l.m the rest's;
ghidden:l.m the gradient with respect to the top's output, gheads:l.m.j to a processor's heads; gpart:l.m and
gpart:l.m.j the terms of the gradient with respect to layer l's input (past the attention, and through each processor).
mid, cols, jctx, cctx, gmid and gcols are the same around the columns; bctx:s.m is BEGIN's context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan, Stage
from workbench.core.schedule import NONE, Op, Schedule, Value, recv, send
from workbench.schedules.division import Division
from workbench.schedules.lowering import insert_transfers

BEGIN, END = "BEGIN", "END"
CONTEXTS_INSIDE = frozenset({"bctx", "hctx", "jctx", "cctx", "lctx"})
"""The values that the operations of a divided layer store for their backward pass."""


def ring_allgather_gemm(num_ranks: int, *, layer: int = 0, overlapped: bool = True) -> Schedule:
    """Return AllGather and GEMM1 of a block on a ring (Eq. 11 and 12), complete with its transfers.

    overlapped: in step k rank i multiplies tile i - k while it forwards that tile.  Otherwise every GEMM waits for all
    tiles.
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
            listed += [
                Op("GEMM", layer, NONE, tile.part, tuple(order), (Value("out", layer, NONE, tile.part),))
                for tile in order
            ]
        ops.append(tuple(listed))
    tiles = range(num_ranks)
    return Schedule(
        ops=tuple(ops),
        inputs=tuple((Value("tile", layer, NONE, rank),) for rank in range(num_ranks)),
        outputs=(tuple(Value("out", layer, NONE, part) for part in tiles),) * num_ranks,
    )


def ring_gemm_reducescatter(num_ranks: int, *, overlapped: bool = True) -> Schedule:
    """Return GEMM2 and ReduceScatter of a block on a ring (Eq. 13 to 15), complete with its transfers.

    overlapped: in step k rank i multiplies tile i - 1 - k during the transfer of step k - 1's sum, then adds the sum
    that arrives.
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
            product, total = Value("product", 0, NONE, part), Value("partial", 0, step, part)
            gemms.append(Op("GEMM", 0, NONE, part, (Value("out", 0, NONE, part),), (product,)))
            earlier = (Value("partial", 0, step - 1, part),) if step else ()
            add = Op("ADD", 0, step, part, (product, *earlier), (total,))
            listed += [gemms[-1], add] if overlapped else [add]
        ops.append(tuple(listed if overlapped else gemms + listed))
    tiles = range(num_ranks)
    return insert_transfers(
        Schedule(
            ops=tuple(ops),
            inputs=(tuple(Value("out", 0, NONE, part) for part in tiles),) * num_ranks,
            outputs=tuple((Value("partial", 0, last, rank),) for rank in range(num_ranks)),
        )
    )


def _require_ring(num_ranks: int) -> None:
    if num_ranks < 2:
        raise ScheduleError(f"A ring of {num_ranks} ranks was asked for.", "It has no neighbours.", "Use at least 2.")


def stream_of(processor: int) -> str:
    """Return the name of a processor's compute stream."""
    return f"compute{processor}" if processor else "compute"


def split_heads(heads_per_processor: Sequence[int], *, num_layers: int = 1) -> Schedule:
    """Return forward and backward of `num_layers` layers on one rank; a processor with 0 heads takes no part in the
    attention.
    """
    processors = [processor for processor, heads in enumerate(heads_per_processor) if heads > 0]
    if not processors or num_layers < 1 or min(heads_per_processor) < 0:
        request = f"{num_layers} layers with heads divided as {tuple(heads_per_processor)} were asked for."
        raise ScheduleError(request, "That is none.", "Give it a layer and a head.")
    ops = [op for layer in range(num_layers) for op in _forward(layer, 0, processors, ())]
    end = Value("ghidden", num_layers, 0)
    terms: tuple[Value, ...] = (end,)
    for layer in reversed(range(num_layers)):
        listed, terms = _backward(layer, 0, processors, (), terms)
        ops += listed
    return Schedule(
        ops=(tuple(ops),), inputs=((Value("hidden", 0, 0), end),), outputs=((Value("hidden", num_layers, 0), *terms),)
    )


def divide_layers(schedule: Schedule, plan: Plan, divisions: Mapping[int, Division]) -> Schedule:
    """Return a pipeline's schedule in which some ranks compute their stage layer by layer, each layer divided over the
    rank's processors.

    schedule: a schedule without its transfers, with one rank per stage.  divisions: each rank's division.  Each F
    becomes BEGIN, the layers and END; each B becomes ENDB, the layers backward and BEGINB.  Both ends run on the first
    processor, so all processors work on one mini-batch at a time, with one version of the weights.  A layer's contexts
    of a mini-batch are carried over to the next window with the mini-batch's context.
    """
    ops, inputs, outputs, carried = (
        list(schedule.ops),
        list(schedule.inputs),
        list(schedule.outputs),
        list(schedule.carried),
    )
    for rank, division in divisions.items():
        index = plan.stage_of(rank)
        if index is None:
            continue
        ops[rank] = tuple(part for op in ops[rank] for part in _divided(op, plan.stages[index], division))
        values = (value for op in ops[rank] for value in (*op.reads, *op.writes))
        contexts = dict.fromkeys(value._replace(microbatch=0) for value in values if value.name in CONTEXTS_INSIDE)
        begun_batches = [value.microbatch for value in inputs[rank] if value.name == "ctx"]
        onward = [
            (output.microbatch, given_as.microbatch) for output, given_as in carried[rank] if output.name == "ctx"
        ]
        pairs = [(value._replace(microbatch=m), value._replace(microbatch=p)) for m, p in onward for value in contexts]
        inputs[rank] = (*inputs[rank], *(value._replace(microbatch=m) for m in begun_batches for value in contexts))
        outputs[rank] = (*outputs[rank], *(value for value, _ in pairs))
        carried[rank] = (*carried[rank], *pairs)
    return Schedule(ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs), carried=tuple(carried))


def _divided(op: Op, stage: Stage, division: Division) -> list[Op]:
    """Return the operations that replace one operation of a stage."""
    m, place, context = op.microbatch, (op.stage, op.microbatch, NONE), Value("bctx", op.stage, op.microbatch)
    heads, columns = division.processors("ATTN"), division.processors("COLS")
    if op.kind == "F":
        inside = [
            layer_op for layer in range(stage.start, stage.stop) for layer_op in _forward(layer, m, heads, columns)
        ]
        begin = Op(BEGIN, *place, op.reads, (Value("hidden", stage.start, m), context))
        return [begin, *inside, Op(END, *place, (Value("hidden", stage.stop, m),), op.writes)]
    if op.kind == "B":
        terms: tuple[Value, ...] = (Value("ghidden", stage.stop, m),)
        listed = [Op(f"{END}B", *place, op.reads, terms)]
        for layer in reversed(range(stage.start, stage.stop)):
            inside, terms = _backward(layer, m, heads, columns, terms)
            listed += inside
        weights = (value for value in op.reads if value.name == "weight")
        return [*listed, Op(f"{BEGIN}B", *place, (context, *weights, *terms), op.writes)]
    return [op]


def _forward(layer: int, m: int, heads: Sequence[int], columns: Sequence[int]) -> list[Op]:
    """Return a layer's forward pass.  heads, columns: the processors that have a part of them."""
    hidden, after = Value("hidden", layer, m), Value("hidden", layer + 1, m)
    partial = tuple(Value("heads", layer, m, part) for part in heads)
    ops = [
        Op("ATTN", layer, m, part, (hidden,), (value, Value("hctx", layer, m, part)), (), stream_of(part))
        for part, value in zip(heads, partial, strict=True)
    ]
    if columns:
        middle, summed = Value("mid", layer, m), partial
        partial = tuple(Value("cols", layer, m, part) for part in columns)
        ops.append(Op("JOIN", layer, m, NONE, (hidden, *summed), (middle, Value("jctx", layer, m))))
        ops += [
            Op("COLS", layer, m, part, (middle,), (value, Value("cctx", layer, m, part)), (), stream_of(part))
            for part, value in zip(columns, partial, strict=True)
        ]
        hidden = middle
    # The residual connection reads the block's input again.
    return [*ops, Op("MLP", layer, m, NONE, (hidden, *partial), (after, Value("lctx", layer, m)))]


def _backward(
    layer: int, m: int, heads: Sequence[int], columns: Sequence[int], above: tuple[Value, ...]
) -> tuple[list[Op], tuple[Value, ...]]:
    """Return a layer's backward pass, and the terms of the gradient with respect to its input.

    above: the terms of its output's gradient.
    """

    def parts(name: str, of: Sequence[int]) -> tuple[Value, ...]:
        return tuple(Value(name, layer, m, part) for part in of)

    # On the residual connection the gradient bypasses the parts and enters the sum that is read below.
    past, head_gradients = Value("gpart", layer, m), parts("gheads", heads)
    ops = []
    if columns:
        middle, to_columns = Value("gmid", layer, m), parts("gcols", columns)
        ops.append(Op("MLPB", layer, m, NONE, (Value("lctx", layer, m), *above), (middle, *to_columns)))
        for part, value in zip(columns, to_columns, strict=True):
            writes = (Value("gmid", layer, m, part),)
            ops.append(Op("COLSB", layer, m, part, (Value("cctx", layer, m, part), value), writes, (), stream_of(part)))
        ops.append(
            Op(
                "JOINB",
                layer,
                m,
                NONE,
                (Value("jctx", layer, m), middle, *parts("gmid", columns)),
                (past, *head_gradients),
            )
        )
    else:
        ops.append(Op("MLPB", layer, m, NONE, (Value("lctx", layer, m), *above), (past, *head_gradients)))
    for part, value in zip(heads, head_gradients, strict=True):
        ops.append(
            Op(
                "ATTNB",
                layer,
                m,
                part,
                (Value("hctx", layer, m, part), value),
                parts("gpart", (part,)),
                (),
                stream_of(part),
            )
        )
    return ops, (past, *parts("gpart", heads))
