"""Turn texts into token ids by the tokenizers library, without the slow import of transformers."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workbench.core.errors import ConfigError


class TextTokenizer:
    """A fast tokenizer with its special tokens.  separator_id is None for families that have no separator."""

    def __init__(self, backend: Any, *, pad_id: int, separator_id: int | None = None) -> None:
        self.backend = backend
        self.pad_id = pad_id
        self.separator_id = separator_id
        backend.no_padding()  # some published tokenizers pad to 128, which would cost a factor of four
        backend.no_truncation()

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text (or pair of texts), cut at max_length; never an empty list.

        Two texts are joined as the model knows pairs if it has a separator, else by a line feed.
        """
        if max_length < 4:
            raise ConfigError(f"max_length = {max_length} was asked for.", "Special tokens alone take up to 3.", "Raise max_length.")
        inputs: list[Any]
        if pairs is None:
            inputs = list(texts)
        elif self.separator_id is None:
            inputs = [f"{first}\n{second}" for first, second in zip(texts, pairs, strict=True)]
        else:
            inputs = list(zip(texts, pairs, strict=True))
        self.backend.enable_truncation(max_length)
        try:
            return [encoding.ids or [self.pad_id] for encoding in self.backend.encode_batch(inputs)]
        finally:
            self.backend.no_truncation()


def tiny_tokenizer(*, is_causal: bool) -> TextTokenizer:
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
    return TextTokenizer(backend, pad_id=0, separator_id=vocabulary["[SEP]"])
