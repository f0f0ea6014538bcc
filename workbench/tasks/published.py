"""Read published data sets: from the hub, saved ones, lines of JSON, and GLUE's tasks in any form (PAC+, section VI-A).

Never waits minutes for an unreachable hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.assets.hub import hub_endpoint, hub_is_reachable
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.names import Kind
from workbench.core.serial import read_text, shown, text_lines, user_path
from workbench.tasks.task import SPLIT_NAMES, Split, Task, fixed_order, numbered
from workbench.tasks.wording import task_table

PARQUET = "refs/convert/parquet"
"""The hub's own copy of a data set published with a loading script, which the library no longer runs."""


def hub_dataset(task: str, repository: str, configuration: str | None, official: str) -> dict[str, Any]:
    """Return the tables of a data set on the hub (or in its local cache) by split.

    official: the required contents of a folder, for the error message.  Raises MissingDataError if the data set is
    unavailable.
    """
    request, todo = (
        f"The task '{task}' was asked for.",
        f"Connect to the network, or pass --data FOLDER with {official}.",
    )
    import datasets

    reachable = hub_is_reachable()
    if not reachable:
        # The library's own offline mode only searches its cache and answers at once.
        offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        try:
            return dict(datasets.load_dataset(repository, configuration))
        except RuntimeError:  # the data set has a loading script
            return dict(datasets.load_dataset(repository, data_dir=configuration, revision=PARQUET))
    except (OSError, ValueError, RuntimeError) as error:
        problem = (
            f"The hub said: {error}."
            if reachable
            else f"'{repository}' is not in the local cache, and {hub_endpoint()} cannot be reached."
        )
        raise MissingDataError(request, problem, todo) from error
    finally:
        if not reachable:
            datasets.config.HF_HUB_OFFLINE = offline


def saved_dataset(folder: Path) -> dict[str, Any]:
    """Return the tables of a data set saved in a folder.  Raises MissingDataError if it does not load."""
    from datasets import load_from_disk

    try:
        saved: Any = load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises many kinds
        raise MissingDataError(
            f"The dataset '{folder}' was asked for.", f"It does not load: {shown(str(error), 200)}.", "Save it again."
        ) from error
    return dict(saved) if isinstance(saved, dict) else {"train": saved}


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the location and the object of each line in a file.  Empty lines are skipped.

    Raises ConfigError if the file cannot be read, and naming a line that is not a JSON object.
    """
    for number, line in enumerate(text_lines(read_text(path, "the data")), start=1):
        if not line.strip():
            continue
        place = f"'{path}', line {number},"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"'{path}' was to be read.", f"Line {number} is not JSON: {error}.", "Fix the line."
            ) from None
        if not isinstance(row, dict):
            raise ConfigError(
                f"'{path}' was to be read.", f"Line {number} is not a JSON object.", "Use the official files."
            )
        yield place, row


def published_parts(
    name: str,
    data: Path | str | None,
    repository: str,
    configuration: str | None,
    folders: Sequence[str],
    files: Mapping[str, Sequence[str]],
    *,
    bases: Sequence[str],
    needed: Sequence[str],
) -> dict[str, Any]:
    """Return each split of a published data set: a table (of the hub or a saved data set), or the path of an official
    file.

    data: a folder; None uses the hub.  It has the files, a saved data set, or one of `folders` or the task's name below
    one of `bases`.
    files: alternative names of each split's file.  needed: splits whose file must exist.
    Raises MissingDataError if the data set is unavailable.
    """
    official = " and ".join(names[0] for split, names in files.items() if split != "test")
    if data is None:
        return hub_dataset(name, repository, configuration, official)
    folder = user_path(data, "The data")
    for place in (folder, *(folder / base / subfolder for base in bases for subfolder in (*folders, name))):
        if (place / "dataset_dict.json").is_file():
            return saved_dataset(place)
        present = {
            split: [place / file_name for file_name in names if (place / file_name).is_file()]
            for split, names in files.items()
        }
        if all(present[split] for split in needed):
            return {split: paths[0] for split, paths in present.items() if paths}
    subfolders = " or ".join(f"{subfolder}/" for subfolder in folders)
    raise MissingDataError(
        f"The task '{name}' was asked for from '{folder}'.",
        f"Neither it nor its {subfolders} holds {official}, or a saved dataset.",
        "Check --data.",
    )


VALIDATION_FROM_TRAIN = 1000
"""Maximum size of the validation split drawn from the training samples if the test labels are secret (see also
validation_share)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlueTask:
    """The file format of a task.

    folder: the official folder's name.  first, second, label: column names, in every spelling that occurs.
    positions: where first, second (if there is one) and label stand in files of num_columns columns without a header.
    validation_share: maximum share of the training samples for the validation split if the test labels are secret.
    has_broken_rows: whether lines of the official file lack columns; the benchmark's own reader skips such lines.
    """

    folder: str
    kind: Kind
    metrics: tuple[str, ...]
    first: tuple[str, ...]
    second: tuple[str, ...] = ()
    label: tuple[str, ...] = ("label",)
    classes: Mapping[str, int] = field(default_factory=dict)
    num_columns: int
    positions: tuple[int, ...]
    validation_share: float = 0.1
    has_broken_rows: bool = False


GLUE = task_table("glue", GlueTask)
_TSV = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test.tsv",)}

Rows = list[tuple[str, str | None, int | float | None]]


def load_glue(name: str, data: Path | str | None = None) -> Task:
    """Return a GLUE task.

    data: a folder with train.tsv and dev.tsv, or MRPC/, or glue/MRPC/ and so on, or a saved dataset; None uses the hub.
    If a labelled test split exists, all three splits are as published.  Otherwise the published validation split is the
    test split, and the validation split is drawn from the training split with a fixed seed.
    Raises MissingDataError if the data is unavailable, ConfigError naming the line if a file is malformed.
    """
    glue = GLUE[name]
    parts = published_parts(
        name,
        data,
        "nyu-mll/glue",
        name,
        (glue.folder,),
        _TSV,
        bases=("", "glue", "GLUE"),
        needed=("train", "validation"),
    )
    columns = {
        split: read_tsv(part, glue) if isinstance(part, Path) else _to_rows(name, glue, part)
        for split, part in parts.items()
    }
    if any(label is None for _, _, label in columns.get("test", [])):
        del columns["test"]
    splits: dict[str, Any] = numbered(
        {split: _split(columns[split], glue) for split in SPLIT_NAMES if split in columns}
    )
    if "test" not in splits:
        splits["test"] = splits["validation"]
        order = fixed_order(name, len(splits["train"]))
        count = min(VALIDATION_FROM_TRAIN, int(len(order) * glue.validation_share))
        splits["train"], splits["validation"] = (
            splits["train"].take(sorted(order[count:])),
            splits["train"].take(sorted(order[:count])),
        )
    return Task(
        name=name, kind=glue.kind, num_outputs=1 if glue.kind == "regression" else 2, metrics=glue.metrics,
        class_names=tuple(dict.fromkeys(glue.classes))[: len(set(glue.classes.values()))],
        source="the hub" if data is None else f"folder '{Path(data).name}'", **splits,
    )  # fmt: skip


def read_tsv(path: Path, glue: GlueTask) -> Rows:
    """Return (first, second, label) of each line.  label is None if the file has none (the secret test labels).

    Quotes are ordinary characters in these files.  A byte-order mark, CRLF and a header are optional.
    """
    lines = enumerate(text_lines(read_text(path, "the data")), start=1)
    cells = [(number, line.split("\t")) for number, line in lines if line.strip()]
    if not cells:
        return []
    header = [cell.strip() for cell in cells[0][1]]
    columns = (glue.first, glue.second, glue.label)
    first, second, label = (next((header.index(name) for name in names if name in header), None) for names in columns)
    if first is not None and (second is not None or not glue.second):
        cells = cells[1:]
    elif first is None and len(header) == glue.num_columns:
        first, *seconds, label = glue.positions
        second = seconds[0] if seconds else None
    else:
        raise ConfigError(
            f"'{path}' was to be read as {glue.folder}.",
            f"Line 1 has {len(header)} unknown columns.",
            "Use the official files.",
        )
    rows: Rows = []
    if label is None and path.name != "test.tsv":
        raise ConfigError(
            f"'{path}' was to be read.",
            f"It has no column {' or '.join(glue.label)}: {header}.",
            "Use the official files.",
        )
    for number, row in cells:
        if len(row) != len(header):
            if glue.has_broken_rows:
                continue
            raise ConfigError(
                f"'{path}' was to be read.",
                f"Line {number} has {len(row)} columns, not {len(header)}.",
                "Fix the line.",
            )
        parsed = None if label is None else _label(row[label].strip(), glue, f"'{path}', line {number},")
        rows.append((row[first], None if second is None else row[second], parsed))
    return rows


def _to_rows(name: str, glue: GlueTask, table: Any) -> Rows:
    columns = list(table.column_names)
    first, second, label = (
        next((column for column in names if column in columns), None) for names in (glue.first, glue.second, glue.label)
    )
    if first is None or label is None or (glue.second and second is None):
        raise ConfigError(
            f"A saved dataset was to be read as '{name}'.", f"Its columns are {columns}.", "Use the hub's column names."
        )
    seconds = table[second] if second else [None] * len(table)
    # The hub stores the secret test labels as -1, which is neither a class nor a similarity.
    labels = (None if value == -1 else _label(str(value), glue, f"Row {row}") for row, value in enumerate(table[label]))
    return list(zip(table[first], seconds, labels, strict=True))


def _split(rows: Rows, glue: GlueTask) -> Split:
    return Split(
        texts=tuple(first for first, _, _ in rows),
        pairs=tuple(str(second) for _, second, _ in rows) if glue.second else None,
        labels=tuple(label for _, _, label in rows),  # type: ignore[misc]
    )


def _label(text: str, glue: GlueTask, place: str) -> int | float:
    try:
        return float(text) if glue.kind == "regression" else glue.classes[text]
    except (ValueError, KeyError):
        allowed = "a number" if glue.kind == "regression" else " or ".join(glue.classes)
        raise ConfigError(
            f"A label of {glue.folder} was to be read.", f"{place} has '{text}', not {allowed}.", "Fix the line."
        ) from None
