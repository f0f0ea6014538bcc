"""Load a model that writes text: a base model, or a run's trained model with its adapters applied."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.serial import shown
from workbench.methods.common.result import load_result
from workbench.methods.common.result_file import find_result, read_result
from workbench.models.chat_template import Message
from workbench.models.configuration import model_config, require_generating
from workbench.models.loading import load_tokenizer
from workbench.models.sharding.whole import WholeModel
from workbench.models.speculation import DraftChoice, local_draft
from workbench.models.text import (
    LocalWriter,
    Piece,
    TextSettings,
    Writer,
    pieces,
)
from workbench.models.text_batch import Passes
from workbench.models.tokenizer import TextTokenizer
from workbench.tasks.characters import whole_characters


class TextModel:
    """Writes text after a prompt or a conversation.

    name: the base model's name.  writer: computes the tokens, here or on devices.  passes: counts of a draft's passes,
    if there is a draft.
    """

    def __init__(self, name: str, writer: Writer, ends: frozenset[int], passes: Passes | None = None) -> None:
        tokenizer = load_tokenizer(name)
        assert isinstance(tokenizer, TextTokenizer), "a model of words"
        self.name, self.tokenizer, self.writer, self.ends, self.passes = name, tokenizer, writer, ends, passes
        self._vocabulary = int(model_config(name).get_text_config().vocab_size)

    def chat(self, messages: Sequence[Message], settings: TextSettings) -> Iterator[Piece]:
        """Yield the pieces of the answer to a conversation.  Raises ConfigError as chat_template.render and write."""
        return self.continued(self.tokenizer.chat(whole_characters(list(messages))), settings)

    def complete(self, prompt: str, settings: TextSettings) -> Iterator[Piece]:
        """Yield the pieces of text that follow a prompt.  Raises ConfigError as the writer."""
        return self.continued(self.tokenizer.prompt(whole_characters(prompt)), settings)

    def continued(self, ids: Sequence[int], settings: TextSettings) -> Generator[Piece]:
        """Yield the pieces of text that follow token ids.  Raises ConfigError for one that the model does not have."""
        wrong = next((index for index in ids if not 0 <= index < self._vocabulary), None)
        if wrong is not None:
            problem = f"'{self.name}' has the ids 0 to {self._vocabulary - 1}."
            raise ConfigError(f"A text after the token id {shown(wrong)} was asked for.", problem, "Change the ids.")
        with closing(self.writer.write(ids, settings.max_tokens, settings.sampling)) as tokens:
            yield from pieces(tokens, self.tokenizer.decode, self.ends, settings)


def load_text_model(place: str, draft: str = "") -> TextModel:
    """Return a model that writes text.  place: a model's name, or a run's folder (its adapters are applied).

    draft: which model guesses tokens (see speculation.DraftChoice.read); '' for none.

    Raises ConfigError for a model that predicts no words and for a result that answers with classes or numbers, and
    else as load_result and load_model do.
    """
    folder = find_result(place)
    if folder is None:
        require_generating(place, f"A text of '{shown(place, 200)}' was asked for.")
    name = place if folder is None else read_result(folder).job.model
    choice = DraftChoice.read(draft, name) if draft else None  # before weights are read
    if folder is not None:
        return _written_by(name, load_result(folder).writer(choice))
    end_id: Any = load_tokenizer(place).end_id  # type: ignore[union-attr]  # a model of words
    model = WholeModel(place)
    guessing = None if choice is None else local_draft(choice, place, model)
    return _written_by(place, LocalWriter(place, model, {end_id}.difference((None,)), guessing))


def _written_by(name: str, writer: LocalWriter) -> TextModel:
    return TextModel(name, writer, writer.ends, writer.passes)
