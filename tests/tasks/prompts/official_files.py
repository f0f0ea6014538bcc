"""Small files in the official formats, of our own making: ten samples a task and split."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_lines(path, (json.dumps(row) for row in rows))


def passage(number: int) -> str:
    return f"Text {number} says that tea is hot."


ROWS = {
    "rte": [
        {
            "premise": f"It rained {n} days. ",
            "hypothesis": "It was wet.",
            "label": ("entailment", "not_entailment")[n % 2],
            "idx": n,
        }
        for n in range(10)
    ],
    "boolq": [{"question": "is tea hot", "passage": passage(n), "idx": n, "label": n % 2 == 1} for n in range(10)],
    "wsc": [
        {
            "text": f"Ann called Eve {n} times, but She was out.",
            "target": {"span1_text": "Eve", "span1_index": 2, "span2_text": "She", "span2_index": 6},
            "idx": n,
            "label": n % 2 == 1,
        }
        for n in range(10)
    ],
    "wic": [
        {
            "word": "bank",
            "sentence1": f"He sat on bank {n}.",
            "sentence2": "The bank lent it.",
            "idx": n,
            "label": n % 2 == 1,
        }
        for n in range(10)
    ],
    "multirc": [
        {
            "idx": n,
            "passage": {
                "text": passage(n),
                "questions": [
                    {
                        "question": "What is tea?",
                        "idx": 0,
                        "answers": [{"text": "Hot", "idx": 0, "label": 1}, {"text": "Cold", "idx": 1, "label": 0}],
                    }
                ],
            },
        }
        for n in range(10)
    ],
    "copa": [
        {
            "premise": f"The sun rose {n} times.",
            "choice1": "The grass grew.",
            "choice2": "I slept.",
            "question": ("cause", "effect")[n % 2],
            "label": n % 2,
            "idx": n,
        }
        for n in range(10)
    ],
    "winogrande": [
        {
            "qID": f"q{n}-1",
            "sentence": f"The cup {n} did not fit in the box as the _ was too small.",
            "option1": "cup",
            "option2": "box",
            "answer": str(1 + n % 2),
        }
        for n in range(10)
    ],
}
FOLDERS = {
    "rte": "RTE",
    "boolq": "BoolQ",
    "wsc": "WSC",
    "wic": "WiC",
    "multirc": "MultiRC",
    "copa": "COPA",
    "winogrande": "winogrande_1.1",
}
GLUE_ROWS = {
    "sst2": ("SST-2", "sentence\tlabel", "film {n} \t{label}"),
    "mrpc": ("MRPC", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{label}\t1\t2\tOne {n}\tTwo"),
    "qqp": ("QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{n}\t1\t2\tHow {n}?\tWhy?\t{label}"),
    "qnli": ("QNLI", "index\tquestion\tsentence\tlabel", "{n}\tWho {n}?\tHe.\t{name}"),
    "wnli": ("WNLI", "index\tsentence1\tsentence2\tlabel", "{n}\tOne {n}.\tTwo.\t{label}"),
}


def write_official(folder: Path, name: str) -> None:
    """Write a task's files as they are published: the test labels are secret, or there is no test file."""
    if name in GLUE_ROWS:
        place, header, row = GLUE_ROWS[name]
        lines = [row.format(n=n, label=n % 2, name=("entailment", "not_entailment")[n % 2]) for n in range(10)]
        for split in ("train", "dev"):
            write_lines(folder / place / f"{split}.tsv", [header, *lines])
    elif name == "squad":
        for split, count in (("train", 10), ("dev", 6)):
            write_squad(folder / f"{split}-v1.1.json", count)
    else:
        files = {"train": "train_xl", "val": "dev"} if name == "winogrande" else {"train": "train", "val": "val"}
        for file in files.values():
            write_rows(folder / FOLDERS[name] / f"{file}.jsonl", ROWS[name])
        if name != "winogrande":
            secret = [{key: value for key, value in row.items() if key != "label"} for row in ROWS[name]]
            write_rows(folder / FOLDERS[name] / "test.jsonl", without_labels(secret))


def without_labels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = json.dumps(rows).replace(', "label": 1', "").replace(', "label": 0', "")
    return json.loads(text)


def write_squad(path: Path, paragraphs: int, *, version: str = "1.1") -> None:
    """Write two questions for each paragraph; in version 2.0 one more, which has no answer."""
    articles = [
        {
            "title": f"Title_{n}",
            "paragraphs": [
                {"context": f"{passage(n)} ", "qas": [question(n, at) for at in range(2 if version == "1.1" else 3)]}
            ],
        }
        for n in range(paragraphs)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": version, "data": articles}), encoding="utf-8")


def question(number: int, at: int) -> dict[str, Any]:
    answers = [{"text": text, "answer_start": passage(number).index(text)} for text in ("tea", "that tea", "tea")]
    result = [] if at == 2 else answers
    return {"id": f"{number}-{at}", "question": f" What is hot {at}?", "answers": result, "is_impossible": at == 2}
