"""The devices' side of texts that are ordered while a service runs: a batch that texts join and leave between two
tokens.

The plan's first device chooses the tokens.  Before each step it announces to the others which texts take part.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta

from workbench.core.errors import DeviceLostError, require_numbers
from workbench.methods.galaxy_plus.prepare import Answer, Request
from workbench.methods.galaxy_plus.prices import Prepared
from workbench.methods.galaxy_plus.session import MESSAGE_NUMBERS, Holding, InferenceSession
from workbench.models.generation import Sampling
from workbench.models.sharding import KeyValueCache, Row
from workbench.models.text_batch import GrowingText
from workbench.runtime.commands import End
from workbench.runtime.device_server import Controls

WAITS, PAUSES, GIVES_UP = -1, -2, -3
"""Codes that the plan's first device sends instead of a request's number."""
WORD_EVERY_S = 1.0
MOST_ROWS = MESSAGE_NUMBERS - 2
"""Texts in the batch; further ones wait."""
_STEPS = -4  # announces one more token of every text in the batch; a text's number: it joins
_PAST_ROUND = 16
"""Steps are planned for a mean number of earlier tokens that is rounded up to this, so that programs are used again."""
_POLL_S = 0.02

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


class TextToken(NamedTuple):
    """A token of a text.  place: how many came before it."""

    number: Annotated[int, Meta(ge=0, le=10**9)]
    place: Annotated[int, Meta(ge=0, le=10**9)]
    token: TokenId


@dataclass(slots=True)
class _Member:
    """A text of the batch.  memory_length: tokens that an encoder read."""

    growing: GrowingText
    cache: KeyValueCache
    memory_length: int


def write_texts(
    session: InferenceSession,
    holding: Holding,
    controls: Controls,
    first: Sequence[TextOrder],
    *,
    tell: Callable[[Any], None],
    done: Callable[[int], None],
    report: Callable[[float], None],
    timeout_s: float,
) -> End:
    """Write texts as they are ordered, until the devices pause or one is lost.

    first: texts that were ordered before.  tell: publishes the tokens, and done a text's end, on the plan's first
    device.  report: publishes how long the steps of a period took, in seconds per expected second.  timeout_s: of a
    message from another device.
    """
    batch = _Batch(session, holding, _Orders(controls, first), tell, done, report, timeout_s)
    word = batch.lead(controls) if session.rank == holding.plan.ranks[0] else batch.follow()
    return "paused" if word == PAUSES else "lost"


class _Orders:
    """The orders of a job, in the order in which they came."""

    def __init__(self, controls: Controls, first: Sequence[TextOrder]) -> None:
        self._controls = controls
        self.waiting = {order.number: order for order in first}
        self.unwanted = set[int]()

    def take(self, timeout_s: float) -> None:
        """Take what has arrived; wait for a first one."""
        try:
            while True:
                order: TextOrder = self._controls.orders.get(timeout=timeout_s) if timeout_s else self._arrived()
                timeout_s = 0.0
                if order.num_tokens:
                    self.waiting[order.number] = order
                else:
                    self.unwanted.add(order.number)
        except queue.Empty:
            return

    def numbered(self, number: int, timeout_s: float) -> TextOrder:
        """Return the text with a number, which may still be on its way to this device; none before it follows."""
        deadline_s = time.monotonic() + timeout_s
        while number not in self.waiting:
            if time.monotonic() > deadline_s:
                raise DeviceLostError(f"Text {number} was to be written.", "Its order has not come.", "Repeat it.")
            self.take(_POLL_S)
        order = self.waiting.pop(number)
        self.waiting = {later: other for later, other in self.waiting.items() if later > number}
        return order

    def _arrived(self) -> TextOrder:
        order: TextOrder = self._controls.orders.get_nowait()
        return order


class _Batch:
    def __init__(
        self,
        session: InferenceSession,
        holding: Holding,
        orders: _Orders,
        tell: Callable[[Any], None],
        done: Callable[[int], None],
        report: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        assert holding.shard is not None, "a device of the plan"
        self._session, self._holding, self._shard, self._orders = session, holding, holding.shard, orders
        self._tell, self._done, self._report, self._timeout_s = tell, done, report, timeout_s
        self._reported_s, self._measured_s, self._expected_s = time.monotonic(), 0.0, 0.0
        self._expected: dict[tuple[int, int, int], float] = {}
        self._members: dict[int, _Member] = {}
        self._leads = session.rank == holding.plan.ranks[0]

    # Which texts take part.

    def lead(self, controls: Controls) -> int:
        """Announce and compute steps until the job pauses or is given up; return this code."""
        told_s, orders, members = time.monotonic(), self._orders, self._members
        while True:
            orders.take(0.0 if members or orders.waiting else _POLL_S)
            for number in orders.unwanted:
                orders.waiting.pop(number, None)
                self._end(number)
            orders.unwanted.clear()
            word = WAITS
            if not controls.is_wanted():
                word = GIVES_UP
            elif controls.wants_pause():
                word = PAUSES
            elif orders.waiting and len(members) < MOST_ROWS:
                word = min(orders.waiting)
            elif members:
                word = _STEPS
            if word != WAITS or time.monotonic() - told_s > WORD_EVERY_S:
                self._session.control.tell(self._holding.plan.ranks, _announcement(word, members))
                told_s = time.monotonic()
            if word in (PAUSES, GIVES_UP):
                return word
            if word != WAITS:
                self._compute(word)

    def follow(self) -> int:
        """Compute what the first device announces, until it sends a code, and return this code."""
        control, first = self._session.control, self._holding.plan.ranks[0]
        while True:
            word, count, *numbers = control.listen(first, self._timeout_s)
            for number in self._members.keys() - set(numbers[:count]):
                del self._members[number]
            if word in (PAUSES, GIVES_UP):
                return word
            if word != WAITS:
                self._compute(word)

    # What they compute.

    def _compute(self, word: int) -> None:
        if word == _STEPS:
            self._step()
        else:
            self._join(self._orders.numbered(word, self._timeout_s))

    def _join(self, order: TextOrder) -> None:
        """Read a text, with what was written of it before, and choose its next token."""
        targets = torch.tensor([order.decoder_ids]) if order.decoder_ids else None
        request = Request(len(order.ids), torch.tensor([order.ids]), len(order.decoder_ids), targets, "last")
        tokens = list(order.decoder_ids or order.ids)
        growing = GrowingText(
            tokens=tokens,
            prompt=order.prompt,
            num_tokens=order.num_tokens,
            ends=order.ends,
            sampling=order.sampling,
            rules=self._session.text_rules.rules(order.prompt, order.num_tokens) if self._leads else None,
        )
        cache = self._shard.new_cache(order.prompt + order.num_tokens)
        self._members[order.number] = _Member(growing, cache, len(order.ids) if order.decoder_ids else 0)
        answer = self._session.answer(self._holding, request, cache=cache)
        if self._leads:
            assert answer.output is not None
            self._take(order.number, answer.output)

    def _step(self) -> None:
        """Compute one more token of every text."""
        members, count = list(self._members.items()), len(self._members)
        past = sum(member.cache.length for _, member in members) // count
        memory_length = sum(member.memory_length for _, member in members) // count
        prepared = self._session.programs.token(
            self._holding.plan, past=past + -past % _PAST_ROUND, memory_length=memory_length, rows=count
        )
        rows = [Row(member.cache, member.cache.length) for _, member in members]
        answer = self._session.rows(prepared, self._shard, rows, [member.growing.tokens[-1] for _, member in members])
        self._measure(prepared, answer)
        for _, member in members:
            member.cache.length += 1
        if self._leads:
            assert answer.output is not None
            for (number, _), logits in zip(members, answer.output[0].split(1), strict=True):
                self._take(number, logits)

    def _measure(self, prepared: Prepared, answer: Answer) -> None:
        """Report the time of the last steps if a report is due."""
        rank, program, layout = self._session.rank, prepared.program, prepared.layout
        key = layout.past, layout.memory_length, layout.lengths[-1]
        if key not in self._expected:
            ops = enumerate(program.schedule.ops[rank])
            self._expected[key] = sum(program.seconds(rank, index) for index, op in ops if not op.is_communication)
        spans = (span for span in answer.spans if not span.op.is_communication)
        self._measured_s += sum(span.end_s - span.start_s - span.late_s for span in spans)
        self._expected_s += self._expected[key]
        every_s = self._session.setup.report_every_s * self._session.context.dilation
        if self._expected_s > 0 and time.monotonic() - self._reported_s > every_s:
            self._report(self._measured_s / self._expected_s)
            self._reported_s, self._measured_s, self._expected_s = time.monotonic(), 0.0, 0.0

    def _take(self, number: int, logits: torch.Tensor) -> None:
        growing = self._members[number].growing
        place = growing.num_new
        self._tell(TextToken(number, place, growing.take(require_numbers(logits, "Tokens"))))
        if growing.is_whole:
            self._end(number)

    def _end(self, number: int) -> None:
        self._members.pop(number, None)
        self._done(number)


def _announcement(word: int, members: dict[int, _Member]) -> list[int]:
    """Return a message: a word, the number of texts that stay, and their numbers."""
    return [word, len(members), *members]
