"""Words with classes: tables of tokens and tags, targets at each word's first token, F1 over whole entities as
conlleval has it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks.helpers import sizes
from workbench.core.errors import ConfigError
from workbench.models.evaluation import Predictions
from workbench.models.loading import load_tokenizer
from workbench.tasks import load_task
from workbench.tasks.metrics import entity_f1, score
from workbench.tasks.tokenize import collate, tokenize

ROWS = [
    {"tokens": ["Emma", "left", "Rouen", f"in {n}."[:2], str(900 + n)], "tags": ["B-PER", "O", "B-LOC", "O", "O"]}
    for n in range(20)
]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.filterwarnings("ignore")
def test_tags_become_classes_with_a_target_at_each_words_first_token(tmp_path: Path) -> None:
    task = load_task("token_classification", data=write(tmp_path / "a.jsonl", ROWS))
    assert task.class_names == ("O", "B-LOC", "B-PER") and task.num_outputs == 3
    assert sizes(task) == [14, 2, 4]
    for model in ("tiny-bert", "all-MiniLM-L6-v2", "tiny-gpt2"):
        rows = tokenize(task.train, load_tokenizer(model), max_length=64)
        assert all([label for label in window.targets if label >= 0] == [2, 0, 1, 0, 0] for window in rows.windows)
        batch = collate(rows, [0, 1, 2])
        assert batch.labels.shape == batch.input_ids.shape and (batch.labels[batch.attention_mask == 0] == -100).all()
    renamed = write(tmp_path / "b.jsonl", [{"w": row["tokens"], "t": row["tags"]} for row in ROWS])
    same = load_task("token_classification", data=renamed, columns="tokens=w,tags=t")
    assert same.train == task.train


@pytest.mark.filterwarnings("ignore")
def test_words_that_are_cut_count_as_outside(tmp_path: Path) -> None:
    task = load_task("token_classification", data=write(tmp_path / "a.jsonl", ROWS))
    encoder = load_tokenizer("all-MiniLM-L6-v2")
    for max_length, f1, accuracy, left_out in ((64, 1.0, 1.0, 0), (4, 2 / 3, 0.8, 4)):
        rows = tokenize(task.test, encoder, max_length=max_length)
        logits = torch.zeros(len(rows), max(rows.lengths), 3)
        for at, window in enumerate(rows.windows):
            for token, label in enumerate(window.targets):
                logits[at, token, max(label, 0)] = 5.0
        result = score(
            task, task.test, rows, Predictions([logits], [torch.zeros(len(rows), 2)], [torch.tensor(rows.sample_ids)])
        )
        assert (
            result == {"entity_f1": pytest.approx(f1), "accuracy": pytest.approx(accuracy)}
            and rows.left_out == left_out
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "", "Row 21 of train has 2 words and 1 tags"),
        ({"tokens": [], "tags": []}, "", "Row 21 of train has 0 words and 0 tags"),
        (ROWS[0], "tags=ner", r"The data have the columns 'tokens', 'tags'. Name them"),
        (ROWS[0], "text=tokens", "Name them, such as --columns tokens=NAME"),
    ],
)
def test_what_cannot_be_learnt_is_said(row: dict, columns: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_task("token_classification", data=write(tmp_path / "a.jsonl", [*ROWS, row]), columns=columns)


def conlleval(names: list[str]) -> set[tuple[str, int, int]]:
    """Entities by the start and end rules of conlleval, as seqeval writes them out one by one."""
    results, begin, before, kind_before = set(), 0, "O", ""
    for at, name in enumerate([*names, "O"]):
        mark, kind = name[0], name[1:].split("-", 1)[-1] or "_"
        end = before in "ES" or (before in "BI" and mark in "BSO") or (before != "O" and kind_before != kind)
        start = mark in "BS" or (before in "ESO" and mark in "EI") or (mark != "O" and kind_before != kind)
        if end:
            results.add((kind_before, begin, at - 1))
        begin = at if start else begin
        before, kind_before = mark, kind
    return results


def test_f1_over_entities() -> None:
    assert entity_f1([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "O"]]) == 1.0
    assert entity_f1([["B-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "B-LOC"]]) == 0.5
    assert entity_f1([["O", "O"]], [["O", "O"]]) == 0.0
    chance, names = random.Random(0), ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "E-LOC", "S-PER"]
    for _ in range(500):
        real = chance.choices(names, k=8)
        guess = [chance.choice([name, chance.choice(names)]) for name in real]
        one, other = conlleval(guess), conlleval(real)
        expected = 2 * len(one & other) / (len(one) + len(other)) if one or other else 0.0
        assert entity_f1([guess], [real]) == pytest.approx(expected, abs=1e-12)


def test_files_of_conll_s_format_are_the_same_data_as_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "conll"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        lines = [
            "-DOCSTART- -X- -X- O",
            "",
            *(line for row in ROWS for line in (*map(" NN I-NP ".join, zip(*row.values(), strict=True)), "")),
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "README.txt").write_text("One word is on each line.\nnothing", encoding="utf-8")
    task = load_task("token_classification", data=folder)
    table = load_task("token_classification", data=write(tmp_path / "a.jsonl", ROWS))
    assert (len(task.train), len(task.test), task.class_names) == (20, 20, table.class_names)
    rows = set(zip(table.train.texts, table.train.spans or (), strict=True))
    assert rows < set(zip(task.train.texts, task.train.spans or (), strict=True))
    (folder / "train.txt").write_text("Emma B-PER\nleft\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="Line 2 is 'left': a word without a tag"):
        load_task("token_classification", data=folder / "train.txt")
    (folder / "train.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="It has no sentence"):
        load_task("token_classification", data=folder / "train.txt")


def perfect(task: Any, encoder: Any) -> dict[str, float]:
    """Return the metrics of logits that are right at every token with a target."""
    rows = tokenize(task.test, encoder, max_length=64)
    logits = torch.zeros(len(rows), max(rows.lengths), task.num_outputs)
    for at, window in enumerate(rows.windows):
        for token, label in enumerate(window.targets):
            logits[at, token, max(label, 0)] = 5.0
    return score(
        task, task.test, rows, Predictions([logits], [torch.zeros(len(rows), 2)], [torch.tensor(rows.sample_ids)])
    )


@pytest.mark.parametrize("model", ["tiny-bert", "all-MiniLM-L6-v2", "SmolLM2-135M"])
@pytest.mark.parametrize("odd", ["\u200b", "\ufe0f", " ", "\u00ad", "\u200d", ""])
def test_a_word_without_tokens_moves_no_tag(tmp_path: Path, model: str, odd: str) -> None:
    rows = [{"tokens": [odd, "lamp", odd, "Rouen"], "tags": ["O", "B-X", "O", "B-LOC"]} for _ in range(10)]
    task = load_task("token_classification", data=write(tmp_path / "a.jsonl", rows))
    encoder = load_tokenizer(model)
    assert perfect(task, encoder) == {"entity_f1": 1.0, "accuracy": 1.0}
    for window in tokenize(task.train, encoder, max_length=64).windows:
        placed = {
            window.targets[window.first + at]: offset
            for at, offset in enumerate(window.offsets)
            if window.targets[window.first + at] > 0
        }
        text = task.train.texts[window.sample]
        assert {
            task.class_names[label]: text[start:stop].strip()[0].lower() for label, (start, stop) in placed.items()
        } == {
            "B-X": "l",
            "B-LOC": "r",
        }


@pytest.mark.parametrize(
    ("tags", "names", "learnt"),
    [
        ([*range(12)], [str(number) for number in range(12)], 12),
        ([1, 2, 3], ["1", "2", "3"], 3),
        ([-100, 0, 1], ["0", "1"], 2),
        (["-100", "B-X", "O"], ["O", "B-X"], 2),
    ],
)
def test_tags_as_numbers_and_words_that_are_not_learnt(
    tmp_path: Path, tags: list[Any], names: list[str], learnt: int
) -> None:
    rows = [{"tokens": [f"w{number}" for number in range(len(tags))], "ner_tags": tags} for _ in range(10)]
    task = load_task("token_classification", data=write(tmp_path / "a.jsonl", rows))
    assert list(task.class_names) == names
    encoder = load_tokenizer("tiny-bert")
    for window in tokenize(task.train, encoder, max_length=64).windows:
        labels = [label for label in window.targets if label >= 0]
        assert [names[label] for label in labels] == [str(tag) for tag in tags if str(tag) != "-100"] and len(
            labels
        ) == learnt
    assert perfect(task, encoder)["accuracy"] == 1.0


@pytest.mark.parametrize("tag", [None, "", ["O"]])
def test_a_word_without_a_tag_is_told(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"Word 2 of row 21 of train is 'b' and its tag .* Give every word a tag; -100 is"
    ):
        load_task(
            "token_classification", data=write(tmp_path / "a.json", [*ROWS, {"tokens": ["a", "b"], "tags": ["O", tag]}])
        )
