"""Tasks with answers in the text: questions (SQuAD's files; Rajpurkar et al., 2016 and 2018), and words with classes.

The embedded questions, about the embedded sentences, are generated from four patterns, not by people.  They show how a run works and
say little about reading.  Own data with word classes (named entities, parts of speech) has a list of tokens and a list of tags per row.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.serial import shown
from workbench.tasks.embedded import load_sentiment_rating
from workbench.tasks.own import FILE, SPLITS, divided, read_tables
from workbench.tasks.published import read_text
from workbench.tasks.task import Span, Split, Task, numbered

METRICS = ("answer_f1", "exact_match")
_NAME = r"[A-Z][a-z]+(?:[ -][A-Z][a-z]+)*"
_NOT_NAMES = "It|He|She|There|That|What|Who|Here|Let|This|Where|How|One|Everyone|Someone|Nobody|Today"
_NOUNS = (
    "film|movie|story|comedy|drama|picture|thriller|tale|plot|script|screenplay|ending|documentary|romance|performance|performances|"
    "character|characters|cast|director|camera|phone|player|battery|software|screen"
)
_ROLES = "director|actor|actress|writer|filmmaker|star|President|Senator|Mayor|Governor|Judge"
_COUNTS = r"\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten|dozens|hundreds|thousands"
_QUALITY = r"(?!(?:is|was|of|s)\b)[\w'-]+(?:,? [\w'-]+){0,2}?"
PATTERNS = {
    "What kind of {} is it?": re.compile(rf"\b(?:an?|the|this|its|his|her)\s+(?P<answer>{_QUALITY})\s+(?P<word>{_NOUNS})\b"),
    "Whose {}?": re.compile(rf"\b(?!(?:{_NOT_NAMES})'s)(?P<answer>{_NAME})'s (?P<word>[a-z]{{3,}})\b"),
    "How many {}?": re.compile(rf"\b(?P<answer>{_COUNTS}) (?P<word>[a-z]{{3,}}s)\b"),
    "Who is the {}?": re.compile(rf"\b(?P<word>{_ROLES}) (?P<answer>{_NAME})\b(?!')"),
}
"""Question patterns, and where a sentence contains the answer: next to the word that is used in the question."""


class Question(NamedTuple):
    """A question about a context.  answers: accepted ones, of which the first is learnt; empty: no answer.  topic: its source."""

    text: str
    context: str
    answers: tuple[Span, ...]
    topic: str


def load_questions(folder: Path | None = None) -> Task:
    """Return the embedded task: questions from PATTERNS about two sentences of one source, one of which contains the answer.

    A sentence is in the same split as in 'sentiment-rating'.  folder: see load_sentiment_rating.
    """
    rated = load_sentiment_rating(folder)
    parts = {name: _asked(_made(getattr(rated, name))) for name in ("train", "validation", "test")}
    return _task("questions", parts, f"made by patterns from {rated.source}")


def _made(split: Split) -> Iterator[Question]:
    assert split.sources is not None
    by_source: dict[str, list[str]] = {}
    for source, text in zip(split.sources, split.texts, strict=True):
        by_source.setdefault(source, []).append(text)
    for source, texts in by_source.items():
        generator = random.Random(f"questions {source}")
        for text in texts:
            for wording, pattern in PATTERNS.items():
                match = pattern.search(text)
                other = generator.choice(texts)
                if match is None or match["word"] in other:
                    continue
                is_first = generator.random() < 0.5
                context = f"{text} {other}" if is_first else f"{other} {text}"
                start = match.start("answer") + (0 if is_first else len(other) + 1)
                yield Question(wording.format(match["word"]), context, (Span(start, match["answer"]),), source)


def load_question_answering(data: Path | str | None) -> Task:
    """Return a SQuAD 1.1 or 2.0 task from an official JSON file, a folder with train*.json and dev*.json, or a table with its columns.

    A table (see own.read_tables) has the columns question, context and answers; answers has the lists text and answer_start.
    A missing split is a fixed random part of the contexts.  Raises MissingDataError if the data is unavailable, ConfigError
    naming a question whose answer is not in its context.
    """
    files = _official(None if data is None else Path(data).expanduser())
    rows: dict[str, Iterable[Question]]
    if files:
        rows = {name: _from_official(path) for name, path in files.items()}
    else:
        rows = {name: _from_table(table, str(data)) for name, table in read_tables("question_answering", data).items()}
    parts = divided({name: _asked(part) for name, part in rows.items()}, data, by_second_text=True)
    return _task("question_answering", parts, Path(str(data)).name)


def read_questions(path: Path) -> list[tuple[str, str]]:
    """Return (question, context) for each question of an official JSON file, in file order (raises as load_question_answering)."""
    return [(question.text, question.context) for question in _from_official(path)]


def _official(path: Path | None) -> dict[str, Path]:
    """Return the official files by split.  Empty if there are none."""
    if path is None or not path.exists():
        return {}
    found = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.json")):
        if file.suffix == ".json" and '"paragraphs"' in read_text(file):
            known = (name for name, own in SPLITS.items() if re.split(r"[^a-z]", file.stem.lower())[0] in own)
            found[next(known, "train")] = file
    return found


def _from_official(path: Path) -> Iterator[Question]:
    try:
        for article in json.loads(read_text(path))["data"]:
            for paragraph in article["paragraphs"]:
                for row in paragraph["qas"]:
                    spans = () if row.get("is_impossible") else ((one["answer_start"], one["text"]) for one in row["answers"])
                    yield _question(row["question"], paragraph["context"], spans, str(article.get("title", "")), str(path))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise MissingDataError(
            f"'{path}' was to be read as SQuAD.", f"It does not read: {shown(repr(error), 200)}.", "Check it."
        ) from error


def _from_table(table: Any, data: str) -> Iterator[Question]:
    missing = {"question", "context", "answers"} - set(table.column_names)
    if missing:
        found = f"The data have the columns {', '.join(table.column_names)}. Wanted are question, context and answers."
        raise ConfigError(f"The data '{shown(data, 200)}' were asked for.", found, "Give SQuAD's JSON file, or a table with these columns.")
    for row in table:
        spans = zip(row["answers"]["answer_start"], row["answers"]["text"], strict=True)
        yield _question(row["question"], row["context"], spans, str(row.get(FILE) or row.get("title", "")), data)


def _question(text: str, context: str, spans: Iterable[tuple[int, str]], topic: str, place: str) -> Question:
    answers = tuple(dict.fromkeys(Span(int(start), answer) for start, answer in spans))
    wrong = next((one for one in answers if not one.text or context[one.start : one.start + len(one.text)] != one.text), None)
    if wrong is not None:
        found = f"The context of '{shown(text, 100)}' does not have '{shown(wrong.text, 60)}' at character {wrong.start}."
        raise ConfigError(f"Questions of '{place}' were asked for.", found, "Mend that answer_start.")
    return Question(text.strip(), context, answers, topic)


def _asked(questions: Iterable[Question]) -> Split:
    rows = tuple(questions)
    return Split(
        texts=tuple(row.text for row in rows),
        pairs=tuple(row.context for row in rows),
        labels=tuple(int(bool(row.answers)) for row in rows),
        spans=tuple(row.answers for row in rows),
        sources=tuple(row.topic for row in rows),
        sample_ids=tuple(range(len(rows))),
    )


def _task(name: str, parts: Mapping[str, Split], source: str) -> Task:
    splits: dict[str, Any] = numbered({part: parts[part] for part in ("train", "validation", "test")})
    return Task(name=name, kind="question_answering", num_outputs=2, metrics=METRICS, source=source, **splits)


USUAL = {"tokens": ("tokens", "words"), "tags": ("tags", "ner_tags", "pos_tags", "labels")}


def load_token_classification(data: Path | str | None, columns: str = "") -> Task:
    """Return own data as a task of tagged words.  Its metrics are F1 over whole entities, and the share of correctly tagged words.

    columns: for example 'tokens=words,tags=pos'; other columns are found by their usual names.  data: see own.load_own; or a file, or a
    folder of files, in CoNLL-2003's format.
    Raises MissingDataError if the data is unavailable, ConfigError naming a row whose lists differ in length or are empty.
    """
    tables = _conll(None if data is None else Path(data).expanduser()) or read_tables("token_classification", data)
    first = next(iter(tables.values()))
    tokens, tags = _columns(columns, first.column_names)
    declared = getattr(getattr(first.features[tags], "feature", None), "names", None)
    names: Sequence[str] = declared or sorted({str(tag) for table in tables.values() for row in table[tags] for tag in row}, key=_order)
    parts = numbered({split: _split(table, tokens, tags, names, split) for split, table in tables.items()})
    return Task(
        name="token_classification",
        kind="token_classification",
        num_outputs=len(names),
        metrics=("entity_f1", "accuracy"),
        class_names=tuple(names),
        source=f"{Path(str(data)).name}, columns {tokens}, {tags}",
        **divided(parts, data),
    )


CONLL = (".conll", ".bio", ".txt")


def _conll(path: Path | None) -> dict[str, Any]:
    """Return the files of CoNLL-2003's format by split; in a folder those named like splits.  Empty if there are none.

    A line has a word, any further columns, and its tag; a sentence ends with an empty line.
    """
    if path is None or not path.exists():
        return {}
    import datasets

    tables = {}
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        stem = re.split(r"[^a-z]", file.stem.lower())[0]
        name = next((name for name, known in SPLITS.items() if stem in known), "train" if file == path else "")
        if name and file.suffix in CONLL:
            sentences = list(_sentences(file))
            if not sentences:
                raise ConfigError(f"'{file}' was to be read as CoNLL-2003.", "It has no sentence.", "Give data.")
            rows = {column: [[word[at] for word in words] for words in sentences] for column, at in (("tokens", 0), ("tags", -1))}
            tables[name] = datasets.Dataset.from_dict(rows)
    return tables


def _sentences(path: Path) -> Iterator[list[list[str]]]:
    """Yield the words of each sentence, each with its columns."""
    words: list[list[str]] = []
    for number, line in enumerate([*read_text(path).splitlines(), ""], start=1):
        columns = line.split()
        if len(columns) == 1:
            found = f"Line {number} is '{shown(line, 60)}': a word without a tag."
            raise ConfigError(f"'{path}' was to be read as CoNLL-2003.", found, "Write a word and its tag on a line.")
        if columns and columns[0] != "-DOCSTART-":
            words.append(columns)
        elif words:
            yield words
            words = []


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


def _split(table: Any, tokens: str, tags: str, names: Sequence[str], split: str) -> Split:
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
    return Split(texts=tuple(texts), labels=(0,) * len(texts), sample_ids=tuple(range(len(texts))), spans=tuple(spans))


def joined(words: Sequence[str], labels: Sequence[int]) -> tuple[str, tuple[Span, ...]]:
    """Join words into a text.  Returns it and each word's span with its class."""
    starts = itertools.accumulate((len(word) + 1 for word in words[:-1]), initial=0)
    return " ".join(words), tuple(map(Span, starts, words, labels))
