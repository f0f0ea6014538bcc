"""Confidant: the attention heads of a layer divided among the processors of one device (section 3.3).

Processor j is a compute stream of the rank: "compute", "compute1", "compute2", ...  Operations, with the layer as stage and the processor
as part: ATTN attention of the processor's heads, MLP joins them and finishes the layer (on the first processor); MLPB and ATTNB backward.
Values: hidden:l.m the input of layer l; heads:l.m.j a processor's heads, hctx:l.m.j their context, ctx:l.m the rest's;
ghidden:l.m the gradient with respect to the top's output, gheads:l.m.j to a processor's heads; gpart:l.m and gpart:l.m.j the terms of the
gradient with respect to layer l's input (past the attention, and through each processor).
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import ScheduleError
from workbench.core.schedule import NONE, Op, Schedule, Value


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
