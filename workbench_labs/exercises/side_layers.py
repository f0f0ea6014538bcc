"""Lab 'Beside the model': a side layer and its gradient (PAC+, section IV-A, Fig. 6), judged by torch's autograd; and
the lab's other exercises (see caches).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from random import Random
from typing import Any

import torch
from torch import Tensor

from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    require_list,
    require_number,
)
from workbench_labs.exercises import caches
from workbench_labs.exercises.caches import CASES
from workbench_labs.exercises.judging import Function, code_exercise, require_close


def side_output(tap: Tensor, side: Tensor, down: Tensor, mix: Tensor) -> Tensor:
    """Return tanh(mix down tap + (1 - mix) side).  tap: (..., d).  side: (..., w).  down: (w, d).  mix: ()."""
    return torch.tanh(torch.lerp(side, torch.nn.functional.linear(tap, down), mix))


def _layer_case(draws: Random) -> tuple[list[float], list[float], list[list[float]], float]:
    """Return a tap, the side layer before, a projection and a mixing weight."""
    hidden, width = draws.randint(2, 6), draws.randint(1, 3)

    def numbers(length: int) -> list[float]:
        return [round(draws.uniform(-1.5, 1.5), 2) for _ in range(length)]

    return numbers(hidden), numbers(width), [numbers(hidden) for _ in range(width)], round(draws.uniform(0.1, 0.9), 2)


def _described(tap: Any, side: Any, down: Any, mix: Any) -> str:
    return f"tap = {tap}, side = {side}, down = {down}, mix = {mix}."


def judge_side_layer(answer: Function, draws: Random) -> str:
    """Compare a side layer with torch's, on random taps."""
    for _ in range(CASES):
        case = _layer_case(draws)
        expected = side_output(*(torch.tensor(values, dtype=torch.float64) for values in case))
        require_close(answer(*case), expected.tolist(), "The side layer's output", _described(*case))
    return f"It equals torch's in {CASES} random cases."


def judge_side_gradient(answer: Function, draws: Random) -> str:
    """Compare the gradients of a side layer with those of torch's autograd; the tap needs none."""
    for _ in range(CASES):
        case = _layer_case(draws)
        after = [round(draws.uniform(-2, 2), 2) for _ in case[1]]
        tap, side, down, mix = (torch.tensor(values, dtype=torch.float64).requires_grad_() for values in case)
        side_output(tap, side, down, mix).backward(torch.tensor(after, dtype=torch.float64))
        gradients = answer(*case, after)
        if not isinstance(gradients, Mapping) or set(gradients) != {"side", "down", "mix"}:
            names = sorted(gradients) if isinstance(gradients, Mapping) else f"{gradients!r:.80}"
            raise WrongAnswerError(
                f"A dict with 'side', 'down' and 'mix' is asked for, and no gradient of the tap: that one would have "
                f"to go on through the backbone. This is {names}."
            )
        case_words = f"{_described(*case)}, gradient of the output = {after}."
        assert side.grad is not None and down.grad is not None and mix.grad is not None
        require_close([gradients["mix"]], [mix.grad.item()], "The gradient of mix", case_words)
        require_close(gradients["side"], side.grad.tolist(), "The gradient of side", case_words)
        rows = require_list(gradients["down"], "The gradient of down", len(case[2]))
        for row, (answered_row, expected_row) in enumerate(zip(rows, down.grad.tolist(), strict=True)):
            require_close(answered_row, expected_row, f"The gradient of down, row {row}", case_words)
    return f"It equals autograd's in {CASES} random cases, and nothing goes back to the tap."


def fewest_epochs(numbers: Numbers) -> int:
    """Return the first number of epochs that takes at most half as long with the cache."""
    first, moved, cached = numbers["first_s"], numbers["moved_s"], numbers["cached_s"]
    return next(epochs for epochs in count(1) if first + moved + (epochs - 1) * cached <= epochs * first / 2)


def judge_half_time(answer: Any, numbers: Numbers) -> str:
    """Compare with the first number of epochs that takes at most half as long, counted up from one."""
    first, moved, cached = numbers["first_s"], numbers["moved_s"], numbers["cached_s"]
    fewest = fewest_epochs(numbers)
    return require_number(
        answer,
        fewest,
        0,
        f"{fewest} epochs take {first + moved + (fewest - 1) * cached} s with the cache, {fewest * first} s without.",
    )


def _epochs(draws: Random) -> Numbers:
    """Return epochs for which the ratio of an epoch without and with the cache is not the answer."""
    while True:
        first = 10 * draws.randint(6, 20)
        drawn = {"first_s": first, "moved_s": first // draws.randint(4, 10), "cached_s": first // draws.randint(3, 8)}
        if fewest_epochs(drawn) != first / drawn["cached_s"]:
            return drawn


def _torch_layer(*arguments: Any) -> Any:
    return side_output(*map(torch.tensor, arguments)).tolist()


def _torch_gradient(*arguments: Any) -> Any:
    tap, *trained, after = map(torch.tensor, arguments)
    with torch.enable_grad():  # a backward pass has switched it off
        for tensor in trained:
            tensor.requires_grad_()
        side_output(tap, *trained).backward(after)
    return dict(zip(("side", "down", "mix"), (tensor.grad.tolist() for tensor in trained), strict=True))


EXERCISES = (
    code_exercise(
        name="side_layer",
        question="""**Write a side layer** (6 points). `side_layer(tap, side, down, mix)` gets the backbone's \
activation `tap` of one token (*d* numbers), the output `side` of the side layer before (*w* numbers), the projection \
`down` (*w* lists of *d* numbers) and the number `mix`. It returns the *w* numbers of the equation above.""",
        points=6,
        hints=(
            "First project the tap down: one number for each list in `down`.",
            "The number for a list `row` is `sum(x * y for x, y in zip(row, tap))`.",
            "`math.tanh(mix * down_tap[i] + (1 - mix) * side[i])` for each i; import math inside the function.",
        ),
        judge=judge_side_layer,
        stand_in=_torch_layer,
    ),
    code_exercise(
        name="side_gradient",
        question="""**Write its backward pass** (10 points). `side_gradient(tap, side, down, mix, after)` gets also \
`after`, the gradient of the loss by the layer's output (*w* numbers). It returns a dict with the gradients by `side`, \
`down` and `mix`, in their shapes. There is none by `tap`: that is the point of the method.""",
        points=10,
        hints=(
            "Write z = mix * u + (1 - mix) * side, with u = down tap. What is the gradient by z, if the output is "
            "tanh(z)?",
            "The derivative of tanh is 1 - tanh squared. So dz[i] = after[i] * (1 - output[i] ** 2).",
            "mix: the sum of dz[i] * (u[i] - side[i]). side: (1 - mix) * dz[i]. down[i][j]: mix * dz[i] * tap[j].",
        ),
        judge=judge_side_gradient,
        stand_in=_torch_gradient,
    ),
    *caches.EXERCISES,
    Exercise(
        name="half_time",
        question="""**Is it worth it?** (2 points) An epoch through the backbone takes {first_s} s. Moving the cache \
to where it is needed takes {moved_s} s, once; an epoch from the cache takes {cached_s} s. From how many epochs on \
does the whole training take at most half as long as without a cache?""",
        points=2,
        hints=(
            "Write both times as a function of the number of epochs n.",
            "With the cache: first + moved + (n - 1) cached. Without: n first.",
            "Try n = 1, 2, 3 ... until the one is at most half of the other.",
        ),
        draw=_epochs,
        judge=judge_half_time,
    ),
)
