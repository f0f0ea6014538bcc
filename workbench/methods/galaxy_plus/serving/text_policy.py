"""The portal of a service that writes texts on the plan's devices; after a loss or another plan each text goes on with
its next token.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.core.cluster import Factors
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.inference import InferencePlan
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.serving.drafts import Round
from workbench.methods.galaxy_plus.serving.messages import TextOrder, TextToken
from workbench.methods.galaxy_plus.serving.policy import ServingPolicy
from workbench.models.generation import GenerationRules, Sampling
from workbench.models.sharding import ModelLayout
from workbench.models.text import require_room
from workbench.models.text_batch import Passes
from workbench.runtime.commands import Generation, Order, Parts, StepDone

MOST_TEXTS = 10**9 - 1
"""Texts of a service, the largest number of a step."""
Action = Literal["kill", "slow", "return"]
"""Actions of the page on a device: 'return' brings it back, at its full speed."""
SLOWED = 4.0
"""How many times slower a device computes after 'slow'."""
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
        has_ended = bool(self.tokens) and self.tokens[-1] in self.ends
        return not self.is_wanted or len(self.tokens) == self.num_tokens or has_ended

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
    """A models.text.Writer on the devices of a service.  policy: the service's."""

    def __init__(self, layout: ModelLayout, ends: Sequence[int], policy: TextPolicy) -> None:
        self._layout, self._policy = layout, policy
        self.rules = GenerationRules(layout.name)
        self.ends = frozenset((*self.rules.ends, *ends))

    def write(self, ids: Sequence[int], num_tokens: int, sampling: Sampling) -> Generator[int]:
        """Yield the tokens of a text (see Writer).  Raises ConfigError for a text that is too long, and the error that
        ended the service.
        """
        start = (self.rules.start_id or 0,) if self._layout.has_decoder else ()
        require_room(len(ids), 0 if start else num_tokens, self._layout.max_length or len(ids) + num_tokens)
        text = Text(tuple(ids), start, num_tokens, tuple(self.ends), sampling)
        self._policy.inbox.put(text)
        if self._policy.error is not None:  # nobody may look into the inbox any more
            raise self._policy.error
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

    place_draft: returns the round of the device that guesses tokens, of the plan's first and the others that may.
    passes: those that checked guesses.

    inbox: texts that wait.  actions: (rank, what happens to it), from the page.  error: the one that
    ended the service.  num_again: texts that were continued after a loss.
    """

    inbox: queue.Queue[Text] = field(default_factory=queue.Queue)
    place_draft: Callable[[InferencePlan, Ranks], Round | None] = lambda plan, others: None
    passes: Passes = field(default_factory=Passes)
    actions: queue.Queue[tuple[int, Action]] = field(default_factory=queue.Queue)
    num_again: int = 0
    error: Exception | None = None

    _texts: dict[int, Text] = field(default_factory=dict)  # by number, until they are written
    _num_ordered: int = 0
    _running: Generation | None = None
    _round: Round | None = None  # of the newest generation

    @property
    def step(self) -> int:
        """Return the number of texts that were written."""
        return self._num_ordered - len(self._texts)

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the wanted plan's devices with the texts that are under way (see Policy)."""
        generation = super().generation(number, ready, factors)
        orders = tuple(text.order(number) for number, text in self._texts.items() if not text.is_whole)
        return generation._replace(job=replace(generation.job, generate=2, writes_texts=True, texts=orders))

    def draft_rank(self, plan: InferencePlan, ready: Ranks) -> int | None:
        """See ServingPolicy."""
        candidates = self.rescheduler.candidates
        others = tuple(rank for rank in ready if rank not in plan.ranks and candidates[rank].is_in)
        self._round = self.place_draft(plan, others)
        return None if self._round is None else self._round.rank

    @property
    def draft_round(self) -> Round | None:
        """Return the round of the device that guesses tokens now."""
        running = self._running  # which the coordinator's thread may change meanwhile
        return None if running is None or running.job.draft_rank is None else self._round

    def begun(self, generation: Generation) -> Generation:
        """Note that orders go to these devices."""
        self._running = super().begun(generation)
        return self._running

    def turn(self) -> bool:
        """Break or revive devices, order texts that have come, and end those that are no longer wanted."""
        while not self.actions.empty():
            rank, action = self.actions.get_nowait()
            if action == "return":
                self.fleet.faults.end(rank, self.now_s)
            else:
                factor = SLOWED if action == "slow" else 1.0
                self.fleet.faults.add(Fault(kind=action, rank=rank, start=max(0.0, self.now_s), factor=factor))
        for number, text in self._texts.items():
            if not text.is_wanted and not text.is_stopped and self._running is not None:
                text.is_stopped = True
                self._order(text.order(number)._replace(num_tokens=0))
        while not self.inbox.empty():
            text = self._texts[self._num_ordered] = self.inbox.get_nowait()
            self._order(text.order(self._num_ordered))
            self._num_ordered += 1
        return super().turn()

    def _order(self, order: TextOrder) -> None:
        running = self._running
        if running is not None:  # otherwise the next generation's job has it
            self.fleet.command(running.members, Order(running.number, order))

    def _finish(self, number: int) -> None:
        self._texts.pop(number).out.put(None)

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Take a token; each only once, and in order."""
        if not isinstance(event, TextToken):
            super().heard(generation, rank, event)
            return
        text = self._texts.get(event.number)
        if text is not None and event.place == len(text.tokens):
            text.tokens.append(event.token)
            if event.place:
                self.passes.add(is_right=event.is_right, is_first=event.is_first)
            text.out.put(event.token)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Take the end of a text, which the plan's first device reports."""
        text = self._texts.get(done.step)
        if text is not None and text.is_whole:
            self._finish(done.step)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Let the next devices go on with the texts that were under way."""
        self._running = None
        super().ended(generation, parts, lost)
        for number, text in [*self._texts.items()]:
            text.is_stopped = False
            if text.is_whole:
                self._finish(number)
        if lost:
            self.num_again += sum(bool(text.tokens) for text in self._texts.values())

    def fail(self, error: Exception) -> None:
        """End the texts that wait, and all that still come: the service has ended."""
        self.error = error  # first: a text comes either before the last look into the inbox, or after this
        texts = [*self._texts.values()]
        while not self.inbox.empty():
            texts.append(self.inbox.get_nowait())
        for text in texts:
            text.out.put(error)

    def rank_of(self, name: str) -> int:
        """Return a device's rank.  Raises ConfigError for an unknown name."""
        names = self.cluster.names
        if name not in names:
            raise ConfigError(f"The device '{name[:100]}' was named.", f"There are {', '.join(names)}.", "Name one.")
        return names.index(name)
