"""Instruction tuning: Alpaca's files, the token that each token predicts, and what the embedded rows
hold."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.tasks.helpers import sizes
from workbench.core.errors import ConfigError
from workbench.models.evaluation import Predictions
from workbench.models.loading import load_tokenizer
from workbench.tasks import load_task
from workbench.tasks.metrics import quality, score
from workbench.tasks.tokenize import IGNORED, collate, tokenize

ROWS = [
    {"instruction": f"Say {n}.", "input": "" if n % 2 else "As a word.", "output": f"number {n}"} for n in range(20)
]


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def test_the_embedded_instructions_are_made_of_the_rated_sentences() -> None:
    task, rated = load_task("instructions"), load_task("sentiment-rating")
    assert sizes(task) == [2000, 200, 400]
    assert task.kind == "text_generation" and not {*task.train.pairs} & {*task.test.pairs}
    likes = "Does the writer like it? Answer yes or no."
    for instruction, given, answer in zip(task.test.texts, task.test.pairs, task.test.answers, strict=True):
        if instruction == likes:
            own = {
                rating > 0 for text, rating in zip(rated.test.texts, rated.test.labels, strict=True) if text == given
            }
            assert (answer == "Yes") in own
        else:  # answers stand in the sentence
            assert answer.lower() in " ".join(given.split()).lower(), (instruction, given)


@pytest.mark.filterwarnings("ignore")
def test_alpacas_files_are_read_with_or_without_an_input(tmp_path: Path) -> None:
    task = load_task("instruction_tuning", data=write(tmp_path / "a.json", ROWS))
    assert sizes(task) == [14, 2, 4]
    reference = task.train + task.validation + task.test
    results = sorted(zip(reference.texts, reference.pairs, reference.answers, strict=True))
    assert results == sorted((row["instruction"], row["input"], row["output"]) for row in ROWS)
    renamed = write(
        tmp_path / "b.json", [{"ask": row["instruction"], "input": row["input"], "say": row["output"]} for row in ROWS]
    )
    assert load_task("instruction_tuning", data=renamed, columns="instruction=ask,output=say").train == task.train


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        (
            {"instruction": " ", "input": "", "output": "a"},
            "",
            "The column 'instruction' was to be read. Row 21 of train is empty.",
        ),
        (
            {"instruction": "a", "input": "", "output": None},
            "",
            "The column 'output' was to be read. Row 21 of train is empty.",
        ),
        (ROWS[0], "output=reply", "The data have the columns 'instruction', 'input', 'output'. Name them"),
        (ROWS[0], "text=input", "The data have the columns 'instruction', 'input', 'output'. Name them"),
    ],
)
def test_unusable_rows_and_columns_are_named(row: dict, columns: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_task("instruction_tuning", data=write(tmp_path / "a.json", [*ROWS, row]), columns=columns)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("asked", "answered"), [("prompt", "completion"), ("Question", "Response")])
def test_usual_names_of_the_columns_need_not_be_given(asked: str, answered: str, tmp_path: Path) -> None:
    rows = [{asked: row["instruction"], "input": row["input"], answered: row["output"]} for row in ROWS]
    task = load_task("instruction_tuning", data=write(tmp_path / "a.json", rows))
    assert task.train == load_task("instruction_tuning", data=write(tmp_path / "b.json", ROWS)).train


def conversation(kind: str, *texts: tuple[str, str]) -> dict[str, Any]:
    """Return a row as chat models are trained with."""
    if kind == "messages":
        return {"messages": [{"role": writer, "content": text} for writer, text in texts]}
    names = {"user": "human", "assistant": "gpt"}
    return {"id": 7, "conversations": [{"from": names.get(writer, writer), "value": text} for writer, text in texts]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["messages", "conversations"])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_conversations_teach_their_first_answer_and_a_note_counts_those_that_go_on(
    kind: str, ending: str, tmp_path: Path
) -> None:
    rows = [
        conversation(kind, ("user", row["instruction"]), ("assistant", row["output"]), *[("user", "Why?")] * (n < 3))
        for n, row in enumerate(ROWS)
    ]
    rows.append(conversation(kind, ("system", "Be brief."), ("user", "Who?"), ("assistant", "We.")))
    path = tmp_path / f"a{ending}"
    if ending == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    task = load_task("instruction_tuning", data=path)
    reference = task.train + task.validation + task.test
    expected = {(row["instruction"], row["output"]) for row in ROWS} | {("Be brief.\n\nWho?", "We.")}
    assert set(zip(reference.texts, reference.answers or (), strict=True)) == expected and set(
        reference.pairs or ()
    ) == {""}
    assert task.notes == ("3 of 21 conversations go on after the first answer; that is not learnt.",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "value",
    [
        "a text",
        [],
        ["a text"],
        [{"role": "user", "content": "Who?"}],
        [{"role": "assistant", "content": "We."}, {"role": "user", "content": "Who?"}],
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": " "}],
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "Who?"}, {"role": "tool", "content": "We."}],
        [{"role": ["user"], "content": "Who?"}, {"role": "assistant", "content": "We."}],
    ],
)
def test_a_row_that_is_no_conversation_is_named(value: Any, tmp_path: Path) -> None:
    good = conversation("messages", ("user", "Who?"), ("assistant", "We."))
    with pytest.raises(ConfigError, match=r"column 'messages' were to be read\. Row 2 of train does not begin"):
        load_task("instruction_tuning", data=write(tmp_path / "a.json", [good, {"messages": value}]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["tiny-gpt2", "SmolLM2-135M"])
def test_a_token_of_the_answer_is_the_target_of_the_token_before_it(model: str, tmp_path: Path) -> None:
    encoder = load_tokenizer(model)
    task = load_task("instruction_tuning", data=write(tmp_path / "a.json", ROWS))
    rows = tokenize(task.train, encoder, max_length=400)
    assert rows.left_out == 0
    columns = (task.train.texts, task.train.pairs, task.train.answers)
    for ids, window, text, given, answer in zip(rows.ids, rows.windows, *columns, strict=True):
        learnt = [at for at, target in enumerate(window.targets) if target != IGNORED]
        assert learnt == list(range(window.first - 1, len(ids) - 1)) and [window.targets[at] for at in learnt] == [
            *ids[window.first :]
        ]
        assert ids[-1] == encoder.end_id and encoder.decode(ids[window.first : -1]).replace(" ##", "") == answer
        assert list(ids[: window.first]) == encoder.instruct(text, given)
    batch = collate(rows, [0, 1, 2])
    assert batch.labels.shape == batch.input_ids.shape and (batch.labels[batch.attention_mask == 0] == IGNORED).all()
    longest = max(rows.lengths)
    cut = tokenize(task.train, encoder, max_length=longest - 1)
    assert cut.left_out == rows.lengths.count(longest) and max(cut.lengths) == longest - 1
    with pytest.raises(ConfigError, match=rf"None begins there: with its answer, a text has \d+ to {longest} tokens"):
        tokenize(task.train, encoder, max_length=8)


@pytest.mark.filterwarnings("ignore")
def test_the_score_is_the_mean_over_samples_whose_answer_begins_and_less_loss_is_better(tmp_path: Path) -> None:
    task = load_task("instruction_tuning", data=write(tmp_path / "a.json", ROWS))
    labels = torch.tensor([[IGNORED, 3], [IGNORED, 2], [IGNORED, IGNORED], [1, 1]])
    predicted = Predictions(
        [torch.tensor([[1.0, 1.0], [2.0, 0.0], [0.0, 0.0], [6.0, 0.5]])], [labels], [torch.arange(4)]
    )
    result = score(task, task.test, tokenize(task.test, load_tokenizer("tiny-gpt2"), max_length=400), predicted)
    assert result == {"loss": pytest.approx(3.0), "token_accuracy": pytest.approx(0.5)}
    assert quality(task, {"loss": 1.0}) > quality(task, {"loss": 2.0})


@pytest.mark.parametrize("value", [0, "0", False, 0.0])
def test_zero_is_a_value(tmp_path: Path, value: Any) -> None:
    rows = [{"instruction": "Is it even?", "input": value, "output": value} for _ in range(6)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    task = load_task("instruction_tuning", data=tmp_path / "a.json")
    assert (task.train.pairs or ("",))[0] == (task.train.answers or ("",))[0] == str(value)


@pytest.mark.parametrize("role", ["instruction", "input", "output"])
def test_a_list_is_no_text(tmp_path: Path, role: str) -> None:
    rows = [
        {"instruction": "Say it.", "input": "", "output": "yes"} | ({role: ["a"]} if n == 2 else {}) for n in range(6)
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with pytest.raises(
        ConfigError, match=rf"The column '{role}' was to be read. Row 3 of train has \['a'\], which is not text"
    ):
        load_task("instruction_tuning", data=tmp_path / "a.json")
