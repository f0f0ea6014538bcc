"""Convert texts to token ids with the tokenizers library, without the slow import of transformers, and images to patches."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workbench.core.errors import ConfigError, MissingDataError


class Located(NamedTuple):
    """ids: of all tokens.  first, stop: range of the tokens of the text.  offsets: characters [start, end) of each token in that range."""

    ids: list[int]
    first: int
    stop: int
    offsets: list[tuple[int, int]]


class TextTokenizer:
    """A fast tokenizer with its special tokens.

    separator_id: None for families without a separator.  start_id: the first token of a decoder's target, None without a decoder.
    end_id: ends a text; None: pad_id.
    """

    def __init__(
        self, backend: Any, *, pad_id: int, separator_id: int | None = None, start_id: int | None = None, end_id: int | None = None
    ) -> None:
        self.backend = backend
        self.pad_id = pad_id
        self.separator_id = separator_id
        self.start_id = start_id
        self.end_id = pad_id if end_id is None else end_id
        backend.no_padding()  # some published tokenizers pad to 128, which would take four times as long
        backend.no_truncation()

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text (or pair of texts), truncated to max_length.  A list is never empty.

        Pairs are joined in the model's own format if it has a separator or a decoder, otherwise with a line feed.
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
        """Return the tokens of each text, or of each pair with the positions of the second text.  Nothing is truncated."""
        inputs: list[Any] = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        found = []
        for encoding in self.backend.encode_batch(inputs):
            own = [at for at, sequence in enumerate(encoding.sequence_ids) if sequence == int(pairs is not None)]
            first, stop = (own[0], own[-1] + 1) if own else (len(encoding.ids),) * 2
            found.append(Located(encoding.ids, first, stop, encoding.offsets[first:stop]))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def tiny_tokenizer(*, is_causal: bool, start_id: int | None = None) -> TextTokenizer:
    """Return an in-memory tokenizer for the tiny random models, with word pieces of one or two characters."""
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
    """Return the settings in a JSON file.  Empty if it is missing or damaged; callers that need it report that."""
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
    except Exception as error:  # the library raises no narrower type
        raise MissingDataError(f"The tokenizer '{path}' was asked for.", f"It does not load: {error}.", "Save it again.") from error

    def id_of(role: str) -> int | None:
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else backend.token_to_id(token)

    pad_id = next((index for index in (id_of("pad"), id_of("eos")) if index is not None), 0)
    return TextTokenizer(backend, pad_id=pad_id, separator_id=id_of("sep"), start_id=start_id, end_id=id_of("eos"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokenizer:
    """Splits images into patches, one token each, preceded by a class token without an image.

    image_size, patch_size: pixels per side.  channels: a grey image is repeated this many times.
    """

    image_size: int
    patch_size: int
    channels: int
    pad_id: int = 0
    separator_id: None = None
    start_id: None = None

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Raise ConfigError, because this model does not accept texts."""
        raise ConfigError("Texts were given to a model of pictures.", "It reads patches.", "Choose a model of text, or the task 'digits'.")

    def encode_images(self, images: Sequence[bytes]) -> list[list[bytes]]:
        """Return each image's tokens: `channels` x patch x patch values of one byte each, all zero for the class token.

        images: square grey images, row by row, one byte per pixel.  They are scaled to the model's size.
        """
        encoded = []
        for image in images:
            side = math.isqrt(len(image))
            if side < 1 or side * side != len(image):
                raise ConfigError(f"A picture of {len(image)} pixels was given.", "It is not square.", "Give square pictures.")
            pixels = torch.frombuffer(bytearray(image), dtype=torch.uint8).view(1, 1, side, side)
            if side != self.image_size:
                size = (self.image_size, self.image_size)
                scaled = F.interpolate(pixels.float(), size=size, mode="bilinear", antialias=True, align_corners=False)
                pixels = scaled.round().clamp(0, 255).to(torch.uint8)
            patch, grid = self.patch_size, self.image_size // self.patch_size
            blocks = pixels[0, 0, : grid * patch, : grid * patch].view(grid, patch, grid, patch).transpose(1, 2).reshape(-1, patch * patch)
            tokens = [row.numpy().tobytes() * self.channels for row in blocks]
            encoded.append([bytes(self.channels * patch * patch), *tokens])
        return encoded


def image_tokenizer(settings: Mapping[str, Any]) -> ImageTokenizer:
    """Return the tokenizer for a vision transformer's configuration.  Raises ConfigError unless images and patches are square."""
    sides = []
    for name, usual in (("image_size", 224), ("patch_size", 16)):
        side = settings.get(name, usual)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if height != width:
            raise ConfigError("A vision transformer was asked for.", f"Its {name} is {height} x {width}.", "Choose one of squares.")
        sides.append(int(height))
    return ImageTokenizer(image_size=sides[0], patch_size=sides[1], channels=settings.get("num_channels", 3))
