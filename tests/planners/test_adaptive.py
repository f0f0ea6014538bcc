"""Queries, batch and precision from time and memory, and what counts as a change of pace."""

from __future__ import annotations

import math

import pytest

from workbench.core.errors import PlanError
from workbench.methods.p_rge.adaptive import Price, Setting, candidates, choose
from workbench.planners.pace import Pace

ASKED = Setting(4, 4)


def test_candidates_keep_the_work_then_halve_it_then_lower_the_precision() -> None:
    found = candidates(ASKED, precisions=("nf4", "int8"))
    same = [setting for setting in found if setting.passes == 16 and setting.precision == "float32"]
    assert same == [Setting(4, 4), Setting(8, 2), Setting(16, 1), Setting(2, 8), Setting(1, 16)]
    assert found[: len(same)] == tuple(same)
    assert [setting.passes for setting in found if setting.precision == "int8"] == [
        setting.passes for setting in found[: len(found) // 3]
    ]
    assert list(dict.fromkeys(setting.precision for setting in found)) == ["float32", "int8", "nf4"]
    assert candidates(Setting(1, 1)) == (Setting(1, 1),)
    # A run that has lowered its precision does not raise it by itself.
    assert {setting.precision for setting in candidates(Setting(1, 2, "int8"), precisions=("float32", "nf4"))} == {
        "int8",
        "nf4",
    }


def test_the_most_wanted_that_fits_is_chosen() -> None:
    """Time goes with the rows; memory allows 8 rows of float32, and any of int8."""

    def price(setting: Setting) -> Price:
        rows = 2 * setting.passes
        if setting.precision == "float32" and rows > 8:
            return Price(math.inf, 1000 * rows)
        return Price(0.1 * rows)

    assert choose(candidates(ASKED), price) == Setting(4, 1)
    assert choose(candidates(ASKED, precisions=("int8",)), price) == Setting(
        4, 1
    )  # precision is kept as long as something fits
    assert choose([ASKED, Setting(4, 4, "int8")], price) == Setting(4, 4, "int8")
    assert choose(candidates(ASKED), price, step_s=0.45) == Setting(2, 1)
    assert choose(candidates(ASKED), price, step_s=0.01) == Setting(1, 1)  # none is so fast: the fastest
    with pytest.raises(PlanError, match=r"0\.0 MB of memory are missing"):
        choose([ASKED], price)


def test_a_change_of_pace_lasts_a_window_and_exceeds_the_threshold() -> None:
    pace = Pace(window=3, threshold=1.3)
    for busy_s in (1.0, 5.0, 1.1, 1.0, 0.9, 1.2):  # one hiccup is none
        pace.observe(0, busy_s, 1.0)
        assert pace.changed() == {}
    for busy_s in (4.0, 4.0):
        pace.observe(0, busy_s, 1.0)
        pace.observe(1, 1.0, 1.0)
    assert pace.changed() == {0: 4.0}
    pace.accept(pace.changed())
    for _ in range(3):
        pace.observe(0, 4.4, 1.0)  # within the threshold of what is planned with
    assert pace.changed() == {}
    for _ in range(3):
        pace.observe(0, 1.0, 1.0)
    assert pace.changed() == {0: 1.0}  # and back


def test_a_straggler_is_repeatedly_slow() -> None:
    pace = Pace(window=5, threshold=1.5, repeats=3)
    for slowness in (4.0, 1.0, 4.0, 1.0, 1.0, 4.0, 1.0):  # never three of five
        pace.observe(1, slowness, 1.0)
        assert pace.changed() == {}
    pace.observe(1, 6.0, 1.0)
    pace.observe(1, 5.0, 1.0)
    assert pace.changed() == {1: 5.0} and pace.slowness(1) == 5.0 and pace.lately(1) == [1.0, 4.0, 1.0, 6.0, 5.0]
    pace.accept({})
    assert pace.changed() == {} and pace.slowness(1) == 1.0
    for _ in range(3):  # it does not wait for a full window
        assert pace.changed() == {}
        pace.observe(1, 2.0, 1.0)
    assert pace.changed() == {1: 2.0}


def test_moments_are_noise() -> None:
    pace = Pace(window=3, least_s=1.0)
    for _ in range(9):
        pace.observe(0, 0.1, 0.05)
    assert not pace.changed()
    pace.observe(0, 0.2, 0.1)
    assert pace.changed() == {0: 2.0}
    for _ in range(10):
        pace.observe(0, 0.1, 0.1)
    assert not pace.changed()
