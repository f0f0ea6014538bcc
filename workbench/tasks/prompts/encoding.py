"""Encode prompts as token ids: the model's input, the target tokens, and their positions.

A causal model reads the prompt and, for an answer of several tokens, all but the last one.  A classification's answer
is the first token of its label word, so that scoring needs one pass (section D.2: cross-entropy over the whole
vocabulary, at that position).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from workbench.core.errors import ConfigError
from workbench.tasks.task import PromptSample
from workbench.tasks.wording import Prompt

Reader = Literal["causal", "encoder_decoder", "encoder"]
UNCUT = 1 << 30
"""A length at which the tokenizer truncates nothing.  We shorten a prompt ourselves, in its text, never at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRow:
    """The tokens of a prompt.

    ids: the input.  targets: tokens to predict, the first from the hidden state at first_position, each other from the
    next position.

    decoder_ids: a decoder's input, to which the positions then refer; empty without a decoder.
    """

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    first_position: int
    decoder_ids: tuple[int, ...] = ()

    def followed_by(self, written: Sequence[int]) -> EncodedRow:
        """Return the row of one unknown target, with generated tokens inserted before it."""
        if self.decoder_ids:
            return replace(
                self, decoder_ids=(*self.decoder_ids, *written), first_position=self.first_position + len(written)
            )
        return replace(self, ids=(*self.ids, *written), first_position=self.first_position + len(written))


@dataclass(frozen=True, kw_only=True)
class EncodedPrompts:
    """A split with rows of different lengths.  labels: classes or correct candidates.  label_ids: one token per class,
    if any.

    For an encoder, which predicts no tokens, targets are classes.
    choices: the tokens over which a loss is computed; empty: the whole vocabulary.
    """

    rows: tuple[EncodedRow, ...]
    labels: tuple[int, ...]
    sample_ids: tuple[int, ...]
    pad_id: int
    reader: Reader
    label_ids: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of input tokens of each sample."""
        return tuple(len(row.ids) for row in self.rows)

    @property
    def max_targets(self) -> int:
        """Return the maximum number of targets of a sample, which is k of a batch that contains it."""
        return max(len(row.targets) for row in self.rows)

    def among_label_words(self) -> EncodedPrompts:
        """Return the split with losses only over its label words.  Raises ConfigError if it has none."""
        if not self.label_ids:
            raise ConfigError(
                "A loss over only the label words was asked for.",
                "The task has no label words, or the model has its own head.",
                "Take the loss over the vocabulary.",
            )
        return replace(self, choices=self.label_ids)

    def digest(self) -> str:
        """Return a digest of all tokens in order."""
        content = (self.reader, self.label_ids, self.choices) if self.choices else (self.reader, self.label_ids)
        digest = hashlib.sha256(repr(content).encode())
        for row in self.rows:
            digest.update(repr((row.ids, row.targets, row.first_position, row.decoder_ids)).encode())
        return digest.hexdigest()


class PromptEncoder:
    """Encodes samples of one prompt for one model.

    encoder: the model's tokenizer, which also decodes the generated tokens.
    max_length: maximum tokens per row.  A longer prompt loses words from the left of its long field (SQuAD's context, a
    passage, a sentence), never from the question itself.
    Raises ConfigError for label words that begin with the same token, and for a model that does not support such a
    task.
    """

    def __init__(self, prompt: Prompt, encoder: Any, *, is_causal: bool, max_length: int) -> None:
        self.prompt, self.encoder, self.max_length = prompt, encoder, max_length
        self.reader: Reader = (
            "encoder_decoder" if encoder.start_id is not None else "causal" if is_causal else "encoder"
        )
        if self.reader == "encoder" and prompt.kind != "classification":
            raise ConfigError(
                f"A task of kind {prompt.kind} was asked for.",
                "The model reads both ways and writes no words: its head does classification.",
                "Choose a causal model such as SmolLM2-135M.",
            )
        empty, letter = encoder.encode(["", "a"], max_length=UNCUT)
        self.lead = _common_prefix(empty, letter)
        """Special tokens before every text."""
        ends = (ids[len(self.lead) :][::-1] for ids in (empty, letter))
        self.trail = _common_prefix(*ends)[::-1]
        """Special tokens after every text."""
        self._encoded: dict[str, list[int]] = {}
        self.label_ids: tuple[int, ...] = ()
        self.dropped = 0
        """Number of tokens at a causal prompt's end that are replaced once the answer follows."""
        if prompt.kind == "classification" and self.reader != "encoder":
            self.label_ids = self._label_ids()

    def split(self, samples: Sequence[PromptSample]) -> EncodedPrompts:
        """Encode samples for training or, in a classification, for scoring.  Raises ConfigError if there are none or
        one does not fit.
        """
        if not samples:
            raise ConfigError("An empty split was to be tokenized.", "It has 0 samples.", "Give data.")
        fields = self.fitted(samples)
        if self.prompt.kind == "classification":
            rows = self._classification(samples, fields)
        else:
            answers = [
                self.continuations(sample, mine)[sample.label] for sample, mine in zip(samples, fields, strict=True)
            ]
            rows = self.rows(fields, answers)
        return EncodedPrompts(
            rows=tuple(rows),
            labels=tuple(sample.label for sample in samples),
            sample_ids=tuple(sample.sample_id for sample in samples),
            pad_id=self.encoder.pad_id,
            reader=self.reader,
            label_ids=self.label_ids,
        )

    def continuations(self, sample: PromptSample, fields: Mapping[str, str]) -> tuple[str, ...]:
        """Return the possible continuations of a sample's prompt: its candidates, or the answer to learn."""
        templates = self.prompt.candidates or (self.prompt.answer,)
        return tuple(template.format_map(fields) for template in templates)

    def rows(self, fields: Sequence[Mapping[str, str]], continuations: Sequence[str]) -> list[EncodedRow]:
        """Return one row for each prompt and its continuation.  All tokens of the continuation are targets."""
        texts = [self.prompt.fill(mine) for mine in fields]
        if self.reader == "encoder_decoder":
            encoded = self.encode(texts)
            written = [ids[len(self.lead) :] for ids in self.encode([text.strip() for text in continuations])]
            return [self._decoder_row(ids, targets) for ids, targets in zip(encoded, written, strict=True)]
        wholes = self._plain([text + following for text, following in zip(texts, continuations, strict=True)])
        starts = [_common_prefix(prompt, full_row) for prompt, full_row in zip(self._plain(texts), wholes, strict=True)]
        return [self._causal_row(full_row, max(1, len(start))) for full_row, start in zip(wholes, starts, strict=True)]

    def openings(self, fields: Sequence[Mapping[str, str]]) -> list[EncodedRow]:
        """Return one row for each prompt alone, with one unknown target (0)."""
        texts = [self.prompt.fill(mine) for mine in fields]
        if self.reader == "encoder_decoder":
            return [self._decoder_row(ids, (0,)) for ids in self.encode(texts)]
        return [EncodedRow(ids=tuple(ids), targets=(0,), first_position=len(ids) - 1) for ids in self._plain(texts)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of whole texts, including the model's special ones.  An empty text has only those."""
        cache = self._encoded
        missing = [text for text in dict.fromkeys(texts) if text not in cache]
        rows = self.encoder.encode(missing, max_length=UNCUT) if missing else []
        encoded = {text: ids if text else [*self.lead, *self.trail] for text, ids in zip(missing, rows, strict=True)}
        # A split is encoded to see what fits, and then for its rows.
        self._encoded = {text: encoded[text] if text in encoded else cache[text] for text in texts}
        return [list(self._encoded[text]) for text in texts]

    def fitted(self, samples: Sequence[PromptSample], reserve: int = 0) -> list[Mapping[str, str]]:
        """Return the samples' fields, shortened where they do not fit.

        reserve: number of tokens that must fit after the prompt, instead of its continuations.  All candidates of a
        sample have the same prompt.  Raises ConfigError naming the first sample that does not fit even with one word
        left in its long field.
        """
        fields: list[Mapping[str, str]] = [sample.fields for sample in samples]
        sizes = self._sizes(samples, fields, reserve)
        if too_long := [index for index, size in enumerate(sizes) if size > self.max_length]:
            encoded = self._encoded
            shortened = self._shortened([samples[index] for index in too_long], reserve, [sizes[i] for i in too_long])
            self._encoded = encoded
            for index, mine in zip(too_long, shortened, strict=True):
                fields[index] = mine
        return fields

    def _sizes(self, samples: Sequence[PromptSample], fields: Sequence[Mapping[str, str]], reserve: int) -> list[int]:
        texts = [self.prompt.fill(mine) for mine in fields]
        if self.prompt.kind == "classification" or self.reader == "encoder_decoder":
            return [len(ids) + reserve for ids in self.encode(texts)]
        if reserve:
            return [len(ids) + reserve for ids in self._plain(texts)]
        following = [self.continuations(sample, mine) for sample, mine in zip(samples, fields, strict=True)]
        wholes = self._plain(
            [text + continuation for text, ones in zip(texts, following, strict=True) for continuation in ones]
        )
        num_continuations = len(following[0])
        return [
            max(len(ids) - 1 for ids in wholes[begin : begin + num_continuations])
            for begin in range(0, len(wholes), num_continuations)
        ]

    def _shortened(
        self, samples: Sequence[PromptSample], reserve: int, sizes: Sequence[int]
    ) -> list[Mapping[str, str]]:
        """Return the fields without the fewest words.  All samples are bisected at the same time: a tokenizer takes
        much longer for texts one by one.
        """
        name = self.prompt.shortened
        starts = [[word.start() for word in re.finditer(r"\S+", sample.fields[name])] for sample in samples]

        def shortened_by(index: int, word: int) -> Mapping[str, str]:
            fields = samples[index].fields
            return {**fields, name: fields[name][starts[index][word] :]}

        firsts, stops = [0] * len(samples), list(map(len, starts))
        while searched := [index for index in range(len(samples)) if firsts[index] < stops[index]]:
            middles = [(firsts[index] + stops[index]) // 2 for index in searched]
            tried = list(map(shortened_by, searched, middles))
            lengths = self._sizes([samples[index] for index in searched], tried, reserve)
            for index, middle, size in zip(searched, middles, lengths, strict=True):
                if size <= self.max_length:
                    stops[index] = middle
                else:
                    firsts[index] = middle + 1
        for sample, word_starts, first, size in zip(samples, starts, firsts, sizes, strict=True):
            if first == len(word_starts):
                raise ConfigError(
                    f"A prompt of {size} tokens was to be read in {self.max_length}.",
                    f"Sample {sample.sample_id} does not fit even with one word of its {name} left.",
                    "Raise max_length, or choose a model that reads more.",
                )
        return list(map(shortened_by, range(len(samples)), firsts))

    def _classification(self, samples: Sequence[PromptSample], fields: Sequence[Mapping[str, str]]) -> list[EncodedRow]:
        texts = [self.prompt.fill(mine) for mine in fields]
        if self.reader == "encoder":
            encoded = self.encode(texts)
            return [
                EncodedRow(ids=tuple(ids), targets=(sample.label,), first_position=0)
                for ids, sample in zip(encoded, samples, strict=True)
            ]
        targets = [(self.label_ids[sample.label],) for sample in samples]
        if self.reader == "encoder_decoder":
            return [self._decoder_row(ids, target) for ids, target in zip(self.encode(texts), targets, strict=True)]
        encoded = [ids[: len(ids) - self.dropped] for ids in self._plain(texts)]
        return [
            EncodedRow(ids=tuple(ids), targets=target, first_position=len(ids) - 1)
            for ids, target in zip(encoded, targets, strict=True)
        ]

    def _label_ids(self) -> tuple[int, ...]:
        words = self.prompt.words
        if self.reader == "encoder_decoder":
            written = [ids[len(self.lead) :] for ids in self.encode([word.strip() for word in words])]
            label_ids = tuple(ids[0] for ids in written)
        else:
            # Encoded after a prompt, because some tokenizers add tokens at the start of a text.  Any prompt gives the
            # same result.
            text = self.prompt.fill(dict.fromkeys(self.prompt.fields, "a"))
            prompt, *wholes = self._plain([text, *(text + word for word in words)])
            start = min(len(_common_prefix(prompt, full_row)) for full_row in wholes)
            self.dropped = len(prompt) - start
            label_ids = tuple(full_row[start] if len(full_row) > start else self.encoder.pad_id for full_row in wholes)
        for index, label_id in enumerate(label_ids):
            if label_id in label_ids[:index]:
                first, second = words[label_ids.index(label_id)].strip(), words[index].strip()
                raise ConfigError(
                    f"The label words '{first}' and '{second}' were asked for.",
                    "With the model's tokenizer they begin with the same token, which does not tell them apart.",
                    "Choose other words, or another model.",
                )
        return label_ids

    def _plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts that will be continued, without the special tokens at the end."""
        return [ids[: len(ids) - len(self.trail)] for ids in self.encode(texts)]

    def _causal_row(self, full_row: Sequence[int], start: int) -> EncodedRow:
        if start >= len(full_row):
            raise ConfigError(
                "An answer of no token was to be learnt.", "The tokenizer makes nothing of it.", "Choose another model."
            )
        return EncodedRow(ids=tuple(full_row[:-1]), targets=tuple(full_row[start:]), first_position=start - 1)

    def _decoder_row(self, ids: Sequence[int], targets: Sequence[int]) -> EncodedRow:
        assert self.encoder.start_id is not None
        decoder_ids = (self.encoder.start_id, *self.lead, *targets[:-1])
        return EncodedRow(
            ids=tuple(ids), targets=tuple(targets), first_position=len(self.lead), decoder_ids=decoder_ids
        )


def _common_prefix(first: Sequence[int], other: Sequence[int]) -> list[int]:
    count = next(
        (index for index, (mine, its) in enumerate(zip(first, other, strict=False)) if mine != its),
        min(len(first), len(other)),
    )
    return list(first[:count])
