"""Speculative decoding: a draft guesses tokens, and the model computes them in one pass and keeps those that it would
have chosen (Leviathan, Kalman, Matias, ICML 2023, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2).

The papers accept a guess with probability min(1, p / q) and draw again after a refusal: the text has the model's
distribution.  Here draft and model choose token n by the same random numbers (torch's multinomial takes the largest
p / exponential noise), and a guess is right if the model chooses it, too (Daliri, Musco, Suresh, arXiv 2408.07978).
So a text does not depend on its draft: the same seed writes the same text, also after a device was lost, and devices
send each other guesses, not their probabilities of every token.  Fewer guesses are right: at least (1 - d) / (1 + d) of
them instead of 1 - d, where d is the total variation distance of p and q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Self

from torch import Tensor
from torch.nn.functional import pad

from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.serial import shown
from workbench.models.configuration import model_config, model_facts, require_generating
from workbench.models.loading import load_tokenizer
from workbench.models.sharding import ModelLayout, model_layout
from workbench.models.sharding.whole import WholeModel
from workbench.models.text_batch import BatchModel, GrowingText, Passes

NUM_GUESSES = 4
"""Tokens that a draft guesses of one text before the model computes them."""
MOST_ROWS = 16
"""Tokens that one pass computes, those of all texts together.  With more than eight texts nothing is guessed."""
INT4 = "int4"
_LAYERS = "layers:"


def num_guesses(num_texts: int) -> int:
    """Return how many tokens are guessed of each of some texts."""
    return max(0, min(NUM_GUESSES, MOST_ROWS // num_texts - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    """Which model guesses.

    layers: the first ones of the model itself; 0: all.  is_int4: whether its matrices are stored in 4 bits.  model: the
    name of another model; '': the same.
    """

    layers: int = 0
    is_int4: bool = False
    model: str = ""

    @classmethod
    def read(cls, text: str, model: str) -> Self:
        """Return the choice that 'layers:N', 'int4' or a model's name stands for.  model: the one that writes.

        No weights are read.  Raises ConfigError for a number that is none, as ModelLayout.first_layers, and for a model
        that cannot read the other one's texts.
        """
        if text == INT4:
            return cls(is_int4=True)
        if text.startswith(_LAYERS):
            number = text.removeprefix(_LAYERS)
            if not number.isdecimal() or not 0 < int(number) < 10**6:
                raise ConfigError(
                    f"The draft '{shown(text)}' was asked for.",
                    "That is no number of layers.",
                    "Give such as layers:8.",
                )
            choice = cls(layers=int(number))
            choice.layout(model)
            return choice
        _require_same_texts(text, model)
        return cls(model=text)

    def layout(self, name: str) -> ModelLayout:
        """Return the draft's layout.  name: the name of the model that it is made of.  Raises as
        ModelLayout.first_layers.
        """
        layout = model_layout(name)
        return layout.first_layers(self.layers) if self.layers else layout


def _require_same_texts(draft: str, model: str) -> None:
    request = f"'{shown(draft, 200)}' as a draft of '{shown(model, 200)}' was asked for."
    require_generating(draft, request)
    require_generating(model, f"A text of '{shown(model, 200)}' was asked for.")
    todo = "Choose a model of the same tokenizer, layers:N or int4."
    theirs, ours = (model_facts(name).num_encoder_layers is not None for name in (draft, model))
    if theirs != ours:
        has, lacks = ("The draft", "the model") if theirs else ("The model", "the draft")
        raise ConfigError(request, f"{has} has an encoder, {lacks} has none.", todo)
    tokenizers: Any = [load_tokenizer(name) for name in (draft, model)]  # of words
    theirs, ours = (tokenizer.backend.get_vocab() for tokenizer in tokenizers)
    if theirs != ours:
        raise ConfigError(request, "It has other tokens.", todo)


def _num_ids(name: str) -> int:
    return int(model_config(name).get_text_config().vocab_size)


@dataclass(slots=True)
class Drafted:
    """A text as a draft knows it.  state: None if the text is longer than the draft reads.  read: the tokens that the
    state has read.
    """

    text: GrowingText
    state: Any
    read: list[int]


class Draft:
    """Guesses tokens of texts by a cheaper model of the same tokens.  passes: those that checked its guesses.

    longest: the draft's most tokens, 0 if it has no table of positions.  Of longer texts nothing is guessed.
    num_ids, num_model_ids: rows of the draft's and of the model's embedding; 0: the same.  Models of one tokenizer may
    have more rows than it has tokens, and not the same number: vocab_size in Qwen2.5's config.json is 151,936 with .5 B
    weights and 152,064 with 7 B.
    """

    def __init__(self, model: BatchModel, longest: int = 0, *, num_ids: int = 0, num_model_ids: int = 0) -> None:
        self._model, self._longest, self.passes = model, longest, Passes()
        self._num_ids, self._num_model_ids = num_ids, num_model_ids

    def join(self, text: GrowingText, ids: Sequence[int], decoder_ids: Sequence[int]) -> Drafted:
        """Read a text (see BatchModel.start)."""
        is_too_long = self._longest and max(len(ids), text.prompt + text.num_tokens) > self._longest
        if is_too_long or not self._can_read(ids):
            return Drafted(text, None, [])
        state, _ = self._model.start(ids, decoder_ids, text.num_tokens - text.num_new)
        return Drafted(text, state, list(decoder_ids or ids))

    def guess(self, drafted: Sequence[Drafted]) -> list[list[int]]:
        """Return the next tokens of each text, at most num_guesses, and none beyond its end."""
        most, guesses = num_guesses(len(drafted)), [list[int]() for _ in drafted]
        texts = [replace(member.text, tokens=[*member.text.tokens]) for member in drafted]
        for number in range(most):
            places = (place for place, member in enumerate(drafted) if member.state is not None)
            going = [
                place
                for place in places
                if len(guesses[place]) == number and _has_room(texts[place]) and self._can_read(texts[place].tokens)
            ]
            if not going:
                break
            unread = [self._unread(drafted[place], texts[place].tokens) for place in going]
            logits = self._model.step([drafted[place].state for place in going], unread).split(list(map(len, unread)))
            for place, rows in zip(going, logits, strict=True):
                try:
                    guesses[place].append(texts[place].take(self._as_the_models(rows[-1:])))
                except WorkbenchError:  # the draft's logits are no numbers, but the model's may be
                    continue
        return guesses

    def _can_read(self, ids: Sequence[int]) -> bool:
        return not self._num_ids or max(ids, default=0) < self._num_ids

    def _as_the_models(self, logits: Tensor) -> Tensor:
        """Return logits with as many columns as the model's have.  So both choose by the same random numbers."""
        missing = self._num_model_ids - self._num_ids
        return pad(logits, (0, missing), value=-inf) if missing else logits  # fewer than none: the last ones are cut

    def _unread(self, member: Drafted, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that the draft has yet to read, after it has forgotten its wrong guesses."""
        pairs = zip(member.read, tokens[:-1], strict=False)
        most = min(len(member.read), len(tokens) - 1)
        same = next((place for place, (drafted_token, token) in enumerate(pairs) if drafted_token != token), most)
        self._model.forget(member.state, len(member.read) - same)
        member.read = list(tokens)
        return list(tokens[same:])


def local_draft(choice: DraftChoice, name: str, model: WholeModel | None) -> Draft:
    """Return the draft of a model in this process.

    model: itself, whose weights a draft of its first layers shares; None: it computes in another way, such as through
    adapters, and its base model `name` guesses.
    """
    drafting = WholeModel(choice.model) if choice.model else model or WholeModel(name)
    if choice.layers:
        drafting = drafting.first_layers(choice.layers)
    return Draft(
        drafting.in_int4() if choice.is_int4 else drafting,
        drafting.longest,
        num_ids=_num_ids(choice.model or name),
        num_model_ids=_num_ids(name),
    )


def _has_room(text: GrowingText) -> bool:
    """Return whether a token may be guessed; the pass that checks it gives one more."""
    return not text.is_whole and text.num_new < text.num_tokens - 1
