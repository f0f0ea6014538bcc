"""Goodput of devices that come and go: against plain predictions, the closed form of one loss, and what ships."""

from __future__ import annotations

import math
from itertools import chain, pairwise, repeat
from random import Random
from statistics import fmean

import pytest

from workbench.core.device_faults import Fault
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.churn import (
    BOARD,
    CLASSROOM,
    COUNT,
    NEVER,
    SHARE_AWAY,
    START_S,
    STAYS_S,
    WAYS,
    Draw,
    exponential,
    length_s,
    run,
    share_present,
    undisturbed,
)
from workbench_studies.papers.compare.churn_executed import EXECUTED_STAYS_S, EXECUTED_WAYS, Point, Run, compared
from workbench_studies.papers.compare.churn_executed import run as stand_in
from workbench_studies.papers.compare.churn_picture import DRAWS
from workbench_studies.papers.result import shipped_result


@pytest.mark.parametrize("way", ["P-RGE", "LoRA, pipeline", "Confidant"])
def test_without_churn_the_coordinator_does_what_the_plain_prediction_says(way: str) -> None:
    result, plain = run(way, 2, BOARD, NEVER, 100.0), undisturbed(way, 2, BOARD, 100.0)
    assert result.changes == 0 and result.present == 1
    assert result.rate == pytest.approx(plain, rel=0.02 if way != "Confidant" else 0.2)  # whole windows of mini-batches
    assert result.lost_s < 1 or way == "Confidant"


@pytest.mark.parametrize("way", ["P-RGE", "LoRA, data parallel"])
def test_after_one_loss_the_others_go_on_at_their_own_rate(way: str) -> None:
    """The closed form: the rate of both until the loss, that of one from then on, and at most two steps in between."""
    end_s, lost_s = 200.0, 60.0
    stays = chain([lost_s], repeat(math.inf))
    result = run(way, 2, BOARD, Draw(stay=lambda draws: next(stays), away=lambda draws: math.inf), end_s)
    both, one = (undisturbed(way, count, BOARD, end_s) for count in (2, 1))
    free = both * lost_s + one * (end_s - lost_s)
    assert result.changes == 1 and result.present == pytest.approx(1 - (end_s - lost_s) / (2 * end_s))
    assert free - 3 * 32 <= result.rate * end_s <= free + 32
    assert 0.1 < result.lost_s < 2 * 32 / one


def test_devices_are_there_as_long_as_the_distributions_say() -> None:
    """Short stays are merged into absences, because a device that starts computes nothing."""
    end_s = 400_000.0
    for stay_s in (30.0, 300.0):
        shares = share_present(exponential(stay_s).faults(COUNT, end_s, 0), COUNT, end_s)
        assert sum(shares.values()) == pytest.approx(1) and set(shares) == set(range(COUNT + 1))
        assert sum(count * share for count, share in shares.items()) / COUNT == pytest.approx(
            1 / (1 + SHARE_AWAY), abs=0.01
        )
        assert shares[COUNT] == pytest.approx(
            (1 / (1 + SHARE_AWAY)) ** COUNT, abs=0.01
        )  # they come and go independently
    away = exponential(10.0).absences(Random(1), end_s)
    assert all(begin_s - back_s >= START_S for (_, back_s), (begin_s, _) in pairwise(away))
    assert fmean(back_s - begin_s for begin_s, back_s in away) > SHARE_AWAY * 10.0
    called = [CLASSROOM.absences(Random(seed), 300.0) for seed in range(300)]
    assert 0.5 < fmean(any(begin < 170 < back for begin, back in one) for one in called) < 0.75  # the teacher's call
    assert share_present((Fault(kind="kill", rank=0, start=1.0, end=3.0),), 2, 4.0) == {2: 0.5, 1: 0.5}


def test_what_ships_is_simulated_again_and_drawn() -> None:
    result = shipped_result(COMPARE, "churn")
    rows = {(row["way"], row["mean stay, s"]): row for row in result.tables[0].records}
    assert set(rows) == {(way, stay_s) for way in WAYS for stay_s in STAYS_S}
    assert [row[0] for row in result.tables[1].rows] == list(WAYS)
    assert all(row["goodput"] <= row["if changes cost nothing"] for row in rows.values())
    way, stay_s = "LoRA, pipeline", STAYS_S[0]
    end_s = length_s(stay_s)
    rates = [run(way, COUNT, BOARD, exponential(stay_s), end_s, seed).rate for seed in range(DRAWS)]
    shipped, alone = rows[way, stay_s], undisturbed(way, COUNT, BOARD, end_s)
    assert (shipped["lowest"], shipped["highest"]) == pytest.approx((min(rates) / alone, max(rates) / alone))
    [drawn] = find_item(COMPARE, "churn").draw(result)
    executed = shipped_result(COMPARE, "churn-executed")
    in_pace = {row[0] for row in executed.tables[0].rows if row[-1] == "yes"}
    assert len(drawn.figure.data) == 2 * len(WAYS) + len(in_pace) + 1


def test_boards_a_hundred_times_slower_with_a_tiny_model_stand_in_for_those_of_the_curves() -> None:
    """A step takes about as long, and churn takes about as much of the goodput."""
    way, stay_s = "LoRA, data parallel", EXECUTED_STAYS_S[0]
    alone, often_gone = stand_in(way, None, "simulate"), stand_in(way, stay_s, "simulate")
    assert alone.changes == 0 and often_gone.changes > 10 and alone.samples == often_gone.samples
    assert alone.rate == pytest.approx(undisturbed(way, COUNT, BOARD, 24.0), rel=0.3)
    executed = shipped_result(COMPARE, "churn-executed")
    shipped = {(row["way"], row["mean stay, s"]): row for row in executed.tables[0].records}
    assert often_gone.rate / alone.rate == pytest.approx(shipped[way, stay_s]["simulated"])
    assert set(shipped) == {(way, stay_s) for way in EXECUTED_WAYS for stay_s in EXECUTED_STAYS_S}


def test_an_executed_goodput_is_over_an_executed_run_in_which_no_board_goes() -> None:
    alone, churned = Run(samples=100, seconds=20.0, dilation=8.0), Run(samples=100, seconds=40.0, in_pace=False)
    simulated = Run(samples=100, seconds=25.0, changes=3, returns_s=(2.7,))
    point = Point(
        way="P-RGE", stay_s=10, executed=churned, executed_alone=alone, simulated=simulated, simulated_alone=alone
    )
    result = compared(find_item(COMPARE, "churn-executed"), [point])
    [row] = result.tables[0].records
    assert (row["goodput, executed"], row["simulated"], row["in pace"]) == (0.5, 0.8, "no")
    assert "at most 30 points" in result.findings[0] and "0 of 1 points" in result.findings[0]
