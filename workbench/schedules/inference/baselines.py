"""The baselines of Galaxy+: Megatron-LM, sequence parallelism, and a pipeline (EdgeShard; Local); the schedule of any paradigm."""

from __future__ import annotations

from workbench.core.errors import ScheduleError
from workbench.core.schedule import ALLREDUCE, BROADCAST, NONE, Schedule, Value
from workbench.schedules.inference.hybrid import hybrid_inference
from workbench.schedules.inference.layout import Block, Builder, InferenceLayout, Tile, after

_ENTER = {"attention": ("QKV", "qkv"), "cross": ("CQ", "q"), "feed_forward": ("UP", "act")}
_LEAVE = {"attention": "OUT", "cross": "COUT", "feed_forward": "DOWN"}


def tensor_inference(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return Megatron-LM's schedule: every position has the whole sequence, and all positions sum the products after each block.

    The sum is a ring all-reduce; for a single token each position sends its product to all others.
    """
    builder = Builder(layout)
    stacks = [len(layout.stacks) - 1] if layout.is_decoding else range(len(layout.stacks))
    for stack in stacks:
        first, end = layout.first_blocks[stack : stack + 2]
        embedded, wide = Value("emb", first, NONE, 0), Value("wide", first, NONE, 0)
        builder.embed(stack, [embedded])
        if layout.num_positions == 1:
            wide = embedded
        elif not layout.is_decoding:
            builder.collective(BROADCAST, first, [(embedded,)] + [()] * (layout.num_positions - 1), wide)
        else:
            wide = embedded
            for position in range(1, layout.num_positions):
                builder.send(embedded, 0, position)
        for position in range(layout.num_positions):
            builder.add(position, "ENTER", first, 0, [wide], _hidden(first))
        for block in layout.blocks[first:end]:
            for position in layout.members(block):
                _products(builder, block, position)
            _sum(builder, block)
    builder.head(_hidden(layout.end)[:1])
    return builder.schedule(world_size)


def _hidden(number: int) -> list[Value]:
    return [Value("hid", number, NONE, 0), Value("res", number, NONE, 0)]


def _products(builder: Builder, block: Block, position: int) -> None:
    number = block.number
    kind, name = _ENTER[block.kind]
    entered, context = Value(name, number, NONE, 0), Value("ctx", number, NONE, 0)
    if block.kind == "cross" and not builder.layout.is_decoding:
        builder.add(
            position, "CKV", number, 0, [Value("mem", builder.layout.first_blocks[block.stack], NONE, 0)], [Value("kv", number, NONE, 0)]
        )
    builder.add(position, kind, number, 0, _hidden(number)[:1], [entered])
    if block.kind == "attention":
        builder.add(position, "ATT", number, 0, [entered], [context])
    elif block.kind == "cross":
        keys = [] if builder.layout.is_decoding else [Value("kv", number, NONE, 0)]  # in the cache
        builder.add(position, "CATT", number, 0, [entered, *keys], [context])
    content = entered if block.kind == "feed_forward" else context
    builder.add(position, _LEAVE[block.kind], number, 0, [content], [_product(builder.layout, block, position)])


def _product(layout: InferenceLayout, block: Block, position: int) -> Value:
    return Value("prod", block.number, position if layout.is_decoding else NONE, 0)


def _sum(builder: Builder, block: Block) -> None:
    layout, members = builder.layout, builder.layout.members(block)
    number, following = block.number, block.number + 1
    everywhere = range(layout.num_positions)
    writes = _hidden(following) if following not in layout.first_blocks else _hidden(following)[:1]
    if following in layout.first_blocks and following != layout.end:
        writes = [Value("mem", following, NONE, 0)]
    products = {position: _product(layout, block, position) for position in members}
    terms = [products[position] for position in members]
    if layout.is_decoding:
        for position in members:
            for other in after(tuple(everywhere), position, 1, layout.num_positions):
                builder.send(products[position], position, other)
    elif layout.num_positions > 1:
        total = Value("sum", number, NONE, 0)
        builder.collective(ALLREDUCE, number, [[products[position]] if position in products else [] for position in everywhere], total)
        terms = [total]
    for position in everywhere:
        builder.add(position, "CONN", number, 0, [*terms, Value("res", number, NONE, 0)], writes)


def sequence_inference(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return sequence parallelism: each position has all weights and its own tokens; keys and values go around the ring in each layer."""
    return _Sequence(layout).build(world_size)


class _Sequence(Builder):
    """One group of tiles for each position, in token order."""

    def build(self, world_size: int | None) -> Schedule:
        """Return the schedule."""
        layout = self.layout
        for stack in range(len(layout.stacks)):
            first, end = layout.first_blocks[stack : stack + 2]
            if stack:
                self._relay("mem", first, layout.tiles[stack - 1])
            tiles = layout.tiles[stack]
            self.embed(stack, [Value("emb", first, NONE, tile.number) for tile in tiles])
            for tile in tiles:
                if tile.position:
                    self.send(Value("emb", first, NONE, tile.number), 0, tile.position)
            for tile in tiles:
                names = ("hid", "res")
                self.add(
                    tile.position, "ENTER", first, tile.number, [Value("emb", first, NONE, tile.number)], self._values(names, first, tile)
                )
            for block in layout.blocks[first:end]:
                self._block(block, tiles)
        self.head([Value("hid", layout.end, NONE, tile.number) for tile in layout.tiles[-1]])
        return self.schedule(world_size)

    @staticmethod
    def _values(names: tuple[str, ...], number: int, tile: Tile) -> list[Value]:
        return [Value(name, number, NONE, tile.number) for name in names]

    def _block(self, block: Block, tiles: tuple[Tile, ...]) -> None:
        number = block.number
        kind, name = _ENTER[block.kind]
        for tile in tiles:
            entered = self._values(("q", "kv") if block.kind == "attention" else (name,), number, tile)
            self.add(tile.position, kind, number, tile.number, self._values(("hid",), number, tile), entered)
            if block.kind == "attention":
                self._start("kv", number, tile, tiles)
        if block.kind == "attention":
            self._relay("kv", number, tiles)
        for tile in tiles:
            content = self._values(("ctx",), number, tile)
            if block.kind == "attention":
                reads = [Value("q", number, NONE, tile.number), *(Value("kv", number, NONE, other.number) for other in tiles)]
                self.add(tile.position, "ATT", number, tile.number, reads, content)
            elif block.kind == "cross":
                memory = self.layout.tiles[block.stack - 1]
                first = self.layout.first_blocks[block.stack]
                keys = Value("kv", number, NONE, 0)
                self.add(tile.position, "CKV", number, 0, [Value("mem", first, NONE, other.number) for other in memory], [keys])
                self.add(tile.position, "CATT", number, tile.number, [Value("q", number, NONE, tile.number), keys], content)
            else:
                content = self._values(("act",), number, tile)
            product = self._values(("prod",), number, tile)
            self.add(tile.position, _LEAVE[block.kind], number, tile.number, content, product)
            self._connect(block, tile, product)

    def _connect(self, block: Block, tile: Tile, product: list[Value]) -> None:
        layout, number = self.layout, block.number + 1
        if number not in layout.first_blocks:
            writes = self._values(("hid", "res"), number, tile)
        else:
            writes = self._values(("hid",) if number == layout.end else ("mem",), number, tile)
        self.add(tile.position, "CONN", block.number, tile.number, [*product, Value("res", block.number, NONE, tile.number)], writes)
        if number == layout.end and tile.position:
            self.send(writes[0], tile.position, 0)
        elif number in layout.first_blocks and number != layout.end:
            self._start("mem", number, tile, layout.tiles[block.stack + 1])

    def _ring(self, tile: Tile, receivers: tuple[Tile, ...]) -> tuple[int, ...]:
        positions = tuple(sorted({other.position for other in receivers}))
        return after(positions, tile.position, 1, self.layout.num_positions)

    def _start(self, name: str, number: int, tile: Tile, receivers: tuple[Tile, ...]) -> None:
        path = self._ring(tile, receivers)
        if path:
            self.send(Value(name, number, NONE, tile.number), tile.position, path[0])

    def _relay(self, name: str, number: int, tiles: tuple[Tile, ...]) -> None:
        """Forward received values; each position forwards in order of arrival."""
        receivers = self.layout.tiles[self.layout.blocks[number].stack]
        steps = []
        for tile in tiles:
            path = self._ring(tile, receivers)
            steps += [(step, position, path[step + 1], tile.number) for step, position in enumerate(path[:-1])]
        for _, position, following, part in sorted(steps):
            self.send(Value(name, number, NONE, part), position, following)


def pipeline_inference(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return a pipeline of whole layers with one sequence: one device after the other (EdgeShard); Local with one position.

    Values: lay:l the residual stream before layer l, mem the encoder's output.  Decoding runs only the decoder's layers.
    """
    builder = Builder(layout)
    plan, num_layers = layout.plan, sum(shape.num_layers for shape in layout.stacks)
    owners = [position for position, count in enumerate(plan.layers) for _ in range(count)]
    if len(owners) != num_layers:
        raise ScheduleError(f"A pipeline of {num_layers} layers was asked for.", f"The plan has {plan.layers}.", "Plan for this model.")
    memory = Value("mem", NONE, NONE, 0)
    at, layer = 0, 0
    for stack, shape in enumerate(layout.stacks):
        layers = range(layer, layer + shape.num_layers)
        layer += shape.num_layers
        if layout.is_decoding and stack < len(layout.stacks) - 1:
            continue
        is_encoder = stack < len(layout.stacks) - 1
        builder.embed(stack, [_lay(layers.start)])
        at = 0
        for number in layers:
            if owners[number] != at:
                builder.send(_lay(number), at, owners[number])
                at = owners[number]
            needs_memory = shape.has_cross_attention and not layout.is_decoding
            ends = number == layers.stop - 1
            writes = memory if ends and is_encoder else _lay(number + 1)
            builder.add(at, "LAYER", number, 0, [_lay(number), *([memory] if needs_memory else [])], [writes])
        if is_encoder:
            for position in sorted({owners[number] for number in range(layer, num_layers)} - {at}):
                builder.send(memory, at, position)
    if at:
        builder.send(_lay(num_layers), at, 0)
    builder.head([_lay(num_layers)])
    return builder.schedule(world_size)


def _lay(layer: int) -> Value:
    return Value("lay", layer, NONE, 0)


BUILDERS = {
    "hybrid": hybrid_inference,
    "tensor": tensor_inference,
    "sequence": sequence_inference,
    "pipeline": pipeline_inference,
}


def inference_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence by the plan's paradigm, complete with its transfers.

    world_size: of the cluster; ranks that the plan does not use have no operations.
    """
    return BUILDERS[layout.plan.paradigm](layout, world_size)


def decode_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one more token (a layout of InferenceLayout.decode): scheme 1 in every layer, or the pipeline."""
    return (pipeline_inference if layout.plan.paradigm == "pipeline" else tensor_inference)(layout, world_size)
