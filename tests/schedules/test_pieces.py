"""Pieces cover a micro-batch once, and belong whole to one rank on either side."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import plan_of

from workbench.core.errors import ScheduleError
from workbench.schedules import backpropagation, hybrid_1f1b
from workbench.schedules.pieces import Piece, boundary_pieces, divide


def test_unequal_groups_are_cut_at_both_sides_cut_points() -> None:
    """3 + 1 samples meet 2 + 2: cuts at 2 and 3."""
    plan = plan_of((3, 1), (2, 2))
    assert boundary_pieces(*plan.stages, 4) == (Piece(0, 0, 2, 0, 2), Piece(1, 2, 3, 0, 3), Piece(2, 3, 4, 1, 3))


def test_a_rank_without_samples_has_no_piece() -> None:
    """One sample among shares of 3 and 1 goes to the first rank alone."""
    plan = plan_of((3, 1), (4,))
    assert boundary_pieces(*plan.stages, 1) == (Piece(0, 0, 1, 0, 2),)
    assert [portion.rank for portion in divide(plan.stages, 1)[0]] == [0]


groups = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda shares: sum(shares) > 0)


@settings(deadline=None)
@given(groups, groups, st.integers(1, 20))
def test_pieces_tile_the_micro_batch(first: list[int], second: list[int], size: int) -> None:
    """Numbered from 0 in sample order, without gap or overlap, each inside one range of either stage."""
    stage_a, stage_b = plan_of(first, second).stages
    pieces = boundary_pieces(stage_a, stage_b, size)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [sample for piece in pieces for sample in range(piece.first, piece.end)] == list(range(size))
    for stage, ranks in ((stage_a, [p.source for p in pieces]), (stage_b, [p.destination for p in pieces])):
        ranges = dict(zip(stage.ranks, stage.split(size), strict=True))
        for piece, rank in zip(pieces, ranks, strict=True):
            assert ranges[rank][0] <= piece.first < piece.end <= ranges[rank][1]


def test_what_cannot_be_meant_is_refused() -> None:
    """An empty micro-batch, a rank with two shares, too small a world."""
    plan = plan_of((1,), (1,))
    with pytest.raises(ScheduleError, match="at least 1"):
        backpropagation(plan, (1, 0))
    with pytest.raises(ScheduleError, match="at least 1"):
        hybrid_1f1b(plan, ())
    with pytest.raises(ScheduleError, match="Rank 1 is to take part"):
        hybrid_1f1b(plan, (1,), world_size=1)
    twice = plan_of((1,), (1,))
    object.__setattr__(
        twice, "stages", (twice.stages[0], twice.stages[1].__class__(start=1, stop=2, shares=twice.stages[0].shares))
    )
    with pytest.raises(ScheduleError, match="Rank 0 has more than one share"):
        hybrid_1f1b(twice, (1,))
