"""GLUE files in all their spellings, and the real ones where they are."""

from pathlib import Path

import pytest

from tests.tasks.helpers import real_data
from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks import load_task

MRPC_ROWS = [
    (1, 'He said "yes.', "He said yes."),
    (0, "It's 4\u2028 parts", 'A "b" c'),
    (1, "Third one", "3rd one"),
] * 7
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def write(path: Path, lines: list[str], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((end.join(lines) + end).encode())


def mrpc_lines(header: str | None) -> list[str]:
    rows = [
        f"{label}\t{number}\t{number + 1}\t{first}\t{second}" for number, (label, first, second) in enumerate(MRPC_ROWS)
    ]
    return [header, *rows] if header else rows


@pytest.mark.parametrize("header", [None, HEADER, f"\ufeff{HEADER}"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("place", ["", "MRPC", "glue/MRPC"])
def test_mrpc_layouts(tmp_path, header, end, place):
    for split in ("train", "dev", "test"):
        write(tmp_path / place / f"{split}.tsv", mrpc_lines(header), end)
    task = load_task("mrpc", data=tmp_path)
    for part in (task.train, task.validation, task.test):
        assert list(zip(part.labels, part.texts, part.pairs, strict=True)) == MRPC_ROWS
    assert task.train.sample_ids[-1] + 1 == task.validation.sample_ids[0] and task.test.sample_ids[-1] == 62
    assert task.metrics == ("accuracy", "f1")


def test_stsb_with_and_without_header_and_secret_test(tmp_path):
    rows = [f"{n}\tg\tf\t2012\t0{n}\tnone\tnone\tfirst {n}\tsecond {n}\t{n / 10:.3f}" for n in range(40)]
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    write(tmp_path / "train.tsv", [header, *rows])
    write(tmp_path / "dev.tsv", rows[:5])
    write(tmp_path / "test.tsv", [header.removesuffix("\tscore"), *(row.rpartition("\t")[0] for row in rows)])
    task = load_task("stsb", data=tmp_path)
    assert task.kind == "regression" and task.num_outputs == 1
    assert task.test.texts == tuple(f"first {n}" for n in range(5)) and task.test.labels[3] == 0.3
    assert len(task.validation) == 4 and len(task.train) == 36
    assert not set(task.validation.sample_ids) & set(task.train.sample_ids)


def test_sst2_and_qnli(tmp_path):
    write(tmp_path / "SST-2" / "train.tsv", ["sentence\tlabel", *(f"text {n} \t{n % 2}" for n in range(20))])
    write(tmp_path / "SST-2" / "dev.tsv", ["sentence\tlabel", "good \t1"])
    write(tmp_path / "SST-2" / "test.tsv", ["index\tsentence", "0\tsecret"])
    task = load_task("sst2", data=tmp_path)
    assert task.test.texts == ("good ",) and task.train.pairs is None and len(task.validation) == 2
    rows = [f"{n}\tWhat {n}?\tAnswer {n}\t{'entailment' if n % 2 else 'not_entailment'}" for n in range(20)]
    for split in ("train", "dev"):
        write(tmp_path / "QNLI" / f"{split}.tsv", ["index\tquestion\tsentence\tlabel", *rows])
    qnli = load_task("qnli", data=tmp_path)
    assert qnli.test.labels[:2] == (1, 0) and qnli.test.pairs[3] == "Answer 3"


@pytest.mark.filterwarnings("ignore")
def test_a_saved_dataset(tmp_path):
    from datasets import Dataset, DatasetDict

    def rows(label):
        return Dataset.from_dict(
            {"question": ["q"] * 20, "sentence": ["s"] * 20, "label": [label] * 20, "idx": list(range(20))}
        )

    DatasetDict({"train": rows(0), "validation": rows(1), "test": rows(-1)}).save_to_disk(str(tmp_path / "qnli"))
    task = load_task("qnli", data=tmp_path)
    assert task.test.labels == (1,) * 20 and len(task.train) + len(task.validation) == 20
    again = load_task("qnli", data=tmp_path / "qnli")
    assert again.train == task.train and again.test == task.test


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1\ta\tb\tc"], "Line 1 has 4 unknown columns"),
        (["1\t1\t2\tfirst\tsecond", "1\t1\t2\tonly first"], "Line 2 has 4 columns, not 5"),
        (["maybe\t1\t2\tfirst\tsecond"], "line 1, has 'maybe'"),
        (["#1 String\t#2 String", "a\tb"], "no column Quality"),
    ],
)
def test_malformed_files(tmp_path, lines, message):
    write(tmp_path / "train.tsv", lines)
    write(tmp_path / "dev.tsv", mrpc_lines(None))
    with pytest.raises(ConfigError, match=message):
        load_task("mrpc", data=tmp_path)


def test_empty_files_and_folders(tmp_path):
    with pytest.raises(MissingDataError, match=r"holds train\.tsv"):
        load_task("mrpc", data=tmp_path)
    write(tmp_path / "train.tsv", [])
    write(tmp_path / "dev.tsv", mrpc_lines(None))
    with pytest.raises(ConfigError, match="0 samples"):
        load_task("mrpc", data=tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_without_the_hub_the_answer_says_data(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingDataError, match="--data FOLDER"):
        load_task("sst2")


@pytest.mark.skipif(
    real_data("glue") is None,
    reason="set WORKBENCH_TEST_DATA to a folder that holds glue/MRPC, glue/STS-B and glue/SST-2",
)
@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        (
            "mrpc",
            (2576, 1500, 1725),
            'Amrozi accused his brother, whom he called "the witness", of deliberately distorting his evidence.',
        ),
        ("stsb", (3825, 424, 1500), None),
        ("sst2", (66349, 1000, 872), None),
    ],
)
def test_the_real_files(name, sizes, text):
    task = load_task(name, data=real_data("glue"))
    assert (len(task.train), len(task.validation), len(task.test)) == sizes
    assert text is None or task.train.texts[0] == text
    assert all(text.strip() for text in task.test.texts) and not any("\ufeff" in text for text in task.test.texts)
    if name == "stsb":
        assert min(task.test.labels) == 0 and max(task.test.labels) == 5
