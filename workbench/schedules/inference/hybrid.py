"""Galaxy+: hybrid model parallelism of schemes 1 and 2 with a ring of tiles between the blocks (sections III-B and III-D, Fig. 6 to 10).

A split block begins with a ring all-gather of the hidden tiles and ends with a ring reduce-scatter of the sums.  The tile's owner adds
the last term and then computes the connection.  With overlap every tile is multiplied when it arrives, and forwarded meanwhile (Fig. 9).
The products are computed in the order in which the ring needs them (Fig. 10), the owner's last.  If the second matrix works token by
token like the first (feed-forward, cross-attention), it follows on each tile at once, so both rings run at the same time.
In scheme 2 the owner runs its tiles through the feed-forward block one by one, and each starts on the ring as soon as it can.
The sums are added on a separate stream, as in a library of collectives, so the ring does not wait for a long product.
Positions without a part of a block's weights are not in its ring; positions without tokens own no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.core.schedule import NONE, RING, Schedule, Value
from workbench.schedules.inference.layout import Block, Builder, InferenceLayout, Tile, after

Group = tuple[Tile, ...]


class _Kinds(NamedTuple):
    """A block's operation on received tiles, the value that it writes, and the block's last operation."""

    enter: str
    entered: str
    leave: str


_KINDS = {"attention": _Kinds("QKV", "qkv", "OUT"), "cross": _Kinds("CQ", "q", "COUT"), "feed_forward": _Kinds("UP", "act", "DOWN")}


def hybrid_inference(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence, complete with its transfers.  Operations and values: see inference/__init__.py."""
    builder = _Hybrid(layout)
    for stack, (first, end) in enumerate(zip(layout.first_blocks, layout.first_blocks[1:], strict=False)):
        if stack:
            builder.relay_memory(layout.blocks[first])
        builder.embed_tiles(stack)
        for block in layout.blocks[first:end]:
            if block.is_split:
                for position in range(layout.num_positions):
                    builder.split_block(block, position)
    builder.head([_value("hid", layout.end, tile) for tile in layout.tiles[-1]])
    return builder.schedule(world_size)


class _Hybrid(Builder):
    """Writes the operation lists block by block, from the layout alone."""

    def __init__(self, layout: InferenceLayout) -> None:
        super().__init__(layout)
        positions = range(layout.num_positions)
        self._own: list[list[Group]] = [[tuple(t for t in tiles if t.position == i) for i in positions] for tiles in layout.tiles]
        self._firsts = [[own[0].number if own else 0 for own in by_position] for by_position in self._own]
        self._chains: dict[tuple[int, str, int, int], tuple[int, ...]] = {}

    def embed_tiles(self, stack: int) -> None:
        """Embed a stack's tokens on the first position; the tiles go around the ring to all positions that compute."""
        block, tiles = self.layout.blocks[self.layout.first_blocks[stack]], self.layout.tiles[stack]
        self.embed(stack, [_value("emb", block.number, tile) for tile in tiles])
        for tile in tiles:
            path = self._path(block, tile)
            if path:
                self.send(_value("emb", block.number, tile), 0, path[0])

    def relay_memory(self, block: Block) -> None:
        """Send the encoder's output around the ring to all that compute cross-attention; block: the decoder's first."""
        for position in range(self.layout.num_positions):
            for tile, following in self._arriving(block.stack - 1, self._memory_path, position):
                if following is not None:
                    self.send(_value("mem", block.number, tile), position, following)

    def split_block(self, block: Block, position: int) -> None:
        """Append a position's part of a block with split weights, and the connection of its own tiles."""
        layout = self.layout
        tiles, own = layout.tiles[block.stack], self._own[block.stack][position]
        is_member, is_first = position in layout.members(block), block.number in layout.first_blocks
        present = own
        if is_first:
            present = () if position else tiles if is_member else own
            for tile in present:
                self._enter_stack(block, position, tile)
        arriving = self._arriving(block.stack, lambda tile: self._path(block, tile), position, keep_order=is_first)
        is_streamed = layout.plan.overlap
        groups: list[Group] = [present] if is_streamed and is_member and present else []
        for group in groups:
            self._multiply(block, position, group)
        for tile, following in arriving:
            if following is not None:
                self.send(_value("emb" if is_first else "hid", block.number, tile), position, following)
            if is_first:
                self._enter_stack(block, position, tile)
            if is_streamed and is_member:
                groups.append((tile,))
                self._multiply(block, position, (tile,))
                if block.kind != "attention":
                    self._leave(block, position, (tile,), groups)
        if is_member and not is_streamed:
            groups = [tiles]
            self._multiply(block, position, tiles)
            if block.kind == "cross":
                self._memory_keys(block, position)
            self._leave(block, position, tiles, groups)
        elif is_member:
            if block.kind == "attention":
                for tile in self._in_sum_order(block, position, [tile for tile in tiles if tile.position != position]):
                    self._leave(block, position, (tile,), groups)
            if own:
                self._leave(block, position, own, groups)
            following_block = layout.blocks[block.number + 1] if block.number + 1 < layout.end else block
            if following_block.kind == "cross":
                self._memory_keys(following_block, position)  # fills the time while the last sums are sent
        self._connect_all(block, position)

    # Routes of tiles and sums.

    def _path(self, block: Block, tile: Tile) -> tuple[int, ...]:
        """Return the positions that a tile of the block's input visits, in order, without its first position."""
        layout = self.layout
        if block.number in layout.first_blocks:  # from the position that embedded it
            return after(tuple(sorted({*layout.members(block), tile.position})), 0, 1, layout.num_positions)
        return after(layout.members(block), tile.position, tile.direction, layout.num_positions)

    def _memory_path(self, tile: Tile) -> tuple[int, ...]:
        """Return the positions that a tile of the encoder's output visits."""
        cross = next(block for block in self.layout.blocks if block.kind == "cross")
        return after(self.layout.members(cross), tile.position, tile.direction, self.layout.num_positions)

    def _chain(self, block: Block, tile: Tile) -> tuple[int, ...]:
        """Return the positions whose products add up to a tile's sum, in order; the owner's is last."""
        key = (block.stack, block.kind, tile.position, tile.direction)
        if key not in self._chains:
            members = self.layout.members(block)
            others = after(members, tile.position, tile.direction, self.layout.num_positions)
            self._chains[key] = (*others, tile.position) if tile.position in members else others
        return self._chains[key]

    def _arriving(
        self, stack: int, path_of: Callable[[Tile], tuple[int, ...]], position: int, *, keep_order: bool = False
    ) -> list[tuple[Tile, int | None]]:
        """Return the tiles of a stack that reach a position, in ring order, each with its next position."""
        found = []
        for tile in self.layout.tiles[stack]:
            path = path_of(tile)
            if position in path:
                step = path.index(position)
                following = path[step + 1] if step + 1 < len(path) else None
                order = (0, tile.number) if keep_order else (step, tile.number - self._firsts[stack][tile.position])
                found.append((order, tile, following))
        return [(tile, following) for _, tile, following in sorted(found, key=lambda entry: entry[0])]

    def _in_sum_order(self, block: Block, position: int, tiles: Sequence[Tile]) -> list[Tile]:
        """Return tiles in the order in which the ring needs this position's products.

        If the owners continue piece by piece, the first pieces of all owners come first, so that all can start on these.
        """
        firsts = self._firsts[block.stack]

        def order(tile: Tile) -> tuple[int, int]:
            step, piece = self._chain(block, tile).index(position), tile.number - firsts[tile.position]
            return (piece, step) if block.kind != "feed_forward" and block.scheme == 2 else (step, piece)

        return sorted(tiles, key=order)

    # Operations at one position.

    def _enter_stack(self, block: Block, position: int, tile: Tile) -> None:
        names = ("hid", "res") if tile.position == position else ("hid",)
        self.add(
            position,
            "ENTER",
            block.number,
            tile.number,
            [_value("emb", block.number, tile)],
            [_value(name, block.number, tile) for name in names],
        )

    def _multiply(self, block: Block, position: int, group: Group) -> None:
        kinds = _KINDS[block.kind]
        reads = [_value("hid", block.number, tile) for tile in group]
        self.add(position, kinds.enter, block.number, group[0].number, reads, [_value(kinds.entered, block.number, group[0])])

    def _memory_keys(self, block: Block, position: int) -> None:
        memory = [_value("mem", self.layout.first_blocks[block.stack], tile) for tile in self.layout.tiles[block.stack - 1]]
        self.add(position, "CKV", block.number, 0, memory, [Value("kv", block.number, NONE, 0)])

    def _leave(self, block: Block, position: int, group: Group, groups: Sequence[Group]) -> None:
        """Append the second half of a block on some tiles, and the ring's operations on their products here."""
        number, first = block.number, group[0].number
        kinds = _KINDS[block.kind]
        if block.kind == "feed_forward":
            contents = [_value(kinds.entered, number, group[0])]
        else:
            contents = [_value("ctx", number, tile) for tile in group]
            if block.kind == "attention":
                keys = sorted(entered[0].number for entered in groups)
                self.add(position, "ATT", number, first, [Value("qkv", number, NONE, key) for key in keys], contents)
            else:
                reads = [_value(kinds.entered, number, group[0]), Value("kv", number, NONE, 0)]
                self.add(position, "CATT", number, first, reads, contents)
        self.add(position, kinds.leave, number, first, contents, [self._product(block, position, tile) for tile in group])
        for tile in self._in_sum_order(block, position, group):
            chain = self._chain(block, tile)
            step = chain.index(position)
            if tile.position == position:
                continue
            total = _value("sum", number, tile, step)
            if step:
                reads = [self._product(block, position, tile), _value("sum", number, tile, step - 1)]
                self.add(position, "ADD", number, tile.number, reads, [total], step=step, stream=RING)
            self.send(total, position, chain[step + 1] if step + 1 < len(chain) else tile.position)

    def _product(self, block: Block, position: int, tile: Tile) -> Value:
        """Return the name of a position's term: the first term in the ring is already a sum."""
        is_first = tile.position != position and self._chain(block, tile)[0] == position
        return _value("sum", block.number, tile, 0) if is_first else _value("prod", block.number, tile)

    def _connect_all(self, block: Block, position: int) -> None:
        own = self._own[block.stack][position]
        following = self.layout.blocks[block.number + 1] if block.number + 1 < self.layout.end else block
        is_own_next = following.kind == "feed_forward" and not following.is_split
        groups = [(tile,) for tile in own] if self.layout.plan.overlap else [own] if own else []
        for group in groups:
            for tile in group:
                self._connect_own(block, position, tile)
            if is_own_next:
                self._feed_forward(following, position, group)

    def _connect_own(self, block: Block, position: int, tile: Tile) -> None:
        chain = self._chain(block, tile)
        terms = [_value("sum", block.number, tile, len(chain) - 1 - (position in chain))] if chain != (position,) else []
        if position in chain:
            terms.insert(0, _value("prod", block.number, tile))
        self._connect(block, position, tile, terms)

    def _feed_forward(self, block: Block, position: int, group: Group) -> None:
        """Append the whole feed-forward block of scheme 2 on some of a position's own tiles."""
        products = [_value("prod", block.number, tile) for tile in group]
        self._multiply(block, position, group)
        self.add(position, "DOWN", block.number, group[0].number, [_value("act", block.number, group[0])], products)
        for tile, product in zip(group, products, strict=True):
            self._connect(block, position, tile, [product])

    def _connect(self, block: Block, position: int, tile: Tile, terms: Sequence[Value]) -> None:
        """Append the connection of an own tile after a block, and send the tile to the next position."""
        layout, number = self.layout, block.number + 1
        reads = [*terms, _value("res", block.number, tile)]
        if number not in layout.first_blocks:
            writes = [_value("hid", number, tile), _value("res", number, tile)]
        else:
            writes = [_value("hid" if number == layout.end else "mem", number, tile)]
        self.add(position, "CONN", block.number, tile.number, reads, writes)
        if number == layout.end:
            path: tuple[int, ...] = (0,) if position else ()
        elif number in layout.first_blocks:
            path = self._memory_path(tile)
        else:
            path = self._path(layout.blocks[number], tile) if layout.blocks[number].is_split else ()
        if path:
            self.send(writes[0], position, path[0])


def _value(name: str, number: int, tile: Tile, step: int = NONE) -> Value:
    return Value(name, number, step, tile.number)
