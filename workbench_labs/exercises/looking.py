"""A student's detector of leaks and reader of hidden states: their judges, and ours, with which a lab goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import torch

from workbench_labs.course.verdict import WrongAnswerError, comparison
from workbench_labs.exercises.judging import Function, require_close

CASES, TEXTS = 50, 10


def judge_leak(answer: Function, draws: Random) -> str:
    """Try a detector on messages in which a list of ids was hidden, and on others that look alike."""
    for number in range(CASES):
        secret = [draws.randint(0, 300) for _ in range(draws.randint(3, 8))]
        message = [draws.gauss(0.0, 1.0) for _ in range(draws.randint(20, 60))]
        place = draws.choice([0, len(message), draws.randrange(len(message))])
        planted, subject = {
            0: ([float(word_id) for word_id in secret], "the ids in order"),
            1: ([float(word_id) for word_id in secret[:-1]] + [301.0], "all ids but the last"),
            2: ([float(word_id) + 0.4 for word_id in secret], "numbers near the ids"),
            3: (list(map(float, (*secret[:1], *secret))), "the first id twice, then the others"),
            4: (
                [float(word_id) for word_id in (*secret[1:], secret[0] + 1, secret[0])],
                "all ids in another order",
            ),
        }[number % 5]
        message[place:place] = planted
        expected, answered = number % 5 in (0, 3), answer(message, secret)
        if answered not in (True, False) or bool(answered) != expected:
            raise WrongAnswerError(
                f"A message of {len(message)} numbers holds {subject}, from place {place} on: the answer is "
                f"{expected}, yours {answered!r:.80}.",
                comparison("The ids", ("looked for",), [(" ".join(map(str, secret)),)]),
            )
    return f"It finds ids that stand one after the other, and only these, in {CASES} messages."


def contains(numbers: list[float], ids: list[int]) -> bool:
    """Return whether the ids stand one after the other in a message."""
    return any(numbers[place : place + len(ids)] == ids for place in range(len(numbers) - len(ids) + 1))


def judge_invert(answer: Function, draws: Random) -> str:
    """Try to read texts of made-up words, whose states point in their embeddings' directions and have any length."""
    for _ in range(TEXTS):
        words, width = draws.randint(20, 40), draws.randint(12, 16)
        embeddings = [
            [scale * draws.gauss(0.0, 1.0) for _ in range(width)]
            for scale in (draws.uniform(0.2, 3.0) for _ in range(words))
        ]
        text = [draws.randrange(words) for _ in range(12)]
        states = [_blurred(embeddings[word], draws) for word in text]
        require_close(answer(states, embeddings), text, "The text", "Not all words of a text are right; all can be.")
    return f"It reads {TEXTS} texts word by word."


def _blurred(embedding: Sequence[float], draws: Random) -> list[float]:
    """Return a vector in about the same direction, of another length."""
    size, scale = math.hypot(*embedding) / math.sqrt(len(embedding)), draws.uniform(0.3, 4.0)
    return [scale * (value / size + draws.gauss(0.0, 0.15)) for value in embedding]


def nearest(states: Sequence[Sequence[float]], embeddings: Sequence[Sequence[float]]) -> list[int]:
    """Return the place of the embedding whose direction is nearest to each state's."""
    towards = [torch.nn.functional.normalize(torch.tensor(rows), dim=1) for rows in (states, embeddings)]
    return (towards[0] @ towards[1].T).argmax(dim=1).tolist()
