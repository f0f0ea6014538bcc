"""Write text token by token: the tokens that follow a prompt, and the pieces of text that they make."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.configuration import model_facts
from workbench.models.generation import GenerationRules, Sampling
from workbench.models.loading import family_of
from workbench.models.matmul import head_of
from workbench.models.speculation import Draft
from workbench.models.text_batch import BatchModel, GrowingText, TextBatch

Finish = Literal["", "stop", "length"]
"""Why a text ended: at an end token or a stop word, or at its most tokens; '' while it goes on."""
MAX_TOKENS = 256
MAX_STOP_WORDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How a text is written.

    max_tokens: its most tokens.  stop: words before which it ends.
    """

    max_tokens: int = MAX_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"A text of {self.max_tokens} tokens was asked for.", "That is none.", "Ask for some.")
        if not all(self.stop) or len(self.stop) > MAX_STOP_WORDS:
            raise ConfigError(
                f"{len(self.stop)} stop words were given.",
                f"There may be {MAX_STOP_WORDS}, none of them empty.",
                "Change them.",
            )


class Writer(Protocol):
    """Writes the tokens that follow a text, here or on other devices."""

    def write(self, ids: Sequence[int], num_tokens: int, sampling: Sampling) -> Generator[int]:
        """Yield up to num_tokens new tokens, the last of them an end of the text if there is one."""


class LocalWriter:
    """A Writer in this process.  Texts that are written at the same time share each step of the model.

    ends: tokens that end a text, with those of the model's generation settings.  draft: see TextBatch.
    """

    def __init__(self, name: str, model: BatchModel, ends: Iterable[int] = (), draft: Draft | None = None) -> None:
        self.rules = GenerationRules(name)
        self.ends = frozenset((*self.rules.ends, *ends))
        self.passes = None if draft is None else draft.passes
        self._batch, self._facts = TextBatch(model, draft), model_facts(name)

    def write(
        self, ids: Sequence[int], num_tokens: int, sampling: Sampling | None = None, start_ids: Sequence[int] = ()
    ) -> Generator[int]:
        """Yield up to num_tokens new tokens (see Writer).  start_ids: tokens that a decoder reads first, by default the
        model's.

        Raises ConfigError for a text without a token or longer than the model reads, DivergedError for logits that are
        no numbers.
        """
        has_decoder, most = self._facts.num_encoder_layers is not None, self._facts.max_length
        decoder_ids = list(start_ids or [self.rules.start_id or 0]) if has_decoder else []
        require_room(len(ids), 0 if has_decoder else num_tokens, most)
        start = decoder_ids or ids
        text = GrowingText(
            tokens=list(start),
            prompt=len(start),
            num_tokens=num_tokens,
            ends=self.ends,
            sampling=sampling or Sampling(),
            rules=self.rules.rules(len(start), num_tokens),
        )
        member = self._batch.join(text, ids, decoder_ids)
        try:
            while (token := self._batch.next(member)) is not None:
                yield token
        finally:
            self._batch.leave(member)


def require_room(length: int, num_tokens: int, most: int) -> None:
    """Raise ConfigError if a text and its new tokens exceed the model's positions, or if there is no text."""
    request = f"{num_tokens} new tokens after a text of {length} were asked for."
    if not length:
        raise ConfigError(request, "There is nothing to continue.", "Give a text.")
    if length + num_tokens > most:
        raise ConfigError(request, f"The model reads {most} tokens in all.", "Shorten the text, or ask for fewer.")


class CachedModel:
    """A BatchModel over a Hugging Face model, whose own layers may be changed.  Its texts take turns within a step.

    A base model without a head (tiny ones) uses its word embedding.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._has_decoder = family_of(model.config.model_type).decoder is not None
        self._head = head_of(model) if model.get_output_embeddings() is None else None

    def start(self, ids: Sequence[int], decoder_ids: Sequence[int], num_tokens: int) -> tuple[dict[str, Any], Tensor]:
        """See BatchModel."""
        from transformers import DynamicCache, EncoderDecoderCache

        cache: Any = DynamicCache()  # with all tokens: the window of a layer that has slid could not be turned back
        state: dict[str, Any] = {"past_key_values": cache}
        if self._has_decoder:
            state["past_key_values"] = EncoderDecoderCache(cache, DynamicCache())
            state["encoder_outputs"] = self._model.get_encoder()(input_ids=torch.tensor([list(ids)]))
        return state, self._logits(state, decoder_ids or ids)

    def step(self, states: Sequence[dict[str, Any]], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See BatchModel."""
        return torch.cat([self._logits(state, new, len(new)) for state, new in zip(states, tokens, strict=True)])

    def forget(self, state: dict[str, Any], count: int) -> None:
        """See BatchModel."""
        if count:
            state["past_key_values"].crop(-count)

    def _logits(self, state: dict[str, Any], new: Sequence[int], num_rows: int = 1) -> Tensor:
        role = "decoder_input_ids" if self._has_decoder else "input_ids"
        more = {"logits_to_keep": num_rows} if self._head is None and not self._has_decoder else {}
        outcome = self._model(**{role: torch.tensor([list(new)])}, use_cache=True, **state, **more)
        if self._head is not None:
            return self._head(outcome.last_hidden_state[0, -num_rows:])
        logits: Tensor = outcome.logits[0, -num_rows:]
        return logits


class RecomputedModel:
    """A BatchModel without a cache: every token computes the whole text again.

    logits_of: returns the logits (1, vocabulary) after a text's ids.
    """

    def __init__(self, logits_of: Callable[[list[int]], Tensor]) -> None:
        self._logits_of = logits_of

    def start(self, ids: Sequence[int], decoder_ids: Sequence[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """See BatchModel."""
        return list(ids), self._logits_of(list(ids))

    def step(self, states: Sequence[list[int]], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See BatchModel."""
        logits = list[Tensor]()
        for state, new in zip(states, tokens, strict=True):
            for token in new:
                state.append(token)
                logits.append(self._logits_of(state))
        return torch.cat(logits)

    def forget(self, state: list[int], count: int) -> None:
        """See BatchModel."""
        del state[len(state) - count :]


class Piece(NamedTuple):
    """A piece of a text, which may be empty.  tokens: how many it took.  finish: see Finish."""

    text: str
    tokens: int
    finish: Finish = ""


def pieces(
    tokens: Iterable[int], decode: Callable[[list[int]], str], ends: frozenset[int], settings: TextSettings
) -> Iterator[Piece]:
    """Yield the pieces of text that tokens make, up to a stop word; the last one says why the text ended.

    A piece that may begin a stop word, or ends within a character, waits for the next token.
    """
    ids, first, num_read, waiting = list[int](), 0, 0, ""
    for token in tokens:
        if token in ends:
            yield Piece(waiting, 1, "stop")
            return
        ids.append(token)
        before, text = decode(ids[first:num_read]), decode(ids[first:])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            waiting, first, num_read = waiting + text[len(before) :], num_read, len(ids)
        end = min((place for word in settings.stop if (place := waiting.find(word)) >= 0), default=-1)
        if end >= 0:
            yield Piece(waiting[:end], 1, "stop")
            return
        sure = len(waiting) - _longest_begin(waiting, settings.stop)
        yield Piece(waiting[:sure], 1)
        waiting = waiting[sure:]
    yield Piece(waiting + decode(ids[first:])[len(decode(ids[first:num_read])) :], 0, "length")


def _longest_begin(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of the words begins."""
    lengths = (size for word in words for size in range(1, len(word)) if text.endswith(word[:size]))
    return max(lengths, default=0)
