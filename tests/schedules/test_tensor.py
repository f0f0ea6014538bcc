"""Galaxy+: tiles that travel while others are multiplied."""

from __future__ import annotations

import pytest
from schedule_plans import peaks, timed

from workbench.core.errors import ScheduleError
from workbench.schedules import ring_allgather_gemm, ring_gemm_reducescatter

BLOCKS = [ring_allgather_gemm, ring_gemm_reducescatter]


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("block", BLOCKS)
def test_closed_forms(block, num_ranks: int) -> None:
    """N g if sends are shorter than GEMMs; else the sends show: (N - 1) s + g."""
    assert timed(block(num_ranks), GEMM=1.0, SEND=0.5).makespan_s == num_ranks
    assert timed(block(num_ranks), GEMM=1.0, SEND=2.0).makespan_s == (num_ranks - 1) * 2.0 + 1.0
    assert timed(block(num_ranks, overlapped=False), GEMM=1.0, SEND=2.0).makespan_s == (num_ranks - 1) * 2.0 + num_ranks


def test_overlap_needs_no_room_for_all_tiles() -> None:
    """A tile is let go when it was multiplied and sent on: in step, only the one in hand and the one that arrives are
    there."""
    assert peaks(ring_allgather_gemm(6), "tile", GEMM=1.0, SEND=1.0) == (2,) * 6
    assert peaks(ring_allgather_gemm(6), "tile", GEMM=1.0, SEND=0.8) == (3,) * 6  # faster links run ahead
    assert peaks(ring_allgather_gemm(6, overlapped=False), "tile", GEMM=1.0, SEND=0.8) == (6,) * 6


def test_a_ring_needs_two() -> None:
    """One rank has no neighbour."""
    for block in BLOCKS:
        with pytest.raises(ScheduleError, match="at least 2"):
            block(1)
