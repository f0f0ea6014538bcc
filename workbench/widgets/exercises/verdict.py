"""What a check answers, and how a number is judged."""

from __future__ import annotations

from markupsafe import Markup

BY_EYE = 0.10  # how far an answer read off a figure may be away


class Verdict:
    """What a check found.  passed: None as long as there is no answer."""

    def __init__(self, passed: bool | None, message: str) -> None:
        self.passed, self.message = passed, message

    def __str__(self) -> str:
        return f"{ {None: 'Not answered yet.', True: 'Right.', False: 'Not yet.'}[self.passed] } {self.message}"

    __repr__ = __str__

    def _repr_html_(self) -> Markup:
        colour = {None: "#4D4D4D", True: "#007A57", False: "#B04A00"}[self.passed]
        return Markup("<div role='status' style='border-left:4px solid {};padding:4px 10px'>{}</div>").format(colour, str(self))


def number_verdict(answer: float | None, expected: float, hint: str, right: str, tolerance: float = BY_EYE) -> Verdict:
    """Compare a number with what is expected, within a share of it."""
    if answer is None:
        return Verdict(None, hint)
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        return Verdict(False, f"A number is asked for, this is {answer!r}. {hint}")
    if abs(answer - expected) <= tolerance * abs(expected):
        return Verdict(True, right)
    return Verdict(False, f"{answer:g} is too {'large' if answer > expected else 'small'}. {hint}")
