"""Own data whose words have classes (named entities, parts of speech): a table with a list of tokens and a list of tags in each row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError
from workbench.tasks.own import divided, read_tables
from workbench.tasks.task import Span, Split, Task

USUAL = {"tokens": ("tokens", "words"), "tags": ("tags", "ner_tags", "pos_tags", "labels")}


def load_token_classification(data: Path | str | None, columns: str = "") -> Task:
    """Return own data as a task of tagged words; the scores are F1 over whole entities, and the share of words with the right tag.

    columns: such as 'tokens=words,tags=pos'; what is not named is found by its usual names.  data: see own.load_own.
    Raises MissingDataError if the data cannot be had, ConfigError naming the row whose lists differ in length or are empty.
    """
    tables = read_tables("token_classification", data)
    first = next(iter(tables.values()))
    tokens, tags = _columns(columns, first.column_names)
    declared = getattr(getattr(first.features[tags], "feature", None), "names", None)
    names: Sequence[str] = declared or sorted({str(tag) for table in tables.values() for row in table[tags] for tag in row}, key=_order)
    parts, first_id = {}, 0
    for split, table in tables.items():
        parts[split] = _split(table, tokens, tags, names, split, first_id)
        first_id += len(table)
    divided_parts: dict[str, Any] = divided(parts, data)
    return Task(
        name="token_classification",
        kind="token_classification",
        num_outputs=len(names),
        metrics=("entity_f1", "accuracy"),
        class_names=tuple(names),
        source=f"{Path(str(data)).name}, columns {tokens}, {tags}",
        **divided_parts,
    )


def _order(tag: str) -> tuple[bool, str]:
    return tag != "O", tag


def _columns(columns: str, present: Sequence[str]) -> tuple[str, str]:
    named = dict(part.strip().partition("=")[::2] for part in columns.split(",") if part.strip())
    found = [named.get(role) or next((name for name in usual if name in present), "") for role, usual in USUAL.items()]
    if not set(named) <= set(USUAL) or not set(found) <= set(present):
        raise ConfigError(
            f"Data with a column of words and one of their tags were asked for{f', by {columns!r}' if columns else ''}.",
            f"The data have the columns {', '.join(map(repr, present))}.",
            "Name them, such as --columns tokens=words,tags=entities.",
        )
    return found[0], found[1]


def _split(table: Any, tokens: str, tags: str, names: Sequence[str], split: str, first_id: int) -> Split:
    index = {name: number for number, name in enumerate(names)}
    texts, spans = [], []
    for row, (words, classes) in enumerate(zip(table[tokens], table[tags], strict=True), start=1):
        if not isinstance(words, list) or not isinstance(classes, list) or not words or len(words) != len(classes):
            sizes = f"{len(words)} words and {len(classes)} tags" if isinstance(words, list) and isinstance(classes, list) else "no lists"
            found = f"Row {row} of {split} has {sizes} in the columns '{tokens}' and '{tags}'."
            raise ConfigError("Words with a tag each were asked for.", found, "Mend or remove that row.")
        text, own = joined([str(word) for word in words], [tag if isinstance(tag, int) else index[str(tag)] for tag in classes])
        texts.append(text)
        spans.append(own)
    ids = tuple(range(first_id, first_id + len(texts)))
    return Split(texts=tuple(texts), labels=(0,) * len(texts), sample_ids=ids, spans=tuple(spans))


def joined(words: Sequence[str], labels: Sequence[int]) -> tuple[str, tuple[Span, ...]]:
    """Return a text of words with a class each, and where in it they stand."""
    starts = itertools.accumulate((len(word) + 1 for word in words[:-1]), initial=0)
    return " ".join(words), tuple(map(Span, starts, words, labels))
