"""Turn texts into token ids by the tokenizers library, without the slow import of transformers."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workbench.core.errors import ConfigError, MissingDataError


class Located(NamedTuple):
    """ids: of all tokens.  first, stop: those of the text that is read.  offsets: the characters [start, end) of each of these."""

    ids: list[int]
    first: int
    stop: int
    offsets: list[tuple[int, int]]


class TextTokenizer:
    """A fast tokenizer with its special tokens.

    separator_id: None for families that have no separator.  start_id: the token that a decoder's target begins with, None without one.
    """

    def __init__(self, backend: Any, *, pad_id: int, separator_id: int | None = None, start_id: int | None = None) -> None:
        self.backend = backend
        self.pad_id = pad_id
        self.separator_id = separator_id
        self.start_id = start_id
        backend.no_padding()  # some published tokenizers pad to 128, which would cost a factor of four
        backend.no_truncation()

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text (or pair of texts), cut at max_length; never an empty list.

        Two texts are joined as the model knows pairs if it has a separator or a decoder, else by a line feed.
        """
        if max_length < 4:
            raise ConfigError(f"max_length = {max_length} was asked for.", "Special tokens alone take up to 3.", "Raise max_length.")
        inputs: list[Any]
        if pairs is None:
            inputs = list(texts)
        elif self.separator_id is None and self.start_id is None:
            inputs = [f"{first}\n{second}" for first, second in zip(texts, pairs, strict=True)]
        else:
            inputs = list(zip(texts, pairs, strict=True))
        self.backend.enable_truncation(max_length)
        try:
            return [encoding.ids or [self.pad_id] for encoding in self.backend.encode_batch(inputs)]
        finally:
            self.backend.no_truncation()

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Located]:
        """Return the tokens of each text, or of each pair with the second text's places; nothing is cut."""
        inputs: list[Any] = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        found = []
        for encoding in self.backend.encode_batch(inputs):
            own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence == int(pairs is not None)]
            first, stop = (own[0], own[-1] + 1) if own else (len(encoding.ids),) * 2
            found.append(Located(encoding.ids, first, stop, encoding.offsets[first:stop]))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def tiny_tokenizer(*, is_causal: bool, start_id: int | None = None) -> TextTokenizer:
    """Return a tokenizer made in memory for the tiny random models: word pieces of one or two characters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    singles = [character for character in string.printable if not character.isspace() and not character.isupper()]
    doubles = [first + second for first in string.ascii_lowercase for second in string.ascii_lowercase]
    pieces = special + singles + doubles + [f"##{piece}" for piece in singles + doubles]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend: Any = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if is_causal:
        return TextTokenizer(backend, pad_id=0)
    backend.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return TextTokenizer(backend, pad_id=0, separator_id=vocabulary["[SEP]"], start_id=start_id)


def read_settings(path: Path) -> dict[str, Any]:
    """Return a JSON file's settings, none if it is not there or damaged (who needs them says so)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tokenizer_from_folder(folder: Path, *, start_id: int | None = None) -> TextTokenizer:
    """Return the tokenizer of a model folder that has a tokenizer.json."""
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise MissingDataError(f"The tokenizer '{path}' was asked for.", f"It does not load: {error}.", "Save it again.") from error

    def id_of(role: str) -> int | None:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    pad_id = next((index for index in (id_of("pad"), id_of("eos")) if index is not None), 0)
    return TextTokenizer(backend, pad_id=pad_id, separator_id=id_of("sep"), start_id=start_id)
