"""Tokenize splits, and form batches padded to their longest sample.

Long contexts are split into overlapping windows, as BERT does for SQuAD: Devlin et al., "BERT" (2019), section 4.2 and
its released code.
An answer is the first and the last token in a window that contains all of it.  For other windows, and for a question
without an answer, both are the window's first token.

In text generation a row is the prompt of an instruction with its input, the answer and the end token.  In the answer,
a token's class is the token that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from workbench.core.errors import ConfigError
from workbench.core.once import once
from workbench.tasks.batching import epoch_batches
from workbench.tasks.task import IGNORED, Span, Split

if TYPE_CHECKING:
    from torch import Tensor


class Encoder(Protocol):
    """The tokenizer interface.  start_id: the first token of a decoder's targets; None for models without a decoder."""

    @property
    def pad_id(self) -> int:
        """The padding token."""

    @property
    def start_id(self) -> int | None:
        """The first token of a decoder's targets."""

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text."""


@runtime_checkable
class ImageEncoder(Protocol):
    """Extra tokenizer method for images."""

    def encode_images(self, images: Sequence[bytes]) -> list[list[bytes]]:
        """Return the tokens of each image, each the values of one patch."""


MAX_WINDOWS = 1024
"""Maximum number of windows per sample: window w of sample i has the sample id 1024 i + w."""
OVERLAP = 1 / 3
"""Overlap of two neighbouring windows.  BERT's is 128 of 384 tokens."""


@runtime_checkable
class SpanEncoder(Protocol):
    """Extra tokenizer method for spans (see TextTokenizer.locate)."""

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, if one is known."""

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Any]:
        """Return the tokens of each text with their character ranges."""


class Window(NamedTuple):
    """A row of tokens.  sample: its index in the split.  first: the row's first token of the context (or text).

    offsets: the characters [start, end) of the tokens from there on.  targets: the answer's first and last token; if
    is_tagged, the class of each token: IGNORED except for the first token of each word, in text generation for the
    tokens in front of an answer's.
    """

    sample: int
    sample_id: int
    first: int
    offsets: tuple[tuple[int, int], ...]
    targets: tuple[int, ...]
    is_tagged: bool

    def hidden(self) -> Window:
        """Return the window without its text positions, answer and tags, for devices that may not see them."""
        return self._replace(offsets=(), targets=(0,) * len(self.targets))


def cut_windows(
    split: Split, encoder: SpanEncoder, max_length: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Window, ...], int]:
    """Return the token ids of every row, the rows' windows, and the number of samples whose answer or words fit into no
    row.

    Raises ConfigError naming a question that leaves no room for its context, and an answer that is not in its context.
    """
    assert split.spans is not None
    ids, windows, left_out = [], [], 0
    for sample, (located, spans) in enumerate(zip(encoder.locate(split.texts, split.pairs), split.spans, strict=True)):
        before, context, after = (
            located.ids[: located.first],
            located.ids[located.first : located.stop],
            located.ids[located.stop :],
        )
        room = max_length - len(before) - len(after)
        if room < 2:
            raise ConfigError(
                f"max_length = {max_length} was asked for.",
                f"The question '{split.texts[sample][:60]}' takes {len(before) + len(after)} tokens, which "
                "leaves no room for its context.",
                "Raise max_length.",
            )
        tagged = split.pairs is None
        step = room if tagged else room - int(OVERLAP * room)
        starts = range(0, max(1, len(context) - (0 if tagged else room - step)), step)[: 1 if tagged else MAX_WINDOWS]
        answer = None if tagged or not spans else _tokens_of(spans[0], located.offsets)
        fits = answer is None or any(start <= answer[0] and answer[1] < start + room for start in starts)
        left_out += not fits or (tagged and len(context) > room)
        for number, start in enumerate(starts):
            offsets = tuple(located.offsets[start : start + room])
            if tagged:
                targets = _classes(spans, len(before), offsets, len(after))
            elif not fits:
                targets = (IGNORED, IGNORED)
            elif answer is not None and start <= answer[0] and answer[1] < start + room:
                targets = (len(before) + answer[0] - start, len(before) + answer[1] - start)
            else:
                targets = (0, 0)
            ids.append((*before, *context[start : start + room], *after))
            windows.append(
                Window(sample, split.sample_ids[sample] * MAX_WINDOWS + number, len(before), offsets, targets, tagged)
            )
    return tuple(ids), tuple(windows), left_out


def _tokens_of(answer: Span, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and last token of an answer.  None if the tokenizer drops all of its characters."""
    end = answer.start + len(answer.text)
    tokens = [index for index, (first, stop) in enumerate(offsets) if stop > answer.start and first < end]
    return (tokens[0], tokens[-1]) if tokens else None


def _classes(words: Sequence[Span], before: int, offsets: Sequence[tuple[int, int]], after: int) -> tuple[int, ...]:
    """Return the class of every token in a row.  A word's class is at its first token."""
    classes = [IGNORED] * (before + len(offsets) + after)
    for word, token in zip(words, first_tokens(words, offsets), strict=True):
        if token is not None:
            classes[before + token] = word.label
    return tuple(classes)


def first_tokens(words: Sequence[Span], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the first token of each word; None for a word that is cut off or that the tokenizer drops completely.

    offsets: the characters [start, end) of each token.  A token that spans several words belongs to the first of them.
    """
    firsts: list[int | None] = [None] * len(words)
    number = 0
    for token, (_, stop) in enumerate(offsets):
        while number < len(words) and words[number].start + len(words[number].text) < stop:
            number += 1
        if number < len(words) and words[number].start < stop:
            firsts[number] = token
            number += 1
    return firsts


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedSplit:
    """Token ids of every sample, with different lengths.  labels: int for classes and label words, float for
    regression.

    ids: for an image each token is the values of a patch.  sample_ids: stable ids of the samples in the whole task,
    independent of the chosen subset.  start_id: the first token of a decoder's targets, None without a decoder.
    words: for sequence-to-sequence the token ids of each class's label word.
    windows: for a split with spans, the part of a sample in each row; empty: each row is a sample.
    left_out: number of samples whose answer fits into no window, or whose last words do not fit; losses ignore these.
    """

    ids: tuple[tuple[int | bytes, ...], ...]
    labels: tuple[int | float, ...]
    sample_ids: tuple[int, ...]
    pad_id: int
    start_id: int | None = None
    words: tuple[tuple[int, ...], ...] = ()
    windows: tuple[Window, ...] = ()
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def rows_of(self, samples: Sequence[int]) -> tuple[int, ...]:
        """Return the rows of some samples of the split: all their windows, or the samples themselves."""
        wanted_samples = set(samples)
        return (
            tuple(row for row, window in enumerate(self.windows) if window.sample in wanted_samples)
            if self.windows
            else tuple(samples)
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each sample."""
        return tuple(map(len, self.ids))

    @property
    def target_length(self) -> int:
        """Return the decoder's number of tokens: that of the longest label word, or 1 for only the start token; 0
        without a decoder.
        """
        return max((len(word) for word in self.words), default=int(self.start_id is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """input_ids, attention_mask: (n, t) int64, padded on the right; for images input_ids are (n, t, patch values)
    uint8.

    labels: (n,) int64 or float32, for sequence-to-sequence (n, s) int64 with IGNORED where padded, for spans (n, 2)
    first and last token, for tagged tokens (n, t).  sample_ids: (n,) int64.
    decoder_ids: (n, s) int64, None without a decoder.  choices: (words, s), the labels of every word for
    sequence-to-sequence.
    indices: positions of the samples in their split.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    sample_ids: Tensor
    indices: tuple[int, ...]
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, first: int, end: int) -> Batch:
        """Return samples [first, end) of the batch, with the padding of the whole batch."""
        span = slice(first, end)
        return replace(
            self,
            input_ids=self.input_ids[span],
            attention_mask=self.attention_mask[span],
            labels=self.labels[span],
            sample_ids=self.sample_ids[span],
            indices=self.indices[span],
            decoder_ids=None if self.decoder_ids is None else self.decoder_ids[span],
        )


@once
def tokenize(split: Split, encoder: Encoder, *, max_length: int, words: Sequence[str] = ()) -> TokenizedSplit:
    """Tokenize a split.  Samples are truncated to max_length tokens; images are never truncated, contexts of questions
    become windows.

    words: a sequence-to-sequence task's label words.  Raises ConfigError if the split is empty, if the model cannot
    read it, if the model's tokenizer cannot distinguish two label words, or if no answer begins within max_length.
    """
    if not split.texts:
        raise ConfigError("An empty split was to be tokenized.", "It has 0 samples.", "Give data.")
    if split.spans is not None:
        return _tokenize_spans(split, encoder, max_length)
    if split.answers is not None:
        return _tokenize_answers(split, encoder, max_length)
    ids: Any
    if split.images is None:
        ids = encoder.encode(split.texts, split.pairs, max_length=max_length)
    elif isinstance(encoder, ImageEncoder):
        ids = encoder.encode_images(split.images)
    else:
        raise ConfigError(
            "A task of pictures was given to a model of text.",
            "It reads no pictures.",
            "Choose tiny-vit or another ViT.",
        )
    return TokenizedSplit(
        ids=tuple(tuple(sample) for sample in ids),
        labels=split.labels,
        sample_ids=split.sample_ids,
        pad_id=encoder.pad_id,
        start_id=encoder.start_id,
        words=_encoded_words(words, encoder, max_length),
    )


def _tokenize_spans(split: Split, encoder: Encoder, max_length: int) -> TokenizedSplit:
    if not isinstance(encoder, SpanEncoder) or encoder.start_id is not None:
        raise ConfigError(
            "Answers or classes of single tokens were asked for.",
            "The model reads pictures, or has a decoder.",
            "Choose a model of text with an encoder or a decoder, not both.",
        )
    ids, windows, left_out = cut_windows(split, encoder, max_length)
    return TokenizedSplit(
        ids=ids,
        labels=tuple(split.labels[window.sample] for window in windows),
        sample_ids=tuple(window.sample_id for window in windows),
        pad_id=encoder.pad_id,
        windows=windows,
        left_out=left_out,
    )


def _tokenize_answers(split: Split, encoder: Any, max_length: int) -> TokenizedSplit:
    assert split.answers is not None
    if encoder.end_id is None:
        request, problem = "Answers that end were asked for.", "The model's tokenizer names no token that ends a text."
        raise ConfigError(request, problem, "Give it an eos_token in tokenizer_config.json.")
    ids, windows, longest = [], [], []
    prompts = map(encoder.instruct, split.texts, split.pairs or ("",) * len(split.texts))
    for sample, (prompt, answer) in enumerate(zip(prompts, encoder.locate(split.answers), strict=True)):
        first, row = len(prompt), (*prompt, *answer.ids[answer.first : answer.stop], encoder.end_id)
        targets = ((IGNORED,) * (first - 1) + row[first:] + (IGNORED,))[:max_length]
        ids.append(row[:max_length])
        windows.append(Window(sample, split.sample_ids[sample], first, (), targets, True))
        longest.append(len(row))
    if not any(target != IGNORED for window in windows for target in window.targets):
        raise ConfigError(
            f"Answers within max_length = {max_length} were asked for.",
            f"None begins there: with its answer, a text has {min(longest)} to {max(longest)} tokens.",
            "Raise max_length, at most to what the model reads.",
        )
    left_out = sum(length > max_length for length in longest)
    fields: Any = {"ids": tuple(ids), "windows": tuple(windows), "left_out": left_out}
    return TokenizedSplit(labels=split.labels, sample_ids=split.sample_ids, pad_id=encoder.pad_id, **fields)


def _encoded_words(words: Sequence[str], encoder: Encoder, max_length: int) -> tuple[tuple[int, ...], ...]:
    if not words:
        return ()
    request = f"Targets such as '{words[0]}' were asked for."
    if encoder.start_id is None:
        raise ConfigError(request, "The model has no decoder.", "Choose a T5 or BART model, or another kind of target.")
    encoded = tuple(tuple(word) for word in encoder.encode(list(words), max_length=max_length))
    if len(set(encoded)) < len(words):
        raise ConfigError(
            request,
            "The model's tokenizer gives two of the words the same tokens.",
            "Choose other words or another model.",
        )
    return encoded


_MULTIPLE = 8


def padded_length(lengths: Sequence[int]) -> int:
    """Return the padded length of a batch with these lengths, a multiple of 8."""
    return -(-max(lengths) // _MULTIPLE) * _MULTIPLE


def collate(split: TokenizedSplit, indices: Sequence[int], *, length: int | None = None) -> Batch:
    """Return the samples at `indices` as one batch.

    length: None pads to the longest sample, rounded up; a number pads to it (parts of a mini-batch must agree on it).
    Raises ConfigError if `indices` is empty or a sample is longer than `length`.
    """
    import torch

    if not indices:
        raise ConfigError("A batch of 0 samples was asked for.", "There is nothing to pad to.", "Leave it out.")
    width = padded_length([len(split.ids[index]) for index in indices]) if length is None else length
    is_image = isinstance(split.ids[0][0], bytes)
    values = (len(split.ids[0][0]),) if is_image else ()  # type: ignore[arg-type]
    dtype = torch.uint8 if is_image else torch.int64
    input_ids = torch.full((len(indices), width, *values), split.pad_id, dtype=dtype)
    attention_mask = torch.zeros((len(indices), width), dtype=torch.int64)
    for row, index in enumerate(indices):
        ids = split.ids[index]
        if len(ids) > width:
            raise ConfigError(
                f"Padding to {width} tokens was asked for.", f"Sample {index} has {len(ids)}.", "Raise the length."
            )
        if is_image:
            pixels = bytearray(b"".join(ids))  # type: ignore[arg-type]
            tokens = torch.frombuffer(pixels, dtype=dtype).view(-1, *values)
        else:
            tokens = torch.tensor(ids)
        input_ids[row, : len(ids)] = tokens
        attention_mask[row, : len(ids)] = 1
    if split.windows:
        targets = [split.windows[index].targets for index in indices]
        # Two labels for an answer, whatever the width; one per token for tagged tokens.
        wide = width if split.windows[0].is_tagged else 2
        labels = torch.tensor([target + (IGNORED,) * (wide - len(target)) for target in targets])
    else:
        is_regression = isinstance(split.labels[0], float)
        labels = torch.tensor(
            [split.labels[index] for index in indices], dtype=torch.float32 if is_regression else torch.int64
        )
    choices = None
    if split.words:
        choices = torch.tensor([word + (IGNORED,) * (split.target_length - len(word)) for word in split.words])
        labels = choices[labels]
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=labels,
        sample_ids=torch.tensor([split.sample_ids[index] for index in indices], dtype=torch.int64),
        indices=tuple(indices),
        decoder_ids=None if split.start_id is None else decoder_inputs(labels, split.start_id, split.pad_id),
        choices=choices,
    )


def decoder_inputs(labels: Tensor, start_id: int, pad_id: int) -> Tensor:
    """Return the decoder's input for labels (n, s): the start token, then all labels but the last; (n, 1) for labels
    (n,).
    """
    import torch

    start = torch.full((len(labels), 1), start_id, dtype=torch.int64)
    if labels.ndim == 1:
        return start
    return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad_id)], dim=1)


def text_batches(
    texts: Sequence[str], encoder: Encoder, max_length: int, batch_size: int, seed: int
) -> Callable[[int], list[Batch]]:
    """Return a function that draws an epoch's mini-batches of unlabelled texts, with at least 2 texts each."""
    tokens = tokenize(Split(texts=tuple(texts)), encoder, max_length=max_length)
    return lambda epoch: [
        collate(tokens, batch) for batch in epoch_batches(tokens.lengths, batch_size, seed, epoch) if len(batch) > 1
    ]


def evaluation_batches(
    split: TokenizedSplit, batch_size: int = 64, report: Callable[[int, int], None] = lambda done, count: None
) -> Iterator[Batch]:
    """Yield the whole split (see by_length).

    report: called after each batch with the number of finished samples, and of all samples.
    """
    done = 0
    for indices in by_length(split.lengths, batch_size):
        yield collate(split, indices)
        done += len(indices)
        report(done, len(split.lengths))


def by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Yield batches of similar length, longest first, so that a memory error occurs at once or not at all."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for begin in range(0, len(order), batch_size):
        yield order[begin : begin + batch_size]
