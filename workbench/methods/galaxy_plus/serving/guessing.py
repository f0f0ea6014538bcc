"""The devices' side of a draft: one device guesses tokens of the texts that all write (see models.speculation).

It may be the plan's first device, which chooses the tokens; or one that the plan leaves out, which is sent the tokens
that were chosen, and sends its guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.prepare import Request
from workbench.methods.galaxy_plus.session import Holding, InferenceSession
from workbench.models.sharding import KeyValueCache, Row
from workbench.models.speculation import Draft, Drafted, num_guesses
from workbench.models.text_batch import GrowingText

WAITS, PAUSES, GIVES_UP = -1, -2, -3
"""Codes that the plan's first device sends instead of a request's number."""
STEPS = -4
"""Announces one step of every text; a text's number: it joins."""
READS = -5
"""To a draft: tokens, of which no next ones are guessed."""
_NOTHING = -1
"""In place of a token: the text goes on, and has no new one."""
Pair = tuple[int, int]
"""A text's number, with a token or with how many of its tokens come before one."""


def message(word: int, pairs: Sequence[Pair]) -> list[int]:
    """Return a message of a code, or of the number of a text that joins, and of at most MOST_ROWS pairs."""
    return [word, len(pairs), *(number for pair in pairs for number in pair)]


def read_message(numbers: Sequence[int]) -> tuple[int, list[Pair]]:
    """Return a message's word and its pairs."""
    word, count, *rest = numbers
    return word, [(rest[2 * index], rest[2 * index + 1]) for index in range(count)]


class Guesses:
    """The state of a draft on the plan's first device: empty, if there is no draft."""

    def join(self, number: int, growing: GrowingText, prompt: Request) -> None:
        """Read a text, before its first token is chosen."""

    def took(self, number: int, token: int) -> None:
        """Note a token that was chosen."""

    def guess(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the next tokens of all texts that are being written; others have ended."""
        return [[] for _ in numbers]

    def tell(self, word: int) -> None:
        """Pass on a code."""


class OwnGuesses(Guesses):
    """The texts of a draft on this device.  holding: its weights; its plan has this device only."""

    def __init__(self, session: InferenceSession, holding: Holding) -> None:
        assert holding.shard is not None, "a draft"
        layout = holding.shard.layout
        self._draft = Draft(
            _DeviceModel(session, holding),
            layout.max_length,
            num_ids=layout.config.vocab_size,
            num_model_ids=session.layout.config.vocab_size,
        )
        self._drafted: dict[int, Drafted] = {}

    def join(self, number: int, growing: GrowingText, prompt: Request) -> None:
        """See Guesses."""
        ids, decoder_ids = (() if part is None else part[0].tolist() for part in (prompt.ids, prompt.decoder_ids))
        self._drafted[number] = self._draft.join(growing, ids, decoder_ids)

    def guess(self, numbers: Sequence[int]) -> list[list[int]]:
        """See Guesses."""
        self._drafted = {number: self._drafted[number] for number in numbers}
        return self._draft.guess([*self._drafted.values()])


class FarGuesses(Guesses):
    """The guesses of a draft on another device."""

    def __init__(self, session: InferenceSession, rank: int) -> None:
        self._control, self._rank = session.control, rank
        self._fresh = list[Pair]()  # chosen, but not sent

    def join(self, number: int, growing: GrowingText, prompt: Request) -> None:
        """See Guesses.  The other device has the order."""
        self.tell(number)

    def took(self, number: int, token: int) -> None:
        """See Guesses."""
        self._fresh.append((number, token))

    def guess(self, numbers: Sequence[int]) -> list[list[int]]:
        """See Guesses."""
        known = {number for number, _ in self._fresh}
        self._fresh = [pair for pair in self._fresh if pair[0] in numbers]
        self._fresh += [(number, _NOTHING) for number in numbers if number not in known]
        if not num_guesses(len(numbers)):
            self.tell(READS)
            return [[] for _ in numbers]
        self.tell(STEPS)
        _, pairs = read_message(self._control.listen(self._rank))
        guesses = {number: [token for _, token in group] for number, group in groupby(pairs, lambda pair: pair[0])}
        return [guesses.get(number, []) for number in numbers]

    def tell(self, word: int) -> None:
        """See Guesses."""
        self._control.tell((self._rank,), message(word, self._fresh))
        self._fresh.clear()


def guess_for(
    session: InferenceSession,
    holding: Holding,
    first: int,
    *,
    text_of: Callable[[int], tuple[GrowingText, Request]],
) -> int:
    """Guess for the plan's first device until it sends a code, and return this code.

    text_of: returns a text that joins, by number.
    """
    guesser, texts = OwnGuesses(session, holding), dict[int, GrowingText]()
    while True:
        word, pairs = read_message(session.control.listen(first))
        if word in (PAUSES, GIVES_UP):
            return word
        for number, token in pairs:
            texts[number].tokens += [] if token == _NOTHING else [token]
        if word in (STEPS, READS):
            texts = {number: texts[number] for number, _ in pairs}
        if word == STEPS:
            guessed = zip(texts, guesser.guess([*texts]), strict=True)
            session.control.tell(
                (first,), message(STEPS, [(number, token) for number, tokens in guessed for token in tokens])
            )
        elif word >= 0:
            texts[word], prompt = text_of(word)
            guesser.join(word, texts[word], prompt)


class _DeviceModel:
    """A models.text_batch.BatchModel on this device, at its pace."""

    def __init__(self, session: InferenceSession, holding: Holding) -> None:
        assert holding.shard is not None and holding.programs is not None, "a draft"
        self._session, self._holding, self._shard, self._programs = session, holding, holding.shard, holding.programs
        self._plan: InferencePlan = holding.plan

    def start(self, ids: Sequence[int], decoder_ids: Sequence[int], num_tokens: int) -> tuple[KeyValueCache, Tensor]:
        """See BatchModel."""
        targets = torch.tensor([decoder_ids]) if decoder_ids else None
        request = Request(len(ids), torch.tensor([ids]), len(decoder_ids), targets, "last")
        cache = self._shard.new_cache(len(decoder_ids or ids) + num_tokens)
        answer = self._session.answer(self._holding, request, cache=cache)
        assert answer.output is not None
        return cache, answer.output

    def step(self, states: Sequence[KeyValueCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See BatchModel."""
        pairs = list(zip(states, tokens, strict=True))
        rows = [Row(cache, cache.length + more) for cache, new in pairs for more in range(len(new))]
        lengths = (0, planned_past(rows))[-len(self._programs.stacks) :]
        prepared = self._programs.token(self._plan, lengths, rows=len(rows))
        answer = self._session.rows(prepared, self._shard, rows, [token for new in tokens for token in new])
        for cache, new in pairs:
            cache.length += len(new)
        assert answer.output is not None
        return answer.output[0]

    def forget(self, state: KeyValueCache, count: int) -> None:
        """See BatchModel."""
        state.length -= count


_PAST_ROUND = 16


def planned_past(rows: Sequence[Row]) -> int:
    """Return the mean number of earlier tokens for which a step is planned.  It is rounded up, so that programs are
    used again.
    """
    past = sum(row.past for row in rows) // len(rows)
    return past + -past % _PAST_ROUND
