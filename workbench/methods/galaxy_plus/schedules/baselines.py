"""The baselines of Galaxy+ without tiles: Megatron-LM, and a pipeline (EdgeShard; Local); the schedule of
any paradigm.
"""

from __future__ import annotations

from workbench.core.schedule import ALLREDUCE, BROADCAST, NONE, Schedule, Value
from workbench.methods.galaxy_plus.schedules.builder import Builder, value_of
from workbench.methods.galaxy_plus.schedules.hybrid import tiled_inference
from workbench.methods.galaxy_plus.schedules.layout import Block, InferenceLayout, after


class _Whole(Builder):
    """The schedule of positions that have the whole sequence: Megatron-LM's, or a pipeline.

    Megatron-LM: all positions sum the products after each block, by a ring all-reduce; for a single token each position
    sends its product to all others.  Pipeline: one position after the other has whole layers; between two of them the
    residual stream travels.
    """

    def build(self, world_size: int | None) -> Schedule:
        """Return the schedule.  Decoding runs only the last stack."""
        layout = self.layout
        for stack in range(len(layout.stacks))[-1:] if layout.is_decoding else range(len(layout.stacks)):
            first, end = layout.first_blocks[stack : stack + 2]
            block, [tile] = layout.blocks[first], layout.tiles[stack]
            embedded = value_of("emb", first, tile)
            self.embed(stack, [embedded])
            others = [position for position in self._connecting(block) if position]
            if layout.plan.paradigm == "tensor" and others and not layout.is_decoding:
                wide = value_of("wide", first, tile)
                self.collective(BROADCAST, first, [(embedded,)] + [()] * len(others), wide)
                for position in self._connecting(block):
                    self.add(
                        position, "ENTER", first, 0, [wide], [value_of(name, first, tile) for name in ("hid", "res")]
                    )
            else:
                self._move(embedded, 0, block)
            for block in layout.blocks[first:end]:
                for position in layout.members(block):
                    if block.kind == "cross" and not layout.is_decoding:
                        self.memory_keys(block, position)
                    self.multiply(block, position, (tile,))
                    entered = value_of("qkv", block.number, tile)
                    self.leave(block, position, (tile,), [entered], [self._product(block, position)])
                self._sum(block)
        self.head([Value("hid", layout.end, NONE, 0)])
        return self.schedule(world_size)

    def _connecting(self, block: Block) -> tuple[int, ...]:
        """Return the positions that have the residual stream of a block."""
        return (
            self.layout.members(block)
            if self.layout.plan.paradigm == "pipeline"
            else tuple(range(self.layout.num_positions))
        )

    def _product(self, block: Block, position: int) -> Value:
        return Value("prod", block.number, position if self.layout.is_decoding else NONE, 0)

    def _move(self, stream: Value, source: int, block: Block) -> None:
        """Send the residual stream to the positions that need it before a block, where it is normalised."""
        [tile] = self.layout.tiles[block.stack]
        connecting = self._connecting(block)
        for position in connecting:
            if position != source:
                self.send(stream, source, position)
        for position in connecting:
            self.enter_stack(block, position, tile, is_own=True)

    def _sum(self, block: Block) -> None:
        """Append the sum of a block's products and its connection, and send what other positions need."""
        layout, members, connecting = self.layout, self.layout.members(block), self._connecting(block)
        [tile] = layout.tiles[block.stack]
        products = {position: self._product(block, position) for position in members}
        terms = list(products.values())
        if layout.is_decoding:
            for position in members:
                for other in after(connecting, position, 1, layout.num_positions):
                    self.send(products[position], position, other)
        elif len(connecting) > 1:
            total = value_of("sum", block.number, tile)
            self.collective(
                ALLREDUCE,
                block.number,
                [[products[position]] if position in products else [] for position in connecting],
                total,
            )
            terms = [total]
        for position in connecting:
            written = self.connect(block, position, tile, terms)
        if layout.plan.paradigm != "pipeline":
            return
        if written.name == "emb":
            self._move(written, position, layout.blocks[block.number + 1])
        elif written.name == "mem":
            decoders = {self._connecting(other) for other in layout.blocks[block.number + 1 :]}
            for [owner] in sorted(decoders - {(position,)}):
                self.send(written, position, owner)
        elif block.number + 1 == layout.end and position:
            self.send(written, position, 0)


def inference_schedule(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence by the plan's paradigm, or of one more token, complete with its transfers.

    world_size: number of the cluster's devices; ranks that the plan does not use have no operations.
    """
    if layout.plan.paradigm in ("hybrid", "sequence") and not layout.is_decoding:
        return tiled_inference(layout, world_size)
    return _Whole(layout).build(world_size)
