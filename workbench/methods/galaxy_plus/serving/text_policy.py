"""The portal of a service that writes texts: one text at a time on the plan's devices; after a loss the others go on
with its next token.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.core.cluster import Factors
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.inference import InferencePlan
from workbench.core.plan import Plan
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.planning import as_plan
from workbench.methods.galaxy_plus.serving.messages import Served
from workbench.methods.galaxy_plus.serving.policy import ServingPolicy
from workbench.methods.galaxy_plus.serving.texts import TextOrder, TextToken
from workbench.models.generation import GenerationRules, Sampling
from workbench.models.sharding import ModelLayout
from workbench.models.text import require_room
from workbench.runtime.commands import Generation, Order, Parts, StepDone

MOST_TEXTS = 10**9 - 1
"""Texts of a service, the largest number of a step."""
WAIT_S = 600.0
"""Seconds without a token after which a text is given up, such as while no plan fits."""


@dataclass(slots=True)
class Text:
    """A text to write.  out: its tokens, None after the last one, or an error.  tokens: those that were written."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...]
    num_tokens: int
    ends: tuple[int, ...]
    sampling: Sampling
    out: queue.Queue[int | Exception | None] = field(default_factory=queue.Queue)
    tokens: list[int] = field(default_factory=list)
    is_wanted: bool = True
    is_stopped: bool = False  # the devices know that it is not wanted

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is left to write."""
        return not self.is_wanted or len(self.tokens) == self.num_tokens or self._has_ended

    @property
    def _has_ended(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.ends

    def order(self, number: int) -> TextOrder:
        """Return the order for the rest of it."""
        decoder, ids = self.decoder_ids, self.ids
        prompt = len(decoder or ids)
        if decoder:
            decoder = (*decoder, *self.tokens)
        else:
            ids = (*ids, *self.tokens)
        return TextOrder(number, ids, decoder, prompt, self.num_tokens, self.ends, self.sampling)


class DeviceWriter:
    """A models.text.Writer on the devices of a service.

    inbox: the texts that the service has yet to write.
    """

    def __init__(self, layout: ModelLayout, ends: Sequence[int], inbox: queue.Queue[Text]) -> None:
        self._layout, self._inbox = layout, inbox
        self.rules = GenerationRules(layout.name)
        self.ends = frozenset((*self.rules.ends, *ends))

    def write(self, ids: Sequence[int], num_tokens: int, sampling: Sampling) -> Generator[int]:
        """Yield the tokens of a text (see Writer).  Raises ConfigError for a text that is too long, and the error that
        ended the service.
        """
        start = (self.rules.start_id or 0,) if self._layout.has_decoder else ()
        require_room(len(ids), 0 if start else num_tokens, self._layout.max_length or len(ids) + num_tokens)
        text = Text(tuple(ids), start, num_tokens, tuple(self.ends), sampling)
        self._inbox.put(text)
        try:
            while (token := text.out.get(timeout=WAIT_S)) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        except queue.Empty:
            request = "A text was to be written on the devices."
            todo = "See whether a device is left."
            raise RuntimeSetupError(request, f"No token came in {WAIT_S:g} s.", todo) from None
        finally:
            text.is_wanted = False


@dataclass(kw_only=True, repr=False)
class TextPolicy(ServingPolicy):
    """A ServingPolicy whose steps are texts that arrive while it runs.

    inbox: texts that wait.  actions: (rank, whether it is killed or comes back), from the page.  has_ended: whether the
    service is over.  num_again: texts that were continued after a loss.  sent_bytes: of the newest text, by rank, for
    each of its tokens.
    """

    inbox: queue.Queue[Text]
    actions: queue.Queue[tuple[int, bool]] = field(default_factory=queue.Queue)
    num_again: int = 0
    has_ended: bool = False
    sent_bytes: dict[int, float] = field(default_factory=dict)

    _text: Text | None = None
    _done: int = 0
    _running: Generation | None = None

    @property
    def step(self) -> int:
        """Return the number of texts that were written."""
        return self._done

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the wanted plan's devices with the text that is under way (see Policy)."""
        made = super().generation(number, ready, factors)
        order = None if self._text is None else self._text.order(self._done)
        return made._replace(job=replace(made.job, generate=2, writes_texts=True, text=order))

    def begun(self, generation: Generation) -> Generation:
        """Note that orders go to these devices."""
        self._running = super().begun(generation)
        return self._running

    def turn(self) -> bool:
        """Break or revive devices, order the next text, and end one that is no longer wanted."""
        while not self.actions.empty():
            rank, is_killed = self.actions.get_nowait()
            if is_killed:
                self.fleet.faults.add(Fault(kind="kill", rank=rank, start=max(0.0, self.now_s)))
            else:
                self.fleet.faults.end(rank, self.now_s)
        if self._text is None and not self.inbox.empty():
            self._text = self.inbox.get_nowait()
            if self._text.is_whole:
                self._finish()
            else:
                self._order(self._text.order(self._done))
        elif self._text is not None and not self._text.is_wanted and not self._text.is_stopped:
            self._text.is_stopped = True
            self._order(self._text.order(self._done)._replace(num_tokens=0))
        return super().turn()

    def _order(self, order: TextOrder) -> None:
        running = self._running
        if running is not None:  # otherwise the next generation's job has it
            ranks = running.job.plan.ranks
            self.fleet.command(ranks, Order(running.number, order))

    def _finish(self) -> None:
        assert self._text is not None
        self._text.out.put(None)
        self._text, self._done = None, self._done + 1

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Take a token; each only once, and in order."""
        text = self._text
        if not isinstance(event, TextToken):
            super().heard(generation, rank, event)
        elif text is not None and event.number == self._done and event.place == len(text.tokens):
            text.tokens.append(event.token)
            text.out.put(event.token)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Record a device's work on a text; with that of the first device the text is done."""
        served: Served = done.content
        text = self._text
        if text is None or done.step != self._done:
            return
        self.sent_bytes[rank] = served.sent_bytes / max(1, len(text.tokens))
        if rank == generation.job.plan.ranks[0]:
            self._finish()

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Let the next devices go on with the text that was under way."""
        self._running = None
        super().ended(generation, parts, lost)
        if self._text is not None:
            if self._text.is_whole:
                self._finish()
            elif lost:
                self.num_again += 1

    def stages(self, plan: InferencePlan) -> Plan:
        """Return a plan as stages, with the devices' ranks in the cluster."""
        return as_plan(plan, self.stacks)

    def fail(self, error: Exception) -> None:
        """End the texts that wait: the service has ended."""
        texts = [] if self._text is None else [self._text]
        while not self.inbox.empty():
            texts.append(self.inbox.get_nowait())
        for text in texts:
            text.out.put(error)

    def rank_of(self, name: str) -> int:
        """Return a device's rank.  Raises ConfigError for an unknown name."""
        names = [device.name for device in self.cluster.devices]
        if name not in names:
            raise ConfigError(f"The device '{name[:100]}' was named.", f"There are {', '.join(names)}.", "Name one.")
        return names.index(name)
