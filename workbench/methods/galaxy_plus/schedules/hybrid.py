"""Galaxy+: hybrid model parallelism of schemes 1 and 2 with a ring of tiles between the blocks (sections III-B and
III-D, Fig. 6 to 10).

A split block begins with a ring all-gather of the hidden tiles and ends with a ring reduce-scatter of the sums.  The
tile's owner adds the last term and then computes the connection.  With overlap every tile is multiplied when it
arrives, and forwarded meanwhile (Fig. 9).
The products are computed in the order in which the ring needs them (Fig. 10), the owner's last.  If the second matrix
works token by token like the first (feed-forward, cross-attention), it follows on each tile at once, so both rings run
at the same time.
In scheme 2 the owner runs its tiles through the feed-forward block one by one, and each starts on the ring as soon as
it can.
The sums are added on a separate stream, as in a library of collectives, so the ring does not wait for a long product.
Positions without a part of a block's weights are not in its ring; positions without tokens own no tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.schedule import RING, Schedule, Value
from workbench.methods.galaxy_plus.schedules.builder import Builder, value_of
from workbench.methods.galaxy_plus.schedules.layout import Block, InferenceLayout, Tile, after

Group = tuple[Tile, ...]


def tiled_inference(layout: InferenceLayout, world_size: int | None = None) -> Schedule:
    """Return the schedule of one sequence in tiles: Galaxy+'s, or sequence parallelism.  Operations and values: see
    inference/__init__.py.

    Sequence parallelism: each position has all weights and its own tokens; keys and values go around the ring in each
    layer.
    """
    builder = _Hybrid(layout)
    for stack, (first, end) in enumerate(zip(layout.first_blocks, layout.first_blocks[1:], strict=False)):
        if stack:
            builder.relay_memory(layout.blocks[first])
        builder.embed_tiles(stack)
        for block in layout.blocks[first:end]:
            for position in range(layout.num_positions):
                if block.is_split:
                    builder.split_block(block, position)
                elif layout.plan.paradigm == "sequence":
                    builder.whole_block(block, position)
    builder.head([value_of("hid", layout.end, tile) for tile in layout.tiles[-1]])
    return builder.schedule(world_size)


class _Hybrid(Builder):
    """Writes the operation lists block by block, from the layout alone."""

    def __init__(self, layout: InferenceLayout) -> None:
        super().__init__(layout)
        positions = range(layout.num_positions)
        self._own: list[list[Group]] = [
            [tuple(t for t in tiles if t.position == i) for i in positions] for tiles in layout.tiles
        ]
        self._firsts = [[tiles[0].number if tiles else 0 for tiles in by_position] for by_position in self._own]
        self._chains: dict[tuple[int, str, int, int], tuple[int, ...]] = {}

    def embed_tiles(self, stack: int) -> None:
        """Embed a stack's tokens on the first position; the tiles go around the ring to all positions that compute."""
        block, tiles = self.layout.blocks[self.layout.first_blocks[stack]], self.layout.tiles[stack]
        self.embed(stack, [value_of("emb", block.number, tile) for tile in tiles])
        for tile in tiles:
            path = self._path(block, tile)
            if path:
                self.send(value_of("emb", block.number, tile), 0, path[0])

    def relay_memory(self, block: Block) -> None:
        """Send the encoder's output around the ring to all that compute cross-attention; block: the decoder's first."""
        for position in range(self.layout.num_positions):
            for tile, following in self._arriving(block.stack - 1, self._memory_path, position):
                if following is not None:
                    self.send(value_of("mem", block.number, tile), position, following)

    def split_block(self, block: Block, position: int) -> None:
        """Append a position's part of a block with split weights, and the connection of the position's tiles."""
        layout = self.layout
        tiles, own_tiles = layout.tiles[block.stack], self._own[block.stack][position]
        is_member, is_first = position in layout.members(block), block.number in layout.first_blocks
        present = own_tiles
        if is_first:
            present = () if position else tiles if is_member else own_tiles
            for tile in present:
                self.enter_stack(block, position, tile, is_own=tile.position == position)
        arriving = self._arriving(block.stack, lambda tile: self._path(block, tile), position, keep_order=is_first)
        is_streamed = layout.plan.overlap
        groups: list[Group] = [present] if is_streamed and is_member and present else []
        for group in groups:
            self.multiply(block, position, group)
        for tile, following in arriving:
            if following is not None:
                self.send(value_of("emb" if is_first else "hid", block.number, tile), position, following)
            if is_first:
                self.enter_stack(block, position, tile, is_own=tile.position == position)
            if is_streamed and is_member:
                groups.append((tile,))
                self.multiply(block, position, (tile,))
                if block.kind != "attention":
                    self._leave(block, position, (tile,), groups)
        if is_member and not is_streamed:
            groups = [tiles]
            self.multiply(block, position, tiles)
            if block.kind == "cross":
                self.memory_keys(block, position)
            self._leave(block, position, tiles, groups)
        elif is_member:
            if block.kind == "attention":
                for tile in self._in_sum_order(block, position, [tile for tile in tiles if tile.position != position]):
                    self._leave(block, position, (tile,), groups)
            if own_tiles:
                self._leave(block, position, own_tiles, groups)
            following_block = layout.blocks[block.number + 1] if block.number + 1 < layout.end else block
            if following_block.kind == "cross":
                self.memory_keys(following_block, position)  # fills the time while the last sums are sent
        self._connect_all(block, position)

    def whole_block(self, block: Block, position: int) -> None:
        """Append a block of sequence parallelism on a position's own tiles."""
        number, own_tiles = block.number, self._own[block.stack][position]
        is_attention = block.kind == "attention"
        for tile in own_tiles:
            if number in self.layout.first_blocks:
                self.enter_stack(block, position, tile, is_own=True)
            self.multiply(block, position, (tile,), ("q", "kv") if is_attention else ())

        def path(tile: Tile) -> tuple[int, ...]:
            return after(self.layout.members(block), tile.position, 1, self.layout.num_positions)

        if is_attention:
            starts = [(tile, next(iter(path(tile)), None)) for tile in own_tiles]
            for tile, following in [*starts, *self._arriving(block.stack, path, position)]:
                if following is not None:
                    self.send(value_of("kv", number, tile), position, following)
        for tile in own_tiles:
            if block.kind == "cross":
                self.memory_keys(block, position)
            gathered = [value_of("kv", number, other) for other in self.layout.tiles[block.stack]]
            product = value_of("prod", number, tile)
            self.leave(block, position, (tile,), [value_of("q", number, tile), *gathered], [product])
            self._connect(block, position, tile, [product])

    # Routes of tiles and sums.

    def _path(self, block: Block, tile: Tile) -> tuple[int, ...]:
        """Return the positions that a tile of the block's input visits, in order, without its first position."""
        layout = self.layout
        members = layout.members(block) if block.is_split else ()
        if block.number in layout.first_blocks:  # from the position that embedded it
            return after(tuple(sorted({*members, tile.position})), 0, 1, layout.num_positions)
        return after(members, tile.position, tile.direction, layout.num_positions)

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
        arriving = []
        for tile in self.layout.tiles[stack]:
            path = path_of(tile)
            if position in path:
                step = path.index(position)
                following = path[step + 1] if step + 1 < len(path) else None
                order = (0, tile.number) if keep_order else (step, tile.number - self._firsts[stack][tile.position])
                arriving.append((order, tile, following))
        return [(tile, following) for _, tile, following in sorted(arriving, key=lambda entry: entry[0])]

    def _in_sum_order(self, block: Block, position: int, tiles: Sequence[Tile]) -> list[Tile]:
        """Return tiles in the order in which the ring needs this position's products.

        If the owners continue piece by piece, the first pieces of all owners come first, so that all can start on
        these.
        """
        firsts = self._firsts[block.stack]

        def order(tile: Tile) -> tuple[int, int]:
            step, piece = self._chain(block, tile).index(position), tile.number - firsts[tile.position]
            return (piece, step) if block.kind != "feed_forward" and block.scheme == 2 else (step, piece)

        return sorted(tiles, key=order)

    # Operations at one position.

    def _leave(self, block: Block, position: int, group: Group, groups: Sequence[Group]) -> None:
        """Append the second half of a block on some tiles, and the ring's operations on their products here."""
        number = block.number
        attended = sorted(value_of("qkv", number, entered[0]) for entered in groups)
        self.leave(block, position, group, attended, [self._product(block, position, tile) for tile in group])
        for tile in self._in_sum_order(block, position, group):
            chain = self._chain(block, tile)
            step = chain.index(position)
            if tile.position == position:
                continue
            total = value_of("sum", number, tile, step)
            if step:
                reads = [self._product(block, position, tile), value_of("sum", number, tile, step - 1)]
                self.add(position, "ADD", number, tile.number, reads, [total], step=step, stream=RING)
            self.send(total, position, chain[step + 1] if step + 1 < len(chain) else tile.position)

    def _product(self, block: Block, position: int, tile: Tile) -> Value:
        """Return the name of a position's term: the first term in the ring is already a sum."""
        is_first = tile.position != position and self._chain(block, tile)[0] == position
        return value_of("sum", block.number, tile, 0) if is_first else value_of("prod", block.number, tile)

    def _connect_all(self, block: Block, position: int) -> None:
        """Append the connections of a position's own tiles, each followed by scheme 2's feed-forward block."""
        own_tiles = self._own[block.stack][position]
        following = self.layout.blocks[block.number + 1] if block.number + 1 < self.layout.end else block
        is_own_next = following.kind == "feed_forward" and not following.is_split
        groups = [(tile,) for tile in own_tiles] if self.layout.plan.overlap else [own_tiles] if own_tiles else []
        for group in groups:
            for tile in group:
                chain = self._chain(block, tile)
                terms = [value_of("prod", block.number, tile)] if position in chain else []
                if chain != (position,):
                    terms.append(value_of("sum", block.number, tile, len(chain) - 1 - (position in chain)))
                self._connect(block, position, tile, terms)
            if is_own_next:
                products = [value_of("prod", following.number, tile) for tile in group]
                self.multiply(following, position, group)
                self.leave(following, position, group, [], products)
                for tile, product in zip(group, products, strict=True):
                    self._connect(following, position, tile, [product])

    def _connect(self, block: Block, position: int, tile: Tile, terms: Sequence[Value]) -> None:
        """Append the connection of an own tile after a block, and send the tile to the next position."""
        layout, written, number = self.layout, self.connect(block, position, tile, terms), block.number + 1
        if number == layout.end:
            path: tuple[int, ...] = (0,) if position else ()
        else:
            path = self._memory_path(tile) if number in layout.first_blocks else self._path(layout.blocks[number], tile)
        if path:
            self.send(written, position, path[0])
