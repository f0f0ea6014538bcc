"""Read users' own tables: CSV, TSV, JSON, JSONL and Parquet files, folders of them, saved data sets, and the hub's.

A reader converts nothing: a cell of a text file stays text, a value of JSON or Parquet keeps its type.  Tasks convert
values as they need them (see own.py).  Classes that a data set stores as numbers become their names here, so that
labels are matched by name everywhere.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, MissingDataError, did_you_mean
from workbench.core.serial import listed, read_text, shown, text_lines, user_path
from workbench.tasks.characters import HALF_CHARACTER, notes_on_broken, whole_characters
from workbench.tasks.published import hub_dataset, saved_dataset

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
FORMS = "CSV, TSV, JSON, JSONL and Parquet files, folders of one kind of them, and folders of save_to_disk"
SPLITS = {
    "train": ("train", "training", "trainset"),
    "validation": ("validation", "valid", "val", "dev", "development", "devset", "eval"),
    "test": ("test", "testing", "testset"),
}
"""Words by which a file's or a table's name says which split it holds."""
FILE = "file"
"""The column that is added if the training rows of a folder come from several files: a file's name, without its
ending."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of own data.

    columns: the values of each column, one for each row: a list, or an Arrow column until it is used.

    classes: the names, in order, of the classes of columns that a data set stores as numbers.
    repeated: names that several columns have.  notes: the reader's assumptions where the file was ambiguous, for the
    report.
    """

    columns: Mapping[str, Any]
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all columns."""
        return tuple(self.columns)

    def values(self, name: str) -> list[Any]:
        """Return the values of a column.  Classes stored as numbers are their names, or None for a number below 0."""
        column = self.columns[name]
        try:
            values = column if isinstance(column, list) else column.to_pylist()
        except ValueError as error:  # bytes that are no UTF-8
            raise ConfigError(
                f"The column '{shown(name)}' was to be read.",
                f"It does not read as text: {shown(str(error), 200)}.",
                "Save it as UTF-8.",
            ) from error
        if (classes := self.classes.get(name)) is None:
            return values
        named = dict(enumerate(classes))

        def name_of(value: Any) -> Any:
            return (
                [name_of(entry) for entry in value]
                if isinstance(value, list)
                else named.get(value, value if value != -1 else None)
            )

        return [name_of(value) for value in values]


def split_of(name: str) -> str | None:
    """Return the split that a name contains, as 'Train', 'test_data' and 'reviewsTest-2' do.  Raises ConfigError if it
    contains two.
    """
    words = {word.lower() for word in _NAME_WORDS.findall(name)}
    named = [split for split, split_words in SPLITS.items() if words & set(split_words)]
    if len(named) > 1:
        raise ConfigError(
            f"The split in '{shown(name)}' was to be read.", f"Its name says {' and '.join(named)}.", "Rename it."
        )
    return named[0] if named else None


def read_tables(task: str, data: Path | str | None) -> dict[str, Table]:
    """Return the tables of own data by split, or only 'train' if they are not divided."""
    if data is None:
        raise ConfigError(
            f"The task '{task}' was asked for.",
            "It reads data of your own.",
            "Name a file, a folder or a hub name by --data.",
        )
    path = user_path(data, "The data")
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if path.exists() and not is_saved:
        by_split = _from_folder(path) if path.is_dir() else {"train": _from_file(path)}
    else:
        if is_saved:
            tables = saved_dataset(path)
        elif _HUB_NAME.fullmatch(str(data)) and path.suffix.lower() not in READERS:
            tables = hub_dataset(task, str(data), None, "a CSV, JSONL or Parquet file")
        else:
            raise _no_such_data(path)
        named: dict[str, Any] = {}
        for name in tables:
            if (split := split_of(name)) is not None:
                named.setdefault(split, tables[name])
        by_split = {
            name: _from_dataset(table) for name, table in (named or {"train": next(iter(tables.values()))}).items()
        }
    for name, table in by_split.items():
        if not len(table):
            raise ConfigError(f"The data '{data}' were asked for.", f"Their {name} split has 0 rows.", "Give data.")
    return {name: by_split[name] for name in SPLITS if name in by_split}


def require_data(data: str) -> None:
    """Raise MissingDataError if own data are neither a file nor a folder nor named as on the hub."""
    path = user_path(data, "The data")
    if not path.exists() and (not _HUB_NAME.fullmatch(data) or path.suffix.lower() in READERS):
        raise _no_such_data(path)


def _no_such_data(path: Path) -> MissingDataError:
    if path.is_symlink():
        problem = "It is a link to a file that does not exist."
    else:
        problem = "There is no such file or folder, and it is not a hub name (OWNER/NAME)."
    siblings = [entry.name for entry in path.parent.iterdir() if entry.exists()] if path.parent.is_dir() else []
    return MissingDataError(
        f"The data '{shown(str(path), 200)}' were asked for.",
        problem,
        did_you_mean(path.name, siblings, "Check --data."),
    )


def _from_folder(folder: Path) -> dict[str, Table]:
    """Return the tables of a folder's files by split.  Hidden files (macOS writes some) are ignored.

    Files whose names contain no split are the training rows if no file's name contains 'train'; otherwise a note names
    them.
    """
    files = sorted(
        entry
        for entry in folder.iterdir()
        if entry.suffix.lower() in READERS and not entry.name.startswith(".") and not entry.is_dir()
    )
    kinds = {READERS[file.suffix.lower()] for file in files}
    if len(kinds) != 1:
        raise ConfigError(
            f"The data '{folder}' were asked for.",
            f"It holds {'several kinds' if kinds else 'no such file'}. Read are {FORMS}.",
            "Check --data.",
        )
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.stem), []).append(file)
    others = by_split.pop(None, [])
    tables_of = {str(split): _joined([_from_file(path) for path in paths], paths) for split, paths in by_split.items()}
    if others and "train" in tables_of:
        note = f"Not read, because the names say no split: {listed(file.name for file in others)}."
        tables_of["train"] = replace(tables_of["train"], notes=(*tables_of["train"].notes, note))
    elif others:
        tables = [_from_file(file) for file in others]
        if len(others) > 1:
            parts = zip(tables, others, strict=True)
            tables = [
                replace(table, columns={**table.columns, FILE: [file.stem] * len(table)}) for table, file in parts
            ]
        tables_of["train"] = _joined(tables, others)
    return tables_of


def _joined(tables: Sequence[Table], files: Sequence[Path]) -> Table:
    """Return the rows of several files as one table.  Files of JSON may lack columns.  Raises ConfigError if
    others do.
    """
    names = dict.fromkeys(name for table in tables for name in table.names)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for table, path in zip(tables, files, strict=True):
        missing = [name for name in names if name not in table.columns]
        if missing and READERS[path.suffix.lower()] != "json":
            raise ConfigError(
                f"The data '{path.parent}' were asked for.",
                f"'{path.name}' has no column {listed(missing)}, unlike other files there.",
                "Give all files the same columns.",
            )
        for name, values in columns.items():
            values += [None] * len(table) if name in missing else table.values(name)
    return Table(
        columns=columns,
        classes={name: class_names for table in tables for name, class_names in table.classes.items()}
        if len(tables) == 1
        else {},
        repeated=frozenset().union(*(table.repeated for table in tables)),
        notes=tuple(note for table in tables for note in table.notes),
    )


def _from_file(path: Path) -> Table:
    request = f"The data '{path}' were asked for."
    kind = READERS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(request, f"'{path.name}' is none by its name. Read are {FORMS}.", "Check --data.")
    if kind == "parquet":
        return _from_parquet(path)
    text = read_text(path, "the data")
    if not text.strip():
        raise ConfigError(request, "It is empty.", "Give data.")
    try:
        if kind == "json":
            table = _from_json(text, one_a_line=path.suffix.lower() != ".json")
        else:
            table = _from_csv(text, _separator(text, "\t" if path.suffix.lower() == ".tsv" else ","))
    except (ValueError, csv.Error, RecursionError) as error:
        cause = (
            "Its brackets are nested too deep"
            if isinstance(error, RecursionError)
            else shown(str(error).rstrip("."), 200)
        )
        raise ConfigError(request, f"It does not read as {kind}: {cause}.", "Fix the file.") from error
    if not len(table):
        raise ConfigError(request, "It has 0 rows.", "Give data.")
    return replace(table, notes=tuple(f"'{path.name}': {note}" for note in table.notes))


def _separator(text: str, expected: str) -> str:
    """Return the character between the columns of the header: the expected one, or else the only other usual one.

    Spreadsheets write semicolons where a comma is the decimal sign.
    """
    header = next(line for line in text.splitlines() if line.strip())
    others = [character for character in ",;\t|" if character in header]
    return others[0] if expected not in others and len(others) == 1 else expected


def _from_csv(text: str, delimiter: str) -> Table:
    """Return a table with a header.  Raises csv.Error naming a line that has more cells than the header.

    Quotes enclose a cell (RFC 4180).  If the text breaks that rule and fits the header without it, quotes are ordinary
    characters.
    """
    notes = []
    try:
        rows, lines = _cells(text, delimiter, csv.QUOTE_MINIMAL)
        spans = [(last - first, number, first + 1, last) for number, (first, last) in enumerate(pairwise(lines), 1)]
        long = [span for span in spans if span[0] > 1 and any("\n" in cell for cell in rows[span[1]])]
        if long:
            _, number, begin, end = max(long)
            notes.append(
                f"in {len(long)} rows a quoted cell has several lines; the longest is row {number}, lines "
                f"{begin} to {end}."
            )
    except csv.Error as error:
        rows, _ = _cells(text, delimiter, csv.QUOTE_NONE)
        if any(len(row) != len(rows[0]) for row in rows):
            raise
        notes.append(f"quotes are read as ordinary characters, because they enclose no cells ({error}).")
    header, *rest = rows
    for number, row in enumerate(rest, 1):
        if any(row[len(header) :]):
            raise csv.Error(
                f"row {number} has {len(row)} cells and the header has {len(header)}; a cell with {delimiter!r} "
                "needs quotes"
            )
    width = len(header)
    columns = zip(*(row[:width] + [""] * (width - len(row)) for row in rest), strict=True)
    values = list(map(list, columns)) or [[] for _ in header]
    return Table(columns=dict(zip(header, values, strict=True)), repeated=_repeated(header), notes=tuple(notes))


def _cells(text: str, delimiter: str, quoting: Any) -> tuple[list[list[str]], list[int]]:
    """Return the cells of each line that is not blank, and the number of the last line of each."""
    before = csv.field_size_limit(len(text) + 1)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=quoting, strict=True)
        rows, lines = [], []
        try:
            for row in reader:
                if len(row) > 1 or (row and row[0].strip()):
                    rows.append(row)
                    lines.append(reader.line_num)
        except csv.Error as error:
            raise csv.Error(f"line {reader.line_num}: {error}") from error
        return rows, lines
    finally:
        csv.field_size_limit(before)


def _from_json(text: str, *, one_a_line: bool) -> Table:
    """Return the table in an array of objects, in an object of arrays, or in lines of an object each.  Raises
    ValueError.
    """
    rows: Any = None
    if not one_a_line:
        try:
            rows = json_value(text)
        except ValueError:
            if not text.lstrip().startswith("{"):
                raise
    if rows is None:
        rows = []
        for number, line in enumerate(text_lines(text), 1):
            if line.strip():
                try:
                    rows.append(json_value(line))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error
    if isinstance(rows, dict):
        lists = {name: values for name, values in rows.items() if isinstance(values, list)}
        if len(lists) == 1 and all(isinstance(entry, dict) for entry in next(iter(lists.values()))):
            [rows] = lists.values()  # such as {"version": 1, "data": [...]}
        elif len(lists) == len(rows) and len({len(values) for values in lists.values()}) == 1:
            return Table(columns=lists, notes=notes_on_broken(lists.values()))
        else:
            rows = [rows]
    if not isinstance(rows, list):
        raise ValueError("it is neither a list nor an object")
    wrong = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if wrong is not None:
        raise ValueError(f"row {wrong} is not an object of columns and values")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Table(columns=columns, notes=notes_on_broken(columns.values()))


def json_value(text: str) -> Any:
    """Return the value of JSON text, in which half a character (half an emoji) becomes U+FFFD.

    Raises ValueError, also if an object repeats a name, and RecursionError.
    """
    value = json.loads(text, object_pairs_hook=_object)
    return whole_characters(value) if "\\ud" in text or "\\uD" in text or HALF_CHARACTER.search(text) else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"an object has the name {listed(_repeated(name for name, _ in pairs))} twice")
    return fields


def _from_parquet(path: Path) -> Table:
    import datasets
    import pyarrow.parquet

    try:
        return _from_dataset(datasets.Dataset(pyarrow.parquet.ParquetFile(path).read()))
    except Exception as error:  # the reader raises many kinds of errors for a damaged file
        raise ConfigError(
            f"The data '{path}' were asked for.",
            f"It does not read as parquet: {shown(str(error).rstrip('.'), 200)}.",
            "Fix the file.",
        ) from error


def _from_dataset(dataset: Any) -> Table:
    """Return the table of a data set of the library `datasets`."""
    arrow = dataset.with_format("arrow")[:]
    classes = {name: _class_names(feature) for name, feature in dataset.features.items()}
    return Table(
        columns=dict(zip(arrow.column_names, arrow.columns, strict=True)),
        classes={name: tuple(class_names) for name, class_names in classes.items() if class_names},
        repeated=_repeated(arrow.column_names),
    )


def _repeated(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name, count in Counter(names).items() if count > 1)


def _class_names(feature: Any) -> Sequence[str] | None:
    return getattr(feature, "names", None) or getattr(getattr(feature, "feature", None), "names", None)
