"""Divide a micro-batch into pieces at a stage boundary, by the cut points of both stages' groups (PAC+,
section V-A).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan, Stage
from workbench.core.schedule import Value


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples [first, end) of a micro-batch, which rank `source` of one stage sends to rank `destination` of
    the next.
    """

    index: int
    first: int
    end: int
    source: int
    destination: int


class Portion(NamedTuple):
    """One rank's part of a micro-batch in a stage: the pieces that it receives and sends."""

    rank: int
    pieces_in: tuple[int, ...]
    pieces_out: tuple[int, ...]


def boundary_pieces(stage_a: Stage, stage_b: Stage, size: int) -> tuple[Piece, ...]:
    """Return the pieces of a micro-batch of `size` samples between consecutive stages, numbered from 0 in sample order.

    Each rank of stage_a writes whole pieces and each rank of stage_b reads whole pieces.
    """
    givers = [
        (first, end, rank) for (first, end), rank in zip(stage_a.split(size), stage_a.ranks, strict=True) if end > first
    ]
    takers = [
        (first, end, rank) for (first, end), rank in zip(stage_b.split(size), stage_b.ranks, strict=True) if end > first
    ]
    cuts = sorted({end for _, end, _ in givers} | {end for _, end, _ in takers} | {0})
    pieces, giver, taker = [], 0, 0
    for index, (first, end) in enumerate(pairwise(cuts)):
        if givers[giver][1] <= first:
            giver += 1
        if takers[taker][1] <= first:
            taker += 1
        pieces.append(Piece(index, first, end, givers[giver][2], takers[taker][2]))
    return tuple(pieces)


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """The samples of a mini-batch on each rank, and the pieces in which they cross from stage to stage.

    sizes[m]: samples of micro-batch m.  lengths[m]: its padded sequence length in tokens.
    """

    plan: Plan
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    _pieces: dict[tuple[int, int], tuple[Piece, ...]] = field(default_factory=dict, compare=False, repr=False)
    _samples: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    def samples(self, rank: int, microbatch: int) -> tuple[int, int]:
        """Return the range (first, end) of the micro-batch's samples that the rank computes."""
        key = (rank, self.sizes[microbatch])
        if key not in self._samples:
            index = self.plan.stage_of(rank)
            assert index is not None, f"rank {rank} is idle in this plan"
            stage = self.plan.stages[index]
            self._samples[key] = stage.split(key[1])[stage.ranks.index(rank)]
        return self._samples[key]

    def pieces(self, boundary: int, microbatch: int) -> tuple[Piece, ...]:
        """Return the pieces in which activations cross from stage `boundary` to the next."""
        key = (boundary, self.sizes[microbatch])
        if key not in self._pieces:
            stages = self.plan.stages
            self._pieces[key] = boundary_pieces(stages[boundary], stages[boundary + 1], key[1])
        return self._pieces[key]

    def piece(self, value: Value) -> Piece:
        """Return the samples in a piece of an activation or of a gradient."""
        return self.pieces(boundary_of(value), value.microbatch)[value.part]


def boundary_of(value: Value) -> int:
    """Return the stage whose output boundary an activation (act, side) or a gradient (grad, sgrad) crosses."""
    return value.stage - 1 if value.name in ("grad", "sgrad") else value.stage


def divide(stages: tuple[Stage, ...], size: int) -> list[tuple[Portion, ...]]:
    """Return, for each stage, the ranks that have samples of a micro-batch of `size` samples."""
    received_rows: list[dict[int, list[int]]] = [{} for _ in stages]
    sent_rows: list[dict[int, list[int]]] = [{} for _ in stages]
    for number, (stage, following) in enumerate(pairwise(stages)):
        for piece in boundary_pieces(stage, following, size):
            sent_rows[number].setdefault(piece.source, []).append(piece.index)
            received_rows[number + 1].setdefault(piece.destination, []).append(piece.index)
    portions = []
    for number, stage in enumerate(stages):
        busy = [rank for rank, (first, end) in zip(stage.ranks, stage.split(size), strict=True) if end > first]
        portions.append(
            tuple(
                Portion(rank, tuple(received_rows[number].get(rank, ())), tuple(sent_rows[number].get(rank, ())))
                for rank in busy
            )
        )
    return portions


def world_size_of(plan: Plan, world_size: int | None, micro_batch_sizes: tuple[int, ...]) -> int:
    """Return the number of ranks of a plan's schedule.  Raises ScheduleError for an invalid plan or invalid sizes."""
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if not ranks:
        raise ScheduleError("A pipeline schedule was asked for.", "The plan has no stages.", "Give it at least one.")
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise ScheduleError(
                "A pipeline schedule was asked for.", f"Rank {rank} has more than one share.", "Give each rank one."
            )
    if not micro_batch_sizes or min(micro_batch_sizes) < 1:
        raise ScheduleError(
            f"A schedule of micro-batches of {micro_batch_sizes} samples was asked for.",
            "Each must have at least 1, and there must be one.",
            "Leave empty micro-batches out.",
        )
    return enclosing_world(ranks, world_size)


def enclosing_world(ranks: Iterable[int], world_size: int | None) -> int:
    """Return the requested world size, or the smallest that contains these ranks.  Raises ScheduleError if it does not
    contain them.
    """
    named = sorted(ranks)
    least = named[-1] + 1 if named else 0
    if named and (named[0] < 0 or (world_size is not None and world_size < least)):
        outside = named[0] if named[0] < 0 else named[-1]
        request = f"A schedule for {world_size or least} ranks was asked for."
        raise ScheduleError(request, f"Rank {outside} is to take part.", "Raise world_size, or name ranks from 0 up.")
    return least if world_size is None else world_size
