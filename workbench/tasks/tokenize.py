"""Tokenize splits, and form batches padded to their longest sample.  Long contexts become windows (see windows).

In text generation a row is the prompt of an instruction with its input, the answer and the end token.  In the answer,
a token's class is the token that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from workbench.core.errors import ConfigError
from workbench.core.once import once
from workbench.tasks.batching import epoch_batches
from workbench.tasks.task import IGNORED, Split
from workbench.tasks.windows import SpanEncoder, Window, cut_windows

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


@dataclass(frozen=True, kw_only=True)
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

    def seen(self, *, tokens: Container[int], labels: Container[int]) -> TokenizedSplit:
        """Return the split for a device that may know the tokens of some rows and the labels of some.  Of other rows'
        tokens it has the number alone.
        """

        def hidden(row: int) -> tuple[int | bytes, ...]:
            return tuple(bytes(len(token)) if isinstance(token, bytes) else self.pad_id for token in self.ids[row])

        return replace(
            self,
            ids=tuple(ids if row in tokens else hidden(row) for row, ids in enumerate(self.ids)),
            labels=tuple(label if row in labels else type(label)() for row, label in enumerate(self.labels)),
            windows=tuple(window if row in labels else window.hidden() for row, window in enumerate(self.windows)),
        )

    @cached_property
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
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "choices"}
        parts = {name: column[first:end] for name, column in columns.items() if column is not None}
        return replace(self, **parts)


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
        raise ConfigError(
            "Answers that end were asked for.",
            "The model's tokenizer names no token that ends a text.",
            "Give it an eos_token in tokenizer_config.json.",
        )
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
