"""Questions about contexts: files as SQuAD has them, windows, the answer of the best window, scores by the official
formulas."""

import json
import random
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.core.errors import ConfigError, MissingDataError
from workbench.models.evaluation import Predictions
from workbench.models.loading import load_tokenizer
from workbench.tasks import load_task
from workbench.tasks.batching import split_samples
from workbench.tasks.metrics import answer_f1, exact_match, mean_of, score
from workbench.tasks.task import Span, Split
from workbench.tasks.tokenize import collate, tokenize

PEOPLE = ("Rollo", "Anna Comnena", "Emma", "Robert Guiscard")
LONG = "the hall was long and the night was cold " * 12


def squad(folder: Path, name: str = "train-v2.0.json", *, impossible: bool = True, contexts: int = 20) -> Path:
    """A file of SQuAD's form: the answer stands behind more and more words, and some questions have none."""
    paragraphs = []
    for number in range(contexts):
        who = PEOPLE[number % 4]
        context = f"{LONG[: 40 * number]}Then {who} came to town {number}."
        answers = [
            {"text": who, "answer_start": context.index(who)},
            {"text": f"{who} came", "answer_start": context.index(who)},
        ]
        qas = [{"id": f"a{number}", "question": f"Who came to town {number}?", "answers": answers}]
        if impossible and number % 2:
            qas.append(
                {
                    "id": f"b{number}",
                    "question": "Who left?",
                    "answers": [],
                    "is_impossible": True,
                    "plausible_answers": answers,
                }
            )
        paragraphs.append({"context": context, "qas": qas})
    data = [{"title": f"topic {part}", "paragraphs": paragraphs[part::2]} for part in (0, 1)]
    path = folder / name
    path.write_text(json.dumps({"version": "v2.0" if impossible else "1.1", "data": data}))
    return path


def test_files_and_folders_give_questions_and_contexts_are_not_shared_between_splits(tmp_path: Path) -> None:
    task = load_task("question_answering", data=squad(tmp_path))
    splits = (task.train, task.validation, task.test)
    assert sum(map(len, splits)) == 30 and task.kind == "question_answering" and set(task.train.labels) == {0, 1}
    contexts = [set(split.pairs) for split in splits]
    assert sum(map(len, contexts)) == len(set().union(*contexts)) == 20
    assert set(task.train.sources) == {"topic 0", "topic 1"}
    by_topic = split_samples(task.train, 2, "source", 0)
    assert [{task.train.sources[index] for index in own} for own in by_topic] in (
        [{"topic 0"}, {"topic 1"}],
        [{"topic 1"}, {"topic 0"}],
    )
    squad(tmp_path, "dev-v2.0.json", contexts=4)
    reference = load_task("question_answering", data=tmp_path)
    assert len(reference.test) == 6 and len(reference.train) + len(reference.validation) == 30
    one = load_task("question_answering", data=squad(tmp_path, "alone.json", impossible=False), train_samples=5)
    assert len(one.train) == 5 and set(one.train.labels) == {1}


@pytest.mark.filterwarnings("ignore")
def test_a_table_with_squads_columns_is_read(tmp_path: Path) -> None:
    import datasets

    rows = [
        {"question": "Who?", "context": f"Emma {n}", "answers": {"text": ["Emma"], "answer_start": [0]}}
        for n in range(12)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert load_task("question_answering", data=tmp_path / "saved").train.spans[0] == (Span(0, "Emma"),)
    (tmp_path / "a.csv").write_text("text,label\nx,1\n")
    with pytest.raises(ConfigError, match=r"columns 'text', 'label'\. .* Name them, such as --columns question="):
        load_task("question_answering", data=tmp_path / "a.csv")
    named = [row | {"asked": row["question"], "question": ""} for row in rows]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, named)))
    task = load_task("question_answering", data=tmp_path / "b.jsonl", columns="question=asked")
    assert set(task.train.texts) == {"Who?"}


def test_what_cannot_be_learnt_is_said(tmp_path: Path) -> None:
    path = squad(tmp_path, contexts=3)
    path.write_text(path.read_text().replace('"answer_start": 5', '"answer_start": 6'))
    with pytest.raises(
        ConfigError, match=r"The context of 'Who came to town 0\?' does not have 'Rollo' at character 6\. Fix"
    ):
        load_task("question_answering", data=path)
    path.write_text('{"data": [{"paragraphs": [{"context": "x"}]}]}')
    with pytest.raises(MissingDataError, match="does not read: KeyError"):
        load_task("question_answering", data=path)
    with pytest.raises(ConfigError, match="contexts are too few"):
        load_task("question_answering", data=squad(tmp_path, contexts=2))
    with pytest.raises(ConfigError, match="Name a file, a folder"):
        load_task("question_answering")
    task = load_task("question_answering", data=squad(tmp_path))
    with pytest.raises(ConfigError, match=r"leaves no room for its context\. Raise max_length"):
        tokenize(task.train, load_tokenizer("tiny-bert"), max_length=8)
    with pytest.raises(ConfigError, match="has a decoder"):
        tokenize(task.train, load_tokenizer("tiny-t5"), max_length=64)


@pytest.mark.parametrize("model", ["tiny-bert", "tiny-gpt2", "all-MiniLM-L6-v2"])
def test_every_answer_is_in_a_window_and_all_of_the_context_is_read(model: str, tmp_path: Path) -> None:
    split = load_task("question_answering", data=squad(tmp_path)).train
    encoder = load_tokenizer(model)
    rows = tokenize(split, encoder, max_length=64)
    assert max(rows.lengths) <= 64 < len(encoder.locate([split.pairs[-1]])[0].ids)
    assert len(set(rows.sample_ids)) == len(rows) > len(split) and rows.left_out == 0
    results, read = set(), [0] * len(split)
    for window in rows.windows:
        assert window.offsets[0][0] <= read[window.sample], "a gap between two windows"
        read[window.sample] = window.offsets[-1][1]
        first, last = window.targets
        if first:
            spans = window.offsets[first - window.first][0], window.offsets[last - window.first][1]
            assert split.pairs[window.sample][slice(*spans)].strip() == split.spans[window.sample][0].text
            results.add(window.sample)
    assert read == [len(pair) for pair in split.pairs]
    assert sorted(rows.rows_of([0, 2]) + rows.rows_of([n for n in range(len(split)) if n not in (0, 2)])) == list(
        range(len(rows))
    )
    assert results == {sample for sample, spans in enumerate(split.spans) if spans}
    batch = collate(rows, [0, 1, 2])
    assert batch.labels.shape == (3, 2) and batch.labels.dtype == torch.int64


def test_an_answer_longer_than_a_window_is_left_out_and_counted() -> None:
    split = Split(
        texts=("Who?",) * 2,
        pairs=(LONG, LONG),
        labels=(1, 1),
        sample_ids=(0, 1),
        spans=((Span(0, LONG),), (Span(0, "the"),)),
    )
    rows = tokenize(split, load_tokenizer("all-MiniLM-L6-v2"), max_length=32)
    assert rows.left_out == 1
    assert {window.targets for window in rows.windows if window.sample == 0} == {(-100, -100)}


def certain(split: Split, rows, choose) -> Predictions:
    """Predictions that are sure of choose(window): first and last token, or none."""
    logits = torch.zeros(len(rows), max(rows.lengths), 2)
    for at, window in enumerate(rows.windows):
        first, last = choose(window)
        logits[at, first, 0] = logits[at, last, 1] = 9.0
    ids = torch.tensor(rows.sample_ids)
    return Predictions([logits], [torch.zeros(len(ids), 2)], [ids])


def test_the_best_window_answers_and_only_tasks_with_unanswerable_questions_may_say_nothing(tmp_path: Path) -> None:
    task = load_task("question_answering", data=squad(tmp_path))
    rows = tokenize(task.test, load_tokenizer("all-MiniLM-L6-v2"), max_length=32)
    right = certain(task.test, rows, lambda window: window.targets)
    assert score(task, task.test, rows, right) == {"answer_f1": 1.0, "exact_match": 1.0}
    nothing = score(task, task.test, rows, certain(task.test, rows, lambda window: (0, 0)))
    assert nothing["exact_match"] == task.test.labels.count(0) / len(task.test)
    answerable = load_task("question_answering", data=squad(tmp_path, impossible=False))
    rows = tokenize(answerable.test, load_tokenizer("all-MiniLM-L6-v2"), max_length=32)
    assert (
        score(answerable, answerable.test, rows, certain(answerable.test, rows, lambda window: window.targets))[
            "exact_match"
        ]
        == 1.0
    )


def official(text: str) -> list[str]:
    """The words of an answer as SQuAD's evaluation script has them."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def official_f1(accepted: str, found: str) -> float:
    """compute_f1 of the official evaluation script of SQuAD 2.0, which evaluate's squad_v2 runs."""
    gold, predicted = official(accepted), official(found)
    same = sum((Counter(gold) & Counter(predicted)).values())
    if not gold or not predicted:
        return float(gold == predicted)
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def test_scores_are_the_official_scripts() -> None:
    words = ["the", "a", "An", "Rollo,", "10th", "century.", "Normans'", "(of)", "x", "-", "!", ""]
    chance = random.Random(0)
    for _ in range(2000):
        result, one, other = (" ".join(chance.choices(words, k=chance.randint(0, 4))) for _ in range(3))
        assert answer_f1(result, one) == pytest.approx(official_f1(one, result), abs=1e-12)
        assert exact_match(result, one) == (official(one) == official(result))
        usable = [text for text in (one, other) if official(text)] or [""]
        assert mean_of(answer_f1, [result], [[one, other]]) == pytest.approx(
            max(official_f1(text, result) for text in usable), abs=1e-12
        )
    assert mean_of(exact_match, ["", "x"], [[], []]) == 0.5


def test_embedded_questions_are_about_their_contexts_and_need_no_data() -> None:
    task = load_task("questions")
    assert len(task.train) > 3000 and len(task.test) > 700 and set(task.train.labels) == {1}
    assert set(task.train.pairs).isdisjoint(task.test.pairs)
    for split in (task.train, task.validation, task.test):
        for question, context, (answer,) in zip(split.texts, split.pairs, split.spans, strict=True):
            assert context[answer.start : answer.start + len(answer.text)] == answer.text
            assert question.split()[0] in ("What", "Whose", "How", "Who")
    assert load_task("questions").train == task.train


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"text": ["lamp"], "answer_start": [2]}, (Span(2, "lamp"),)),
        ({"text": "lamp", "answer_start": 2}, (Span(2, "lamp"),)),
        ([{"text": "lamp", "answer_start": 2}, {"text": "a", "answer_start": 0}], (Span(2, "lamp"), Span(0, "a"))),
        ("{'text': ['lamp'], 'answer_start': [2]}", (Span(2, "lamp"),)),
        ('{"text": ["lamp"], "answer_start": [2]}', (Span(2, "lamp"),)),
        ("lamp", (Span(2, "lamp"),)),
        (["lamp"], (Span(2, "lamp"),)),
        *((none, ()) for none in (None, "", [], {"text": [], "answer_start": []})),
    ],
)
def test_forms_of_answers_in_a_table(tmp_path: Path, answers: Any, found: tuple[Span, ...]) -> None:
    rows = [{"question": f"q{n}?", "context": f"a lamp {n}", "answers": answers} for n in range(10)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert set(load_task("question_answering", data=tmp_path / "a.json").train.spans or ()) == {found}


@pytest.mark.parametrize(
    "answers",
    [
        "nowhere",
        "p",
        3,
        {"text": ["lamp"]},
        "{" * 5000,
        "{'text': array(['lamp'])}",
        {"text": [1, 2], "answer_start": [1]},
    ],
)
def test_answers_that_cannot_be_read_are_told_by_row(tmp_path: Path, answers: Any) -> None:
    rows = [{"question": "q?", "context": f"a lamp {n} pp", "answers": None if n else answers} for n in range(10)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match=r"Row 1 of train has .*, no list of texts with the places"):
        load_task("question_answering", data=tmp_path / "a.json")
