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

Finish = Literal["", "stop", "length"]
"""Why a text ended: at an end token or a stop word, or at its most tokens; '' while it goes on."""
NextLogits = Callable[[Tensor], Tensor]
"""(ids (1, t) int64 that follow those of the calls before) -> logits (1, vocabulary) of the token after them."""
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
            problem = f"There may be {MAX_STOP_WORDS}, none of them empty."
            raise ConfigError(f"{len(self.stop)} stop words were given.", problem, "Change them.")


class Writer(Protocol):
    """Writes the tokens that follow a text, here or on other devices."""

    def write(self, ids: Sequence[int], num_tokens: int, sampling: Sampling) -> Generator[int]:
        """Yield up to num_tokens new tokens, the last of them an end of the text if there is one."""


class LocalWriter:
    """A Writer in this process, for one text at a time.

    start: called with the text's ids (1, t), which an encoder-decoder's encoder reads; returns the text's NextLogits.
    ends: tokens that end a text, with those of the model's generation settings.
    """

    def __init__(self, name: str, start: Callable[[Tensor], NextLogits], ends: Iterable[int] = ()) -> None:
        self.rules = GenerationRules(name)
        self.ends = frozenset((*self.rules.ends, *ends))
        self._start, self._facts = start, model_facts(name)

    def write(
        self, ids: Sequence[int], num_tokens: int, sampling: Sampling | None = None, start_ids: Sequence[int] = ()
    ) -> Generator[int]:
        """Yield up to num_tokens new tokens (see Writer).  start_ids: tokens that a decoder reads first, by default the
        model's.

        Raises ConfigError for a text without a token or longer than the model reads, DivergedError for logits that are
        no numbers.
        """
        has_decoder, most = self._facts.num_encoder_layers is not None, self._facts.max_length
        sampling = sampling or Sampling()
        text = list(start_ids or [self.rules.start_id or 0]) if has_decoder else list(ids)
        require_room(len(ids), 0 if has_decoder else num_tokens, most)
        rules = self.rules.rules(len(text), num_tokens)
        with torch.inference_mode():
            next_logits = self._start(torch.tensor([list(ids)]))
        new = text
        for number in range(num_tokens):
            with torch.inference_mode():
                logits = rules(torch.tensor([text]), next_logits(torch.tensor([new])))
                token = sampling.choose(logits, number)
            yield token
            if token in self.ends:
                return
            new = [token]
            text.append(token)


def require_room(length: int, num_tokens: int, most: int) -> None:
    """Raise ConfigError if a text and its new tokens exceed the model's positions, or if there is no text."""
    request = f"{num_tokens} new tokens after a text of {length} were asked for."
    if not length:
        raise ConfigError(request, "There is nothing to continue.", "Give a text.")
    if length + num_tokens > most:
        raise ConfigError(request, f"The model reads {most} tokens in all.", "Shorten the text, or ask for fewer.")


def cached_logits(model: Any) -> Callable[[Tensor], NextLogits]:
    """Return LocalWriter's `start` for a Hugging Face model, which keeps the keys and values of a text.

    A base model without a head (tiny ones) uses its word embedding.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    head = head_of(model) if model.get_output_embeddings() is None else None
    has_decoder = family_of(model.config.model_type).decoder is not None
    more = {"logits_to_keep": 1} if head is None and not has_decoder else {}

    def start(ids: Tensor) -> NextLogits:
        cache: Any = DynamicCache(config=model.config)
        inputs: dict[str, Any] = more
        if has_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
            inputs = {"encoder_outputs": model.get_encoder()(input_ids=ids)}

        def next_logits(new: Tensor) -> Tensor:
            role = "decoder_input_ids" if has_decoder else "input_ids"
            outcome = model(**{role: new}, past_key_values=cache, use_cache=True, **inputs)
            logits: Tensor = outcome.logits[:, -1] if head is None else head(outcome.last_hidden_state[:, -1])
            return logits

        return next_logits

    return start


def recomputed_logits(logits_of: Callable[[list[int]], Tensor]) -> Callable[[Tensor], NextLogits]:
    """Return LocalWriter's `start` for a model without a cache: every token computes the whole text again.

    logits_of: returns the logits (1, vocabulary) after a text's ids.
    """

    def start(ids: Tensor) -> NextLogits:
        text = list[int]()

        def next_logits(new: Tensor) -> Tensor:
            text.extend(new[0].tolist())
            return logits_of(text)

        return next_logits

    return start


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
    ids, first, read, waiting = list[int](), 0, 0, ""
    for token in tokens:
        if token in ends:
            yield Piece(waiting, 1, "stop")
            return
        ids.append(token)
        before, text = decode(ids[first:read]), decode(ids[first:])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            waiting, first, read = waiting + text[len(before) :], read, len(ids)
        found = min((at for word in settings.stop if (at := waiting.find(word)) >= 0), default=-1)
        if found >= 0:
            yield Piece(waiting[:found], 1, "stop")
            return
        sure = len(waiting) - _begun(waiting, settings.stop)
        yield Piece(waiting[:sure], 1)
        waiting = waiting[sure:]
    yield Piece(waiting + decode(ids[first:])[len(decode(ids[first:read])) :], 0, "length")


def _begun(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of the words begins."""
    lengths = (size for word in words for size in range(1, len(word)) if text.endswith(word[:size]))
    return max(lengths, default=0)
