"""Load own data as a task: a CSV, TSV, JSON, JSONL or Parquet file, a folder of them, a saved data set, or one on the hub."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.core.serial import shown
from workbench.tasks.published import hub_dataset, saved_dataset
from workbench.tasks.task import Split, Task, fixed_order, numbered

OWN = ("classification", "regression")
FROM_FILES = (*OWN, "question_answering", "token_classification", "instruction_tuning")
"""Tasks whose data may be a file or a hub name."""
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2
READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}

_PAIRS = (("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"))
_TEXTS = ("text", "sentence", "review", "content", "comment", "message", "question", "title")
_LABELS = ("label", "labels", "class", "category", "target", "score", "rating", "stars", "sentiment")
SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "testing")}
FILE = "file"
"""The column that read_tables adds if the training rows of a folder come from several files: a file's name, without its ending."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Columns(NamedTuple):
    """Names of the columns for the text, the second text of a pair, the label, and the source.  None: no such column."""

    text: str
    pair: str | None
    label: str | None
    source: str | None = None


class Rows(NamedTuple):
    """The contents of one table.  labels: unchanged from the file, None without such a column.  sources: as in Split."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: list[Any] | None
    sources: tuple[str, ...] | None = None


def load_own(kind: str, data: Path | str | None, columns: str = "") -> Task:
    """Return own data as a task of kind 'classification' (any number of classes) or 'regression'.

    columns: for example 'text=review,label=stars'; other columns are found by their usual names.  source=reviewer: a sample's origin.
    In a folder, files that are not named like splits are the training rows, and each file is a source: one file per device, for example.
    If a table has no test or validation split, a fixed random part of its rows is used.
    Raises MissingDataError if the data is unavailable, ConfigError naming column and row for unusable values.
    """
    tables = read_tables(kind, data)
    found = find_columns(columns, next(iter(tables.values())), needs_label=True)
    rows = {name: read_rows(table, found, name) for name, table in tables.items()}
    if "test" in rows and set(rows["test"].labels or ()) == {-1}:
        del rows["test"]  # the hub keeps the labels of this test split secret
    if kind == "regression":
        names: tuple[str, ...] = ()
        labels = {name: numbers(one.labels or (), found, name) for name, one in rows.items()}
    else:
        names = class_names([table.features[found.label] for table in tables.values()], [one.labels or () for one in rows.values()], found)
        labels = {name: classes(one.labels or (), names, found, name) for name, one in rows.items()}
    parts = {
        name: Split(texts=one.texts, pairs=one.pairs, labels=labels[name], sample_ids=tuple(range(len(one.texts))), sources=one.sources)
        for name, one in rows.items()
    }
    metrics = ("pearson", "spearman") if kind == "regression" else ("accuracy", "f1" if len(names) == 2 else "macro_f1")
    return Task(
        name=kind,
        kind="regression" if kind == "regression" else "classification",
        num_outputs=len(names) or 1,
        metrics=metrics,
        class_names=names,
        source=f"{Path(str(data)).name}, columns {', '.join(name for name in found if name)}",
        **divided(numbered(parts), data),
    )


def read_tables(task: str, data: Path | str | None) -> dict[str, Any]:
    """Return the tables of own data by split, or only 'train' if they are not divided.  Secret test labels are left out."""
    if data is None:
        raise ConfigError(
            f"The task '{task}' was asked for.", "It reads data of your own.", "Name a file, a folder or a hub name by --data."
        )
    tables = _read(task, str(data))
    named = {name: next((tables[own] for own in known if own in tables), None) for name, known in SPLITS.items()}
    found = {name: table for name, table in named.items() if table is not None} or {"train": next(iter(tables.values()))}
    empty = [name for name, table in found.items() if not len(table)]
    if empty:
        raise ConfigError(f"The data '{data}' were asked for.", f"Their {empty[0]} split has 0 rows.", "Give data.")
    return found


def _read(task: str, data: str) -> dict[str, Any]:
    path = Path(data).expanduser()
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return saved_dataset(path)
    if path.exists():
        return _from_files(path)
    if _HUB_NAME.fullmatch(data) and path.suffix not in READERS:
        return hub_dataset(task, data, None, "a CSV, JSONL or Parquet file")
    found = "There is no such file or folder, and it is no hub name (OWNER/NAME)."
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    raise MissingDataError(f"The data '{shown(data, 200)}' were asked for.", found, did_you_mean(path.name, beside, "Check --data."))


def _from_files(path: Path) -> dict[str, Any]:
    import datasets

    asked = f"The data '{path}' were asked for."
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix in READERS)
        by_split = {name: [str(one) for one in files if one.stem.split("-")[0] in known] for name, known in SPLITS.items()}
        by_split = {name: own for name, own in by_split.items() if own}
        others = [one for one in files if "train" not in by_split and not any(str(one) in own for own in by_split.values())]
    else:
        files, by_split, others = [path], {}, [path]
    by_split |= {f"file{number}": [str(one)] for number, one in enumerate(others)}
    kinds = {READERS.get(one.suffix, "") for one in files}
    if len(kinds) != 1 or "" in kinds:
        what = "CSV, TSV, JSON, JSONL and Parquet files, folders of one kind of them, and folders of save_to_disk"
        found = "It holds no such file, or several kinds." if path.is_dir() else f"'{path.name}' is none by its name."
        raise ConfigError(asked, f"{found} Read are {what}.", "Check --data.")
    kind = kinds.pop()
    # Only empty cells count as missing: 'None' and 'NA' may be classes.
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]} if kind == "csv" else {}
    if any(one.suffix == ".tsv" for one in files):
        options["sep"] = "\t"
    if not any(one.stat().st_size for one in files):
        raise ConfigError(asked, "It is empty.", "Give data.")
    try:
        # Read into memory through a temporary folder, so that no copy of the user's data is left behind.
        with tempfile.TemporaryDirectory(prefix="workbench-data-") as cache, _quiet():
            tables = dict(datasets.load_dataset(kind, data_files=by_split, cache_dir=cache, keep_in_memory=True, **options))
            parts = [tables.pop(f"file{number}") for number in range(len(others))]
            if len(parts) > 1:
                parts = [part.add_column(FILE, [one.stem] * len(part)) for part, one in zip(parts, others, strict=True)]
            return ({"train": datasets.concatenate_datasets(parts)} if parts else {}) | tables
    except Exception as error:  # the readers raise many kinds of errors for a user's file
        cause = str(error.__cause__ or error)
        if "corresponds to no data" in cause:
            raise ConfigError(asked, "It has 0 rows.", "Give data.") from None
        raise ConfigError(asked, f"It does not read as {kind}: {shown(cause.rstrip('.'), 200)}.", "Mend the file.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and messages of datasets."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    disabled, verbosity = are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if not disabled:
            enable_progress_bars()


def find_columns(columns: str, table: Any, *, needs_label: bool) -> Columns:
    """Return the given or detected columns.  columns: see load_own.  Raises ConfigError with the columns found and wanted."""
    present = list(table.column_names)
    lower = {name.lower(): name for name in reversed(present)}
    named = dict(part.strip().partition("=")[::2] for part in columns.split(",") if part.strip())
    unknown = next((f"{role}={name}" for role, name in named.items() if role not in Columns._fields or name not in present), None)
    has = f"The data have the columns {', '.join(map(repr, present))}."
    example = "Name them, such as --columns text=review,label=stars."
    if unknown is not None:
        raise ConfigError(f"The columns '{columns}' were asked for.", f"'{unknown}' names no role or no column. {has}", example)
    label = named.get("label") or next((lower[name] for name in _LABELS if name in lower), None)
    text, pair = named.get("text"), named.get("pair")
    if text is None:
        pairs = next(((lower[one], lower[two]) for one, two in _PAIRS if one in lower and two in lower), (None, None))
        texts = [name for name, kind in table.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
        strings = [name for name in texts if not hasattr(table.features[name], "names") and name not in (label, FILE)]
        text = pairs[0] or next((lower[name] for name in _TEXTS if name in lower and lower[name] != label), None)
        text, pair = text or (strings[0] if len(strings) == 1 else None), pair or pairs[1]
    missing = "text" if text is None else "label" if label is None and needs_label else ""
    if missing:
        usual = ", ".join(_TEXTS if missing == "text" else _LABELS)
        raise ConfigError(f"Data with a column of each {missing} were asked for.", f"{has} Wanted is one of {usual}.", example)
    assert text is not None
    return Columns(text, pair, label, named.get("source") or (FILE if FILE in present else None))


def read_rows(table: Any, columns: Columns, split: str) -> Rows:
    """Return a table's texts, pairs, labels and sources.  Raises ConfigError naming a row in which one is missing."""
    texts = [_texts(table, name, split) for name in (columns.text, columns.pair) if name is not None]
    labels = None if columns.label is None or columns.label not in table.column_names else list(table[columns.label])
    rows = enumerate(labels or (), start=1)
    missing = next((row for row, value in rows if value in (None, "") or (isinstance(value, float) and math.isnan(value))), None)
    if missing is not None:
        raise _bad_label(columns, f"Row {missing} of {split} has no label.", "Mend or remove that row.")
    has_sources = columns.source is not None and columns.source in table.column_names
    sources = _texts(table, columns.source, split) if has_sources else None  # type: ignore[arg-type]  # not None
    return Rows(texts[0], texts[1] if columns.pair is not None else None, labels, sources)


def _texts(table: Any, column: str, split: str) -> tuple[str, ...]:
    if not isinstance(table.features[column], Mapping | Sequence) and hasattr(table.features[column], "dtype"):
        values = list(table[column])
        missing = next((row for row, value in enumerate(values, start=1) if value is None or not str(value).strip()), None)
        if missing is None:
            return tuple(map(str, values))
        raise ConfigError(f"The column '{column}' was to be read.", f"Row {missing} of {split} is empty.", "Mend or remove that row.")
    raise ConfigError(f"The column '{column}' was to be read.", "It holds lists or objects, not texts.", "Name another column.")


def numbers(labels: Sequence[Any], columns: Columns, split: str) -> tuple[float, ...]:
    """Return labels as numbers.  Raises ConfigError naming the row of a label that is not a number."""
    found = []
    for row, value in enumerate(labels, start=1):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            told = f"Row {row} of {split} has {shown(str(value))!r}, which is no number."
            raise _bad_label(columns, told, "Mend or remove that row, or choose --task classification.")
        found.append(number)
    return tuple(found)


def class_names(features: Sequence[Any], labels: Sequence[Sequence[Any]], columns: Columns) -> tuple[str, ...]:
    """Return the names of all classes: as declared by the data set, otherwise the sorted labels.  Raises ConfigError for only one class."""
    declared = getattr(features[0], "names", None)
    if declared:
        return tuple(declared)
    values = {_plain(value) for part in labels for value in part}
    names = sorted(values, key=lambda value: (isinstance(value, str), value))
    total = sum(map(len, labels))
    if any(isinstance(value, float) for value in names):
        found = f"It holds numbers such as {next(value for value in names if isinstance(value, float))}."
        raise _bad_label(columns, found, "Choose --task regression.")
    if len(names) < 2:
        raise _bad_label(columns, f"All {total} rows have the same label: {', '.join(map(str, names))}.", "Give two classes.")
    if len(names) > max(2, total / 2):
        found = f"It has {len(names)} different values in {total} rows: these are no classes."
        raise _bad_label(columns, found, "Name the label's column by --columns label=NAME, or choose --task regression.")
    return tuple(map(str, names))


def classes(labels: Sequence[Any], names: Sequence[str], columns: Columns, split: str) -> tuple[int, ...]:
    """Return the class number of each label.  Raises ConfigError naming the row of a label that is not a class."""
    index = {name: number for number, name in enumerate(names)}
    found = []
    for row, value in enumerate(labels, start=1):
        plain = _plain(value)
        number = index.get(str(plain), plain if isinstance(plain, int) and 0 <= plain < len(names) else None)
        if number is None:
            known = ", ".join(names)
            raise _bad_label(columns, f"Row {row} of {split} has {shown(str(value))!r}; the classes are {known}.", "Mend that row.")
        found.append(number)
    return tuple(found)


def _plain(value: Any) -> Any:
    """Return a label for display: 3.0 becomes 3, because a column with empty cells cannot hold integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bad_label(columns: Columns, found: str, todo: str) -> ConfigError:
    return ConfigError(f"The labels in the column '{columns.label}' were asked for.", found, todo)


def divided(parts: dict[str, Split], data: Path | str | None, *, by_second_text: bool = False) -> dict[str, Any]:
    """Return train, validation and test split.  A missing split is a fixed random part of the training rows.

    by_second_text: rows with the same second text stay together.
    """
    if "train" not in parts:
        parts["train"] = parts.pop(next(iter(parts)))
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    train = parts["train"]
    keys: Sequence[Any] = train.pairs or () if by_second_text else range(len(train))
    known = list(dict.fromkeys(keys))
    order = [known[index] for index in fixed_order("own", len(known))]

    def part(chosen: Sequence[Any]) -> Split:
        wanted = set(chosen)
        return train.take([row for row, key in enumerate(keys) if key in wanted])

    for name, share in (("test", TEST_SHARE), ("validation", VALIDATION_SHARE)):
        if name not in parts:
            count = max(1, round(share * len(known)))
            parts[name], order = part(order[:count]), order[count:]
    if not order:
        found = f"{len(known)} {'contexts' if by_second_text else 'rows'} are too few to train, choose and test on."
        raise ConfigError(f"The data '{data}' were asked for.", found, "Give more rows.")
    return parts | {"train": part(order)}
