"""Queries and batch from time and memory, and what counts as a change of pace."""

from __future__ import annotations

import math

from workbench.methods.p_rge.adaptive import Setting, candidates, choose
from workbench.planners.pace import Pace

ASKED = Setting(4, 4)


def test_candidates_keep_the_work_then_halve_it() -> None:
    settings = candidates(ASKED)
    same = [setting for setting in settings if setting.passes == 16]
    assert same == [Setting(4, 4), Setting(8, 2), Setting(16, 1), Setting(2, 8), Setting(1, 16)]
    assert settings[: len(same)] == tuple(same)
    assert list(dict.fromkeys(setting.passes for setting in settings)) == [16, 8, 4, 2, 1]
    assert candidates(Setting(1, 1)) == (Setting(1, 1),)


def test_the_most_wanted_that_fits_is_chosen() -> None:
    """Time goes with the rows; memory allows 8 rows."""

    def seconds(setting: Setting) -> float:
        rows = 2 * setting.passes
        return math.inf if rows > 8 else 0.1 * rows

    assert choose(candidates(ASKED), seconds) == Setting(4, 1)
    assert choose(candidates(ASKED), seconds, step_s=0.45) == Setting(2, 1)
    assert choose(candidates(ASKED), seconds, step_s=0.01) == Setting(1, 1)  # none is so fast: the fastest
    assert choose([ASKED, Setting(8, 2)], seconds) == Setting(8, 2)  # none fits: the plan says what is missing


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
