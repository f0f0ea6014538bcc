"""Recompute activations in the backward pass, layer by layer (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", 2016; on phones: MeBP, arXiv 2510.03425).

A stage that recomputes keeps only the input of each layer between F and B.  R is a layer's forward pass again, right
before that layer's backward pass, so the activations of one layer are in memory at a time.  R does not need the
gradient: a stage that waits for it recomputes meanwhile.
A stage with its activations on the disk writes those of each layer in F, and READ takes the place of R (MeBP maps
activations into memory from files).
Operations: the part of R and of these B is the layer.  Values: in5:s.m.r the input of layer 5 in stage s on rank r,
ctx5:s.m.r its autograd context, grad5:s.m.r the gradient with respect to its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.core.costs import Spec
from workbench.core.plan import DISK, KEEP, Plan, Stage
from workbench.core.schedule import Op, Schedule, Value

AGAIN, READ = "R", "READ"
INPUT, CONTEXT, GRADIENT = "in", "ctx", "grad"
Size = Callable[[Value], Spec]
"""Returns a value's size (see TableCosts)."""


def of_layer(value: Value, name: str, layer: int) -> Value:
    """Return the value of one layer that replaces a stage's.  name: INPUT, CONTEXT or GRADIENT."""
    return value._replace(name=f"{name}{layer}")


def sizes_in_layers(plan: Plan, sizes: Callable[[int], tuple[Size, Size, Size]]) -> dict[str, Size]:
    """Return the sizes of the values of those layers of a plan whose stages do not keep their activations, by name.

    sizes: layer -> those of its input, its context, and the gradient of its input.
    """
    stages = [stage for stage in plan.stages if stage.activations != KEEP]
    return {
        f"{name}{layer}": size
        for stage in stages
        for layer in range(stage.start, stage.stop)
        for name, size in zip((INPUT, CONTEXT, GRADIENT), sizes(layer), strict=True)
    }


def recompute(schedule: Schedule, plan: Plan, lowest: Callable[[int], int] = lambda microbatch: 0) -> Schedule:
    """Return a pipeline's schedule in which the stages that the plan marks recompute or read their activations.

    schedule: a schedule without its transfers.  lowest: gives the first layer of a micro-batch that F and B compute;
    the stages below keep nothing.  Each F writes the layers' inputs instead of its context.  Each B
    becomes, from the last layer to the first, R and B of the layer.  If B follows right after F, F keeps the context
    of the last layer, which needs no R.
    A context that is carried over to the next window is replaced by the inputs of the layers.
    """
    stages = {rank: stage for stage in plan.stages if stage.activations != KEEP for rank in stage.ranks}
    if not stages:
        return schedule
    ops = list(schedule.ops)
    for rank, stage in stages.items():
        ops[rank] = _layer_by_layer(schedule.ops[rank], stage, lowest)

    def inputs_of(rank: int, value: Value) -> tuple[Value, ...]:
        if rank not in stages or value.name != CONTEXT:
            return (value,)
        return tuple(of_layer(value, INPUT, layer) for layer in range(stages[rank].start, stages[rank].stop))

    def replaced(per_rank: tuple[tuple[Value, ...], ...]) -> tuple[tuple[Value, ...], ...]:
        return tuple(
            tuple(layer_input for value in values for layer_input in inputs_of(rank, value))
            for rank, values in enumerate(per_rank)
        )

    carried = tuple(
        tuple(
            pair
            for output, given_as in pairs
            for pair in zip(inputs_of(rank, output), inputs_of(rank, given_as), strict=True)
        )
        for rank, pairs in enumerate(schedule.carried)
    )
    return replace(
        schedule,
        ops=tuple(ops),
        inputs=replaced(schedule.inputs),
        outputs=replaced(schedule.outputs),
        carried=carried,
    )


def _layer_by_layer(ops: tuple[Op, ...], stage: Stage, lowest: Callable[[int], int]) -> tuple[Op, ...]:
    listed: list[Op] = []
    is_adjacent = False
    for index, op in enumerate(ops):
        layers = range(max(stage.start, lowest(op.microbatch)), stage.stop) if op.kind in "FB" else range(0)
        if op.kind == "F":
            following = ops[index + 1] if index + 1 < len(ops) else None
            is_adjacent = following is not None and (following.kind, following.microbatch) == ("B", op.microbatch)
            listed.append(_keeping_inputs(op, layers, keeps_last=is_adjacent))
        elif op.kind == "B":
            kind = READ if stage.activations == DISK else AGAIN
            listed += _backward(op, kind, layers, has_last=is_adjacent)
            is_adjacent = False
        else:
            listed.append(op)
    return tuple(listed)


def _keeping_inputs(op: Op, layers: range, *, keeps_last: bool) -> Op:
    """Return a stage's forward pass that keeps inputs; the last layer's context, too, if `keeps_last`."""
    *ends, context = op.writes
    assert context.name == CONTEXT, f"{op.label} writes no context"
    inputs = [of_layer(context, INPUT, layer) for layer in layers[: len(layers) - keeps_last]]
    last = [of_layer(context, CONTEXT, layers[-1])] if keeps_last else []
    return op._replace(writes=(*ends, *inputs, *last))


def _backward(op: Op, kind: str, layers: range, *, has_last: bool) -> list[Op]:
    """Return the operations that replace a stage's backward pass.  kind: AGAIN or READ.  has_last: whether F has stored
    the last layer's context.
    """
    [context] = (value for value in op.reads if value.name == CONTEXT)
    weights = tuple(value for value in op.reads if value.name == "weight")
    gradients = tuple(value for value in op.reads if value != context and value not in weights)
    listed = []
    for layer in reversed(layers):
        layer_context = of_layer(context, CONTEXT, layer)
        place = (op.stage, op.microbatch, layer)
        if not (has_last and layer == layers[-1]):
            listed.append(Op(kind, *place, (of_layer(context, INPUT, layer), *weights), (layer_context,)))
        below = of_layer(context, GRADIENT, layer)
        writes = op.writes if layer == layers[0] else (below,)
        listed.append(Op(op.kind, *place, (layer_context, *weights, *gradients), writes))
        gradients = (below,)
    return listed
