"""Own data: every format gives the same task, columns are found or named, and what cannot be learnt is told with its
column and row."""

import json
from pathlib import Path

import pytest

from tests.tasks.helpers import sizes
from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks import load_task
from workbench.tasks.batching import split_samples

WORDS = {"sad": "bad, awful", "fine": "okay", "glad": "good"}
ROWS = [{"Review": f"film {number} was {WORDS[name]}", "stars": name} for number, name in enumerate([*WORDS] * 34)]


def write(path: Path, rows: list[dict]) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        table.to_parquet(str(path))
    elif path.suffix == ".csv":
        table.to_csv(str(path))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        table.save_to_disk(str(path))
    return path


@pytest.mark.filterwarnings("ignore")
def test_every_format_gives_the_same_task(tmp_path: Path) -> None:
    tasks = [
        load_task("classification", data=write(tmp_path / name, ROWS))
        for name in ("a.csv", "a.jsonl", "a.parquet", "saved")
    ]
    first = tasks[0]
    assert (
        first.class_names == ("fine", "glad", "sad")
        and first.num_outputs == 3
        and first.metrics == ("accuracy", "macro_f1")
    )
    assert sizes(first) == [72, 10, 20]
    taken = sorted(
        (sample_id, text, first.class_names[int(label)])
        for split in (first.train, first.validation, first.test)
        for sample_id, text, label in zip(split.sample_ids, split.texts, split.labels, strict=True)
    )
    assert taken == [(number, row["Review"], row["stars"]) for number, row in enumerate(ROWS)]
    for task in tasks[1:]:
        assert (task.train, task.validation, task.test, task.class_names) == (
            first.train,
            first.validation,
            first.test,
            first.class_names,
        )


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_splits_pairs_and_numbers(tmp_path: Path) -> None:
    rows = [{"premise": f"p {number}", "hypothesis": "h", "how much": number / 4} for number in range(20)]
    for name in ("train.csv", "dev.csv", "test.csv"):
        write(tmp_path / name, rows if name == "train.csv" else rows[:5])
    task = load_task("regression", data=tmp_path, columns="label=how much")
    assert sizes(task) == [20, 5, 5]
    assert task.train.pairs == ("h",) * 20 and task.train.labels[3] == 0.75 and task.metrics == ("pearson", "spearman")
    with pytest.raises(ConfigError, match=r"numbers such as 0\.25\. Choose --task regression"):
        load_task("classification", data=tmp_path, columns="label=how much")


@pytest.mark.filterwarnings("ignore")
def test_a_folder_may_have_a_file_for_each_device(tmp_path: Path) -> None:
    for name in ("beta-2.csv", "alpha.csv", "test.csv"):
        write(
            tmp_path / name,
            [{"remark": f"{name} {number}", "stars": "good" if number % 2 else "bad"} for number in range(10)],
        )
    task = load_task("classification", data=tmp_path)
    assert task.train.sources is not None and len(task.test) == 10 and len(task.train) + len(task.validation) == 20
    assert all(
        text.startswith(f"{source}.csv") for text, source in zip(task.train.texts, task.train.sources, strict=True)
    )
    names = ("alpha", "beta-2")
    assert [
        {task.train.sources[row] for row in split_sample}
        for split_sample in split_samples(task.train, 2, "device", 0, names)
    ] == [{name} for name in names]
    with pytest.raises(
        ConfigError,
        match=r"A sample belongs to 'beta-2'\. Name one of these devices in each row, or each file after one",
    ):
        split_samples(task.train, 2, "device", 0, ("alpha", "gamma"))


@pytest.mark.filterwarnings("ignore")
def test_whole_numbers_and_words_that_look_missing_are_classes(tmp_path: Path) -> None:
    stars = write(tmp_path / "stars.csv", [{"text": f"t {number}", "label": number % 5 + 1} for number in range(20)])
    assert load_task("classification", data=stars).class_names == ("1", "2", "3", "4", "5")
    named = write(
        tmp_path / "named.csv", [{"text": f"t {number}", "label": ("None", "NA")[number % 2]} for number in range(20)]
    )
    assert load_task("classification", data=named).class_names == ("NA", "None")


@pytest.mark.filterwarnings("ignore")
def test_as_a_prompt(tmp_path: Path) -> None:
    task = load_task("classification", prompted=True, data=write(tmp_path / "a.csv", ROWS))
    sample = min(task.train.prompts, key=lambda one: one.sample_id)
    assert task.template.fill(sample.fields) == f"{ROWS[sample.sample_id]['Review']}\nLabel:"
    words = task.template.label_words
    assert words == ("fine", "glad", "sad") and words[sample.label] == ROWS[sample.sample_id]["stars"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "text", "columns", "message"),
    [
        (
            "classification",
            "a.csv",
            "question,context,answers\na,b,b\n",
            "",
            "usual for --task question_answering. Name",
        ),
        ("regression", "a.json", '[{"title": "a", "paragraphs": []}]', "", "usual for --task question_answering. Name"),
        (
            "classification",
            "a.json",
            '[{"tokens": ["a"], "ner_tags": [1]}]',
            "",
            "for --task token_classification. Name",
        ),
        ("classification", "a.csv", "prompt,completion\na,b\n", "", "are usual for --task instruction_tuning. Name"),
        ("classification", "a.json", '[{"messages": []}]', "", "are usual for --task instruction_tuning. Name"),
        ("token_classification", "a.csv", "text,label\na,b\n", "", "are usual for --task classification. Name"),
        ("instruction_tuning", "a.csv", "text,stars\na,b\n", "", "are usual for --task classification. Name"),
        ("classification", "a.csv", "a,b\n1,2\n", "", r"have the columns 'a', 'b'. Wanted is one of text, sentence"),
        ("classification", "a.csv", "text,what\nx,1\n", "", r"'text', 'what'. Wanted is one of label"),
        ("classification", "a.csv", "text,label\nx,a\n", "text=foo", "'text=foo' names no role or no column"),
        ("classification", "a.csv", "text,label\nx,1\ny,\nz,1\n", "", "Row 2 of train has no label"),
        ("classification", "a.csv", "text,label\nx,1\n,2\n", "", "Row 2 of train is empty"),
        ("classification", "a.csv", "text,label\nx,1\ny,1\n", "", "All 2 rows have the same label: 1"),
        (
            "classification",
            "a.csv",
            "text,label\nx,a\ny,b\nz,c\nu,d\n",
            "",
            "4 different values in 4 rows: these are not classes",
        ),
        ("classification", "a.csv", "text,label\nx,a\ny,b\n", "", "2 rows are too few"),
        ("classification", "a.csv", "text,label\n", "", "0 rows"),
        ("classification", "a.csv", "", "", "It is empty"),
        ("regression", "a.csv", "text,score\nx,1.5\ny,nan\n", "", "Row 2 of train has 'nan', which is not a number"),
        ("regression", "a.csv", "text,score\nx,1.5\ny,high\n", "", "Row 2 of train has 'high', which is not a number"),
        ("classification", "a.parquet", "no parquet", "", "does not read as parquet"),
        ("classification", "a.jsonl", '{"text": "a", "label": 1\n', "", "does not read as json"),
        ("classification", "a.docx", "hello", "", "Read are CSV, TSV, JSON, JSONL and Parquet files"),
    ],
)
def test_what_cannot_be_learnt(tmp_path: Path, kind: str, name: str, text: str, columns: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_task(kind, data=tmp_path / name, columns=columns)


@pytest.mark.filterwarnings("ignore")
def test_data_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="by --data"):
        load_task("classification")
    (tmp_path / "reviews.csv").write_text("x")
    with pytest.raises(MissingDataError, match=r"no such file or folder.*Did you mean 'reviews\.csv'"):
        load_task("classification", data=tmp_path / "review.csv")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr("workbench.tasks.published.hub_is_reachable", lambda: False)
    with pytest.raises(MissingDataError, match=r"'me/imaginary' is not in the local cache, .* cannot be reached"):
        load_task("classification", data="me/imaginary")
