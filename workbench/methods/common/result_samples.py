"""The samples that a result's model reads: the rows of a file, a text's lines, or questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.serial import read_text, shown, text_lines, user_path
from workbench.methods.common.model_card import Result
from workbench.tasks import load_task
from workbench.tasks.columns import Columns, find_columns, named_columns
from workbench.tasks.own import class_numbers, classes, numbers, read_rows
from workbench.tasks.question_answering import joined, official_questions, words_of
from workbench.tasks.tables import read_tables
from workbench.tasks.task import PromptSample, Split, prompt_split

Rows = list[tuple[str, ...]]


def read_samples(about: Result, path: str, columns: str | None = None) -> Rows:
    """Return the samples of a file: a table's rows by column (see load_own), a text's lines, or SQuAD's questions
    (JSON).
    """
    kind, task = Path(path).suffix.lower(), about.job.task
    rows: Rows
    if kind in ("", ".txt") and len(about.texts) == 1:
        rows = [(line,) for line in text_lines(read_text(path, "the sentences")) if line.strip()]
    elif about.kind == "question_answering" and kind == ".json":
        questions = official_questions(user_path(path, "The questions"))
        rows = [(question.text, question.context) for question in questions]
    elif about.kind == "token_classification" and columns is None:
        loaded = load_task(task, data=path, columns=about.job.columns, class_names=about.class_names, whole=True)
        rows = [(text,) for text in loaded.test.texts]
    else:
        rows = table_samples(about, path, columns, "test", has_labels=False)[0]
    if not rows:
        raise ConfigError(f"Samples in '{shown(str(path), 200)}' were asked for.", "It has none.", "Give data.")
    return rows


def table_samples(
    about: Result, data: str, columns: str | None, split: str, *, has_labels: bool
) -> tuple[Rows, list[int] | list[float]]:
    """Return the samples of a table, with labels if requested."""
    if has_labels and not (about.class_names or about.kind == "regression"):
        request = f"An evaluation on '{shown(data, 200)}' was asked for."
        raise ConfigError(
            request,
            "Its answers are texts, not classes.",
            f"Give --data FOLDER with the files of '{about.job.task}'.",
        )
    tables = read_tables(about.job.task, data)
    table = tables.get(split) or next(iter(tables.values()))
    left_out = ("source",) if has_labels else ("source", "label")
    named = named_columns(about.job.columns if columns is None else columns, Columns._fields, table, left_out=left_out)
    roles_of_both = [named]
    if about.texts and about.texts[0] != "text" and set(about.texts) <= set(table.names):
        roles_of_both = [
            {role: name for role, name in named.items() if role == "label"} | {"text": name} for name in about.texts
        ]
    columns_of_both = [find_columns(roles, table, needs_label=has_labels) for roles in roles_of_both]
    rows_of_both = [
        read_rows(table, columns_of_one if has_labels else columns_of_one._replace(label=None), split)
        for columns_of_one in columns_of_both
    ]
    rows = list(
        zip(
            *(
                texts
                for table_rows in rows_of_both
                for texts in (table_rows.texts, table_rows.pairs)
                if texts is not None
            ),
            strict=True,
        )
    )
    if not has_labels:
        return rows, []
    labels, column = rows_of_both[0].labels or [], columns_of_both[0].label or ""
    if about.kind == "regression":
        return rows, list(numbers(labels, column, split))
    return rows, list(class_numbers(classes(labels, column, split), about.class_names, column, split))


def split_of(about: Result, rows: Rows, labels: Sequence[int] | Sequence[float]) -> Split:
    """Convert rows to the model's samples."""
    if about.prompt is not None:
        fields = [dict(zip(about.texts, row, strict=True)) for row in rows]
        prompts = [
            PromptSample(sample_id=index, fields=sample_fields, label=int(labels[index]))
            for index, sample_fields in enumerate(fields)
        ]
        return prompt_split(prompts, about.prompt)
    texts, *pairs = zip(*rows, strict=True)
    spans: Any = None
    if about.kind == "question_answering":
        spans = ((),) * len(rows)
    elif about.kind == "token_classification":
        texts, spans = zip(*(joined(words, [0] * len(words)) for words in map(words_of, texts)), strict=True)
    return Split(
        texts=texts,
        pairs=pairs[0] if pairs else None,
        labels=tuple(labels),
        spans=spans,
    )
