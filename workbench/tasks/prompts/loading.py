"""Load a task of Table 8 by name, embedded, from a folder or from the hub, as prompts or as a classification with a head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, did_you_mean
from workbench.tasks.embedded import load_sentiment
from workbench.tasks.own import load_own
from workbench.tasks.prompts.sources import SOURCES, Source, read_source
from workbench.tasks.prompts.templates import PROMPTS, Prompt, PromptSample, PromptSplit, PromptTask, own_prompt, shuffled
from workbench.tasks.published import GLUE, VALIDATION_FROM_TRAIN, load_glue
from workbench.tasks.task import Split, Task, fixed_order

PROMPT_TASKS = tuple(PROMPTS)
OWN_PROMPT = "classification"
"""The task of own data, whose prompt is built from its columns."""
VALIDATION_SHARE = 0.2
"""Maximum share of a training set for the validation split: the small sets have fewer than the paper's 1,000 + 500 samples."""
SHARES_OF_ONE = (0.4, 0.2, 0.4)
"""Shares of train, validation and test for a set with only one split, in proportion to the paper's 1,000, 500 and 1,000."""

# Names of GLUE's two texts in the prompts.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "sentiment": ("sentence",),
    "sst2": ("sentence",),
    "rte": ("premise", "hypothesis"),
    "qqp": ("question1", "question2"),
}


def load_prompt_task(
    name: str,
    *,
    data: Path | str | None = None,
    columns: str = "",
    train_samples: int | None = None,
    validation_samples: int | None = None,
    test_samples: int | None = None,
) -> PromptTask:
    """Return a task with its prompt: one of PROMPT_TASKS; 'sentiment' needs no network.

    data: a folder with the official files, or own data and their columns (see load_own); None uses the embedded data or the hub.
    *_samples: maximum numbers, chosen with a fixed seed (PAPER_SAMPLES are the paper's); a larger number includes all samples of a smaller.
    The published validation split is the test split, because the test labels are secret.  The validation split is drawn from the
    training split with a fixed seed.  If a folder has only one split (SQuAD's), all three are drawn from it.
    Raises ConfigError for an unknown name or malformed files, MissingDataError if the data is unavailable.
    """
    if name not in (*PROMPTS, OWN_PROMPT):
        raise unknown_prompt_task(name)
    if name == OWN_PROMPT:
        task = _from_task(load_own(name, data, columns))
    elif name in SOURCES and (name not in GLUE or _is_superglue(SOURCES[name], data)):
        task = _from_source(name, SOURCES[name], data)
    else:
        found = load_sentiment(None if data is None else Path(data).expanduser()) if name == "sentiment" else load_glue(name, data)
        task = _from_task(found)
    return task.limited(train_samples, validation_samples, test_samples)


def unknown_prompt_task(name: str) -> ConfigError:
    """Return the error for a name without a prompt."""
    found = f"Prompts are known for {', '.join(PROMPT_TASKS)}."
    return ConfigError(f"The task '{name}' was asked for as next-word prediction.", found, did_you_mean(name, PROMPT_TASKS))


def _is_superglue(source: Source, data: Path | str | None) -> bool:
    """Return whether a folder has SuperGLUE's files of a task that is also in GLUE, with the same samples (RTE)."""
    return data is not None and any((Path(data).expanduser() / place / "train.jsonl").is_file() for place in ("", *source.folders))


def _from_task(task: Task) -> PromptTask:
    names = _NAMES.get(task.name, ("sentence1", "sentence2"))
    if task.name == OWN_PROMPT:
        names = ("text",) if task.train.pairs is None else ("text", "pair")
    return PromptTask(
        name=task.name,
        prompt=PROMPTS[task.name] if task.name in PROMPTS else own_prompt(names, task.class_names),
        **{part: _from_split(getattr(task, part), names) for part in ("train", "validation", "test")},
        source=task.source,
    )


def _from_split(split: Split, names: tuple[str, ...]) -> PromptSplit:
    columns = (split.texts,) if split.pairs is None else (split.texts, split.pairs)
    assert len(columns) == len(names), f"{len(columns)} texts for the fields {names}"
    samples = [
        PromptSample(sample_id=sample_id, fields=dict(zip(names, (text.strip() for text in texts), strict=True)), label=int(label))
        for sample_id, label, *texts in zip(split.sample_ids, split.labels, *columns, strict=True)
    ]
    return shuffled(samples)


def _from_source(name: str, source: Source, data: Path | str | None) -> PromptTask:
    splits = read_source(name, source, data)
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if "validation" not in splits and "train" in splits:
        count = min(VALIDATION_FROM_TRAIN, int(len(splits["train"]) * VALIDATION_SHARE))
        splits["train"], splits["validation"] = _divided(name, source, splits["train"], [len(splits["train"]) - count, count])
    elif "train" not in splits and "test" in splits:
        total = len(splits["test"])
        counts = [round(share * total) for share in SHARES_OF_ONE]
        splits["train"], splits["validation"], splits["test"] = _divided(name, source, splits["test"], counts)
    return PromptTask(
        name=name,
        prompt=PROMPTS[name],
        **{part: shuffled(splits.get(part, ())) for part in ("train", "validation", "test")},
        source="the hub" if data is None else f"folder '{Path(data).name}'",
    )


def _divided(name: str, source: Source, samples: list[PromptSample], counts: list[int]) -> list[list[PromptSample]]:
    """Return parts of at least `counts` samples while they last, in the samples' order.  Samples of one text stay in one part."""
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(index if source.group is None else sample.fields[source.group], []).append(index)
    shuffled = [list(groups.values())[index] for index in fixed_order(name, len(groups))]
    parts: list[list[int]] = [[] for _ in counts]
    at = len(parts) - 1  # the last parts are filled first, so that the remainder goes to training
    for group in shuffled:
        while at and len(parts[at]) >= counts[at]:
            at -= 1
        parts[at] += group
    return [[samples[index] for index in sorted(part)] for part in parts]


PROMPTED = tuple(name for name, prompt in PROMPTS.items() if prompt.kind == "classification" and name not in (*GLUE, "sentiment"))
"""SuperGLUE's tasks: boolq, wsc, wic and multirc."""
_BEHIND = ("boolq", "multirc")
"""In these tasks the long passage is the second text, so that truncation never affects the question."""


def load_prompted(name: str, data: Path | str | None = None) -> Task:
    """Return one of the PROMPTED tasks.  Raises as load_prompt_task does."""
    task = load_prompt_task(name, data=data)
    parts: dict[str, Any] = {part: _split(name, getattr(task, part), task.prompt) for part in ("train", "validation", "test")}
    metrics = ("accuracy", "f1")
    return Task(name=name, kind="classification", num_outputs=len(task.words), metrics=metrics, source=task.source, **parts)


def _split(name: str, samples: PromptSplit, prompt: Prompt) -> Split:
    long = prompt.shortened if name in _BEHIND else None
    return Split(
        texts=tuple(prompt.fill(sample.fields if long is None else {**sample.fields, long: ""}).strip() for sample in samples),
        pairs=None if long is None else tuple(sample.fields[long] for sample in samples),
        labels=tuple(sample.label for sample in samples),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )
