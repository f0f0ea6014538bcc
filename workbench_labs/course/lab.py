"""A student's work on one lab: guesses, answers, explanations, and the file that is handed in."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal

from IPython.display import Markdown
from markupsafe import Markup
from msgspec import Meta

from workbench.core.errors import ConfigError, check_choice, did_you_mean
from workbench.core.files import make_folder
from workbench.core.serial import listed, read_json, write_json
from workbench.core.units import counted, three_figures
from workbench.widgets import output_folder
from workbench_labs.course.verdict import Exercise, Verdict, in_short, usable
from workbench_labs.notes import note

EXERCISES = {
    "00": "workbench_labs.exercises.first_run",
    "01": "workbench_labs.exercises.devices",
    "02": "workbench_labs.exercises.pipelines",
    "03": "workbench_labs.exercises.side_layers",
    "04": "workbench_labs.exercises.cuts",
    "05": "workbench_labs.exercises.slopes",
    "06": "workbench_labs.exercises.queries",
    "07": "workbench_labs.exercises.layer_cuts",
    "08": "workbench_labs.exercises.straggling",
    "09": "workbench_labs.exercises.ring",
    "10": "workbench_labs.exercises.never_drain",
    "11": "workbench_labs.exercises.clinic",
    "12": "workbench_labs.exercises.projects",
}
"""The module of each lab that has exercises of this kind."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z"
NOT_FINITE = "a number that is not finite"
LARGEST_SOURCE = 100_000
LARGEST_HAND_IN = 2_000_000

Name = Annotated[str, Meta(pattern=NAME)]
Text = Annotated[str, Meta(max_length=20_000)]
Numbers = Annotated[list[int | float], Meta(max_length=100)]
Plain = float | int | str | bool | Numbers | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A student's guess and the outcome.  at: the time of the guess (UTC)."""

    value: Plain
    at: Text
    outcome: Plain = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The newest answer to an exercise, or the newest right one if there is one.

    source: the text of a function; value: any other answer.

    hints: hints that were shown.  attempts: judged answers, wrong ones after a right one among them.
    """

    passed: bool | None = None
    points: Annotated[float, Meta(ge=0)] = 0.0
    message: Text = ""
    attempts: Annotated[int, Meta(ge=0)] = 0
    hints: Annotated[int, Meta(ge=0, le=3)] = 0
    source: Annotated[str, Meta(max_length=LARGEST_SOURCE)] = ""
    value: Plain = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandIn:
    """All of a student's work on one lab; the file that `submit` writes and `workbench labs grade` reads."""

    lab: Name
    student: Name
    guesses: dict[str, Guess] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    explanations: dict[str, Text] = field(default_factory=dict)
    written_at: Text = ""
    version: Literal[1] = 1

    @classmethod
    def read(cls, path: Path) -> HandIn:
        """Read a file.  Raises ConfigError if it is none, too large, or of a version that is not known."""
        return read_json(path, cls, "the hand-in", most_bytes=LARGEST_HAND_IN)


def exercises_of(lab: str) -> dict[str, Exercise]:
    """Return a lab's exercises by name.  Raises ConfigError for a lab that has none."""
    check_choice("lab with exercises", lab, EXERCISES)
    return {exercise.name: exercise for exercise in import_module(EXERCISES[lab]).EXERCISES}


class Lab:
    """A student's work on a lab.  It is stored in a folder, so that a restarted notebook goes on.

    student: a short name; exercises draw their numbers from it.  folder: default figures/lab-NUMBER.
    Raises ConfigError for an unknown lab or a name with other characters than letters, digits, - and _.
    """

    def __init__(self, lab: str, *, student: str = "guest", folder: Path | str | None = None) -> None:
        if not re.match(NAME, student):
            raise ConfigError(
                f"The student '{student:.40}' was named.",
                "A name has 1 to 32 letters, digits, - and _.",
                'Choose such a name, as in Lab("02", student="mz42").',
            )
        self.exercises = exercises_of(lab)
        self._path = Path(folder or output_folder(f"lab-{lab}")) / f"{lab}-{student}.json"
        work = HandIn.read(self._path) if self._path.exists() else HandIn(lab=lab, student=student)
        self.work = work
        self._seed = f"{lab}/{student}"

    def task(self, name: str) -> Markdown:
        """Return the question of an exercise, with this student's numbers."""
        return Markdown(self._exercise(name).question_for(self._seed))

    def numbers(self, name: str) -> dict[str, Any]:
        """Return the numbers that an exercise has drawn for this student."""
        return self._exercise(name).numbers(self._seed)

    def guess(self, name: str, value: Plain, choices: Sequence[str] = ()) -> Markup:
        """Keep what the student expects: a number, a list of numbers, or one of `choices`.  Another value is refused in
        a sentence, and a former guess stays.  A guess cannot be changed once its outcome is known.
        """
        guess = self.work.guesses.get(name)
        if guess is not None and guess.outcome is not None:
            return note(f"Your guess is kept: {guess.value}. Its outcome is known already.")
        if value is None:
            return note("No guess yet. Put a value where None is: a wrong guess teaches more than none.")
        plain, now = _plain(value), datetime.now(UTC).isoformat(timespec="seconds")
        if refusal := _refusal(plain, choices):
            stays = "" if guess is None else f" Your guess stays {_short(guess.value)}."
            return note(f"No guess is kept: {refusal}{stays}")
        self._keep(guesses=self.work.guesses | {name: Guess(value=plain, at=now)})
        return note(f"Your guess is kept: {_short(plain)}.")

    def compare(self, name: str, outcome: Plain) -> Markup:
        """Show a guess next to its outcome, and keep both."""
        guess, outcome = self.work.guesses.get(name), _plain(outcome)
        unit = " %" if name.endswith("%") else ""
        if guess is None:
            return note(f"It is {_short(outcome)}{unit}. You made no guess.")
        self._keep(guesses=self.work.guesses | {name: replace(guess, outcome=outcome)})
        return note(f"You said {_short(guess.value)}{unit}; it is {_short(outcome)}{unit}{_off(guess.value, outcome)}.")

    def exercise(self, name: str, answer: Any) -> Verdict:
        """Judge an answer and store it, unless a right one is stored and this one is wrong.  Only judged answers count
        as attempts.

        A function is judged as it is handed in: its text alone, without what other cells define.
        """
        exercise, before = self._exercise(name), self.work.answers.get(name, Answer())
        source, value = "", None
        if exercise.is_code and answer is not None:
            source = source_of(answer, name)
            answer = _alone(source, name)
        elif answer is not None:
            value = _plain(answer)
        verdict = exercise.check(answer, self._seed)
        if before.passed and verdict.passed is False:
            self._keep(answers=self.work.answers | {name: replace(before, attempts=before.attempts + 1)})
            return replace(verdict, message=f"{verdict.message} Your right answer from before is kept.")
        if verdict.passed is not None:
            now = replace(
                before,
                passed=verdict.passed,
                points=verdict.points,
                message=verdict.message[:20_000],
                attempts=before.attempts + 1,
                source=source,
                value=value,
            )
            self._keep(answers=self.work.answers | {name: now})
            if verdict.passed is False and now.attempts > 1 and not now.hints:
                return replace(verdict, message=f'{verdict.message} Stuck? lab.hint("{name}") gives a hint.')
        return verdict

    def usable(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return the student's function, or the workbench's own as long as it is not written or not right."""
        return usable([self._exercise(name)], name, answer)

    def hint(self, name: str = "") -> Markup:
        """Return the next of three hints.  Their number is stored; the teacher may ask, nobody subtracts."""
        exercise, before = self._exercise(name), self.work.answers.get(name, Answer())
        number = min(before.hints + 1, len(exercise.hints))
        self._keep(answers=self.work.answers | {name: replace(before, hints=number)})
        return note(f"Hint {number} of {len(exercise.hints)}: {exercise.hints[number - 1]}")

    def explain(self, name: str, text: str | None) -> Markup:
        """Keep an explanation for the teacher.  Nobody grades it here."""
        if text is not None and not isinstance(text, str):
            return note(
                f'Nothing is kept: this is {text!r:.40}. Write a text in quotation marks, as in """I think …""".'
            )
        if text is None or not text.strip():
            return note("Nothing is written yet. Explain it in your own words.")
        self._keep(explanations=self.work.explanations | {name: _text(text)})
        count = len(text.split())
        return note(f"Kept, {counted(count, 'word')}.")

    def progress(self) -> Markup:
        """Return which exercises are solved, and the points."""
        return note(self._standing())

    def _standing(self) -> str:
        solved = [name for name, answer in self.work.answers.items() if answer.passed]
        points = sum(answer.points for answer in self.work.answers.values())
        most = sum(exercise.points for exercise in self.exercises.values())
        unsolved = [name for name in self.exercises if name not in solved]
        return f"{points:g} of {most} points. " + (f"Left: {', '.join(unsolved)}." if unsolved else "All are solved.")

    def submit(self) -> Markup:
        """Write the file to hand in, and show its place and the missing answers."""
        self._keep(written_at=datetime.now(UTC).isoformat(timespec="seconds"))
        return note(f"{self._standing()} Hand in this file: {self._path}")

    def _exercise(self, name: str) -> Exercise:
        check_choice("exercise", name, self.exercises)
        return self.exercises[name]

    def _keep(self, **changes: Any) -> None:
        work = replace(self.work, **changes)
        make_folder(self._path.parent)
        write_json(self._path, work)
        self.work = work


def source_of(answer: Any, name: str) -> str:
    """Return the text of a student's function.  Raises ConfigError if it is none, has no text, or is too long."""
    request, todo = f"A function was asked for in the exercise '{name}'.", f"Write it with def {name}(...) in a cell."
    if not inspect.isfunction(answer) or answer.__name__ == "<lambda>":
        kind = "a lambda" if inspect.isfunction(answer) else f"{answer!r:.60}"
        raise ConfigError(request, f"This is {kind}.", todo)
    try:
        source = textwrap.dedent(inspect.getsource(answer))
    except OSError as error:
        raise ConfigError(request, "Its text cannot be found.", todo) from error
    if len(source) > LARGEST_SOURCE:
        raise ConfigError("The answer was to be kept.", f"It has {len(source)} characters.", "Write a shorter one.")
    return source


def _alone(source: str, name: str) -> Callable[..., Any]:
    """Return the function that a source defines, without anything else.  Raises ConfigError if it has another name."""
    scope: dict[str, Any] = {"__name__": "hand_in"}
    try:
        exec(source, scope)  # the student's own code, in the student's own notebook
    except Exception as error:
        raise ConfigError(
            f"A function was given for the exercise '{name}'.",
            f"Its text alone stops with {type(error).__name__}: {in_short(str(error))}.",
            "Write what it needs inside it.",
        ) from error
    if not callable(scope.get(name)):
        raise ConfigError(
            f"A function was given for the exercise '{name}'.",
            f"Its text defines {listed(sorted(set(scope) - {'__name__', '__builtins__'}))}.",
            f"Name it {name}, and write what it needs inside it.",
        )
    return scope[name]


def _plain(answer: Any) -> Plain:
    """Return an answer as a JSON file keeps it: numbers of any library as numbers, lists of them as lists."""
    value = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(value, list | tuple):
        numbers = [_plain(entry) for entry in value[:100]]
        are_numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        return numbers if are_numbers and len(value) <= 100 else _text(repr(value)[:200])  # type: ignore[return-value]
    if isinstance(value, bool | str) or value is None:
        return _text(value) if isinstance(value, str) else value
    if isinstance(value, Real):
        if isinstance(value, int) and abs(value) < 2**53:
            return value
        with contextlib.suppress(OverflowError):
            if math.isfinite(number := float(value)):
                return number
        return NOT_FINITE
    return _text(repr(value)[:200])


def _refusal(guess: Plain, choices: Sequence[str]) -> str:
    """Return why a guess is refused; '' if it is one of the choices or, without choices, in numbers."""
    if choices:
        todo = did_you_mean(f"{guess}", choices, "Choose one.")
        return "" if guess in choices else f"{_quoted(guess)} is not among {listed(choices)}. {todo}"
    if guess == NOT_FINITE:
        return "this is no finite number. Give one."
    if isinstance(guess, str | bool):
        return f"{_quoted(guess)} is no number. Write one without quotation marks and with a point, such as 2.5."
    return ""


def _quoted(value: Plain) -> str:
    return f'"{value:.40}"' if isinstance(value, str) else f"{value}"


def _text(text: str) -> str:
    """Return a text that a file can keep: without halves of characters, and not too long."""
    return text[:20_000].encode("utf-8", "replace").decode("utf-8")


def _short(value: Plain) -> str:
    """Return a value as it is read."""
    if isinstance(value, float):
        return three_figures(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


def _off(guess: Plain, outcome: Plain) -> str:
    """Return by how much a guess is off, if both are numbers."""
    is_number = all(isinstance(value, float | int) and not isinstance(value, bool) for value in (guess, outcome))
    if not is_number or not outcome:
        return ", as you said" if guess == outcome else ""
    ratio = float(guess) / float(outcome)  # type: ignore[arg-type]
    return f" ({_short(ratio)} times the outcome)" if abs(ratio - 1) > 0.05 else ", as you said"
