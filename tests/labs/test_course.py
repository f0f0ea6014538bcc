"""The course: what passes and what does not, what is kept, and what a teacher gets, also from hostile hand-ins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.labs.solutions import ALL, ROOT, SOLUTIONS, Functions, defined, written
from workbench.core.errors import ConfigError
from workbench.runs.notebooks import run_notebook
from workbench_labs.course import release
from workbench_labs.course.cuts import equal_cut, every_cut, makespan_s
from workbench_labs.course.lab import EXERCISES, HandIn, Lab, exercises_of
from workbench_labs.course.pipelines import both_table, gpipe_over_1f1b, run_both, usable


@pytest.fixture
def right() -> Functions:
    return {name: defined(source)[name] for name, source in SOLUTIONS.items()}


def never_waits(orders: Any, forward_s: Any, backward_s: Any) -> Any:
    """Each device does one thing after another, whatever the others do."""
    if orders == [["B0", "F0"]]:
        raise ValueError
    times = []
    for stage, order in enumerate(orders):
        now, own = 0.0, []
        for operation in order:
            length = (forward_s if operation[0] == "F" else backward_s)[stage]
            own.append([now, now + length])
            now += length
        times.append(own)
    return times


def no_deadlock(orders: Any, forward_s: Any, backward_s: Any) -> Any:
    """The solution, but a deadlock returns what there is."""
    try:
        return defined(SOLUTIONS["event_loop"])["event_loop"](orders, forward_s, backward_s)
    except ValueError:
        return [[[0.0, 1.0], [1.0, 2.0]]]


def alternating(stages: int, stage: int, count: int) -> list[str]:
    """One forward and one backward from the beginning on every stage: right, but slow."""
    return [f"{kind}{number}" for number in range(count) for kind in "FB"]


def gpipe(stages: int, stage: int, count: int) -> list[str]:
    return [f"F{number}" for number in range(count)] + [f"B{number}" for number in range(count)]


def reversed_backwards(stages: int, stage: int, count: int) -> list[str]:
    """Each stage does its backward passes in another order."""
    backwards = [f"B{number}" for number in range(count)]
    return [f"F{number}" for number in range(count)] + (backwards if stage % 2 else backwards[::-1])


def backward_first(stages: int, stage: int, count: int) -> list[str]:
    return [f"B{number}" for number in range(count)] + [f"F{number}" for number in range(count)]


def greedy(layer_s: Any) -> Any:
    """Each device takes layers up to its share of the whole: nearly balanced."""
    layers = len(layer_s[0])
    weights = [1 / sum(own) for own in layer_s]
    counts = [max(1, round(layers * weight / sum(weights))) for weight in weights[:-1]]
    return [*counts, layers - sum(counts)]


def ignores_memory(layer_s: Any, layer_bytes: Any, budgets: Any) -> Any:
    return defined(ALL["09"]["cut"])["cut"](layer_s)


def never_fits(layer_s: Any, layer_bytes: Any, budgets: Any) -> Any:
    return None


def balanced(drawn: dict[str, Any]) -> Any:
    return defined(ALL["09"]["cut"])["cut"](drawn["layer_s"])


WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "event_loop": {
        "it returns nothing": (lambda *_: None, "The result is a list"),
        "devices never wait": (never_waits, "goes from"),
        "a deadlock is not noticed": (no_deadlock, "Raise ValueError"),
        "too few": (lambda orders, *_: [[] for _ in orders], "has .* entries"),
        "texts": (lambda orders, *_: [[["a", "b"] for _ in order] for order in orders], "A number is asked for"),
        "it fails": (lambda *_: {}[0], "KeyError"),
        "not a number": (lambda orders, *_: [[[math.nan] * 2 for _ in order] for order in orders], "finite"),
        "it empties the question": (lambda orders, *_: orders.clear() or [], "has .* entries"),
    },
    "gpipe": {
        "alternating": (alternating, "are possible"),
        "one operation twice": (lambda p, s, n: ["F0"] * 2 * n, "each has F and B once"),
        "backward before forward": (backward_first, "wait for each other"),
        "1F1B": (lambda p, s, n: defined(SOLUTIONS["one_f_one_b"])["one_f_one_b"](p, s, n), "all forward passes"),
    },
    "one_f_one_b": {
        "GPipe": (gpipe, "are enough"),
        "alternating": (alternating, "are possible"),
        "another order on each stage": (reversed_backwards, "are possible|wait for each other|are enough"),
        "no list": (lambda *_: "F0 B0", "is a list"),
    },
    "bubble": {
        "a constant": (0.5, "is not it"),
        "in per cent": (47.0, "is not it"),
        "one more stage": (
            lambda numbers: numbers["stages"] / (numbers["stages"] + numbers["micro_batches"]),
            "is not",
        ),
        "a text": ("a third", "A number is asked for"),
        "not a number": (math.nan, "finite"),
    },
    "ways": {
        "all orders": (lambda drawn: drawn["layers"] ** drawn["devices"], "is not it"),
        "one place more": (lambda drawn: math.comb(drawn["layers"], drawn["devices"] - 1), "is not it"),
        "a constant": (56, "is not it"),
    },
    "cut": {
        "equal": (lambda layer_s: equal_cut(len(layer_s[0]), len(layer_s)), "are possible"),
        "by speed": (greedy, "are possible|one layer or more"),
        "too many": (lambda layer_s: [len(layer_s[0])] * len(layer_s), "in all"),
        "none for the last": (lambda layer_s: [len(layer_s[0]), *[0] * (len(layer_s) - 1)], "one layer or more"),
        "a text": (lambda layer_s: "3, 1", "is a list"),
    },
    "cut_within": {
        "memory is ignored": (ignores_memory, "None is asked for|needs"),
        "never": (never_fits, "fits; your function returned None"),
        "equal": (lambda layer_s, *_: equal_cut(len(layer_s[0]), len(layer_s)), "asked for|needs|possible"),
    },
    "beat": {
        "the planner's own cut": (balanced, "with the planner's cut"),
        "equal": ([3, 2, 2], "with the planner's cut"),
        "all on one": ([7, 0, 0], "one layer or more"),
        "too few devices": ([4, 3], "has 3 entries"),
    },
}


def test_every_exercise_has_wrong_answers_and_hints() -> None:
    for lab in EXERCISES:
        for name, exercise in exercises_of(lab).items():
            assert len(WRONG[name]) >= 3 and len(set(exercise.hints)) == 3, name


LAB_OF = {name: lab for lab in EXERCISES for name in exercises_of(lab)}


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, answers in WRONG.items() for what in answers])
def test_a_wrong_answer_fails_and_says_why(name: str, what: str) -> None:
    exercise = exercises_of(LAB_OF[name])[name]
    answer, message = WRONG[name][what]
    for seed in ("a", "b", "c"):
        given = answer(exercise.numbers(seed)) if callable(answer) and not exercise.is_code else answer
        verdict = exercise.check(given, seed)
        assert verdict.passed is False and verdict.points == 0
        assert re.search(message, str(verdict))


def test_the_solutions_pass_with_every_students_numbers() -> None:
    for lab, solutions in ALL.items():
        for name, source in solutions.items():
            for seed in ("a", "mz42", "a/secret"):
                exercise = exercises_of(lab)[name]
                verdict = exercise.check(defined(source)[name], f"{lab}/{seed}")
                assert verdict.passed and verdict.points == exercise.points, str(verdict)
    for seed in "abc":
        ways, beat = (exercises_of("09")[name] for name in ("ways", "beat"))
        drawn = ways.numbers(seed)
        assert ways.check(math.comb(drawn["layers"] - 1, drawn["devices"] - 1), seed).passed
        drawn = beat.numbers(seed)
        shortest = min(every_cut(7, 3), key=lambda cut: makespan_s(cut, drawn["layer_s"], drawn["micro_batches"]))
        assert beat.check(shortest, seed).passed and beat.check(np.array(shortest).tolist(), seed).passed


def test_numbers_are_each_students_own_and_of_any_kind() -> None:
    bubbles = {seed: exercises_of("08")["bubble"] for seed in map(str, range(20))}
    assert len({exercise.asked(seed) for seed, exercise in bubbles.items()}) > 10
    for seed, exercise in bubbles.items():
        numbers = exercise.numbers(seed)
        share = Fraction(numbers["stages"] - 1, numbers["stages"] - 1 + numbers["micro_batches"])
        for answer in (share, float(share), np.float32(share), np.float64(share), torch.tensor(float(share))):
            assert exercise.check(answer, seed).passed


def test_students_get_the_source_without_solutions() -> None:
    assert release.main(["--check"]) == 0
    for lab, solutions in ALL.items():
        [path] = (ROOT / "notebooks").glob(f"{lab}_*.ipynb")
        text = path.read_text(encoding="utf-8")
        assert "SOLUTION" not in text and text.count("raise NotImplementedError") == len(solutions)
        assert not re.search(r"\bwhile\b[^\n]*:\\n|for k in range", text)


@pytest.mark.parametrize("lab", ALL)
def test_the_source_with_its_solutions_runs_as_a_whole(
    lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", "1")
    [path] = (ROOT / "labs").glob(f"{lab}_*.ipynb")
    run_notebook(path, tmp_path / "done.ipynb", {"student": "anna", "output": str(tmp_path), "fidelity": "paced"})
    work = HandIn.read(tmp_path / f"{lab}-anna.json")
    assert {name: answer.passed for name, answer in work.answers.items()} == dict.fromkeys(ALL[lab], True)


ALTERNATING = "def gpipe(p, s, n):\n    return [f'{kind}{number}' for number in range(n) for kind in 'FB']\n"


def test_what_a_student_does_is_kept(tmp_path: Path) -> None:
    lab = Lab("08", student="mz42", folder=tmp_path)
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
    assert "5 of 27 points" in lab.submit()
    again = Lab("08", student="mz42", folder=tmp_path)
    assert again.work == lab.work == HandIn.read(tmp_path / "08-mz42.json")
    answer = again.work.answers["gpipe"]
    assert (answer.attempts, answer.hints, answer.points) == (2, 2, 5.0) and "def gpipe" in answer.source
    assert again.work.guesses["speed"].value == 1.5 and again.work.guesses["cut"].value == [3, 1]


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
    lab = Lab("08", folder=tmp_path)
    name = "mine" if "def mine" in text else "gpipe"
    try:
        shown = str(lab.exercise("gpipe", written(text, name)))
    except ConfigError as error:
        shown = str(error)
    assert said in shown


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: Lab("99", folder=folder), "Lab '99'.*08"),
        (lambda folder: Lab("08", student="../../etc", folder=folder), "letters, digits"),
        (lambda folder: Lab("08", folder=folder).task("gpip"), "Did you mean 'gpipe'"),
        (lambda folder: Lab("08", folder=folder).exercise("event_loop", print), "Write it with def"),
        (lambda folder: Lab("08", student="anna\n", folder=folder), "letters, digits"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        call(tmp_path)


def test_a_students_list_is_simulated_and_executed(right: Functions) -> None:
    """Both have the same operations; what is not right yet is replaced by the workbench's own."""
    assert usable(right["one_f_one_b"]) is right["one_f_one_b"]
    assert usable(gpipe)(3, 2, 2) == ["F0", "B0", "F1", "B1"]
    settings: dict[str, Any] = {"num_micro_batches": 3, "forward_s": 0.002, "backward_s": 0.004, "fidelity": "paced"}
    simulated, executed = run_both(right["one_f_one_b"], **settings)
    assert executed.source == "emulated"
    assert {(span.rank, span.op) for span in executed.spans} == {(span.rank, span.op) for span in simulated.spans}
    assert executed.makespan_s > 0.9 * simulated.makespan_s
    assert len(both_table(simulated, executed).rows) == 4
    assert gpipe_over_1f1b(4, 8) == pytest.approx(1.0)
