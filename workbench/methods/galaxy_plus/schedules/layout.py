"""Index conventions of inference schedules: blocks counted through the model, tiles of the sequence, shares of every
position.

Galaxy+ section III-B: a layer consists of attention, cross-attention (in a decoder with an encoder), and feed-forward
network.  The operations between two blocks (bias of the output matrix, residual, norms) are the connection of the first
of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from workbench.core.errors import ScheduleError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.schedule import Op

BlockKind = Literal["attention", "cross", "feed_forward"]

BY_READS = frozenset({"QKV", "CQ", "UP", "ENTER", "CKV"})
"""Kinds that work on the tokens of the tiles they read; all other kinds work on the tokens of the tiles they write."""


class Block(NamedTuple):
    """One block of the model.

    number, layer: its number and its layer's, counted through all stacks.  is_split: whether its weights are split, not
    its tokens.
    """

    number: int
    layer: int
    stack: int
    kind: BlockKind
    scheme: int
    is_split: bool


class Tile(NamedTuple):
    """Tokens [start, stop) of a stack's sequence.

    position: its owner's position.  direction: +1 goes to the next position first, -1 back.
    """

    number: int
    position: int
    start: int
    stop: int
    direction: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class InferenceLayout:
    """A plan applied to a sequence (two sequences for an encoder-decoder).

    lengths[stack]: number of tokens.  past: number of tokens in the key-value cache before this step (decoding).
    is_decoding: whether it is one more token in each of some texts, by scheme 1 in every layer; past is their mean.
    memory_length: number of tokens of the encoder's output that they attend to.
    room: number of tokens for whose keys and values each device reserves memory, those of all texts together; 0 if none
    are kept.
    """

    plan: InferencePlan
    stacks: tuple[StackShape, ...]
    lengths: tuple[int, ...]
    past: int = 0
    memory_length: int = 0
    is_decoding: bool = False
    room: int = 0

    @classmethod
    def build(
        cls, plan: InferencePlan, stacks: Sequence[StackShape], lengths: Sequence[int] | int, room: int = 0
    ) -> InferenceLayout:
        """Return the layout of one sequence of `lengths` tokens (one number for each stack).  Raises ScheduleError if
        they disagree.
        """
        lengths_of_stacks = (lengths,) * len(stacks) if isinstance(lengths, int) else tuple(lengths)
        request = (
            f"A sequence of {lengths_of_stacks} tokens through {len(stacks)} stacks by '{plan.method}' was asked for."
        )
        if len(lengths_of_stacks) != len(stacks) or min(lengths_of_stacks, default=0) < 1:
            raise ScheduleError(
                request, "Each stack takes a sequence of at least one token.", "Give one length for each stack."
            )
        _require_complete(request, plan, stacks)
        memory = lengths_of_stacks[0] if len(stacks) > 1 else 0
        return cls(plan=plan, stacks=tuple(stacks), lengths=lengths_of_stacks, memory_length=memory, room=room)

    @classmethod
    def decode(
        cls,
        plan: InferencePlan,
        stacks: Sequence[StackShape],
        *,
        past: int,
        memory_length: int = 0,
        rows: int = 1,
        room: int = 0,
    ) -> InferenceLayout:
        """Return the layout of one more token after `past` tokens, in each of `rows` texts; in an encoder-decoder only
        the decoder takes part.
        """
        request = f"The token behind {past} others by '{plan.method}' was asked for."
        if plan.paradigm == "sequence" or past < 0:
            problem = "A single token cannot be divided among devices." if past >= 0 else "No sequence has so few."
            raise ScheduleError(request, problem, "Decode by a plan of another paradigm.")
        _require_complete(request, plan, stacks)
        lengths = (0,) * (len(stacks) - 1) + (rows,)
        return cls(
            plan=plan,
            stacks=tuple(stacks),
            lengths=lengths,
            past=past,
            memory_length=memory_length,
            is_decoding=True,
            room=room or rows * (past + 1),
        )

    @property
    def num_positions(self) -> int:
        """Return the number of devices that take part."""
        return self.plan.num_positions

    @property
    def end(self) -> int:
        """Return the number of blocks, which is the stage of HEAD."""
        return len(self.blocks)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of all stacks in order, including an encoder's if only the decoder runs."""
        blocks: list[Block] = []
        layer = 0
        for stack, shape in enumerate(self.stacks):
            kinds: tuple[BlockKind, ...] = (
                ("attention", "cross", "feed_forward") if shape.has_cross_attention else ("attention", "feed_forward")
            )
            for _ in range(shape.num_layers):
                scheme = self.plan.schemes[layer] if self.plan.paradigm == "hybrid" and not self.is_decoding else 1
                for kind in kinds:
                    is_split = self.plan.paradigm in ("hybrid", "tensor") and not (
                        kind == "feed_forward" and scheme == 2
                    )
                    blocks.append(Block(len(blocks), layer, stack, kind, scheme, is_split))
                layer += 1
        return tuple(blocks)

    @cached_property
    def first_blocks(self) -> tuple[int, ...]:
        """Return the first block's number of each stack, and the end."""
        firsts = [
            next(block.number for block in self.blocks if block.stack == stack) for stack in range(len(self.stacks))
        ]
        return (*firsts, self.end)

    @cached_property
    def tiles(self) -> tuple[tuple[Tile, ...], ...]:
        """Return each stack's tiles in token order."""
        return tuple(self._cut(length) for length in self.lengths)

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Return each stack's attention units by position; all units on each position if the weights are not split."""
        return self._shares(0)

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Return each stack's columns by position, as in scheme 1."""
        return self._shares(1)

    def stack_of(self, number: int) -> int:
        """Return the stack of a block.  The number after a stack's last block (see `hid`, `mem`) belongs to that stack
        or the next.
        """
        return self.blocks[min(number, self.end - 1)].stack

    def members(self, block: Block) -> tuple[int, ...]:
        """Return the positions that compute a block, in ring order: those with a part of its weights, or all its
        weights and tokens.
        """
        if self.plan.paradigm == "pipeline":
            return (self._owners[block.layer],)
        if self.plan.paradigm == "sequence":
            return tuple(tile.position for tile in self.tiles[block.stack])
        return self._members[block.kind == "feed_forward"][block.stack]

    def width(self, block: Block, position: int) -> int:
        """Return the units or columns with which a position computes a block."""
        shape = self.stacks[block.stack]
        if block.kind != "feed_forward":
            return self.units[block.stack][position]
        return self.columns[block.stack][position] if block.is_split else shape.columns

    def span(self, op: Op) -> tuple[int, int]:
        """Return the tokens [start, stop) that a compute operation works on, past ones included; for ATT and CATT its
        queries.
        """
        if op.kind in ("EMB", "HEAD"):
            return self.past, self.past + self.lengths[self.stack_of(op.stage)]
        if op.kind == "CKV":
            return 0, self.memory_length
        values = op.reads if op.kind in BY_READS else op.writes
        tiles = self.tiles[self.blocks[op.stage].stack]
        first, last = tiles[values[0].part], tiles[values[-1].part]
        if op.kind == "ENTER":
            last = first
        return self.past + first.start, self.past + last.stop

    @cached_property
    def _members(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(position for position, share in enumerate(shares) if share > 0) for shares in by_stack)
            for by_stack in (self.units, self.columns)
        )

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """Return the position of each layer of a pipeline."""
        return tuple(position for position, count in enumerate(self.plan.layers) for _ in range(count))

    def _cut(self, length: int) -> tuple[Tile, ...]:
        if self.is_decoding or self.plan.paradigm in ("tensor", "pipeline"):
            return (Tile(0, 0, 0, length, 1),) if length else ()
        tiles: list[Tile] = []
        first = 0
        for position, tokens in enumerate(self.plan.tokens(length)):
            is_cut = self.plan.paradigm == "hybrid"
            largest = self.plan.tile_tokens if is_cut and self.plan.tile_tokens else tokens
            pieces = -(-tokens // largest) if tokens else 0
            if is_cut and self.plan.both_ways and tokens > 1:
                pieces = min(pieces + pieces % 2, tokens)  # as many in one direction as in the other
            for piece in range(pieces):
                start, stop = first + piece * tokens // pieces, first + (piece + 1) * tokens // pieces
                tiles.append(
                    Tile(len(tiles), position, start, stop, -1 if is_cut and self.plan.both_ways and piece % 2 else 1)
                )
            first += tokens
        return tuple(tiles)

    def _shares(self, which: int) -> tuple[tuple[int, ...], ...]:
        if self.plan.paradigm in ("hybrid", "tensor"):
            return tuple(self.plan.cut(shape)[which] for shape in self.stacks)
        full_sizes = [(shape.num_units, shape.columns)[which] for shape in self.stacks]
        return tuple((number,) * self.num_positions for number in full_sizes)


def _require_complete(request: str, plan: InferencePlan, stacks: Sequence[StackShape]) -> None:
    """Raise ScheduleError if the plan lacks a field that its paradigm needs."""
    needs = {
        "hybrid": ("units", "columns", "shares", "schemes"),
        "tensor": ("units", "columns"),
        "sequence": ("shares",),
        "pipeline": ("layers",),
    }
    missing = [name for name in needs[plan.paradigm] if not getattr(plan, name)]
    if missing:
        raise ScheduleError(
            request, f"The plan does not say its {', '.join(missing)}.", f"Give what paradigm '{plan.paradigm}' needs."
        )
    layers = sum(shape.num_layers for shape in stacks)
    num_layers = (
        len(plan.schemes) if plan.paradigm == "hybrid" else sum(plan.layers) if plan.paradigm == "pipeline" else layers
    )
    if num_layers != layers:
        raise ScheduleError(
            request, f"The plan speaks of {num_layers} layers, the model has {layers}.", "Plan for this model."
        )


@lru_cache(maxsize=4096)
def after(positions: tuple[int, ...], first: int, direction: int, num_positions: int) -> tuple[int, ...]:
    """Return the positions other than `first` in the order in which the ring visits them from there (direction +1 or
    -1).
    """
    others = [position for position in positions if position != first]
    return tuple(sorted(others, key=lambda position: (position - first) * direction % num_positions))
