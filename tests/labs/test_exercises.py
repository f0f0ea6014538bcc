from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from widget_reports import CLUSTER, PLAN, make_report

from workbench import experiment
from workbench.core.report import SweepPoint
from workbench_labs import exercises, progress
from workbench_labs.exercises import Verdict
from workbench_labs.planning import with_bandwidth, with_memory

REPORT = make_report(first_s=8.0, cached_s=2.0)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (lambda answer: exercises.check_speedup(answer, REPORT), 4, 6),
        (lambda answer: exercises.check_idlest(answer, REPORT), "delta", "alpha"),
        # 8 + (n - 1) 2 <= 4 n from n = 3 on.
        (lambda answer: exercises.check_half_time(answer, REPORT), 3, 2),
        (lambda answer: exercises.check_half_time(answer, REPORT), 3, 4),
    ],
)
def test_a_check_tells_right_from_wrong_and_waits_for_an_answer(check, right, wrong) -> None:
    assert check(right).passed is True, check(right)
    assert check(wrong).passed is False
    assert check(None).passed is None
    assert len(check(wrong).message) > 20, "a hint helps"


def test_an_unknown_check_is_named() -> None:
    with pytest.raises(AttributeError, match="check_nothing"):
        _ = exercises.check_nothing
    assert {"check_speedup", "check_idlest"} <= set(dir(exercises))


def test_not_a_number_is_told() -> None:
    verdict = exercises.check_speedup("four", REPORT)  # type: ignore[arg-type]
    assert verdict.passed is False and "'four'" in verdict.message
    verdict = exercises.check_idlest("Gamma", REPORT)
    assert verdict.passed is False and "Did you mean 'gamma'?" in verdict.message
    verdict = exercises.check_faster_plan("mine", REPORT)  # type: ignore[arg-type]
    assert verdict.passed is False and "A Plan is asked for, this is 'mine'." in verdict.message


def test_right_answers_are_kept_and_counted_by_lab() -> None:
    notebooks = Path(__file__).parents[2] / "notebooks"
    exercises.check_speedup(6, REPORT)
    assert not progress.passed() and "0 of 4" in str(progress.labs(notebooks))
    for _ in range(2):
        exercises.check_speedup(4, REPORT)
    assert progress.passed() == {"check_speedup"} and "1 of 4" in str(progress.labs(notebooks))
    progress.progress_file().write_text("{broken")
    assert not progress.passed()


def test_a_cache_that_never_halves_the_time_is_told() -> None:
    alone = replace(REPORT, epochs=REPORT.epochs[:1])
    assert {one(3, alone).message for one in (exercises.check_half_time, exercises.check_speedup)} == {
        "No epoch of this run came from the cache. Train 2 epochs or more."
    }
    assert "never" in exercises.check_half_time(3, make_report(first_s=2.0, cached_s=1.5)).message


@pytest.mark.parametrize(
    ("mine_s", "passed", "said"),
    [
        (0.9, True, "beat"),
        (1.05, True, "did not beat the planner: yours takes 5% longer. A plan of your own within 10%"),
        (1.5, False, "Get within"),
    ],
)
def test_a_plan_of_ones_own_is_compared_with_the_planners(monkeypatch, mine_s: float, passed: bool, said: str) -> None:
    def sweep(job, cluster, plans, mode, *, num_steps):
        assert mode == "simulate"
        seconds = {"mine": mine_s, "planner": 1.0}
        return tuple(SweepPoint(name=name, plan=plan, predicted_s=seconds[name]) for name, plan in plans.items())

    monkeypatch.setattr(experiment, "sweep", sweep)
    front, back = PLAN.stages
    own = replace(PLAN, stages=(replace(front, stop=3), replace(back, start=3)))
    verdict = exercises.check_faster_plan(own, REPORT)
    assert verdict.passed is passed and said in verdict.message
    assert "the planner's own plan" in str(exercises.check_faster_plan(PLAN, REPORT))
    assert exercises.check_faster_plan(None, REPORT).passed is None


def test_a_verdict_reads_well_with_and_without_html() -> None:
    assert str(Verdict(False, "Try <again>.")) == "Not yet. Try <again>."
    assert "Try &lt;again&gt;." in Verdict(False, "Try <again>.")._repr_html_()


def test_variations_change_every_device() -> None:
    slow = with_bandwidth(CLUSTER, 20)
    assert {device.link.bytes_per_s for device in slow.devices} == {2.5e6} and slow.link(0, 3).bytes_per_s == 2.5e6
    assert {device.memory_bytes for device in with_memory(CLUSTER, 5).devices} == {5}
