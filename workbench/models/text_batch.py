"""Texts that are written together: each joins and leaves between two tokens, and equals the same text alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.core.errors import WorkbenchError
from workbench.models.generation import Sampling


class BatchModel(Protocol):
    """Computes the next tokens of several texts.  A text's state has its keys and values."""

    def start(self, ids: Sequence[int], decoder_ids: Sequence[int], num_tokens: int) -> tuple[Any, Tensor]:
        """Return the state of a text with room for more tokens, and the logits (1, vocabulary) of its next one.

        decoder_ids: those that a decoder reads first; () without a decoder.
        """

    def step(self, states: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits (tokens of all texts, vocabulary) after each of one or more further tokens of each text."""

    def forget(self, state: Any, count: int) -> None:
        """Remove the last tokens that a text's state has read."""


@dataclass(slots=True, kw_only=True)
class GrowingText:
    """A text that is being written.

    tokens: those that it continues, with the new ones.  prompt: how many of them were given.  num_tokens: the most new
    ones.  ends: tokens that end it.  rules: the model's rules (see GenerationRules.rules).
    """

    tokens: list[int]
    prompt: int
    num_tokens: int
    ends: Collection[int]
    sampling: Sampling
    rules: Any

    @property
    def num_new(self) -> int:
        """Return how many tokens are new."""
        return len(self.tokens) - self.prompt

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is left to write."""
        return self.num_new >= self.num_tokens or (self.num_new > 0 and self.tokens[-1] in self.ends)

    def take(self, logits: Tensor) -> int:
        """Append the token that logits (1, vocabulary) choose, and return it.  Raises DivergedError."""
        token = self.sampling.choose(self.rules(torch.tensor([self.tokens]), logits), self.num_new)
        self.tokens.append(token)
        return token

    def check(self, guesses: Sequence[int], logits: Tensor) -> list[int]:
        """Append the tokens that logits (1 + guesses, vocabulary) choose, up to the first that was not guessed.

        Returns them: one more than the guesses that were right, or fewer if the text ends.  Raises DivergedError.
        """
        taken = list[int]()
        for row, guess in zip(logits.split(1), (*guesses, None), strict=True):
            taken.append(self.take(row))
            if taken[-1] != guess or self.is_whole:
                break
        return taken


@dataclass(slots=True)
class Passes:
    """The passes of a model that checked a draft's guesses, one for each text in it.

    tokens: those that they gave.  right, wrong: guesses that the model has chosen, too, or not.  What was guessed after
    a wrong one is neither.
    """

    count: int = 0
    tokens: int = 0
    right: int = 0
    wrong: int = 0

    @property
    def mean(self) -> float:
        """Return the tokens of a pass, 0 before the first."""
        return self.tokens / max(1, self.count)

    @property
    def acceptance(self) -> float | None:
        """Return the share of right guesses, by which drafts.Round says when a draft pays; None before the first."""
        return self.right / (self.right + self.wrong) if self.right or self.wrong else None

    @property
    def told(self) -> str:
        """Return both in words."""
        right = "nothing guessed" if self.acceptance is None else f"{self.acceptance:.0%} of the guesses right"
        return f"{self.mean:.1f} a pass, {right}"

    def add(self, *, is_right: bool | None, is_first: bool) -> None:
        """Note a token.  is_right: whether it had been guessed, None if none was.  is_first: whether it is the first of
        its pass.
        """
        self.count, self.tokens = self.count + is_first, self.tokens + 1
        self.right, self.wrong = self.right + (is_right is True), self.wrong + (is_right is False)


def checked(guesses: Sequence[int], taken: Sequence[int]) -> list[bool | None]:
    """Return for each token of a pass whether it had been guessed, None for one after the last guess."""
    return [guesses[place] == token if place < len(guesses) else None for place, token in enumerate(taken)]


class Guesser(Protocol):
    """Guesses tokens of several texts (see models.speculation.Draft)."""

    passes: Passes

    def join(self, text: GrowingText, ids: Sequence[int], decoder_ids: Sequence[int]) -> Any:
        """Return what it knows of a text that is new to it (see BatchModel.start)."""

    def guess(self, drafted: Sequence[Any]) -> list[list[int]]:
        """Return the next tokens of each text, or none."""


@dataclass(slots=True)
class _Member:
    text: GrowingText
    state: Any
    drafted: Any
    out: deque[int] = field(default_factory=deque)
    error: WorkbenchError | None = None


class TextBatch:
    """The texts that a model in this process writes.  Whoever waits for a token computes one for every text.

    draft: guesses tokens, which the model then computes together.  It may be used from several threads.
    """

    def __init__(self, model: BatchModel, draft: Guesser | None = None) -> None:
        self._model, self._draft, self._members = model, draft, list[_Member]()
        self._lock = Lock()

    def join(self, text: GrowingText, ids: Sequence[int], decoder_ids: Sequence[int]) -> _Member:
        """Add a text, with its first token."""
        with self._lock, torch.inference_mode():
            state, logits = self._model.start(ids, decoder_ids, text.num_tokens)
            drafted = None if self._draft is None else self._draft.join(text, ids, decoder_ids)
            member = _Member(text, state, drafted)
            member.out.append(text.take(logits))
            if not text.is_whole:
                self._members.append(member)
        return member

    def next(self, member: _Member) -> int | None:
        """Return the next token of a text, None after the last one.  Raises DivergedError."""
        with self._lock:
            if not member.out and not member.text.is_whole and member.error is None:
                self._step()
            if member.out:
                return member.out.popleft()
            if member.error is not None:
                raise member.error
            return None

    def leave(self, member: _Member) -> None:
        """Remove a text."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]

    def _step(self) -> None:
        members = self._members
        with torch.inference_mode():
            guesses: list[list[int]] = [[]] * len(members)
            if self._draft is not None:
                guesses = self._draft.guess([member.drafted for member in members])
            tokens = [[member.text.tokens[-1], *guessed] for member, guessed in zip(members, guesses, strict=True)]
            logits = self._model.step([member.state for member in members], tokens).split(list(map(len, tokens)))
            for member, guessed, rows in zip(members, guesses, logits, strict=True):
                try:
                    taken = member.text.check(guessed, rows)
                except WorkbenchError as error:  # of this text alone
                    member.error = error
                    continue
                member.out.extend(taken)
                if self._draft is not None:
                    for place, is_right in enumerate(checked(guessed, taken)):
                        self._draft.passes.add(is_right=is_right, is_first=place == 0)
                self._model.forget(member.state, len(rows) - len(taken))
        self._members = [member for member in members if not member.text.is_whole and member.error is None]
