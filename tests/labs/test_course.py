"""The course: what passes and what does not, and what is kept."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.labs import outputs
from tests.labs.solutions import ALL, ROOT, SOLUTIONS, Functions, defined, source_path, written
from workbench.core.errors import ConfigError
from workbench.core.report import Report
from workbench_labs.course import interruption, release
from workbench_labs.course.lab import EXERCISES, HandIn, Lab, exercises_of
from workbench_labs.course.verdict import is_right, usable
from workbench_labs.exercises.pipelines import both_table, gpipe_over_1f1b, run_both
from workbench_labs.progress import exercises_of as in_order


@pytest.fixture
def right() -> Functions:
    return {name: defined(source)[name] for name, source in SOLUTIONS.items()}


def answers_of(lab: str) -> ModuleType:
    return import_module(f"tests.labs.answers.lab{lab}")


WRONG = {lab: answers_of(lab).WRONG for lab in EXERCISES}


@pytest.mark.parametrize("lab", EXERCISES)
def test_every_exercise_has_right_and_wrong_answers_and_hints(lab: str) -> None:
    exercises = exercises_of(lab)
    assert set(WRONG[lab]) == set(exercises) == {*ALL[lab], *answers_of(lab).RIGHT}
    assert list(exercises) == in_order(source_path(lab))
    assert {name for name, exercise in exercises.items() if exercise.is_code} == set(ALL[lab])
    for name, exercise in exercises.items():
        assert len(WRONG[lab][name]) >= 3 and len(set(exercise.hints)) == 3, name


SLOW_JUDGES = {"break_even", "planner", "rule", "tiles", "unfreeze"}
"""They simulate: one student's numbers for each wrong answer, otherwise three students'."""
WRONG_ANSWERS = [(lab, name, what) for lab in EXERCISES for name, answers in WRONG[lab].items() for what in answers]


@pytest.mark.parametrize(("lab", "name", "what"), WRONG_ANSWERS)
def test_a_wrong_answer_fails_and_says_why(lab: str, name: str, what: str) -> None:
    exercise = exercises_of(lab)[name]
    answer, message = WRONG[lab][name][what]
    for seed in "a" if name in SLOW_JUDGES else "abc":
        given = answer(exercise.numbers(seed)) if callable(answer) and not exercise.is_code else answer
        verdict = exercise.check(given, seed)
        assert verdict.passed is False and verdict.points == 0
        with pytest.raises(AssertionError):
            verdict.require()
        assert re.search(message, str(verdict))


def test_names_may_come_in_any_collection() -> None:
    source = ALL["03"]["stale_records"]
    for kind in (set, tuple, frozenset):
        answer = defined(source)["stale_records"]
        verdict = exercises_of("03")["stale_records"].check(lambda *given, a=answer, k=kind: k(a(*given)), "03/a")
        assert verdict.passed, verdict


SEEDS = {"cluster": 10, "beat": 10, "least_time": 20, "break_even": 10, "tiles": 0}
"""Of exercises whose judge simulates; of all others 200.  The next test judges three seeds of each."""
VALUES = [(lab, exercise.name) for lab in EXERCISES for exercise in exercises_of(lab).values() if not exercise.is_code]


@pytest.mark.parametrize(("lab", "name"), VALUES)
def test_no_wrong_formula_is_within_the_tolerance_of_any_students_numbers(lab: str, name: str) -> None:
    exercise, right = exercises_of(lab)[name], answers_of(lab).RIGHT[name]
    wrong = {what: given for what, (given, _) in WRONG[lab][name].items() if callable(given)}
    for number in range(SEEDS.get(name, 200)):
        drawn = exercise.numbers(f"{lab}/{number}")
        for what, given in wrong.items():
            assert not exercise.check(given(drawn), f"{lab}/{number}").passed, f"{what}: {drawn}"
        assert exercise.check(right(drawn), f"{lab}/{number}").passed


@pytest.mark.parametrize("lab", EXERCISES)
def test_the_solutions_pass_with_every_students_numbers(lab: str) -> None:
    for seed in ("a", "mz42", "a/secret"):
        for name, exercise in exercises_of(lab).items():
            seed_of_lab = f"{lab}/{seed}"
            if exercise.is_code:
                answer = defined(ALL[lab][name])[name]
            else:
                answer = answers_of(lab).RIGHT[name](exercise.numbers(seed_of_lab))
            verdict = exercise.check(answer, seed_of_lab)
            assert verdict.passed and verdict.points == exercise.points, f"{name}: {verdict}"


def test_numbers_are_each_students_own_and_of_any_kind() -> None:
    bubbles = {seed: exercises_of("02")["bubble"] for seed in map(str, range(20))}
    assert len({exercise.question_for(seed) for seed, exercise in bubbles.items()}) > 10
    for seed, exercise in bubbles.items():
        numbers = exercise.numbers(seed)
        share = Fraction(numbers["stages"] - 1, numbers["stages"] - 1 + numbers["micro_batches"])
        for answer in (share, float(share), np.float32(share), np.float64(share), torch.tensor(float(share))):
            assert exercise.check(answer, seed).passed


@pytest.mark.parametrize("lab", EXERCISES)
def test_a_hint_has_no_place_for_a_number_that_nobody_fills(lab: str) -> None:
    """The question is filled with the student's numbers; hints are the same for everybody."""
    for exercise in exercises_of(lab).values():
        places = [f"{{{name}}}" for name in exercise.numbers("a")]
        assert [hint for hint in exercise.hints if any(place in hint for place in places)] == []


def test_students_get_the_source_without_solutions() -> None:
    assert release.main(["--check"]) == 0
    for lab, solutions in ALL.items():
        text = (ROOT / "notebooks" / source_path(lab).name).read_text(encoding="utf-8")
        assert "SOLUTION" not in text and text.count("raise NotImplementedError") == len(solutions)
        assert not re.search(r"\bwhile\b[^\n]*:\\n|for k in range", text)


@pytest.mark.parametrize("lab", ALL)
def test_nbgrader_gets_a_locked_check_with_points_for_each_exercise(lab: str) -> None:
    source = json.loads(source_path(lab).read_text(encoding="utf-8"))
    cells = release.for_nbgrader(source, lab)["cells"]
    described = {cell["metadata"]["nbgrader"]["grade_id"]: cell for cell in cells if "nbgrader" in cell["metadata"]}
    assert len(described) == sum("nbgrader" in cell["metadata"] for cell in cells)
    for name, exercise in exercises_of(lab).items():
        check = described[f"check-{name}"]
        settings = check["metadata"]["nbgrader"]
        assert (settings["grade"], settings["locked"], settings["points"]) == (True, True, exercise.points)
        assert "".join(check["source"]).startswith("lab.exercise(") and "".join(check["source"]).endswith(".require()")
    answers = [cell for name, cell in described.items() if name.startswith("answer-")]
    assert len(answers) >= len(ALL[lab]) and not any(cell["metadata"]["nbgrader"]["locked"] for cell in answers)


@pytest.mark.parametrize("lab", ALL)
def test_the_source_with_its_solutions_runs_as_a_whole(
    lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)  # IPython warns of one that is not this Python's
    shown = outputs.run(lab, tmp_path)
    assert shown == outputs.kept().get(lab, {}), f"If the change is meant: python -m tests.labs.outputs {lab}"
    work = HandIn.read(tmp_path / f"{lab}-anna.json")
    assert {name: answer.passed for name, answer in work.answers.items()} == dict.fromkeys(ALL[lab], True)
    if lab == "00":
        [path] = tmp_path.rglob("report.json")
        report, other = Report.read(path), outputs.OTHERS[lab]
        assert (report.job.model, report.job.epochs) == (other["model"], other["epochs"])
        assert [device.name for device in report.cluster.devices] == ["oak", "birch"]
        assert list(tmp_path.rglob("*.html"))


def test_a_right_answer_is_kept_when_a_wrong_one_follows(tmp_path: Path) -> None:
    lab = Lab("02", student="anna", folder=tmp_path)
    numbers = lab.numbers("bubble")
    right = answers_of("02").RIGHT["bubble"](numbers)
    assert lab.exercise("bubble", right).passed and lab.exercise("gpipe", written(SOLUTIONS["gpipe"], "gpipe")).passed
    kept = lab.work.answers
    for name, wrong in (("bubble", 7), ("gpipe", written(ALTERNATING, "gpipe"))):
        verdict = lab.exercise(name, wrong)
        assert verdict.passed is False and "Your right answer from before is kept." in verdict.message
        assert HandIn.read(tmp_path / "02-anna.json").answers[name] == replace(kept[name], attempts=2)


def test_an_answer_that_never_ends_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "SECONDS", 0.2)
    endless = "def gpipe(p, s, n):\n    while True:\n        try:\n            s += 1\n        except Exception: pass\n"
    verdict = Lab("02", folder=tmp_path).exercise("gpipe", written(endless, "gpipe"))
    assert verdict.passed is False and "It takes more than 0.2 s." in verdict.message


ALTERNATING = "def gpipe(p, s, n):\n    return [f'{kind}{number}' for number in range(n) for kind in 'FB']\n"


def test_what_a_student_does_is_kept(tmp_path: Path) -> None:
    lab = Lab("02", student="mz42", folder=tmp_path)
    assert "wrong guess teaches" in lab.guess("speed", None) and not lab.work.guesses
    lab.guess("speed", 2)
    lab.guess("speed", np.float64(1.5))
    lab.guess("cut", [3, np.int64(1)])
    assert "You said 1.5; it is 1 (1.5 times" in lab.compare("speed", torch.tensor(1.0))
    assert "outcome is known" in lab.guess("speed", 1.0)
    assert lab.exercise("gpipe", None).passed is None
    assert lab.exercise("gpipe", written(ALTERNATING, "gpipe")).passed is False
    assert "Hint 1 of 3" in lab.hint("gpipe") and "Hint 2 of 3" in lab.hint("gpipe")
    assert lab.exercise("gpipe", written(SOLUTIONS["gpipe"], "gpipe")).passed
    assert lab.exercise("bubble", 10**5000).passed is False
    lab.explain("why", "Because activations take memory \ud800.")
    assert "No guess is kept" in lab.guess("nothing", math.nan) and "quotation marks" in lab.explain("other", 5)
    assert {"nothing", "other"}.isdisjoint(lab.work.guesses | lab.work.explanations)
    assert "It is 42.5 %." in lab.compare("share, %", 42.5)
    assert "28,200." in lab.compare("bytes", 28_200.0)
    assert "5 of 27 points" in lab.submit()
    again = Lab("02", student="mz42", folder=tmp_path)
    assert again.work == lab.work == HandIn.read(tmp_path / "02-mz42.json")
    answer = again.work.answers["gpipe"]
    assert (answer.attempts, answer.hints, answer.points) == (2, 2, 5.0) and "def gpipe" in answer.source
    assert again.work.guesses["speed"].value == 1.5 and again.work.guesses["cut"].value == [3, 1]


@pytest.mark.parametrize(
    ("guess", "choices", "said"),
    [
        ("1,5", (), '"1,5" is no number. Write one without quotation marks and with a point'),
        ("3", (), '"3" is no number.'),
        (True, (), "True is no number."),
        ({"speed": 2}, (), "is no number."),
        (math.inf, (), "no finite number"),
        ("form the cache", ("first epoch", "from the cache"), "is not among .*first epoch.* Did you mean"),
        (2, ("yes", "no"), "2 is not among .*Choose one"),
    ],
)
def test_a_guess_of_another_kind_is_refused_and_the_former_stays(
    guess: Any, choices: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    lab, former = Lab("02", folder=tmp_path), choices[0] if choices else 2
    lab.guess("speed", former, choices)
    shown = html.unescape(lab.guess("speed", guess, choices).striptags())
    assert re.search(said, shown) and shown.endswith(f"Your guess stays {former}.")
    assert lab.work.guesses["speed"].value == former


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SOLUTIONS["gpipe"].replace("return ", "return shared and "), "name 'shared' is not defined"),
        (SOLUTIONS["gpipe"].replace("def gpipe", "def mine"), "Name it gpipe"),
        ("@shared\n" + SOLUTIONS["gpipe"], "name 'shared' is not defined. Write what it needs inside it."),
    ],
)
def test_a_function_is_judged_as_it_is_handed_in(text: str, said: str, tmp_path: Path) -> None:
    """Without what other cells define, and under the exercise's name."""
    lab = Lab("02", folder=tmp_path)
    name = "mine" if "def mine" in text else "gpipe"
    try:
        shown = str(lab.exercise("gpipe", written(text, name)))
    except ConfigError as error:
        shown = str(error)
    assert said in shown


def test_a_hint_is_offered_from_the_second_wrong_answer_until_one_was_asked_for(tmp_path: Path) -> None:
    lab, answer = Lab("02", folder=tmp_path), written("def gpipe(p, s, n):\n    print(p)", "gpipe")
    first, second = (lab.exercise("gpipe", answer).message for _ in range(2))
    assert first.endswith("this is None. Does your function end with return?")
    assert second == f'{first} Stuck? lab.hint("gpipe") gives a hint.'
    lab.hint("gpipe")
    assert lab.exercise("gpipe", answer).message == first


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: Lab("99", folder=folder), "lab with exercises '99'.*02"),
        (lambda folder: Lab("02", student="../../etc", folder=folder), "letters, digits"),
        (lambda folder: Lab("02", folder=folder).task("gpip"), "Did you mean 'gpipe'"),
        (lambda folder: Lab("02", folder=folder).hint(), "Known are event_loop, gpipe"),
        (lambda folder: Lab("02", folder=folder).exercise("event_loop", print), "Write it with def"),
        (lambda folder: Lab("02", folder=folder).exercise("gpipe", 5), "This is 5. Write it with def gpipe"),
        (lambda folder: Lab("02", folder=folder).exercise("gpipe", partial(print)), "Write it with def gpipe"),
        (lambda folder: Lab("02", folder=folder).exercise("gpipe", lambda p, s, n: []), "This is a lambda. Write it"),
        (lambda folder: Lab("02", student="anna\n", folder=folder), "letters, digits"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        call(tmp_path)


def test_a_students_list_is_simulated_and_executed(right: Functions) -> None:
    """Both have the same operations; what is not right yet is replaced by the workbench's own."""
    exercises = exercises_of("02").values()
    assert usable(exercises, "one_f_one_b", right["one_f_one_b"]) is right["one_f_one_b"]
    assert usable(exercises, "one_f_one_b", right["gpipe"])(3, 2, 2) == ["F0", "B0", "F1", "B1"]
    settings: dict[str, Any] = {"num_micro_batches": 3, "forward_s": 0.002, "backward_s": 0.004, "fidelity": "paced"}
    simulated, executed = run_both(right["one_f_one_b"], **settings)
    assert executed.source == "emulated"
    assert {(span.rank, span.op) for span in executed.spans} == {(span.rank, span.op) for span in simulated.spans}
    assert executed.makespan_s > 0.9 * simulated.makespan_s
    assert len(both_table(simulated, executed).rows) == 4
    assert gpipe_over_1f1b(4, 8) == pytest.approx(1.0)


def loops(*given: Any) -> Any:
    while True:
        pass


def never_right(*given: Any) -> Any:
    raise RuntimeError("not yet")


@pytest.mark.parametrize("lab", EXERCISES)
def test_a_lab_goes_on_only_with_a_function_that_is_right(lab: str) -> None:
    exercises = exercises_of(lab).values()
    for exercise in exercises:
        if exercise.is_code:
            assert not is_right(exercises, exercise.name, never_right)
            assert is_right(exercises, exercise.name, defined(ALL[lab][exercise.name])[exercise.name]), exercise.name
        if exercise.stand_in is not None:
            assert usable(exercises, exercise.name, never_right) is exercise.stand_in
            # The policy that stands in is a simple one, which the judge refuses.
            assert is_right(exercises, exercise.name, exercise.stand_in) == (exercise.name != "unfreeze"), exercise.name


def test_a_function_that_never_ends_does_not_hold_up_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "SECONDS", 0.2)
    assert usable(exercises_of("02").values(), "one_f_one_b", loops) is not loops
