"""How many guesses are right: what ships of it, and that a whole trial counts them."""

from __future__ import annotations

import pytest

from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.acceptance import DRAFTS, QUICK_DRAFTS, compared
from workbench_studies.papers.result import Settings, shipped_result


def test_what_ships_has_every_draft_and_its_shares_are_those_of_its_guesses() -> None:
    result = shipped_result(COMPARE, "acceptance")
    rows = result.tables[0].rows
    assert [row[:2] for row in rows] == [(draft, way) for draft in DRAFTS for way in ("greedy", "sampled")]
    for *_, right, guesses, share, a_pass in rows:
        assert 0 <= right <= guesses and share == pytest.approx(right / guesses)
        assert 1 <= a_pass <= 5
    assert result.environment["cores"] and not result.quick


def test_a_trial_counts_guesses_and_a_share_is_that_of_the_right_ones() -> None:
    item = find_item(COMPARE, "acceptance")
    trial = item.run(Settings(quick=True, seeds=(0,)))
    assert [row[0] for row in trial.tables[0].rows] == [draft for draft in QUICK_DRAFTS for _ in range(2)]
    one = {"count": 10.0, "tokens": 25.0, "right": 15.0, "wrong": 5.0}
    result = compared(item, {"int4": {"greedy": one}}, model="m", tokens=4)
    assert result.tables[0].rows == (("int4", "greedy", 15.0, 20.0, 0.75, 2.5),)
    assert "int4 75%" in result.findings[0]
