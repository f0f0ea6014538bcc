"""Tasks with answers in the text: questions (SQuAD's files; Rajpurkar et al., 2016 and 2018), and words with classes.

The embedded questions, about the embedded sentences, are generated from four patterns, not by people.  They show how a
run works and say little about reading.  Own data with word classes (named entities, parts of speech) has a list of
tokens and a list of tags per row.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.serial import read_text, shown, text_lines, user_path
from workbench.tasks.characters import notes_on_broken
from workbench.tasks.columns import as_class, as_text, columns_by_role, is_missing
from workbench.tasks.embedded import load_sentiment_rating
from workbench.tasks.own import class_numbers, divided, sorted_classes, texts_of
from workbench.tasks.tables import FILE, SPLITS, Table, json_value, read_tables, split_of
from workbench.tasks.task import IGNORED, Span, Split, Task, numbered

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
    "What kind of {} is it?": re.compile(
        rf"\b(?:an?|the|this|its|his|her)\s+(?P<answer>{_QUALITY})\s+(?P<word>{_NOUNS})\b"
    ),
    "Whose {}?": re.compile(rf"\b(?!(?:{_NOT_NAMES})'s)(?P<answer>{_NAME})'s (?P<word>[a-z]{{3,}})\b"),
    "How many {}?": re.compile(rf"\b(?P<answer>{_COUNTS}) (?P<word>[a-z]{{3,}}s)\b"),
    "Who is the {}?": re.compile(rf"\b(?P<word>{_ROLES}) (?P<answer>{_NAME})\b(?!')"),
}
"""Question patterns, and where a sentence contains the answer: next to the word that is used in the question."""


class Question(NamedTuple):
    """A question about a context.

    answers: accepted answers, of which the first is learnt; empty: no answer.  topic: its source.
    """

    text: str
    context: str
    answers: tuple[Span, ...]
    topic: str


def load_questions(folder: Path | None = None) -> Task:
    """Return the embedded task: questions from PATTERNS about two sentences of one source, one of which contains the
    answer.

    A sentence is in the same split as in 'sentiment-rating'.  folder: see load_sentiment_rating.
    """
    rated = load_sentiment_rating(folder)
    parts = {name: _split_of(_pattern_questions(getattr(rated, name))) for name in ("train", "validation", "test")}
    return _task("questions", parts, f"made by patterns from {rated.source}")


def _pattern_questions(split: Split) -> Iterator[Question]:
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


def load_question_answering(data: Path | str | None, columns: str = "", *, whole: bool = False) -> Task:
    """Return a SQuAD 1.1 or 2.0 task from an official JSON file, a folder with train*.json and dev*.json, or a table
    with its columns.

    A table (see tables.py) has the columns question, context and answers (for the forms of answers see _spans), or
    others that `columns` names, for example 'question=asked'.
    A missing split is a fixed random part of the contexts.  whole: see own.divided.
    Raises MissingDataError if the data is unavailable, ConfigError naming a question whose answer is not in its
    context.
    """
    files = _official(None if data is None else user_path(data, "The data"))
    rows: dict[str, Iterable[Question]]
    notes: list[str] = []
    if files:
        rows = {name: itertools.chain.from_iterable(map(official_questions, paths)) for name, paths in files.items()}
    else:
        tables = read_tables("question_answering", data)
        rows = {name: _from_table(table, columns, str(data), name) for name, table in tables.items()}
        notes += [note for table in tables.values() for note in table.notes]
    parts = {name: _split_of(part) for name, part in rows.items()}
    if files:
        notes += [
            note for part in parts.values() for note in notes_on_broken([list(part.texts), list(part.pairs or ())])
        ]
    name = Path(str(data)).name
    return _task("question_answering", divided(parts, data, by_second_text=True, whole=whole), name, notes)


def _files(path: Path | None) -> list[Path]:
    """Return a file, or the files of a folder except hidden ones; none if there is no such path."""
    if path is None or not path.exists():
        return []
    return [path] if path.is_file() else sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _official(path: Path | None) -> dict[str, list[Path]]:
    """Return the official files by split.  Empty if there are none."""
    files: dict[str, list[Path]] = {}
    for file in _files(path):
        if file.suffix.lower() == ".json" and '"paragraphs"' in read_text(file, "the questions"):
            files.setdefault(split_of(file.stem) or "train", []).append(file)
    return files


def official_questions(path: Path) -> Iterator[Question]:
    """Yield the questions of an official JSON file, in its order.  Raises as load_question_answering."""
    try:
        for article in json_value(read_text(path, "the questions"))["data"]:
            for paragraph in article["paragraphs"]:
                for row in paragraph["qas"]:
                    spans = (
                        ()
                        if row.get("is_impossible")
                        else ((answer["answer_start"], answer["text"]) for answer in row["answers"])
                    )
                    yield _question(
                        row["question"], paragraph["context"], spans, str(article.get("title", "")), str(path)
                    )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise MissingDataError(
            f"'{path}' was to be read as SQuAD.", f"It does not read: {shown(repr(error), 200)}.", "Check it."
        ) from error


def _from_table(table: Table, columns: str, data: str, split: str) -> Iterator[Question]:
    question, context, answers = columns_by_role(table, columns, "question_answering").values()
    texts, contexts = texts_of(table, question, split), texts_of(table, context, split)
    topic = next((name for name in (FILE, "title") if name in table.columns), None)
    topics = texts_of(table, topic, split, may_be_empty=True) if topic is not None else ("",) * len(table)
    for row, (text, passage, row_answers, title) in enumerate(
        zip(texts, contexts, table.values(answers), topics, strict=True), 1
    ):
        try:
            spans = _spans(row_answers, passage)
        except (ValueError, LookupError, TypeError, SyntaxError, MemoryError, RecursionError):
            raise ConfigError(
                f"The answers of '{shown(data, 200)}' were asked for.",
                f"Row {row} of {split} has {shown(row_answers)}, no list of texts with the places where they begin in "
                "the context.",
                "Write such as {'text': ['Rouen'], 'answer_start': [10]}; empty lists: no answer.",
            ) from None
        yield _question(text, passage, spans, title, data)


def _spans(answers: Any, context: str) -> list[tuple[int, str]]:
    """Return the place and text of each answer in a table's forms: None; objects, or lists in an object; or a text.

    A text holds one of these as JSON or in Python's notation (a CSV file has no lists), or is an answer that occurs
    once in the context.
    Raises ValueError, LookupError, TypeError and the errors of ast.literal_eval.
    """
    if is_missing(answers):
        return []
    if isinstance(answers, str):
        if answers.lstrip().startswith(("[", "{")):
            return _spans(ast.literal_eval(answers) if "'" in answers else json_value(answers), context)
        if context.count(answers) != 1:
            raise ValueError(answers)
        return [(context.index(answers), answers)]
    if isinstance(answers, list):
        return [span for answer in answers for span in _spans(answer, context)]
    starts, texts = answers["answer_start"], answers["text"]
    pairs = zip(starts, texts, strict=True) if isinstance(texts, list) else [(starts, texts)]
    return [(int(start), str(text)) for start, text in pairs]


def _question(text: str, context: str, spans: Iterable[tuple[int, str]], topic: str, place: str) -> Question:
    answers = tuple(dict.fromkeys(Span(int(start), answer) for start, answer in spans))
    wrong = next(
        (
            answer
            for answer in answers
            if not answer.text or context[answer.start : answer.start + len(answer.text)] != answer.text
        ),
        None,
    )
    if wrong is not None:
        raise ConfigError(
            f"Questions of '{place}' were asked for.",
            f"The context of '{shown(text, 100)}' does not have '{shown(wrong.text, 60)}' at character {wrong.start}.",
            "Fix that answer_start.",
        )
    return Question(text.strip(), context, answers, topic)


def _split_of(questions: Iterable[Question]) -> Split:
    rows = tuple(questions)
    return Split(
        texts=tuple(row.text for row in rows),
        pairs=tuple(row.context for row in rows),
        labels=tuple(int(bool(row.answers)) for row in rows),
        spans=tuple(row.answers for row in rows),
        sources=tuple(row.topic for row in rows),
    )


def _task(name: str, parts: Mapping[str, Split], source: str, notes: Sequence[str] = ()) -> Task:
    splits: dict[str, Any] = numbered({part: parts[part] for part in ("train", "validation", "test")})
    return Task(
        name=name,
        kind="question_answering",
        num_outputs=2,
        metrics=METRICS,
        source=source,
        notes=tuple(notes),
        **splits,
    )


NOT_LEARNT = str(IGNORED)
"""The tag of a word that is neither learnt nor scored, as transformers' datasets have it."""


def load_token_classification(
    data: Path | str | None, columns: str = "", class_names: Sequence[str] = (), *, whole: bool = False
) -> Task:
    """Return own data as a task of tagged words.  Its metrics are F1 over whole entities, and the share of correctly
    tagged words.

    columns: for example 'tokens=words,tags=pos'; other columns have their usual names.  data: see own.load_own;
    or a file, or a folder of files, in CoNLL-2003's format.  class_names: a model's class names, to which tags are
    matched; empty: the data's own names.
    whole: see own.divided.
    Raises MissingDataError if the data is unavailable, ConfigError naming a row whose lists differ in length or are
    empty.
    """
    tables = _conll(None if data is None else user_path(data, "The data")) or read_tables("token_classification", data)
    first = next(iter(tables.values()))
    tokens, tags = columns_by_role(first, columns, "token_classification").values()
    rows = {split: list(_tagged(table, tokens, tags, split)) for split, table in tables.items()}
    used_tags = (tag for split_rows in rows.values() for _, names in split_rows for tag in names if tag != NOT_LEARNT)
    classes = tuple(class_names) or first.classes.get(tags) or sorted_classes(used_tags, first="O")
    if not classes:
        raise ConfigError(
            f"The tags in the column '{shown(tags)}' were asked for.", f"All are {NOT_LEARNT}.", "Give words a class."
        )
    return Task(
        name="token_classification",
        kind="token_classification",
        num_outputs=len(classes),
        metrics=("entity_f1", "accuracy"),
        class_names=classes,
        source=f"{Path(str(data)).name}, columns {tokens}, {tags}",
        notes=tuple(note for table in tables.values() for note in table.notes),
        **divided(
            numbered({split: _split(split_rows, classes, tags, split) for split, split_rows in rows.items()}),
            data,
            whole=whole,
        ),
    )


CONLL = (".conll", ".bio", ".txt")


def _conll(path: Path | None) -> dict[str, Table]:
    """Return the files of CoNLL-2003's format by split; in a folder those named like splits.  Empty if there are none.

    A line has a word, any further columns, and its tag; a sentence ends with an empty line.
    """
    sentences: dict[str, list[list[list[str]]]] = {}
    for file in _files(path):
        split = "" if file.suffix.lower() not in CONLL else split_of(file.stem) or ("train" if file == path else "")
        if split:
            file_sentences = list(_sentences(file))
            if not file_sentences:
                raise ConfigError(f"'{file}' was to be read as CoNLL-2003.", "It has no sentence.", "Give data.")
            sentences.setdefault(split, []).extend(file_sentences)
    places = (("tokens", 0), ("tags", -1))
    return {
        split: Table(
            columns={column: [[word[place] for word in words] for words in split_sentences] for column, place in places}
        )
        for split, split_sentences in ((split, sentences[split]) for split in SPLITS if split in sentences)
    }


def _sentences(path: Path) -> Iterator[list[list[str]]]:
    """Yield the words of each sentence, each with its columns."""
    words: list[list[str]] = []
    for number, line in enumerate([*text_lines(read_text(path, "the tagged words")), ""], start=1):
        columns = words_of(line)
        if len(columns) == 1:
            raise ConfigError(
                f"'{path}' was to be read as CoNLL-2003.",
                f"Line {number} is '{shown(line, 60)}': a word without a tag.",
                "Write a word and its tag on a line.",
            )
        if columns and columns[0] != "-DOCSTART-":
            words.append(columns)
        elif words:
            yield words
            words = []


def words_of(text: str) -> list[str]:
    """Return the words of a text.  Only blanks, tabs and line ends divide them; a no-break space belongs to
    its word.
    """
    return re.findall(r"[^ \t\r\n]+", text)


def _tagged(table: Table, tokens: str, tags: str, split: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words and the tags of each row.  Raises ConfigError naming a row that has no lists of equal length, or
    a word or tag.
    """
    request = "Words with a tag each were asked for."
    for row, (words, classes) in enumerate(zip(table.values(tokens), table.values(tags), strict=True), start=1):
        if not isinstance(words, list) or not isinstance(classes, list) or not words or len(words) != len(classes):
            sizes = (
                f"{len(words)} words and {len(classes)} tags"
                if isinstance(words, list) and isinstance(classes, list)
                else "no lists"
            )
            raise ConfigError(
                request,
                f"Row {row} of {split} has {sizes} in the columns '{tokens}' and '{tags}'.",
                "Fix or remove that row.",
            )
        texts, names = list(map(as_text, words)), list(map(as_class, classes))
        wrong = next(
            (index for index, (text, name) in enumerate(zip(texts, names, strict=True)) if text is None or not name),
            None,
        )
        if wrong is not None:
            raise ConfigError(
                request,
                f"Word {wrong + 1} of row {row} of {split} is '{shown(words[wrong])}' and its tag "
                f"'{shown(classes[wrong])}'.",
                f"Give every word a tag; {NOT_LEARNT} is that of a word that is not learnt.",
            )
        yield [text or "" for text in texts], [name or "" for name in names]


def _split(rows: Sequence[tuple[list[str], list[str]]], names: Sequence[str], column: str, split: str) -> Split:
    texts, spans = [], []
    numbers = {name: number for number, name in enumerate(names)} | {NOT_LEARNT: IGNORED}
    for words, tags in rows:
        if not numbers.keys() >= set(tags):
            class_numbers([tag for _, row_tags in rows for tag in row_tags if tag != NOT_LEARNT], names, column, split)
        text, word_spans = joined(words, [numbers[tag] for tag in tags])
        texts.append(text)
        spans.append(word_spans)
    return Split(texts=tuple(texts), spans=tuple(spans))


def joined(words: Sequence[str], labels: Sequence[int]) -> tuple[str, tuple[Span, ...]]:
    """Join words into a text.  Returns it and each word's span with its class."""
    starts = itertools.accumulate((len(word) + 1 for word in words[:-1]), initial=0)
    return " ".join(words), tuple(map(Span, starts, words, labels))
