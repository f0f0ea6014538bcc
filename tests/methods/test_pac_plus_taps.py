"""Where a stage's taps lie in a whole record."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.methods.builders import PLANS, make_rank_job
from tests.methods.conftest import four_devices
from workbench.methods.pac_plus.prepare import StageTaps, stage_taps
from workbench.models.loading import load_stack


def names(start: int, stop: int, border: int | None) -> list[str]:
    """Return the taps of layers [start, stop) as the backbone gives them, by name."""
    result = ["b0"] if start == 0 else []
    for layer in range(start, stop):
        result += ["decoder embedding"] if layer == border else []
        result.append(f"layer {layer}")
    return result


@pytest.mark.parametrize("border", [None, 1, 3, 5])
def test_every_cut_gives_each_tap_its_place(border: int | None) -> None:
    reference = names(0, 6, border)
    for count in range(6):
        for cuts in combinations(range(1, 6), count):
            for start, stop in zip((0, *cuts), (*cuts, 6), strict=True):
                taps = stage_taps(start, stop, border)
                assert reference[taps.first : taps.first + taps.total] == names(start, stop, border)
                targets = [
                    name for name in names(start, stop, border) if border is not None and reference.index(name) > border
                ]
                assert taps.num_target_taps == len(targets)


def test_a_single_stack() -> None:
    assert stage_taps(0, 6) == StageTaps(first=0, num_taps=7, num_target_taps=0)
    assert stage_taps(2, 4) == StageTaps(first=3, num_taps=2, num_target_taps=0)


def test_the_predicted_moves_are_those_that_are_carried_out(tmp_path: Path) -> None:
    """A prediction counts the bytes on each way; the devices move each record."""
    stack, first = load_stack("tiny-bert"), PLANS["[3, 3] on [2-2]"]
    job = make_rank_job(stack, "tiny-bert", first, four_devices(), tmp_path, samples=22, epochs=2)
    for stages in (first, PLANS["[2, 2, 2] on [2-1-1]"]):
        planned = replace(job, plan=replace(job.plan, stages=stages))
        predicted = planned.phases()[0].moves()["sharing the activations"]
        moved = [move.program for move in planned.tape_moves(planned.planned_epoch(0))]
        assert moved and [program.digest for program in predicted] == [program.digest for program in moved]
