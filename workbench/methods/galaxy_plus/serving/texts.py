"""The devices' side of texts that are ordered while a service runs: token by token, each device with its own part of
the keys and values.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta

from workbench.core.errors import DeviceLostError, require_numbers
from workbench.methods.galaxy_plus.prepare import Answer, Request
from workbench.methods.galaxy_plus.session import Holding, InferenceSession
from workbench.models.generation import Sampling
from workbench.runtime.commands import End
from workbench.runtime.device_server import Controls

WAITS, PAUSES, GIVES_UP = -1, -2, -3
"""Codes that the plan's first device sends instead of a request's number."""
WORD_EVERY_S = 1.0
_GOES_ON, _IS_OVER = 0, 1  # what it sends after each token of a text

TokenId = Annotated[int, Meta(ge=0, le=10**9)]


class TextOrder(NamedTuple):
    """A text to write, or the rest of it.

    ids: of the prompt, with the tokens that were written before (for a decoder: decoder_ids with them).  prompt: how
    many of them were given.  num_tokens: how many the whole text has at most; 0: the text is no longer wanted.
    """

    number: int
    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...]
    prompt: int
    num_tokens: int
    ends: tuple[int, ...]
    sampling: Sampling

    @property
    def written(self) -> tuple[int, ...]:
        """Return the tokens that were written before."""
        return (self.decoder_ids or self.ids)[self.prompt :]


class TextToken(NamedTuple):
    """A token of a text.  place: how many came before it."""

    number: Annotated[int, Meta(ge=0, le=10**9)]
    place: Annotated[int, Meta(ge=0, le=10**9)]
    token: TokenId


def write_texts(
    session: InferenceSession,
    holding: Holding,
    controls: Controls,
    first: TextOrder | None,
    *,
    tell: Callable[[Any], None],
    done: Callable[[int, float, list[Answer]], None],
    timeout_s: float,
) -> End:
    """Write texts as they are ordered, until the devices pause or one is lost.

    first: a text that was ordered before.  tell: publishes the tokens (on the plan's first device).  done: called with
    each text's number, its beginning and the work on its steps.  timeout_s: of a message from another device.
    """
    leads, desk = session.rank == holding.plan.ranks[0], _Orders(controls, first)
    while True:
        word = _lead(session, holding, controls, desk) if leads else _follow(session, holding, timeout_s)
        if word in (PAUSES, GIVES_UP):
            return "paused" if word == PAUSES else "lost"
        order = desk.numbered(word, timeout_s)
        since_s = session.context.now_s() + session.context.clock_offset_s
        done(order.number, since_s, _write(session, holding, order, desk, tell=tell, timeout_s=timeout_s))


class _Orders:
    """The orders of a job, in the order in which they came."""

    def __init__(self, controls: Controls, first: TextOrder | None) -> None:
        self._controls, self._next = controls, first
        self._unwanted = -1

    def next(self, timeout_s: float) -> TextOrder | None:
        """Return the next text, None if none comes in time.  It stays the next one."""
        if self._next is None:
            self._take(timeout_s)
        return self._next

    def numbered(self, number: int, timeout_s: float) -> TextOrder:
        """Return the text with a number, and go on to the next.  It may still be on its way to this device."""
        order = self.next(timeout_s)
        if order is None or order.number != number:
            found = "none" if order is None else f"text {order.number}"
            raise DeviceLostError(
                f"Text {number} was to be written.", f"The coordinator ordered {found}.", "Repeat it."
            )
        self._next = None
        return order

    def is_wanted(self, number: int) -> bool:
        """Return whether a text is still wanted."""
        self._take(0.0)
        return self._unwanted != number

    def _take(self, timeout_s: float) -> None:
        try:
            order: TextOrder = (
                self._controls.orders.get(timeout=timeout_s) if timeout_s else self._controls.orders.get_nowait()
            )
        except queue.Empty:
            return
        if order.num_tokens:
            self._next = order
        else:
            self._unwanted = order.number


def _lead(session: InferenceSession, holding: Holding, controls: Controls, orders: _Orders) -> int:
    """Wait for an order, announce it to the plan's other devices, and return its number; or a code."""
    told_s = time.monotonic()
    while True:
        order = orders.next(0.02)
        word = WAITS if order is None else order.number
        if not controls.is_wanted():
            word = GIVES_UP
        elif controls.wants_pause():
            word = PAUSES
        if word != WAITS or time.monotonic() - told_s > WORD_EVERY_S:
            session.control.tell(holding.plan.ranks, word)
            told_s = time.monotonic()
        if word != WAITS:
            return word


def _follow(session: InferenceSession, holding: Holding, timeout_s: float) -> int:
    while (word := session.control.listen(holding.plan.ranks[0], timeout_s)) == WAITS:
        pass
    return word


def _write(
    session: InferenceSession,
    holding: Holding,
    order: TextOrder,
    orders: _Orders,
    *,
    tell: Callable[[Any], None],
    timeout_s: float,
) -> list[Answer]:
    """Write one text together with the plan's other devices; return the work on its steps."""
    shard, ranks = holding.shard, holding.plan.ranks
    assert shard is not None, "a device of the plan"
    before, leads = order.written, session.rank == ranks[0]
    targets = torch.tensor([order.decoder_ids]) if order.decoder_ids else None
    request = Request(len(order.ids), torch.tensor([order.ids]), len(order.decoder_ids), targets, "last")
    text = list(order.decoder_ids or order.ids)
    left = order.num_tokens - len(before)
    cache = shard.new_cache(len(text) + left)
    rules = session.text_rules.rules(order.prompt, order.num_tokens) if leads else None
    answers = [session.answer(holding, request, cache=cache)]
    for index in range(len(before), order.num_tokens):
        if rules is None:
            word = session.control.listen(ranks[0], timeout_s)
        else:
            logits = answers[-1].output
            assert logits is not None
            token = order.sampling.choose(rules(torch.tensor([text]), require_numbers(logits, "Tokens")), index)
            text.append(token)
            tell(TextToken(order.number, index, token))
            is_last = token in order.ends or index == order.num_tokens - 1 or not orders.is_wanted(order.number)
            word = _IS_OVER if is_last else _GOES_ON
            session.control.tell(ranks, word)
        if word == _IS_OVER:
            break
        answers.append(session.token(holding, shard, cache, request, text[-1:]))
    return answers
