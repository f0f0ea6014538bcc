"""A model of whole numbers: every operation of the inference schedules on integers, exact, so that any split must give
the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.core.inference import StackShape
from workbench.core.schedule import ALLREDUCE, BROADCAST, RECV, SEND, Op, Schedule, Value
from workbench.methods.galaxy_plus.schedules import InferenceLayout

PRIME = 2_147_483_647
Numbers = tuple[int, ...]


def shape(
    num_layers: int = 2, num_units: int = 4, columns: int = 8, *, has_cross_attention: bool = False, **given: Any
) -> StackShape:
    """Return a small stack."""
    sizes = {"hidden_size": 16, "unit_bytes": 1000, "column_bytes": 100, "hidden_bytes": 64} | given
    return StackShape(
        num_layers=num_layers, num_units=num_units, columns=columns, has_cross_attention=has_cross_attention, **sizes
    )


def whole(stacks: Sequence[StackShape], ids: Sequence[Numbers]) -> Numbers:
    """Return the hidden states of the last stack, unsplit."""
    number, memory, hidden = 0, (), ()
    for shape, tokens in zip(stacks, ids, strict=True):
        hidden = tuple(map(_embedded, tokens))
        for _ in range(shape.num_layers):
            for kind in (
                ("attention", "cross", "feed_forward") if shape.has_cross_attention else ("attention", "feed_forward")
            ):
                shares = range(shape.columns if kind == "feed_forward" else shape.num_units)
                keys = memory if kind == "cross" else hidden
                hidden = tuple(
                    _connected(number, sum(_term(kind, number, share, h, keys) for share in shares), h) for h in hidden
                )
                number += 1
        memory = hidden
    return hidden


def run(
    schedule: Schedule,
    layout: InferenceLayout,
    ids: Sequence[Numbers],
    cache: dict[tuple[int, int], Numbers] | None = None,
) -> Numbers:
    """Return `out` of a schedule, executed rank by rank as its values become present.  cache: (rank, block) -> hidden
    states seen."""
    present: list[dict[Value, Any]] = [{} for _ in schedule.ops]
    for rank, inputs in enumerate(schedule.inputs):
        for value in inputs:
            present[rank][value] = ids[layout.blocks[value.stage].stack]
    places = [0] * schedule.world_size
    parts: dict[tuple[int, Op], list[Numbers]] = {}
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while places[rank] < len(ops):
                op = ops[places[rank]]
                if op.kind == SEND:
                    pass  # a send is its own stream: the receiver takes the value when it is there
                elif op.kind == RECV:
                    source, value = op.ranks[0], op.writes[0]
                    if value not in present[source]:
                        break
                    present[rank][value] = present[source][value]
                elif any(value not in present[rank] for value in op.reads):
                    break
                elif op.kind in (ALLREDUCE, BROADCAST):
                    ready = _collective(schedule, places, present, op, parts)
                    if ready is None:
                        break
                    present[rank][op.writes[0]] = ready
                else:
                    results = _compute(layout, rank, op, [present[rank][value] for value in op.reads], cache)
                    assert len(results) == len(op.writes), op
                    present[rank].update(zip(op.writes, results, strict=True))
                places[rank] += 1
                moved = True
    assert all(place == len(ops) for place, ops in zip(places, schedule.ops, strict=True)), "the schedule does not end"
    (out,) = [present[rank][value] for rank, outputs in enumerate(schedule.outputs) for value in outputs]
    return out


def _collective(
    schedule: Schedule, places: list[int], present: list[dict[Value, Any]], op: Op, parts: dict
) -> Numbers | None:
    """Return the sum (or the root's value) once every member has come to the operation."""
    for rank in op.ranks:
        at = next(
            index for index, other in enumerate(schedule.ops[rank]) if other._replace(reads=()) == op._replace(reads=())
        )
        if places[rank] < at or any(value not in present[rank] for value in schedule.ops[rank][at].reads):
            return None
        parts.setdefault(
            (rank, op._replace(reads=())), [present[rank][value] for value in schedule.ops[rank][at].reads]
        )
    contents = [content for rank in op.ranks for content in parts[rank, op._replace(reads=())]]
    return contents[0] if op.kind == BROADCAST else _added(contents)


def _compute(layout: InferenceLayout, rank: int, op: Op, contents: list[Any], cache: dict | None) -> list[Any]:
    kind = op.kind
    if kind == "EMB":
        hidden = tuple(map(_embedded, contents[0]))
        stack = layout.blocks[op.stage].stack
        return [
            hidden[layout.tiles[stack][value.part].start : layout.tiles[stack][value.part].stop] for value in op.writes
        ]
    if kind == "HEAD":
        return [_joined(contents)]
    if kind == "ENTER":
        return [contents[0]] * len(op.writes)
    block = layout.blocks[op.stage]
    position = layout.plan.position_of(rank)
    if kind in ("QKV", "CQ", "UP", "CKV"):
        return [_joined(contents)] * len(op.writes)
    if kind == "ADD":
        return [_added(contents)]
    if kind == "CONN":
        *terms, residual = contents
        total = _added(terms)
        return [tuple(_connected(op.stage, t, r) for t, r in zip(total, residual, strict=True))] * len(op.writes)
    tiles = layout.tiles[block.stack]
    if kind == "ATT":
        is_sequence = layout.plan.paradigm == "sequence"
        keys = _joined(contents[1:] if is_sequence else contents)
        start, stop = layout.span(op)
        queries = contents[0] if is_sequence else keys[start - layout.past : stop - layout.past]
        if cache is not None:
            keys = cache[rank, op.stage] = cache.get((rank, op.stage), ()) + keys
        return _cut(op, tiles, [(query, keys) for query in queries])
    if kind == "CATT":
        memory = cache["memory"] if len(contents) == 1 else contents[1]
        return _cut(op, tiles, [(query, memory) for query in contents[0]])
    # OUT, COUT, DOWN: this position's shares of the sum.
    first = sum(_shares(layout, block)[:position]) if block.is_split else 0
    shares = range(first, first + layout.width(block, position))
    if kind == "DOWN":
        products = [sum(_term(block.kind, op.stage, share, h, ()) for share in shares) for h in contents[0]]
    else:
        products = [
            sum(_term(block.kind, op.stage, share, h, keys) for share in shares) for h, keys in _joined(contents)
        ]
    return _cut(op, tiles, products)


def _shares(layout: InferenceLayout, block: Any) -> Numbers:
    return layout.columns[block.stack] if block.kind == "feed_forward" else layout.units[block.stack]


def _cut(op: Op, tiles: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
    """Divide what belongs to neighbouring tokens among the tiles that an operation writes."""
    first = tiles[op.writes[0].part].start
    return [tuple(tokens[tiles[value.part].start - first : tiles[value.part].stop - first]) for value in op.writes]


def _joined(contents: Sequence[tuple]) -> tuple:
    return tuple(token for content in contents for token in content)


def _added(contents: Sequence[Numbers]) -> Numbers:
    return tuple(sum(column) for column in zip(*contents, strict=True))


def _embedded(token: int) -> int:
    return (token * 7919 + 13) % PRIME


def _term(kind: str, number: int, share: int, hidden: int, keys: Sequence[int]) -> int:
    """Return what one unit or column adds to a token's sum: a token's own state, and for attention all the keys in
    their order."""
    weight = 31 * number + 7 * share + 3
    if kind == "feed_forward":
        return weight * hidden * hidden % PRIME
    return weight * hidden * sum((place + 1) * key for place, key in enumerate(keys)) % PRIME


def _connected(number: int, total: int, residual: int) -> int:
    return (total + 17 * number + residual) % PRIME
