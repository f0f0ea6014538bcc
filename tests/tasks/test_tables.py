"""Reading people's files: what a cell says is kept, and what a reader cannot know is refused or told by row."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks import load_task
from workbench.tasks.tables import read_tables, split_of
from workbench.tasks.task import Split, Task

pytestmark = pytest.mark.filterwarnings("ignore")


def rows_of(task: Task) -> dict[str, Any]:
    """Return the label of every text, by class name."""
    parts: tuple[Split, ...] = (task.train, task.validation, task.test)
    return {
        text: task.class_names[int(label)] if task.class_names else label
        for part in parts
        for text, label in zip(part.texts, part.labels, strict=True)
    }


def write(path: Path, text: str | list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    content = text if isinstance(text, str) else "".join(json.dumps(row) + "\n" for row in text)
    path.write_text(content, encoding="utf-8", newline="")
    return path


def table(labels: list[str], head: str = "text,label") -> str:
    return "\n".join([head, *(f"w {number},{label}" for number, label in enumerate(labels))]) + "\n"


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("zeros", table(["007", "042"] * 4), {"007", "042"}),
        ("late", table([*["A1", "007"] * 5200, "007"]), {"007", "A1"}),
        ("huge", table([str(2**70), str(2**64 + 1)] * 4), {str(2**70), str(2**64 + 1)}),
        ("words", table(["NA", "null", "true"] * 4), {"NA", "null", "true"}),
        ("spaces", "\ufefftext ,label \nw 0,a\nw 1,b\nw 2,a\nw 3,b\n", {"a", "b"}),
        ("blank lines", "text,label\r\n\r\nw 0,a\r\nw 1,b\r\n\r\nw 2,a\r\nw 3,b", {"a", "b"}),
        ("trailing comma", table(["a,", "b,"] * 4), {"a", "b"}),
    ],
)
def test_cells_stay_what_they_say(tmp_path: Path, name: str, text: str, labels: set[str]) -> None:
    rows = rows_of(load_task("classification", data=write(tmp_path / f"{name}.csv", text)))
    assert set(rows.values()) == labels
    assert rows["w 1"] == next(line for line in text.splitlines() if line.startswith("w 1,")).strip(",").split(",")[1]


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.csv", "|"), ("a.tsv", ",")])
def test_the_header_says_what_stands_between_columns(tmp_path: Path, name: str, separator: str) -> None:
    text = table(list("abababab")).replace(",", separator)
    assert rows_of(load_task("classification", data=write(tmp_path / name, text)))["w 3"] == "b"


def test_a_link_to_nothing_is_not_its_own_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to(tmp_path / "nowhere.csv")
    with pytest.raises(MissingDataError, match=r"link to a file that does not exist\. Check --data"):
        load_task("classification", data=tmp_path / "a.csv")


def test_numbers_of_every_size_are_in_order(tmp_path: Path) -> None:
    data = write(tmp_path / "a.csv", table([str(number) for number in [10, 9, 2, -1, 2**70] * 4]))
    assert load_task("classification", data=data).class_names == ("-1", "2", "9", "10", str(2**70))


def test_a_numeric_column_with_a_blank_keeps_its_texts(tmp_path: Path) -> None:
    data = write(
        tmp_path / "a.csv", "id,text,label\n" + "".join(f",{number},{'ab'[number % 2]}\n" for number in range(1, 9))
    )
    assert set(rows_of(load_task("classification", data=data))) == {str(number) for number in range(1, 9)}


@pytest.mark.parametrize("odd", ["\x0b", "\x1c", "\x85", "\u2028", "\xa0"])
def test_only_line_ends_divide_lines(tmp_path: Path, odd: str) -> None:
    data = write(
        tmp_path / "a.csv", "".join(["text,label\n", *(f"w{odd}{number},{'ab'[number % 2]}\n" for number in range(8))])
    )
    assert len(rows_of(load_task("classification", data=data))) == 8
    words = write(tmp_path / "a.conll", "".join(f"w{odd}{number} O\nRouen B-LOC\n\n" for number in range(8)))
    task = load_task("token_classification", data=words)
    assert all(
        spans[0].text == text.removesuffix(" Rouen")
        for text, spans in zip(task.train.texts, task.train.spans or (), strict=True)
    )


def test_quotes_that_enclose_nothing_are_characters(tmp_path: Path) -> None:
    begin = {5: '"w', 25: '"w'}
    lines = [f"{begin.get(number, 'w')} {number},{'ab'[number % 2]}" for number in range(60)]
    task = load_task("classification", data=write(tmp_path / "a.csv", "\n".join(["text,label", *lines])))
    rows = rows_of(task)
    assert len(rows) == 60 and '"w 5' in rows
    assert "quotes are read as ordinary characters" in task.notes[0] and "line 27" in task.notes[0]


def test_a_cell_of_several_lines_is_told_by_row(tmp_path: Path) -> None:
    lines = [f'"w, {number}\nmore ""{number}""",{number % 2}' for number in range(8)]
    task = load_task("classification", data=write(tmp_path / "a.csv", "\n".join(["text,label", *lines])))
    assert 'w, 3\nmore "3"' in rows_of(task)
    assert task.notes == ("'a.csv': in 8 rows a quoted cell has several lines; the longest is row 8, lines 16 to 17.",)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", table(["a", "b, c"]), "row 2 has 3 cells and the header has 2; a cell with ',' needs quotes"),
        ("a.csv", 'text,label\n"w,a\nw,b,c\n', "line 3: unexpected end of data"),
        ("a.csv", "text,text,label\nx,y,a\n", "The column 'text' was to be read. Several columns have that name"),
        ("a.csv", "text,label,Label\nx,a,b\n", "The columns 'label', 'Label' differ in case or blanks only"),
        ("a.jsonl", '{"text": "x", "text": "y", "label": 1}\n', "line 1: an object has the name 'text' twice"),
        ("a.jsonl", "[" * 100_000, "Its brackets are nested too deep"),
        ("a.json", '{"a":' * 100_000, "Its brackets are nested too deep"),
        ("a.jsonl", "3\n", "row 1 is not an object of columns and values"),
        ("a.json", "3", "it is neither a list nor an object"),
        ("a.json", '"x"', "it is neither a list nor an object"),
        ("a.jsonl", '{"text": ["x"], "label": 1}\n', "Row 1 of train has ['x'], which is not text"),
        ("a.jsonl", '{"text": "x", "label": {"a": 1}}\n', "Row 1 of train has {'a': 1}, which is not a class"),
        ("a.csv", "text\0,label\n", "byte 4 is zero"),
        ("a.csv", table(["a", "b"]) + "w" * 1_000_001 + ",a\n", "Row 3 of train has 1,000,001 characters; at most"),
        ("a.csv", ",".join(f"column{number}" for number in range(5000)) + "\n" + "," * 4999 + "\n", "and 4,980 more"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task("classification", data=write(tmp_path / name, text))
    assert told in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize("value", ["1e300", "-1e19", "1e400", "inf", "1_000", "x"])
def test_a_number_that_cannot_be_learnt_is_told_by_row(tmp_path: Path, value: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"Row 3 of train has '{value}', which is not a number from -1e\+18 to 1e\+18"
    ):
        load_task("regression", data=write(tmp_path / "a.csv", table(["1", "2.5", value, "3"])))


def test_values_of_json_and_parquet_become_what_the_task_needs(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = [{"text": 7, "label": 3.0}, {"text": True, "label": 2}, {"text": "x", "label": True}]
    result = rows_of(load_task("classification", data=write(tmp_path / "a.json", json.dumps(rows * 2))))
    assert result == {"7": "3", "True": "2", "x": "True"}
    columns = {"text": [b"caf\xc3\xa9", b"tea"] * 3, "label": [1.0, 2.0] * 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert rows_of(load_task("classification", data=tmp_path / "a.parquet")) == {"café": "1", "tea": "2"}
    columns = {"text": [b"\xff"] * 3, "label": [["a"]] * 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="Row 1 of train has"):
        load_task("classification", data=tmp_path / "a.parquet")


def test_half_an_emoji_becomes_one_character_and_is_told(tmp_path: Path) -> None:
    rows = [{"text": f"w {number} \ud83d", "label": "ab"[number % 2]} for number in range(8)]
    task = load_task("classification", data=write(tmp_path / "a.jsonl", rows))
    assert task.train.texts[0].endswith(" \ufffd") and "8 rows hold broken characters" in task.notes[0]
    questions = [{"question": "what?", "answers": [{"text": "lamp", "answer_start": 5}]}]
    squad = {
        "data": [
            {"title": "a", "paragraphs": [{"context": f"nice lamp {n} \ud83d", "qas": questions} for n in range(8)]}
        ]
    }
    request = load_task("question_answering", data=write(tmp_path / "b.json", json.dumps(squad)))
    assert (request.train.pairs or ("",))[0].endswith("\ufffd") and "rows hold broken characters" in request.notes[0]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *(
            (name, "train")
            for name in ("train", "Train", "TRAIN", "train_data", "my-train-1", "trainSet", "Training", "reviewsTrain")
        ),
        *((name, "test") for name in ("test", "Test.v2", "test_data", "TESTData", "2024test")),
        *((name, "validation") for name in ("dev", "Val", "valid-00000-of-00002", "validation_matched")),
        *((name, None) for name in ("latest", "contest", "trainer", "alpha", "devil", "")),
    ],
)
def test_names_that_say_a_split(name: str, split: str | None) -> None:
    assert split_of(name) == split


def test_names_that_say_two_splits(tmp_path: Path) -> None:
    write(tmp_path / "d/train_test.csv", table(["a", "b"] * 4))
    with pytest.raises(ConfigError, match="Its name says train and test"):
        load_task("classification", data=tmp_path / "d")


@pytest.mark.parametrize(
    "names", [("Train.csv", "Test.csv"), ("train_data.csv", "test_data.csv"), ("TRAIN.CSV", "x-test.CSV")]
)
def test_test_rows_are_not_trained_on(tmp_path: Path, names: tuple[str, str]) -> None:
    train, test = names
    write(tmp_path / "d" / train, table(["a", "b"] * 4))
    write(tmp_path / "d" / test, table(["a", "b"] * 4).replace("w ", "held "))
    write(tmp_path / "d" / "._train.csv", "\x00\x05\x16\x07 a resource fork")
    task = load_task("classification", data=tmp_path / "d")
    assert all(text.startswith("w ") for text in task.train.texts) and all(
        text.startswith("held ") for text in task.test.texts
    )


@pytest.mark.parametrize("test", ["text\nx 1\nx 2\n", "text,label\nx 1,\nx 2,\n", "text,label\nx 1,-1\nx 2,-1\n"])
def test_a_test_split_without_labels_is_not_used(tmp_path: Path, test: str) -> None:
    write(tmp_path / "d/train.csv", table(["a", "b"] * 8))
    write(tmp_path / "d/test.csv", test)
    write(tmp_path / "d/sample_submission.csv", "text,label\nx 1,a\n")
    task = load_task("classification", data=tmp_path / "d")
    assert len(task.train) + len(task.validation) + len(task.test) == 16
    assert "Not read, because the names say no split: 'sample_submission.csv'." in task.notes[0]
    assert task.notes[1] == "The test split has no labels in a column 'label' and is not used."


@pytest.mark.parametrize("name", ["part [ab].csv", "part *.csv", "part ?.csv", "{a,b}.csv", "UPPER.CSV", "a.ndjson"])
def test_the_file_that_was_named_is_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "[x] *?"
    write(folder / "part a.csv", table(["a", "b"] * 4).replace("w ", "other "))
    rows = [{"text": f"w {number}", "label": "ab"[number % 2]} for number in range(8)]
    data = write(folder / name, table(["a", "b"] * 4) if name.lower().endswith("csv") else rows)
    assert all(text.startswith("w ") for text in rows_of(load_task("classification", data=data)))
    if name.lower().endswith("csv"):
        assert len(rows_of(load_task("classification", data=folder))) == 16


def test_a_folder_of_many_small_files(tmp_path: Path) -> None:
    for number in range(2000):
        write(tmp_path / f"d/r{number:05}.csv", f"text,label\nw {number},{'ab'[number % 2]}\n")
    result = read_tables("classification", tmp_path / "d")["train"]
    assert len(result) == 2000 and result.values("text")[7] == "w 7" and result.values("file")[7] == "r00007"
    write(tmp_path / "d/r3.csv", "Text,label\nw,a\n")
    with pytest.raises(ConfigError, match=r"has no column 'Text'"):
        read_tables("classification", tmp_path / "d")


def test_columns_whose_names_have_commas_and_blanks(tmp_path: Path) -> None:
    data = write(tmp_path / "a.csv", '"what, they said",stars \n' + "".join(f"w {n},{n % 2}\n" for n in range(8)))
    task = load_task("classification", data=data, columns="text=what, they said,label=stars")
    assert len(rows_of(task)) == 8 and task.class_names == ("0", "1")
    with pytest.raises(ConfigError, match="A role is named twice"):
        load_task("classification", data=data, columns="text=stars,text=stars")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("~nouser/x.csv", "There is no such user here"),
        ("n" * 300 + ".csv", "File name too long"),
        ("loop.csv", "Too many levels of symbolic links"),
        ("nowhere.csv", "It is a link to a file that does not exist"),
        ("folder", "It is a link to a file that does not exist"),
    ],
)
def test_paths_that_no_data_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.csv", "loop.csv")
    os.symlink("absent", "nowhere.csv")
    os.mkdir("folder")
    os.symlink("absent", "folder/b.csv")
    with pytest.raises((ConfigError, MissingDataError), match=told):
        load_task("classification", data=name)


def test_a_file_of_holes_is_refused_at_once(tmp_path: Path) -> None:
    import tracemalloc

    with open(tmp_path / "a.csv", "wb") as file:
        file.truncate(2 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="byte 0 is zero"):
            load_task("classification", data=tmp_path / "a.csv")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while data are read, so that a killed process leaves nothing either."""
    import tempfile

    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args, **named: pytest.fail("a temporary folder was made"))
    assert rows_of(load_task("classification", data=write(tmp_path / "a.csv", table(["a", "b"] * 4))))


def saved(path: Path, names: list[str], labels: list[int]) -> Any:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = {"text": [f"w {number}" for number in range(len(labels))], "label": labels}
    result = datasets.Dataset.from_dict(rows, features=features)
    result.save_to_disk(str(path))
    return result


def test_classes_are_their_names_whatever_their_numbers(tmp_path: Path) -> None:
    import datasets

    one, other = (
        saved(tmp_path / "one", ["neg", "pos"], [0, 1] * 4),
        saved(tmp_path / "other", ["pos", "neg"], [1, 0] * 4),
    )
    tasks = [load_task("classification", data=tmp_path / name) for name in ("one", "other")]
    assert rows_of(tasks[0]) == rows_of(tasks[1]) and [task.class_names for task in tasks] == [
        ("neg", "pos"),
        ("pos", "neg"),
    ]
    datasets.DatasetDict(train=one, test=other).save_to_disk(str(tmp_path / "both"))
    both = load_task("classification", data=tmp_path / "both")
    assert all(
        (both.class_names[int(label)] == "neg") == (int(text[2:]) % 2 == 0)
        for text, label in zip(both.test.texts, both.test.labels, strict=True)
    )
    named = load_task("classification", data=tmp_path / "other", class_names=("neg", "pos"))
    assert named.class_names == ("neg", "pos") and rows_of(named) == rows_of(tasks[0])
    with pytest.raises(
        ConfigError, match=r"Row 1 of train has 'neg'\. The data hold 'neg', 'pos'; the classes are 'bad', 'good'"
    ):
        load_task("classification", data=tmp_path / "one", class_names=("bad", "good"))
    with pytest.raises(ConfigError, match=r"Row 1 of train has '0'\. The data hold '0', '1'; the classes are '1', '2'"):
        load_task("classification", data=write(tmp_path / "a.csv", table(["0", "1"] * 4)), class_names=("1", "2"))
