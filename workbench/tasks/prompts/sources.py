"""Read the data sets beyond GLUE as published: SuperGLUE and WinoGrande (lines of JSON), SQuAD (one JSON document), or the hub's tables.

Wang et al., NeurIPS 2019; Sakaguchi et al., AAAI 2020; Rajpurkar et al., EMNLP 2016 (1.1) and ACL 2018 (2.0).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks.prompts.templates import PromptSample
from workbench.tasks.published import hub_dataset, json_lines, read_text, saved_dataset

Row = Mapping[str, Any]
Placed = tuple[str, Row]


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
    sample: Callable[[Row], tuple[dict[str, str], int | None, tuple[str, ...]] | None]
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
        parts = _from_folder(name, source, Path(data).expanduser(), official)
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
            rows: Iterable[Placed] = ((f"'{path}'", article) for article in json.loads(read_text(path))["data"])
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


def _rte(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    fields = {"premise": row["premise"].strip(), "hypothesis": row["hypothesis"].strip()}
    return fields, _class(row.get("label"), ("entailment", "not_entailment")), ()


def _boolq(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    question = row["question"].strip().rstrip("?")  # the prompt adds a question mark
    return {"passage": row["passage"].strip(), "question": question[:1].upper() + question[1:]}, _class(row.get("label")), ()


def _wsc(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    target = row.get("target", row)  # the hub's rows are flat
    fields = {"text": row["text"].strip(), "span1": target["span1_text"], "span2": target["span2_text"].lower()}
    return fields, _class(row.get("label")), ()


def _wic(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    fields = {"word": row["word"], "sent1": row["sentence1"].strip(), "sent2": row["sentence2"].strip()}
    return fields, _class(row.get("label")), ()


def _multirc(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    fields = {name: row[name].strip() for name in ("paragraph", "question", "answer")}
    return fields, _class(row.get("label")), ()


def _flat_multirc(row: Row) -> Iterator[Row]:
    passage = row["passage"]
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield {
                "paragraph": passage["text"], "question": question["question"], "answer": answer["text"], "label": answer.get("label"),
            }  # fmt: skip


def _copa(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    conjunctions = {"cause": "because", "effect": "so"}
    if row["question"] not in conjunctions:
        raise ValueError(f"the question '{row['question']}', neither cause nor effect")
    fields = {"premise": row["premise"].strip().removesuffix("."), "conjunction": conjunctions[row["question"]]}
    for number in (1, 2):
        choice = row[f"choice{number}"].strip()
        # It continues in the middle of a sentence.
        fields[f"candidate{number}"] = choice if choice.split(" ")[0] == "I" else choice[:1].lower() + choice[1:]
    return fields, _class(row.get("label"), ("0", "1")), ()


def _winogrande(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]]:
    before, blank, after = row["sentence"].partition("_")
    if not blank:
        raise ValueError(f"a sentence without a blank: '{row['sentence']}'")
    context = before.rstrip()
    fields = {"context": context, "space": before[len(context) :], "object": after.rstrip()}
    fields |= {"subject1": row["option1"], "subject2": row["option2"]}
    answer = row.get("answer")
    return fields, None if not answer else _class(int(answer) - 1, ("0", "1")), ()


def _squad(row: Row) -> tuple[dict[str, str], int | None, tuple[str, ...]] | None:
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
_SUPERGLUE = "aps/super_glue"

SOURCES: Mapping[str, Source] = {
    "rte": Source(folders=("RTE",), repository=_SUPERGLUE, configuration="rte", sample=_rte, files=_JSONL),
    "boolq": Source(folders=("BoolQ",), repository=_SUPERGLUE, configuration="boolq", sample=_boolq, files=_JSONL),
    "wsc": Source(folders=("WSC",), repository=_SUPERGLUE, configuration="wsc.fixed", sample=_wsc, files=_JSONL),
    "wic": Source(folders=("WiC",), repository=_SUPERGLUE, configuration="wic", sample=_wic, files=_JSONL),
    "multirc": Source(
        folders=("MultiRC",), repository=_SUPERGLUE, configuration="multirc", sample=_multirc, flatten=_flat_multirc, files=_JSONL,
        group="paragraph",
    ),
    "copa": Source(folders=("COPA",), repository=_SUPERGLUE, configuration="copa", sample=_copa, files=_JSONL),
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
