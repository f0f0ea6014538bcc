"""Read the published tasks of P-RGE's Table 8 that are not GLUE's: SuperGLUE and WinoGrande (lines of JSON), SQuAD (a
JSON document).

They come from a folder or from the hub's tables.  Wang et al., NeurIPS 2019; Sakaguchi et al., AAAI 2020; Rajpurkar et
al., EMNLP 2016 (1.1) and ACL 2018 (2.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.serial import user_path
from workbench.tasks.published import GLUE, VALIDATION_FROM_TRAIN, json_lines, published_parts
from workbench.tasks.question_answering import official_questions
from workbench.tasks.task import SPLIT_NAMES, PromptSample, Split, Task, fixed_order, prompt_split
from workbench.tasks.wording import PROMPTS, Prompt

Row = Mapping[str, Any]
Placed = tuple[str, Row]
Made = tuple[dict[str, str], int | None, tuple[str, ...]]
"""Fields, label (None if it is secret) and answers of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The published form of a data set.

    folders: names of its folder.  files: for each split, alternative file names.  repository, configuration: names on
    the hub.
    sample: converts a row in the hub's form to fields, label (None if it is secret) and answers; returns None to skip
    the row.
    flatten: converts a row in the official form to rows in the hub's.  group: the field that samples of one text share.
    Such samples stay in the same part when the training samples are divided.
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
    parts = published_parts(
        name,
        data,
        source.repository,
        source.configuration,
        source.folders,
        source.files,
        bases=("", "superglue"),
        needed=("validation",),
    )
    first_id = 0
    splits: dict[str, list[PromptSample]] = {}
    for split in SPLIT_NAMES:
        if split not in parts:
            continue
        part = parts[split]
        rows: Iterable[Placed]
        if isinstance(part, Path):
            rows = _from_file(part, source)
        else:
            rows = ((f"Row {number} of {split}", row) for number, row in enumerate(part))
        samples = list(_samples(name, source, rows, first_id, keep_secret=split == "test"))
        first_id += len(samples)
        if samples:
            splits[split] = samples
    return splits


def _from_file(path: Path, source: Source) -> Iterator[Placed]:
    if path.suffix == ".json":
        for question in official_questions(path):
            fields = {"title": question.topic, "context": question.context, "question": question.text}
            yield f"'{path}'", {**fields, "answers": {"text": [answer.text for answer in question.answers]}}
        return
    for place, row in json_lines(path):
        if source.flatten is None:
            yield place, row
            continue
        try:
            flat = list(source.flatten(row))
        except (KeyError, TypeError) as error:
            raise _no_field(place, error) from None
        yield from ((place, row) for row in flat)


def _samples(
    name: str, source: Source, rows: Iterable[Placed], first_id: int, *, keep_secret: bool
) -> Iterator[PromptSample]:
    number = first_id
    for place, row in rows:
        try:
            content = source.sample(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise _no_field(place, error) from None
        except ValueError as error:
            raise ConfigError(
                f"A sample of {name} was to be read.", f"{place} has {error}.", "Fix it, or use the official files."
            ) from None
        if content is None:
            continue
        fields, label, answers = content
        if label is None:
            if keep_secret:
                return  # a test split without labels is useless
            raise ConfigError(
                f"A sample of {name} was to be read.", f"{place} has no label.", "Use the official files."
            )
        yield PromptSample(sample_id=number, fields=fields, label=label, answers=answers)
        number += 1


def _no_field(place: str, error: Exception) -> ConfigError:
    return ConfigError(
        "A sample was to be read.",
        f"{place} lacks a field, or has it in another form: {error}.",
        "Use the official files.",
    )


def _class(value: Any, names: tuple[str, ...] = ("false", "true")) -> int | None:
    """Return the class of a label, given as number or name.  None if it is secret (absent, empty, -1).  Raises
    ValueError for others.
    """
    if value is None or value in ("", -1, "-1"):
        return None
    text = str(value).lower()
    if text in names:
        return names.index(text)
    if text in tuple(str(number) for number in range(len(names))):
        return int(text)
    raise ValueError(f"the label '{value}', none of {', '.join(names)}")


def _copied(fields: Mapping[str, str], names: tuple[str, ...] = ("false", "true")) -> Callable[[Row], Made]:
    """Return a function that makes a sample of a row's texts.

    fields: their names in the prompt -> in the row.  names: names of the classes.
    """
    return lambda row: (
        {ours: row[theirs].strip() for ours, theirs in fields.items()},
        _class(row.get("label"), names),
        (),
    )


def _boolq(row: Row) -> Made:
    question = row["question"].strip().rstrip("?")  # the prompt adds a question mark
    return (
        {"passage": row["passage"].strip(), "question": question[:1].upper() + question[1:]},
        _class(row.get("label")),
        (),
    )


def _wsc(row: Row) -> Made:
    target = row.get("target", row)  # the hub's rows are flat
    fields = {"text": row["text"].strip(), "span1": target["span1_text"], "span2": target["span2_text"].lower()}
    return fields, _class(row.get("label")), ()


def _flat_multirc(row: Row) -> Iterator[Row]:
    passage = row["passage"]
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": passage["text"],
                "question": question["question"],
                "answer": answer["text"],
                "label": answer.get("label"),
            }


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
    fields = {
        "title": row["title"],
        "context": row["context"].strip(),
        "question": row["question"].strip(),
        "answer": answers[0],
    }
    return fields, 0, answers


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
        folders=("MultiRC",),
        configuration="multirc",
        sample=_MULTIRC,
        flatten=_flat_multirc,
        group="paragraph",
        **_SUPERGLUE,
    ),
    "copa": Source(folders=("COPA",), configuration="copa", sample=_copa, **_SUPERGLUE),
    "winogrande": Source(
        folders=("WinoGrande", "winogrande_1.1"),
        repository="allenai/winogrande",
        configuration="winogrande_debiased",
        sample=_winogrande,
        files={
            "train": ("train_debiased.jsonl", "train_xl.jsonl", "train_l.jsonl", "train_m.jsonl", "train.jsonl"),
            "validation": ("dev.jsonl",),
        },
    ),
    "squad": Source(
        folders=("SQuAD",),
        repository="rajpurkar/squad",
        configuration=None,
        sample=_squad,
        group="context",
        files={"train": ("train-v1.1.json", "train-v2.0.json"), "validation": ("dev-v1.1.json", "dev-v2.0.json")},
    ),
}


VALIDATION_SHARE = 0.2
"""Maximum share of a training set for the validation split: the small sets have fewer than the paper's 1,000 + 500
samples."""
SHARES_OF_ONE = (0.4, 0.2, 0.4)
"""Shares of train, validation and test for a set with only one split, in proportion to the paper's 1,000, 500 and
1,000."""

SUPERGLUE = tuple(name for name in SOURCES if PROMPTS[name].kind == "classification" and name not in GLUE)
"""boolq, wsc, wic and multirc, which are also classifications with a head."""
_BEHIND = ("boolq", "multirc")
"""In these tasks the long passage is the second text, so that truncation never affects the question."""


def has_superglue(name: str, data: Path | str | None) -> bool:
    """Return whether a folder has SuperGLUE's files of a task that is also in GLUE, with the same samples (RTE)."""
    places = ("", *SOURCES[name].folders)
    return data is not None and any((user_path(data, "The data") / place / "train.jsonl").is_file() for place in places)


def load_benchmark(name: str, data: Path | str | None = None) -> Task:
    """Return one of SOURCES' tasks.  Its splits have prompts, and are in a fixed random order: files may be sorted by
    class.

    data: a folder with the official files; None uses the hub.
    The published validation split is the test split, because the test labels are secret.  The validation split is drawn
    from the training split with a fixed seed.  If a folder has only one split (SQuAD's), all three are drawn from it.
    Raises ConfigError for malformed files, MissingDataError if the data is unavailable.
    """
    source, prompt = SOURCES[name], PROMPTS[name]
    splits = read_source(name, source, data)
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    if "validation" not in splits and "train" in splits:
        count = min(VALIDATION_FROM_TRAIN, int(len(splits["train"]) * VALIDATION_SHARE))
        splits["train"], splits["validation"] = _divided(
            name, source, splits["train"], [len(splits["train"]) - count, count]
        )
    elif "train" not in splits and "test" in splits:
        total = len(splits["test"])
        counts = [round(share * total) for share in SHARES_OF_ONE]
        splits["train"], splits["validation"], splits["test"] = _divided(name, source, splits["test"], counts)
    parts: dict[str, Any] = {split: _split(name, splits.get(split, []), prompt) for split in SPLIT_NAMES}
    return Task(
        name=name,
        kind=prompt.kind,
        num_outputs=len(prompt.words or prompt.candidates),
        metrics=("accuracy", "f1"),
        source="the hub" if data is None else f"folder '{Path(data).name}'",
        **parts,
    )


def _divided(name: str, source: Source, samples: list[PromptSample], counts: list[int]) -> list[list[PromptSample]]:
    """Return parts of at least `counts` samples while they last, in the samples' order.  Samples of one text stay in
    one part.
    """
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(index if source.group is None else sample.fields[source.group], []).append(index)
    shuffled = [list(groups.values())[index] for index in fixed_order(name, len(groups))]
    parts: list[list[int]] = [[] for _ in counts]
    part_index = len(parts) - 1  # the last parts are filled first, so that the remainder goes to training
    for group in shuffled:
        while part_index and len(parts[part_index]) >= counts[part_index]:
            part_index -= 1
        parts[part_index] += group
    return [[samples[index] for index in sorted(part)] for part in parts]


def _split(name: str, samples: list[PromptSample], prompt: Prompt) -> Split:
    split = prompt_split([samples[index] for index in fixed_order("limit", len(samples))], prompt)
    if name not in _BEHIND:
        return replace(split, texts=tuple(map(str.strip, split.texts)))
    long = prompt.shortened
    return replace(
        split,
        texts=tuple(prompt.fill({**sample.fields, long: ""}).strip() for sample in split.prompts),
        pairs=tuple(sample.fields[long] for sample in split.prompts),
    )
