"""Build the operation lists of all positions of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.errors import ScheduleError
from workbench.core.schedule import NONE, Op, RankList, Schedule, Value, send
from workbench.methods.galaxy_plus.schedules.layout import Block, InferenceLayout, Tile
from workbench.schedules.lowering import insert_receives


class _Kinds(NamedTuple):
    """A block's operation on received tiles, the value that it writes, and the block's last operation."""

    enter: str
    entered: str
    leave: str


KINDS = {
    "attention": _Kinds("QKV", "qkv", "OUT"),
    "cross": _Kinds("CQ", "q", "COUT"),
    "feed_forward": _Kinds("UP", "act", "DOWN"),
}


def value_of(name: str, number: int, tile: Tile, step: int = NONE) -> Value:
    """Return a tile's value at a block."""
    return Value(name, number, step, tile.number)


class Builder:
    """The operation lists of all positions, and the schedule's inputs and outputs."""

    def __init__(self, layout: InferenceLayout) -> None:
        self.layout = layout
        self.lists = [RankList() for _ in range(layout.num_positions)]

    def add(
        self,
        position: int,
        kind: str,
        stage: int,
        part: int,
        reads: Sequence[Value],
        writes: Sequence[Value],
        *,
        step: int = NONE,
        stream: str = "compute",
    ) -> None:
        """Append a compute operation to a position's list."""
        self.lists[position].ops.append(Op(kind, stage, step, part, tuple(reads), tuple(writes), (), stream))

    def collective(self, kind: str, stage: int, reads: Sequence[Sequence[Value]], write: Value) -> None:
        """Append a collective of all positions.  reads: the values read by each position."""
        for position, values in enumerate(reads):
            self.lists[position].ops.append(
                Op(kind, stage, NONE, NONE, tuple(values), (write,), self.layout.plan.ranks, "collective")
            )

    def send(self, value: Value, source: int, destination: int) -> None:
        """Append the SEND of a transfer between two positions."""
        ranks = self.layout.plan.ranks
        self.lists[source].ops.append(send(value, ranks[source], ranks[destination]))

    def embed(self, stack: int, writes: Sequence[Value]) -> None:
        """Append EMB of a stack on the first position."""
        first = self.layout.first_blocks[stack]
        ids = Value("ids", first)
        self.lists[0].inputs.append(ids)
        self.add(0, "EMB", first, NONE, (ids,), writes)

    def enter_stack(self, block: Block, position: int, tile: Tile, *, is_own: bool) -> None:
        """Append ENTER before a block.  is_own: whether the residual stream of the tile stays at this position."""
        writes = [value_of(name, block.number, tile) for name in ("hid", "res")[: 1 + is_own]]
        self.add(position, "ENTER", block.number, tile.number, [value_of("emb", block.number, tile)], writes)

    def multiply(self, block: Block, position: int, tiles: Sequence[Tile], names: Sequence[str] = ()) -> None:
        """Append the first product of a block on some tiles.

        names: names of the values that it writes, if they are not the usual one.
        """
        reads, first = [value_of("hid", block.number, tile) for tile in tiles], tiles[0]
        writes = [value_of(name, block.number, first) for name in names or (KINDS[block.kind].entered,)]
        self.add(position, KINDS[block.kind].enter, block.number, first.number, reads, writes)

    def memory_keys(self, block: Block, position: int) -> None:
        """Append the keys and values of the encoder's output."""
        memory = [
            value_of("mem", self.layout.first_blocks[block.stack], tile) for tile in self.layout.tiles[block.stack - 1]
        ]
        self.add(position, "CKV", block.number, 0, memory, [Value("kv", block.number, NONE, 0)])

    def leave(
        self, block: Block, position: int, tiles: Sequence[Tile], attended: Sequence[Value], products: Sequence[Value]
    ) -> None:
        """Append the second half of a block on some tiles.

        attended: the values that ATT reads.  products: the products of each tile.
        """
        number, first = block.number, tiles[0]
        entered = value_of(KINDS[block.kind].entered, number, first)
        contents = [entered] if block.kind == "feed_forward" else [value_of("ctx", number, tile) for tile in tiles]
        if block.kind == "attention":
            self.add(position, "ATT", number, first.number, attended, contents)
        elif block.kind == "cross":
            keys = [] if self.layout.is_decoding else [Value("kv", number, NONE, 0)]  # in the cache
            self.add(position, "CATT", number, first.number, [entered, *keys], contents)
        self.add(position, KINDS[block.kind].leave, number, first.number, contents, products)

    def connect(self, block: Block, position: int, tile: Tile, terms: Sequence[Value]) -> Value:
        """Append the connection of a tile after a block, and return the value that the next block begins with.

        `emb`: another position of a pipeline normalises it.
        """
        layout, number = self.layout, block.number + 1
        names: tuple[str, ...] = ("hid", "res")
        if number in layout.first_blocks:
            names = ("hid",) if number == layout.end else ("mem",)
        elif layout.plan.paradigm == "pipeline" and layout.members(layout.blocks[number]) != (position,):
            names = ("emb",)
        writes = [value_of(name, number, tile) for name in names]
        self.add(position, "CONN", block.number, tile.number, [*terms, value_of("res", block.number, tile)], writes)
        return writes[0]

    def head(self, reads: Sequence[Value]) -> None:
        """Append HEAD on the first position."""
        out = Value("out", self.layout.end)
        self.add(0, "HEAD", self.layout.end, NONE, reads, (out,))
        self.lists[0].outputs.append(out)

    def schedule(self, world_size: int | None) -> Schedule:
        """Return the schedule over ranks, complete with its receives; ranks that the plan does not use have no
        operations.
        """
        ranks = self.layout.plan.ranks
        size = max(ranks) + 1 if world_size is None else world_size
        if max(ranks) >= size:
            raise ScheduleError(
                f"A schedule for {size} ranks was asked for.", f"The plan uses {ranks}.", "Give the cluster's size."
            )
        by_rank = dict(zip(ranks, self.lists, strict=True))
        return insert_receives(Schedule.of([by_rank.get(rank, RankList()) for rank in range(size)]))
