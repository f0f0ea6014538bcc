"""The devices' side of texts that are ordered while a service runs: a batch that texts join and leave between two
tokens.

The plan's first device chooses the tokens.  Before each step it announces to the others which tokens of which texts are
computed: one of each, and those that a draft has guessed.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from workbench.core.errors import DeviceLostError, require_numbers
from workbench.methods.galaxy_plus.prepare import Answer, Request
from workbench.methods.galaxy_plus.prices import Prepared
from workbench.methods.galaxy_plus.serving.guessing import (
    GIVES_UP,
    PAUSES,
    STEPS,
    WAITS,
    FarGuesses,
    Guesses,
    OwnGuesses,
    Pair,
    guess_for,
    message,
    planned_past,
    read_message,
)
from workbench.methods.galaxy_plus.serving.messages import WHOLE, BlockReport, ServiceJob, TextOrder, TextToken
from workbench.methods.galaxy_plus.session import Holding, InferenceSession
from workbench.models.sharding import KeyValueCache, Row
from workbench.models.speculation import MOST_ROWS
from workbench.models.text_batch import GrowingText, checked
from workbench.runtime.commands import End, StepDone
from workbench.runtime.device_server import Controls

WORD_EVERY_S = 1.0
_POLL_S = 0.02


@dataclass(slots=True)
class _Member:
    """A text of the batch.  memory_length: tokens that an encoder read."""

    growing: GrowingText
    cache: KeyValueCache
    memory_length: int


def write_texts(
    session: InferenceSession,
    holding: Holding,
    job: ServiceJob,
    controls: Controls,
    draft: Holding | int | None = None,
) -> End:
    """Write texts as they are ordered, until the devices pause or one is lost.

    draft: on the device that guesses: its draft; on the plan's first device otherwise: the rank of that device.
    """
    orders, leader = _Orders(controls, job.texts, session.timeout_s), holding.plan.ranks[0]
    if holding.shard is None:
        assert isinstance(draft, Holding), "a device outside the plan guesses"

        def text_of(number: int) -> tuple[GrowingText, Request]:
            order = orders.numbered(number)
            return _growing(order, session), _request(order)

        word = guess_for(session, draft, leader, text_of=text_of)
        return "paused" if word == PAUSES else "lost"
    guesses = Guesses()
    if session.rank == leader and draft is not None:
        guesses = FarGuesses(session, draft) if isinstance(draft, int) else OwnGuesses(session, draft)
    batch = _Batch(session, holding, job, orders, guesses)
    try:
        word = batch.lead(controls) if session.rank == leader else batch.follow()
    except (DeviceLostError, RuntimeError):
        if isinstance(draft, int) and session.rank == leader:  # who has not met the lost device listens to this one
            for rank in (*holding.plan.ranks, draft):
                with suppress(DeviceLostError):
                    session.control.tell((rank,), message(GIVES_UP, []))
        raise
    return "paused" if word == PAUSES else "lost"


class _Orders:
    """The orders of a job, in the order in which they came.  timeout_s: how long to wait for one."""

    def __init__(self, controls: Controls, first: Sequence[TextOrder], timeout_s: float) -> None:
        self._controls, self._timeout_s = controls, timeout_s
        self.waiting = {order.number: order for order in first}
        self.unwanted = set[int]()

    def take(self, timeout_s: float) -> None:
        """Take what has arrived; wait for a first one."""
        try:
            while True:
                order: TextOrder = self._controls.orders.get(timeout_s > 0, timeout_s)
                timeout_s = 0.0
                if order.num_tokens:
                    self.waiting[order.number] = order
                else:
                    self.unwanted.add(order.number)
        except queue.Empty:
            return

    def numbered(self, number: int) -> TextOrder:
        """Return the text with a number, which may still be on its way to this device; none before it follows."""
        deadline_s = time.monotonic() + self._timeout_s
        while number not in self.waiting:
            if time.monotonic() > deadline_s:
                raise DeviceLostError(f"Text {number} was to be written.", "Its order has not come.", "Repeat it.")
            self.take(_POLL_S)
        order = self.waiting.pop(number)
        self.waiting = {later: other for later, other in self.waiting.items() if later > number}
        return order


class _Batch:
    """The texts that are written together.  guesses: on the plan's first device, what it knows of a draft."""

    def __init__(
        self, session: InferenceSession, holding: Holding, job: ServiceJob, orders: _Orders, guesses: Guesses
    ) -> None:
        assert holding.shard is not None, "a device of the plan"
        self._session, self._holding, self._shard, self._orders = session, holding, holding.shard, orders
        self._publish, self._index = session.context.publish, job.index
        self._reported_s, self._measured_s, self._expected_s = time.monotonic(), 0.0, 0.0
        self._expected: dict[tuple[int, int, int], float] = {}
        self._members: dict[int, _Member] = {}
        self._guesses = guesses
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
                word = STEPS
            guesses = self._guesses.guess([*members]) if word == STEPS else [[] for _ in members]
            rows = [
                (number, len(member.growing.tokens) - 1 + more)
                for (number, member), guessed in zip(members.items(), guesses, strict=True)
                for more in range(1 + len(guessed))
            ]
            if word != WAITS or time.monotonic() - told_s > WORD_EVERY_S:
                self._session.control.tell(self._holding.plan.ranks, message(word, rows))
                if word < 0 and word != STEPS:
                    self._guesses.tell(word)
                told_s = time.monotonic()
            if word in (PAUSES, GIVES_UP):
                return word
            if word == STEPS:
                self._step(rows, guesses)
            elif word != WAITS:
                self._join(orders.numbered(word))

    def follow(self) -> int:
        """Compute what the first device announces, until it sends a code, and return this code."""
        control, first = self._session.control, self._holding.plan.ranks[0]
        while True:
            word, rows = read_message(control.listen(first))
            for number in self._members.keys() - {number for number, _ in rows}:
                del self._members[number]
            if word in (PAUSES, GIVES_UP):
                return word
            if word == STEPS:
                self._step(rows, [])
            elif word != WAITS:
                self._join(self._orders.numbered(word))

    # What they compute.

    def _join(self, order: TextOrder) -> None:
        """Read a text, with what was written of it before, and choose its next token."""
        request, growing = _request(order), _growing(order, self._session if self._leads else None)
        cache = self._shard.new_cache(order.prompt + order.num_tokens)
        self._members[order.number] = _Member(growing, cache, len(order.ids) if order.decoder_ids else 0)
        self._guesses.join(order.number, growing, request)
        answer = self._session.answer(self._holding, request, cache=cache)
        if self._leads:
            assert answer.output is not None
            self._take(order.number, [], answer.output)

    def _step(self, numbered: list[Pair], guesses: list[list[int]]) -> None:
        """Compute tokens of every text: the last one, and those that were guessed."""
        members = list(self._members.items())
        memory_length = sum(member.memory_length for _, member in members) // len(members)
        rows = [Row(self._members[number].cache, past) for number, past in numbered]
        lengths = (memory_length, planned_past(rows))[-len(self._session.stacks) :]
        prepared = self._session.programs.token(self._holding.plan, lengths, rows=len(rows))
        tokens = [
            [member.growing.tokens[-1], *guessed] for (_, member), guessed in zip(members, guesses, strict=self._leads)
        ]
        answer = self._session.rows(prepared, self._shard, rows, [token for new in tokens for token in new])
        self._measure(prepared, answer)
        if self._leads:
            assert answer.output is not None
            logits = answer.output[0].split(list(map(len, tokens)))
            for (number, _), guessed, chosen in zip(members, guesses, logits, strict=True):
                self._take(number, guessed, chosen)

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
            # Its seconds are those per expected second: of texts, the lengths and numbers change.
            self._publish(BlockReport(self._index, {WHOLE: self._measured_s / self._expected_s}))
            self._reported_s, self._measured_s, self._expected_s = time.monotonic(), 0.0, 0.0

    def _take(self, number: int, guessed: list[int], logits: torch.Tensor) -> None:
        growing = self._members[number].growing
        place = growing.num_new
        chosen = growing.check(guessed, require_numbers(logits, "Tokens"))
        for more, (token, is_right) in enumerate(zip(chosen, checked(guessed, chosen), strict=True)):
            self._publish(TextToken(number, place + more, token, more == 0, is_right))
            self._guesses.took(number, token)
        if growing.is_whole:
            self._end(number)

    def _end(self, number: int) -> None:
        self._members.pop(number, None)
        self._publish(StepDone(number, 0.0))


def _request(order: TextOrder) -> Request:
    """Return the request for what a text begins with, and what was written of it before."""
    targets = torch.tensor([order.decoder_ids]) if order.decoder_ids else None
    return Request(len(order.ids), torch.tensor([order.ids]), len(order.decoder_ids), targets, "last")


def _growing(order: TextOrder, session: InferenceSession | None) -> GrowingText:
    """Return a text as it is before its next token.  session: the session of a device that chooses or guesses
    tokens.
    """
    return GrowingText(
        tokens=list(order.decoder_ids or order.ids),
        prompt=order.prompt,
        num_tokens=order.num_tokens,
        ends=order.ends,
        sampling=order.sampling,
        rules=None if session is None else session.text_rules.rules(order.prompt, order.num_tokens),
    )
