"""Profile single-shot inference on this host by the very calls that a run makes (Galaxy+, section III-C, 'Galaxy+ Profiler')."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from workbench.methods.galaxy_plus.requests import shape_of_picture
from workbench.models.sharding import (
    LayerSlices,
    ModelLayout,
    ModelShard,
    ShardSpec,
    WeightSource,
    What,
    load_shard,
)
from workbench.profiler.inference import StackSizes, sizes_of_shape
from workbench.profiler.inference_timing import SHARES, TOKENS, Makers, MeasuredInference, measure_inference
from workbench.profiler.timing import Call

BUDGET_S = 25.0


def measure_host(
    layout: ModelLayout, source: WeightSource, *, longest: int, what: What, shares: Sequence[float] = SHARES, budget_s: float = BUDGET_S
) -> MeasuredInference:
    """Return what one core of this host takes for each operation of each stack.

    longest: tokens of the longest request.  shares: of a layer's units and columns that are timed.
    """
    tokens = (*(count for count in TOKENS if count < longest), longest)
    if what == "last":
        tokens = (1, *tokens)  # a text grows token by token
    first_bytes, last_bytes = layout.end_bytes
    return measure_inference(
        layout.name,
        sizes_of(layout),
        [stack_makers(layout, source, stack, what=what) for stack in range(len(layout.parts))],
        tokens=tuple(dict.fromkeys(tokens)),
        shares=shares,
        budget_s=budget_s,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
    )


def sizes_of(layout: ModelLayout) -> list[StackSizes]:
    """Return each stack's sizes as the profiler asks for them."""
    return [
        sizes_of_shape(
            part.shape,
            query_width=part.group_size * part.head_size,
            kv_width=part.head_size,
            heads_per_unit=part.group_size,
            is_gated=part.is_gated,
        )
        for part in layout.parts
    ]


def stack_makers(layout: ModelLayout, source: WeightSource, stack: int, *, what: What) -> Makers:
    """Return what to time of a stack: the operations of its first layer, on a device that has so many units or columns of it."""
    part, hidden_size = layout.parts[stack], layout.hidden_size
    layer = layout.blocks[part.first_block].layer
    numbers = {block.kind: block.number for block in layout.layer_blocks(layer)}
    attention, cross, feed_forward = numbers["attention"], numbers.get("cross_attention", -1), numbers["feed_forward"]

    @cache
    def shard(units: int = 0, columns: int = 0, ends: bool = False) -> ModelShard:
        own = LayerSlices(units=_range(units), columns=_range(columns), own_columns=columns)
        layers = tuple(own if index == layer else LayerSlices() for index in range(layout.num_layers))
        return load_shard(layout, ShardSpec(layers=layers, has_ends=ends, connects_all=False), source)

    def hidden(tokens: int) -> torch.Tensor:
        return torch.randn(1, tokens, hidden_size)

    def attend(tokens: int, units: int) -> Call:
        own = shard(units)
        with torch.inference_mode():
            projected = own.qkv(attention, hidden(tokens))
        begin = partial(own.begin, tokens, target_length=tokens)  # what is made once for a request counts with it
        return begin, lambda run: own.attend(attention, (projected,), run)

    def cross_attend(tokens: int, units: int) -> Call:
        own = shard(units)
        with torch.inference_mode():
            asked, memory = own.cross_query(cross, hidden(tokens)), own.cross_keys_values(cross, hidden(tokens))
        return partial(own.begin, tokens, target_length=tokens), lambda run: own.cross_attend(cross, (asked,), (memory,), run)

    def product(function: str, number: int, *, columns: bool = False, width: int = 0) -> Callable[[int, int], Call]:
        def make(tokens: int, units: int) -> Call:
            own = shard(columns=units) if columns else shard(units)
            given = torch.randn(1, tokens, width * units) if width else hidden(tokens)
            return partial(getattr(own, function), number, given)

        return make

    def connect(tokens: int, units: int) -> Call:
        return partial(shard(units=1).connect, attention, hidden(tokens), hidden(tokens))

    def add(tokens: int, units: int) -> Call:
        own, arrived = hidden(tokens), hidden(tokens)
        return lambda: arrived.add_(own)

    def embed(tokens: int, units: int) -> Call:
        ids = torch.ones(1, tokens, dtype=torch.int64)
        if layout.family.reads_images:
            ids = torch.zeros(1, shape_of_picture(layout)[0], shape_of_picture(layout)[1], dtype=torch.uint8)
        return partial(shard(units=1, ends=True).embed, stack, ids)

    makers: dict[str, Callable[[int, int], Call]] = {
        "QKV": product("qkv", attention),
        "ATT": attend,
        "OUT": product("out", attention, width=part.group_size * part.head_size),
        "UP": product("up", feed_forward, columns=True),
        "DOWN": product("down", feed_forward, columns=True, width=1),
        "CONN": connect,
        "ADD": add,
        "ENTER": lambda tokens, units: partial(shard(units=1).enter, stack, hidden(tokens)),
        "EMB": embed,
        "HEAD": lambda tokens, units: partial(shard(units=1, ends=True).head, hidden(tokens), what),
    }
    if part.shape.has_cross_attention:
        makers |= {
            "CQ": product("cross_query", cross),
            "CKV": product("cross_keys_values", cross),
            "CATT": cross_attend,
            "COUT": product("out", cross, width=part.head_size),
        }
    return makers


def _range(count: int) -> tuple[tuple[int, int], ...]:
    return ((0, count),) if count else ()
