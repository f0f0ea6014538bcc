"""Convert texts to token ids with the tokenizers library, without the slow import of transformers, and images to
patches.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from workbench.core.errors import ConfigError, MissingDataError
from workbench.models.chat_template import ALPACA, Message, alpaca_prompt, render, stored_template

ENCODED_AT_ONCE = 4096
LONG_TEXT = 1 << 16
LEAST_TOKENS = 4
"""Up to three special tokens, and one of text."""


class Located(NamedTuple):
    """The tokens of a text.

    ids: ids of all tokens.  first, stop: range of the text's own tokens.  offsets: characters [start, end) of each
    token in that range.
    """

    ids: list[int]
    first: int
    stop: int
    offsets: list[tuple[int, int]]


@dataclass(eq=False)
class TextTokenizer:
    """A fast tokenizer with its special tokens.

    backend: the library tokenizers' object.  pad_id: the padding token.
    joins_pairs: whether a pair is one text with a line feed in it, as for decoder-only models; others have their own
    format.
    has_token_types: whether the model reads which text of a pair a token belongs to; ~id stands for a token of the
    second text.
    start_id: the first token of a decoder's target, None without a decoder.  end_id: ends a text, None if none is
    known.  chat_template: the model's own, None without one.  special_tokens: their texts, as templates name them.
    """

    backend: Any
    _: KW_ONLY
    pad_id: int
    joins_pairs: bool = False
    has_token_types: bool = False
    start_id: int | None = None
    end_id: int | None = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One object for each id, whatever the number of tokens: a new one takes four times the bytes of its place in a
        # list.
        self._numbers = {index: index for index in self.backend.get_vocab(with_added_tokens=True).values()}
        self.backend.no_padding()  # some published tokenizers pad to 128, which would take four times as long
        self.backend.no_truncation()

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text (or pair of texts), truncated to max_length.  A list is never empty.

        In a pair ~id stands for a token of the second text if the model has token types.
        """
        if max_length < LEAST_TOKENS:
            raise ConfigError(
                f"max_length = {max_length} was asked for.",
                f"Special tokens take up to {LEAST_TOKENS - 1}.",
                "Raise max_length.",
            )
        inputs: list[Any]
        texts = self._beginnings(texts, max_length)
        if pairs is None:
            inputs = list(texts)
        elif self.joins_pairs:
            inputs = [f"{first}\n{second}" for first, second in zip(texts, pairs, strict=True)]
        else:
            inputs = list(zip(texts, self._beginnings(pairs, max_length), strict=True))
        self.backend.enable_truncation(max_length)
        try:
            encodings = self._encoded(inputs, self.backend.encode_batch_fast)
            return [self._ids(encoding) or [self.pad_id] for encoding in encodings]
        finally:
            self.backend.no_truncation()

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Located]:
        """Return the tokens of each text, or of each pair with the positions of the second text.  Nothing
        is truncated.
        """
        inputs: list[Any] = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        located = []
        for encoding in self._encoded(inputs, self.backend.encode_batch):
            positions = [
                position
                for position, sequence in enumerate(encoding.sequence_ids)
                if sequence == int(pairs is not None)
            ]
            first, stop = (positions[0], positions[-1] + 1) if positions else (len(encoding.ids),) * 2
            located.append(Located(self._ids(encoding), first, stop, encoding.offsets[first:stop]))
        return located

    def _beginnings(self, texts: Sequence[str], max_length: int) -> list[str]:
        """Return the texts, with the end of very long ones cut off.  They still have more than twice as many tokens as
        are used.
        """

        def beginning(text: str) -> str:
            size = LONG_TEXT
            while size < len(text):
                part = text[: text.rfind(" ", 0, size) if " " in text[:size] else size]
                if len(self.backend.encode(part, add_special_tokens=False).ids) > 2 * max_length:
                    return part
                size *= 4
            return text

        return [beginning(text) if len(text) > LONG_TEXT else text for text in texts]

    def _encoded(self, inputs: Sequence[Any], encode: Callable[[Sequence[Any]], Sequence[Any]]) -> Iterator[Any]:
        """Yield the encoding of each input.  Only so many exist at a time, because they take kilobytes each.

        encode: the backend's, with offsets or, faster, without.
        """
        for begin in range(0, len(inputs), ENCODED_AT_ONCE):
            yield from encode(inputs[begin : begin + ENCODED_AT_ONCE])

    def _ids(self, encoding: Any) -> list[int]:
        ids = list(map(self._numbers.__getitem__, encoding.ids))
        types = encoding.type_ids if self.has_token_types and encoding.n_sequences > 1 else None
        return ids if types is None else [~index if second else index for index, second in zip(ids, types, strict=True)]

    @property
    def begin_id(self) -> int | None:
        """The token that begins every text, None if none does."""
        begin = self.backend.token_to_id(self.special_tokens.get("bos_token", ""))
        return begin if begin is not None and self.prompt("a")[0] == begin else None

    @property
    def whole_template(self) -> str:
        """The chat template with which other programs write what `chat` does: the model's own, or Alpaca's prompt."""
        return self.chat_template or ("" if self.begin_id is None else "{{ bos_token }}") + ALPACA

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins (see chat_template.render)."""
        if self.chat_template is None:
            return self.prompt(render(ALPACA, messages, self.special_tokens))
        text = render(self.chat_template, messages, self.special_tokens)  # it names the special tokens itself
        return self.backend.encode(text, add_special_tokens=False).ids

    def instruct(self, instruction: str, input: str = "") -> list[int]:
        """Return the token ids of an instruction, up to where the answer begins: in the model's chat template, or as
        Alpaca's prompt.
        """
        if self.chat_template is None:
            return self.prompt(alpaca_prompt(instruction, input))
        return self.chat([{"role": "user", "content": f"{instruction}\n\n{input}" if input else instruction}])

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a text to continue, without what ends a text."""
        [located] = self.locate([text])
        return located.ids[: located.stop]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)


def tiny_tokenizer(*, is_causal: bool, has_token_types: bool = False, start_id: int | None = None) -> TextTokenizer:
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
        return TextTokenizer(backend, pad_id=0, end_id=0, joins_pairs=True)
    backend.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return TextTokenizer(backend, pad_id=0, has_token_types=has_token_types, start_id=start_id)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file.  Empty if it is missing or damaged; callers that need it report that."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


_USUAL_TOKENS = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "eos": ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>"),
}
"""Names of special tokens, for a tokenizer.json without the settings that say which token is which."""


def tokenizer_from_folder(folder: Path, config: Mapping[str, Any], **kind: Any) -> TextTokenizer:
    """Return the tokenizer of a model folder that has a tokenizer.json.

    config: the model's configuration.  kind: settings of TextTokenizer that depend on the model's family.
    """
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / "tokenizer_config.json")
    path = folder / "tokenizer.json"
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise MissingDataError(
            f"The tokenizer '{path}' was asked for.", f"It does not load: {error}.", "Save it again."
        ) from error
    special = {token.content: index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    num_rows = config.get("vocab_size")

    def id_of(role: str) -> int | None:
        """Return a special token as the tokenizer's settings, the model's, or else its usual name say."""
        token, number = settings.get(f"{role}_token"), config.get(f"{role}_token_id")
        named = (
            backend.token_to_id(token["content"] if isinstance(token, dict) else token) if token is not None else None
        )
        numbers = [
            named,
            *(number if isinstance(number, list) else [number]),
            *(special.get(name) for name in _USUAL_TOKENS[role]),
        ]
        token_ids = (
            token_id
            for token_id in numbers
            if isinstance(token_id, int) and 0 <= token_id < 1 << 32 and backend.id_to_token(token_id) is not None
        )
        # A token that was added later may lie beyond the model's embedding.
        return next((token_id for token_id in token_ids if not isinstance(num_rows, int) or token_id < num_rows), None)

    end_id = id_of("eos")
    pad_id = next((index for index in (id_of("pad"), end_id) if index is not None), 0)
    texts = ((role, token["content"] if isinstance(token, dict) else token) for role, token in settings.items())
    kind["special_tokens"] = {role: text for role, text in texts if role.endswith("_token") and isinstance(text, str)}
    kind["chat_template"] = stored_template(folder, settings)
    return TextTokenizer(backend, pad_id=pad_id, end_id=end_id, **kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokenizer:
    """Splits images into patches, one token each, preceded by a class token without an image.

    image_size, patch_size: pixels per side.  channels: a grey image is repeated this many times.
    """

    image_size: int
    patch_size: int
    channels: int
    pad_id: int = 0
    start_id: None = None

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Raise ConfigError, because this model does not accept texts."""
        raise ConfigError(
            "Texts were given to a model of pictures.",
            "It reads patches.",
            "Choose a model of text, or the task 'digits'.",
        )

    def encode_images(self, images: Sequence[bytes]) -> list[list[bytes]]:
        """Return each image's tokens: `channels` x patch x patch values of one byte each, all zero for the class token.

        images: square grey images, row by row, one byte per pixel.  They are scaled to the model's size.
        """
        encoded = []
        for image in images:
            side = math.isqrt(len(image))
            if side < 1 or side * side != len(image):
                raise ConfigError(
                    f"A picture of {len(image)} pixels was given.", "It is not square.", "Give square pictures."
                )
            pixels = torch.frombuffer(bytearray(image), dtype=torch.uint8).view(1, 1, side, side)
            if side != self.image_size:
                size = (self.image_size, self.image_size)
                scaled = F.interpolate(pixels.float(), size=size, mode="bilinear", antialias=True, align_corners=False)
                pixels = scaled.round().clamp(0, 255).to(torch.uint8)
            patch, grid = self.patch_size, self.image_size // self.patch_size
            blocks = (
                pixels[0, 0, : grid * patch, : grid * patch]
                .view(grid, patch, grid, patch)
                .transpose(1, 2)
                .reshape(-1, patch * patch)
            )
            tokens = [row.numpy().tobytes() * self.channels for row in blocks]
            encoded.append([bytes(self.channels * patch * patch), *tokens])
        return encoded


def image_tokenizer(settings: Mapping[str, Any]) -> ImageTokenizer:
    """Return the tokenizer for a vision transformer's configuration.  Raises ConfigError unless images and patches are
    square.
    """
    sides = []
    for name, usual in (("image_size", 224), ("patch_size", 16)):
        side = settings.get(name, usual)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        if height != width:
            raise ConfigError(
                "A vision transformer was asked for.", f"Its {name} is {height} x {width}.", "Choose one of squares."
            )
        sides.append(int(height))
    return ImageTokenizer(image_size=sides[0], patch_size=sides[1], channels=settings.get("num_channels", 3))
