"""Load a task of Table 8 by name, embedded, from a folder or from the hub, as prompts or as a classification with a head.

Beyond GLUE: SuperGLUE and WinoGrande (lines of JSON), SQuAD (one JSON document), or the hub's tables.  Wang et al., NeurIPS 2019;
Sakaguchi et al., AAAI 2020; Rajpurkar et al., EMNLP 2016 (1.1) and ACL 2018 (2.0).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.core.serial import read_text, user_path
from workbench.tasks.embedded import load_sentiment
from workbench.tasks.own import load_own
from workbench.tasks.prompts.templates import PROMPTS, Prompt, PromptSample, PromptSplit, PromptTask, shuffled
from workbench.tasks.published import GLUE, VALIDATION_FROM_TRAIN, hub_dataset, json_lines, load_glue, saved_dataset
from workbench.tasks.task import Split, Task, fixed_order

Row = Mapping[str, Any]
Placed = tuple[str, Row]
Made = tuple[dict[str, str], int | None, tuple[str, ...]]
"""Fields, label (None if it is secret) and answers of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The published form of a data set.

    folders: names of its folder.  files: for each split, alternative file names.  repository, configuration: on the hub.
    sample: converts a row in the hub's form to fields, label (None if it is secret) and answers; returns None to skip the row.
    flatten: converts a row in the official form to rows in the hub's.  group: the field that samples of one text share; such samples stay
    in the same part when the training samples are divided.
    """

    folders: tuple[str, ...]
    repository: str
    configuration: str | None
    sample: Callable[[Row], Made | None]
    files: Mapping[str, tuple[str, ...]]
    flatten: Callable[[Row], Iterator[Row]] | None = None
    group: str | None = None


def read_source(name: str, source: Source, data: Path | str | None) -> dict[str, list[PromptSample]]:
    """Return the samples of each split with published labels.  Sample numbers continue from split to split.

    data: a folder with the official files or with a folder of them, or a saved data set; None uses the hub.
    Raises MissingDataError if the data is unavailable, ConfigError naming the location if a file is malformed.
    """
    official = " and ".join(names[0] for split, names in source.files.items() if split != "test")
    if data is None:
        tables = hub_dataset(name, source.repository, source.configuration, official)
        parts: dict[str, Iterable[Placed]] = {split: _placed(split, table) for split, table in tables.items()}
    else:
        parts = _from_folder(name, source, user_path(data, "The data"), official)
    first_id = 0
    splits: dict[str, list[PromptSample]] = {}
    for split in ("train", "validation", "test"):
        if split not in parts:
            continue
        samples = list(_samples(name, source, parts[split], first_id, keep_secret=split == "test"))
        first_id += len(samples)
        if samples:
            splits[split] = samples
    return splits


def _from_folder(name: str, source: Source, folder: Path, official: str) -> dict[str, Iterable[Placed]]:
    for place in (folder, *(base / one for base in (folder, folder / "superglue") for one in (name, *source.folders))):
        if (place / "dataset_dict.json").is_file():
            return {split: _placed(split, table) for split, table in saved_dataset(place).items()}
        files = {split: [place / name for name in names if (place / name).is_file()] for split, names in source.files.items()}
        if files["validation"]:
            return {split: _from_file(found[0], source) for split, found in files.items() if found}
    raise MissingDataError(
        f"The task '{name}' was asked for from '{folder}'.",
        f"Neither it nor its {' or '.join(f'{one}/' for one in source.folders)} holds {official}, or a saved dataset.",
        "Check --data.",
    )


def _placed(split: str, table: Any) -> Iterator[Placed]:
    return ((f"Row {number} of {split}", row) for number, row in enumerate(table))


def _from_file(path: Path, source: Source) -> Iterator[Placed]:
    if path.suffix == ".json":
        try:
            rows: Iterable[Placed] = ((f"'{path}'", article) for article in json.loads(read_text(path, "the data"))["data"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path}' was to be read.", f"It is not the official JSON: {error!r}.", "Use the official file.") from None
    else:
        rows = json_lines(path)
    for place, row in rows:
        if source.flatten is None:
            yield place, row
            continue
        try:
            flat = list(source.flatten(row))
        except (KeyError, TypeError) as error:
            raise _no_field(place, error) from None
        yield from ((place, one) for one in flat)


def _samples(name: str, source: Source, rows: Iterable[Placed], first_id: int, *, keep_secret: bool) -> Iterator[PromptSample]:
    number = first_id
    for place, row in rows:
        try:
            made = source.sample(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise _no_field(place, error) from None
        except ValueError as error:
            raise ConfigError(
                f"A sample of {name} was to be read.", f"{place} has {error}.", "Mend it, or use the official files."
            ) from None
        if made is None:
            continue
        fields, label, answers = made
        if label is None:
            if keep_secret:
                return  # a test split without labels is useless
            raise ConfigError(f"A sample of {name} was to be read.", f"{place} has no label.", "Use the official files.")
        yield PromptSample(sample_id=number, fields=fields, label=label, answers=answers)
        number += 1


def _no_field(place: str, error: Exception) -> ConfigError:
    return ConfigError("A sample was to be read.", f"{place} lacks a field, or has it in another form: {error}.", "Use the official files.")


def _class(value: Any, names: tuple[str, ...] = ("false", "true")) -> int | None:
    """Return the class of a label, given as number or name.  None if it is secret (absent, empty, -1).  Raises ValueError for others."""
    if value is None or value in ("", -1, "-1"):
        return None
    text = str(value).lower()
    if text in names:
        return names.index(text)
    if text in tuple(str(number) for number in range(len(names))):
        return int(text)
    raise ValueError(f"the label '{value}', none of {', '.join(names)}")


def _copied(fields: Mapping[str, str], names: tuple[str, ...] = ("false", "true")) -> Callable[[Row], Made]:
    """Return what makes a sample of a row's texts.  fields: their names in the prompt -> in the row.  names: of the classes."""
    return lambda row: ({ours: row[theirs].strip() for ours, theirs in fields.items()}, _class(row.get("label"), names), ())


def _boolq(row: Row) -> Made:
    question = row["question"].strip().rstrip("?")  # the prompt adds a question mark
    return {"passage": row["passage"].strip(), "question": question[:1].upper() + question[1:]}, _class(row.get("label")), ()


def _wsc(row: Row) -> Made:
    target = row.get("target", row)  # the hub's rows are flat
    fields = {"text": row["text"].strip(), "span1": target["span1_text"], "span2": target["span2_text"].lower()}
    return fields, _class(row.get("label")), ()


def _flat_multirc(row: Row) -> Iterator[Row]:
    passage = row["passage"]
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": passage["text"], "question": question["question"], "answer": answer["text"], "label": answer.get("label"),
            }  # fmt: skip


def _copa(row: Row) -> Made:
    conjunctions = {"cause": "because", "effect": "so"}
    if row["question"] not in conjunctions:
        raise ValueError(f"the question '{row['question']}', neither cause nor effect")
    fields = {"premise": row["premise"].strip().removesuffix("."), "conjunction": conjunctions[row["question"]]}
    for number in (1, 2):
        choice = row[f"choice{number}"].strip()
        # It continues in the middle of a sentence.
        fields[f"candidate{number}"] = choice if choice.split(" ")[0] == "I" else choice[:1].lower() + choice[1:]
    return fields, _class(row.get("label"), ("0", "1")), ()


def _winogrande(row: Row) -> Made:
    before, blank, after = row["sentence"].partition("_")
    if not blank:
        raise ValueError(f"a sentence without a blank: '{row['sentence']}'")
    context = before.rstrip()
    fields = {"context": context, "space": before[len(context) :], "object": after.rstrip()}
    fields |= {"subject1": row["option1"], "subject2": row["option2"]}
    answer = row.get("answer")
    return fields, None if not answer else _class(int(answer) - 1, ("0", "1")), ()


def _squad(row: Row) -> Made | None:
    answers = tuple(dict.fromkeys(row["answers"]["text"]))
    if not answers:
        return None  # version 2.0 has questions without an answer; the task uses version 1.1
    fields = {"title": row["title"], "context": row["context"].strip(), "question": row["question"].strip(), "answer": answers[0]}
    return fields, 0, answers


def _flat_squad(article: Row) -> Iterator[Row]:
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            yield {
                "title": article["title"], "context": paragraph["context"], "question": question["question"],
                "answers": {"text": [answer["text"] for answer in question["answers"]]},
            }  # fmt: skip


_JSONL = {"train": ("train.jsonl",), "validation": ("val.jsonl",), "test": ("test.jsonl",)}
_SUPERGLUE: dict[str, Any] = {"repository": "aps/super_glue", "files": _JSONL}
_RTE = _copied({"premise": "premise", "hypothesis": "hypothesis"}, ("entailment", "not_entailment"))
_WIC = _copied({"word": "word", "sent1": "sentence1", "sent2": "sentence2"})
_MULTIRC = _copied({"paragraph": "paragraph", "question": "question", "answer": "answer"})
SOURCES: Mapping[str, Source] = {
    "rte": Source(folders=("RTE",), configuration="rte", sample=_RTE, **_SUPERGLUE),
    "boolq": Source(folders=("BoolQ",), configuration="boolq", sample=_boolq, **_SUPERGLUE),
    "wsc": Source(folders=("WSC",), configuration="wsc.fixed", sample=_wsc, **_SUPERGLUE),
    "wic": Source(folders=("WiC",), configuration="wic", sample=_WIC, **_SUPERGLUE),
    "multirc": Source(
        folders=("MultiRC",), configuration="multirc", sample=_MULTIRC, flatten=_flat_multirc, group="paragraph", **_SUPERGLUE
    ),
    "copa": Source(folders=("COPA",), configuration="copa", sample=_copa, **_SUPERGLUE),
    "winogrande": Source(
        folders=("WinoGrande", "winogrande_1.1"), repository="allenai/winogrande", configuration="winogrande_debiased", sample=_winogrande,
        files={
            "train": ("train_debiased.jsonl", "train_xl.jsonl", "train_l.jsonl", "train_m.jsonl", "train.jsonl"),
            "validation": ("dev.jsonl",),
        },
    ),
    "squad": Source(
        folders=("SQuAD",), repository="rajpurkar/squad", configuration=None, sample=_squad, flatten=_flat_squad, group="context",
        files={"train": ("train-v1.1.json", "train-v2.0.json"), "validation": ("dev-v1.1.json", "dev-v2.0.json")},
    ),
}  # fmt: skip


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
    class_names: Sequence[str] = (),
    train_samples: int | None = None,
    validation_samples: int | None = None,
    test_samples: int | None = None,
) -> PromptTask:
    """Return a task with its prompt: one of PROMPT_TASKS; 'sentiment' needs no network.

    data: a folder with the official files, or own data and their columns (see load_own); None uses the embedded data or the hub.
    class_names: see load_own.
    *_samples: maximum numbers, chosen with a fixed seed (PAPER_SAMPLES are the paper's); a larger number includes all samples of a smaller.
    The published validation split is the test split, because the test labels are secret.  The validation split is drawn from the
    training split with a fixed seed.  If a folder has only one split (SQuAD's), all three are drawn from it.
    Raises ConfigError for an unknown name or malformed files, MissingDataError if the data is unavailable.
    """
    if name not in (*PROMPTS, OWN_PROMPT):
        raise unknown_prompt_task(name)
    if name == OWN_PROMPT:
        task = _from_task(load_own(name, data, columns, class_names))
    elif name in SOURCES and (name not in GLUE or _is_superglue(SOURCES[name], data)):
        task = _from_source(name, SOURCES[name], data)
    else:
        found = load_sentiment(None if data is None else user_path(data, "The data")) if name == "sentiment" else load_glue(name, data)
        task = _from_task(found)
    return task.limited(train_samples, validation_samples, test_samples)


def unknown_prompt_task(name: str) -> ConfigError:
    """Return the error for a name without a prompt."""
    found = f"Prompts are known for {', '.join(PROMPT_TASKS)}."
    return ConfigError(f"The task '{name}' was asked for as next-word prediction.", found, did_you_mean(name, PROMPT_TASKS))


def _is_superglue(source: Source, data: Path | str | None) -> bool:
    """Return whether a folder has SuperGLUE's files of a task that is also in GLUE, with the same samples (RTE)."""
    return data is not None and any((user_path(data, "The data") / place / "train.jsonl").is_file() for place in ("", *source.folders))


def _from_task(task: Task) -> PromptTask:
    names = _NAMES.get(task.name, ("sentence1", "sentence2"))
    if task.name == OWN_PROMPT:
        names = ("text",) if task.train.pairs is None else ("text", "pair")
    lines = "".join(f"{{{name}}}\n" for name in names)
    own = PROMPTS.get(task.name) or Prompt(text=f"{lines}Label:", shortened=names[0], words=tuple(f" {name}" for name in task.class_names))
    return PromptTask(
        name=task.name,
        prompt=own,
        **{part: _from_split(getattr(task, part), names) for part in ("train", "validation", "test")},
        source=task.source,
        notes=task.notes,
        class_names=task.class_names if task.name == OWN_PROMPT else (),
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
        train=shuffled(splits.get("train", ())),
        validation=shuffled(splits.get("validation", ())),
        test=shuffled(splits.get("test", ())),
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
