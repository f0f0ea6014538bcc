"""Define a task: texts, labels, splits and metrics; its views as text-to-text and as prompts of
next-word prediction.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.names import Kind
from workbench.tasks.wording import MOBIZO_PROMPTS, PROMPTS, STEP, WORDINGS, Prompt, Wording

SPLIT_NAMES = ("train", "validation", "test")
IGNORED = -100
"""The label of padding in a target, which losses ignore; also of a word that is neither learnt nor scored."""


class Span(NamedTuple):
    """A range of characters in a text, and its text.

    label: the class of a word in token classification, or IGNORED.
    """

    start: int
    text: str
    label: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSample:
    """A sample of a task as next-word prediction.

    fields: the prompt's contents by name.  label: the class, or the number of the correct candidate; 0 for a question.

    answers: for a question, all correct answers; the first is the one to learn.
    """

    sample_id: int
    fields: Mapping[str, str]
    label: int = 0
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples of a task.

    pairs: second texts, or None.  labels: int (class, also of a label word) or float (regression); by default
    0.  sample_ids: stable, unique; by default the samples' places.
    images: square grey images, row by row, one byte per pixel; the texts are then empty.
    sources: where each sample comes from (a reviewer, product or topic), or None.
    spans: in question answering the accepted answers in `pairs`, where texts are questions and labels are 1 if there is
    an answer; in token classification the words of each text, with all labels 0.  None in other tasks.
    answers: in text generation the text that follows each text, with all labels 0.  None in other tasks.
    prompts: the prompt's fields for each sample; empty if there are only texts and pairs (see as_prompts).
    """

    texts: tuple[str, ...]
    labels: tuple[int | float, ...] = ()
    sample_ids: tuple[int, ...] = ()
    pairs: tuple[str, ...] | None = None
    images: tuple[bytes, ...] | None = None
    sources: tuple[str, ...] | None = None
    spans: tuple[tuple[Span, ...], ...] | None = None
    answers: tuple[str, ...] | None = None
    prompts: tuple[PromptSample, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.labels or (0,) * len(self.texts))
        object.__setattr__(self, "sample_ids", self.sample_ids or tuple(range(len(self.texts))))
        sizes = {
            len(column)
            for name, column in self._columns().items()
            if column is not None and (column or name != "prompts")
        }
        assert len(sizes) == 1, f"a split of unequal columns: {sizes}"

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> Split:
        """Return the samples at `indices`, with their original sample ids."""
        columns: Any = {
            name: column and tuple(column[index] for index in indices) for name, column in self._columns().items()
        }
        return Split(**columns)

    def __add__(self, other: Split) -> Split:
        """Return the samples of both splits, which must have the same columns."""
        others = other._columns()
        columns: Any = {
            name: None if column is None else column + others[name] for name, column in self._columns().items()
        }
        return Split(**columns)

    def _columns(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Samples in three splits, none of them empty.

    metrics: names in workbench.tasks.metrics; the first one selects the best epoch (see metrics.quality).
    words: for sequence-to-sequence the label word of each class; the splits' labels stay classes, which the metrics
    compare.
    class_names: a classification's class names, in class order; empty: classes are numbers, or a prompt's label words.
    prompt: the prompt of a task as next-word prediction, whose splits have prompts; None for others.
    source: where the data comes from, for reports.  notes: the reader's assumptions where the data was ambiguous, for
    reports.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    source: str = ""
    notes: tuple[str, ...] = ()
    kind: Kind
    num_outputs: int
    metrics: tuple[str, ...]
    words: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    prompt: Prompt | None = None

    def __post_init__(self) -> None:
        assert bool(self.words) == (self.kind == "sequence_to_sequence"), "label words are for sequence-to-sequence"
        for name in SPLIT_NAMES:
            if not len(getattr(self, name)):
                raise ConfigError(
                    f"The task '{self.name}' was asked for.",
                    f"Its {name} split has 0 samples.",
                    "Give data, or fewer conditions.",
                )

    def limited(self, train: int | None, validation: int | None, test: int | None) -> Task:
        """Return the task with at most this many samples in each split, chosen with a fixed seed.  None keeps all."""
        limits = zip(SPLIT_NAMES, (train, validation, test), strict=True)
        parts: dict[str, Any] = {name: _limit(getattr(self, name), limit, self.prompt) for name, limit in limits}
        return replace(self, **parts)

    @property
    def metric(self) -> str:
        """Return the metric that selects the best epoch."""
        return self.metrics[0]

    @property
    def template(self) -> Prompt:
        """Return the prompt of a task as next-word prediction."""
        assert self.prompt is not None, f"'{self.name}' was loaded without its prompt"
        return self.prompt

    @property
    def may_be_none(self) -> bool:
        """Return whether a question may have no answer, as in SQuAD 2.0."""
        return self.kind == "question_answering" and 0 in self.train.labels


def _limit(split: Split, limit: int | None, prompt: Prompt | None) -> Split:
    if limit is None or limit >= len(split):
        return split
    if limit < 1:
        raise ConfigError(
            f"A split of {limit} samples was asked for.", "An empty split trains and tests nothing.", "Raise the limit."
        )
    # One fixed permutation, so that a larger limit includes all samples of a smaller one.  Prompts are in such an order
    # already.
    return split.take(range(limit) if prompt else sorted(fixed_order("limit", len(split))[:limit]))


def samples_digest(task: Task, split: str) -> str:
    """Return a digest of the samples of one of a task's splits, in their order; of their prompts if the task has a
    prompt.
    """
    samples: Split = getattr(task, split)
    columns = (
        [samples.prompts]
        if task.prompt
        else [column for name, column in samples._columns().items() if column is not None and name != "prompts"]
    )
    digest = hashlib.sha256()
    for row in zip(*columns, strict=True):
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def numbered(parts: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits with sample ids that continue from one split to the next."""
    starts = itertools.accumulate(map(len, parts.values()), initial=0)
    return {
        name: replace(part, sample_ids=tuple(range(start, start + len(part))))
        for (name, part), start in zip(parts.items(), starts, strict=False)
    }


def fixed_order(purpose: str, count: int) -> list[int]:
    """Return a fixed permutation of `count` numbers, the same on every machine."""
    order = list(range(count))
    random.Random(purpose).shuffle(order)
    return order


def as_text_to_text(task: Task) -> Task:
    """Return the task with the kind 'sequence_to_sequence': texts with T5's prefixes, no pairs, a label word for each
    class.

    A regression's numbers become classes in steps of 0.2.  Correlations of the classes are those of the rounded
    numbers.
    Raises ConfigError for a task without a wording.
    """
    if task.kind == "sequence_to_sequence":
        return task
    if task.name not in WORDINGS:
        raise ConfigError(
            f"The task '{task.name}' was asked for as text to text.",
            f"Words are known for {', '.join(WORDINGS)}.",
            "Choose one of them, or add an entry to data/tasks.toml.",
        )
    wording = WORDINGS[task.name]
    count = round((wording.highest - wording.lowest) / STEP) + 1
    words = wording.words or tuple(f"{wording.lowest + index * STEP:.1f}" for index in range(count))
    parts: dict[str, Any] = {name: _reworded(getattr(task, name), wording, len(words)) for name in SPLIT_NAMES}
    return replace(task, kind="sequence_to_sequence", num_outputs=len(words), words=words, **parts)


def _reworded(split: Split, wording: Wording, num_words: int) -> Split:
    first, second = wording.names
    if split.pairs is None:
        texts = tuple(f"{wording.prefix} {first}: {text}" for text in split.texts)
    else:
        texts = tuple(
            f"{wording.prefix} {first}: {text} {second}: {other}"
            for text, other in zip(split.texts, split.pairs, strict=True)
        )
    labels = (
        split.labels
        if wording.words
        else tuple(min(max(round((float(label) - wording.lowest) / STEP), 0), num_words - 1) for label in split.labels)
    )
    return replace(split, texts=texts, pairs=None, labels=labels)


OWN_PROMPT = "classification"
"""The task of own data, whose prompt is built from its columns."""


def as_prompts(task: Task) -> Task:
    """Return the task as next-word prediction, with a prompt, and splits whose samples have prompts.

    Splits are in a fixed random order, so that their first samples are representative: published files may be sorted by
    class.
    The metric is 'f1' (over the answer's words) for questions, 'accuracy' for all other tasks (P-RGE, appendix D.1).
    """
    prompt, is_own = PROMPTS.get(task.name), task.name == OWN_PROMPT
    if prompt is None:
        fields = ("text",) if task.train.pairs is None else ("text", "pair")
        lines = "".join(f"{{{name}}}\n" for name in fields)
        prompt = Prompt(text=f"{lines}Label:", shortened="text", words=tuple(f" {name}" for name in task.class_names))
    parts: dict[str, Any] = {name: _with_prompts(getattr(task, name), prompt) for name in SPLIT_NAMES}
    metric = "f1" if prompt.kind == "question_answering" else "accuracy"
    return replace(
        task,
        kind=prompt.kind,
        metrics=(metric,),
        prompt=prompt,
        class_names=task.class_names if is_own else (),
        **parts,
    )


def _with_prompts(split: Split, prompt: Prompt) -> Split:
    if split.prompts:
        return split
    columns = (split.texts,) if split.pairs is None else (split.texts, split.pairs)
    assert len(columns) == len(prompt.fields), f"{len(columns)} texts for the fields {prompt.fields}"
    prompts = (
        PromptSample(
            sample_id=sample_id, fields=dict(zip(prompt.fields, map(str.strip, texts), strict=True)), label=int(label)
        )
        for sample_id, label, *texts in zip(split.sample_ids, split.labels, *columns, strict=True)
    )
    return replace(split, prompts=tuple(prompts)).take(fixed_order("limit", len(split)))


def prompt_split(prompts: Sequence[PromptSample], prompt: Prompt) -> Split:
    """Return samples of a prompt as a split, whose texts are the filled prompts."""
    return Split(
        texts=tuple(prompt.fill(sample.fields) for sample in prompts),
        labels=tuple(sample.label for sample in prompts),
        sample_ids=tuple(sample.sample_id for sample in prompts),
        prompts=tuple(prompts),
    )


def with_mobizo_prompt(task: Task) -> Task:
    """Return the task with MobiZO's prompt; unchanged if that is P-RGE's."""
    return replace(task, prompt=MOBIZO_PROMPTS.get(task.name, task.prompt))


def with_mobizo_evaluation(task: Task) -> Task:
    """Return the task with its test split as validation split, too, so that the reported epoch is the best one there.
    A question has its first answer only.
    """
    prompts = tuple(replace(sample, answers=sample.answers[:1]) for sample in task.test.prompts)
    split = replace(task.test, prompts=prompts)
    return replace(task, validation=split, test=split)


def with_label_words(task: Task, words: Sequence[str]) -> Task:
    """Return a classification by a prompt with other label words, in class order.

    Raises ConfigError if the task is not a classification, or if the number of different words differs from the number
    of classes.
    """
    request, prompt = f"The label words {'/'.join(words)} were asked for on '{task.name}'.", task.prompt
    if prompt is None or task.kind != "classification":
        raise ConfigError(request, f"It is {task.kind.replace('_', ' ')}, without classes.", "Leave them out.")
    bare = [word.strip() for word in words]
    if len(bare) != len(prompt.words) or not all(bare) or len(set(bare)) < len(bare):
        raise ConfigError(
            request,
            f"It has {len(prompt.words)} classes: {'/'.join(prompt.label_words)}.",
            "Give a different word for each.",
        )
    space = " " if prompt.words[0].startswith(" ") else ""
    return replace(task, prompt=replace(prompt, words=tuple(f"{space}{word}" for word in bare)))
