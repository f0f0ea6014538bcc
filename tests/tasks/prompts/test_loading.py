"""The 13 tasks from their official files, and the prompts as the paper prints them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tasks.helpers import real_data, sizes
from tests.tasks.prompts.official_files import (
    FOLDERS,
    ROWS,
    passage,
    write_lines,
    write_official,
    write_rows,
    write_squad,
)
from workbench.core.errors import ConfigError, MissingDataError
from workbench.tasks import TASKS, benchmarks, load_task, published
from workbench.tasks.benchmarks import SHARES_OF_ONE
from workbench.tasks.prompts import PAPER_SAMPLES, PROMPTS
from workbench.tasks.task import PromptSample, Task, with_label_words, with_mobizo_prompt
from workbench.tasks.wording import MOBIZO_PROMPTS

# Table 8, filled in for the first sample of each official file: prompt, and what is to follow it.
PRINTED = {
    "sst2": ("film 0 It was", " terrible"),
    "rte": ('It rained 0 days. Does this mean that "It was wet." is true? Yes or No?\n', "Yes"),
    "mrpc": (
        "Do the following two sentences mean the same thing? Yes or No?\nSentence 1: One 0\nSentence 2: Two\n",
        "No",
    ),
    "qqp": ("Are these two questions asking the same thing? Yes or No?\nQuestion 1: How 0?\nQuestion 2: Why?\n", "No"),
    "qnli": ("Does this sentence answer the question? Yes or No?\nSentence 1: Who 0?\nSentence 2: He.\n", "Yes"),
    "wnli": (
        "Given the first sentence, is the second sentence true? Yes or No?\nSentence 1: One 0.\nSentence 2: Two.\n",
        "No",
    ),
    "boolq": (f"{passage(0)} Is tea hot?\n", "No"),
    "wsc": (
        'Ann called Eve 0 times, but She was out. In the previous sentence, does the pronoun "she" refer to Eve?\n',
        "No",
    ),
    "wic": (
        'Does the word "bank" have the same meaning in these two sentences?\nHe sat on bank 0. The bank lent '
        "it.\nYes, No?\n",
        "No",
    ),
    "multirc": (
        f'{passage(0)} Question: What is tea?\nI found this answer "Hot". Is that correct?\nYes or No?\n',
        "Yes",
    ),
    "copa": ("The sun rose 0 times because", " the grass grew."),
    "winogrande": ("The cup 0 did not fit in the box as the", " cup was too small."),
    "squad": (f"Title: Title_0\nContext: {passage(0)}\nQuestion: What is hot 0?\nAnswer:", " tea\n"),
}


# As MobiZO's code verbalizes the same samples.
MOBIZO = {
    "rte": 'It rained 0 days.\nDoes this mean that "It was wet." is true? Yes or No? Yes',
    "mrpc": f"{PRINTED['mrpc'][0]} No",
    "qqp": f"{PRINTED['qqp'][0]} No",
    "qnli": "Does this sentence answer the question? Yes or No?\nQuestion: Who 0?\nSentence: He.\n No",
    "wnli": f"{PRINTED['wnli'][0]} No",
    "boolq": f"{passage(0)} Is tea hot? No",
    "wsc": "Ann called Eve 0 times, but She was out.\nIn the previous sentence, does the pronoun "
    '"she" refer to? Eve? Yes or No? No',
    "wic": 'Does the word "bank" have the same meaning in these two sentences? Yes, No?\n'
    "He sat on bank 0.\nThe bank lent it.\n No",
    "multirc": f'{passage(0)}\nQuestion: What is tea?\nI found this answer "Hot". Is that correct? Yes or No? Yes',
}


def load_prompts(name: str, **settings: Any) -> Task:
    return load_task(name, prompted=True, **settings)


def following(task: Task, sample: PromptSample) -> str:
    prompt = task.template
    templates = prompt.words or prompt.candidates or (prompt.answer,)
    return templates[sample.label].format_map(sample.fields)


@pytest.mark.parametrize("name", PRINTED)
def test_official_files_read_as_printed(tmp_path: Path, name: str) -> None:
    write_official(tmp_path, name)
    task = load_prompts(name, data=tmp_path)
    splits = (task.train, task.validation, task.test)
    samples = sorted((sample for split in splits for sample in split.prompts), key=lambda sample: sample.sample_id)
    first = min(task.test.prompts, key=lambda sample: sample.sample_id)
    for sample in (samples[0], first):
        assert (task.template.fill(sample.fields), following(task, sample)) == PRINTED[name]
    share = 1 if name in ("sst2", "mrpc", "qqp", "qnli") else 4 if name in ("multirc", "squad") else 2
    assert (len(task.validation), len(task.train) + len(task.validation)) == (
        share,
        20 if name in ("multirc", "squad") else 10,
    )
    assert len({sample.sample_id for sample in samples}) == len(samples)
    assert task.metric == ("f1" if name == "squad" else "accuracy")
    assert load_prompts(name, data=tmp_path) == task
    few = load_prompts(name, data=tmp_path, train_samples=5, validation_samples=1, test_samples=3)
    assert (few.train, few.validation, few.test) == tuple(
        split.take(range(count)) for split, count in zip(splits, (5, 1, 3), strict=True)
    )


def test_all_13_tasks_have_a_prompt() -> None:
    assert set(PROMPTS) == {*PRINTED, "sentiment"} and len(PRINTED) == 13
    assert set(PROMPTS) - set(TASKS) == {"copa", "winogrande", "squad"}


def flat_rows(name: str) -> list[dict]:
    """A task's rows as the hub has them."""
    if name == "wsc":
        return [{**row, **row["target"], "label": int(row["label"])} for row in ROWS[name]]
    if name == "multirc":
        return [dict(flat) for row in ROWS[name] for flat in benchmarks._flat_multirc(row)]
    if name == "rte":
        return [{**row, "label": int(row["label"] == "not_entailment")} for row in ROWS[name]]
    return [{**row, "label": int(row["label"])} if "label" in row else row for row in ROWS[name]]


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "rte"])
def test_the_hubs_tables_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """RTE is taken from GLUE there."""
    write_official(tmp_path, name)
    table = flat_rows(name)
    secret = [{**row, "answer": ""} if name == "winogrande" else {**row, "label": -1} for row in table]
    requests = []
    monkeypatch.setattr(
        published,
        "hub_dataset",
        lambda *names: requests.append(names) or {"train": table, "validation": table, "test": secret},
    )
    actual, expected = load_prompts(name), load_prompts(name, data=tmp_path)
    assert (actual.train, actual.validation, actual.test) == (expected.train, expected.validation, expected.test)
    assert requests[0][0] == name and requests[0][2] in (name, "wsc.fixed", "winogrande_debiased")


def test_a_data_set_with_a_script_is_taken_as_the_hub_converted_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(*names: object, **settings: object) -> dict:
        calls.append((names, settings))
        if len(calls) == 1:
            raise RuntimeError("Dataset scripts are no longer supported, but found super_glue.py")
        return {"train": flat_rows("wic"), "validation": flat_rows("wic")}

    module = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_HUB_OFFLINE=False))
    monkeypatch.setitem(__import__("sys").modules, "datasets", module)
    monkeypatch.setattr("workbench.tasks.published.hub_is_reachable", lambda: False)
    assert len(load_prompts("wic").test) == 10 and module.config.HF_HUB_OFFLINE is False
    assert calls == [
        (("aps/super_glue", "wic"), {}),
        (("aps/super_glue",), {"data_dir": "wic", "revision": "refs/convert/parquet"}),
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_saved_data_set(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    table = Dataset.from_list(
        [{key: row[key] for key in ("word", "sentence1", "sentence2", "label")} for row in flat_rows("wic")]
    )
    DatasetDict({"train": table, "validation": table}).save_to_disk(str(tmp_path / "saved" / "wic"))
    write_official(tmp_path / "official", "wic")
    actual, expected = (load_prompts("wic", data=tmp_path / place) for place in ("saved", "official"))
    assert (actual.train, actual.validation, actual.test) == (expected.train, expected.validation, expected.test)


def test_superglues_rte_and_glues_are_the_same(tmp_path: Path) -> None:
    write_official(tmp_path / "one", "rte")
    rows = [f"{n}\tIt rained {n} days.\tIt was wet.\t{('entailment', 'not_entailment')[n % 2]}" for n in range(10)]
    for split in ("train", "dev"):
        write_lines(tmp_path / "other" / "RTE" / f"{split}.tsv", ["index\tsentence1\tsentence2\tlabel", *rows])
    one, other = (load_prompts("rte", data=tmp_path / place) for place in ("one", "other"))
    read = [{(sample.fields["premise"], sample.label) for sample in task.test.prompts} for task in (one, other)]
    assert read[0] == read[1]
    assert load_task("rte", data=tmp_path / "other").test.pairs == ("It was wet.",) * 10


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_samples_of_one_text_stay_together(tmp_path: Path, version: str) -> None:
    """Of one file all three splits are drawn; version 2.0's questions without an answer are left out."""
    write_squad(tmp_path / f"dev-v{version}.json", 25, version=version)
    task = load_prompts("squad", data=tmp_path)
    parts = [
        {sample.fields["context"] for sample in split.prompts} for split in (task.train, task.validation, task.test)
    ]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 25
    assert sizes(task) == [round(50 * share) for share in SHARES_OF_ONE]
    assert all(sample.answers == ("tea", "that tea") for sample in task.test.prompts)


def test_broken_rows_of_qqp_are_left_out_as_its_own_reader_does(tmp_path: Path) -> None:
    write_official(tmp_path, "qqp")
    path = tmp_path / "QQP" / "train.tsv"
    path.write_text(path.read_text() + "11\tbroken\n")
    assert len(load_prompts("qqp", data=tmp_path).train) == 9


def test_the_class_of_a_prompt_alone_is_a_task_like_any_other(tmp_path: Path) -> None:
    write_official(tmp_path, "wic")
    task = load_task("wic", data=tmp_path, train_samples=4)
    assert len(task.train) == 4 and task.kind == "classification" and task.num_outputs == 2
    assert (
        sorted(task.test.texts)[0] == PRINTED["wic"][0].strip()
        and set(task.test.labels) == {0, 1}
        and task.test.pairs is None
    )
    write_official(tmp_path, "boolq")
    boolq = load_task("boolq", data=tmp_path)
    assert set(boolq.test.texts) == {"Is tea hot?"} and sorted(boolq.test.pairs)[0] == passage(0)


@pytest.mark.parametrize("name", PRINTED)
def test_mobizos_prompts_are_those_of_its_code(tmp_path: Path, name: str) -> None:
    write_official(tmp_path, name)
    printed = load_prompts(name, data=tmp_path)
    task = with_mobizo_prompt(printed)
    if name not in MOBIZO:
        assert task == printed
        return
    [first] = [
        sample for split in (printed.train, printed.validation) for sample in split.prompts
        if printed.template.fill(sample.fields) == PRINTED[name][0]
    ]  # fmt: skip
    assert task.template.fill(first.fields) + task.template.words[first.label] == MOBIZO[name]
    assert set(MOBIZO_PROMPTS) == set(MOBIZO)


def test_other_label_words(tmp_path: Path) -> None:
    write_official(tmp_path, "sst2")
    task = load_prompts("sst2", data=tmp_path)
    assert task.template.label_words == ("terrible", "great")
    assert with_label_words(task, ("bad", " good ")).template.words == (" bad", " good")
    for words in (("bad",), ("bad", "bad"), ("bad", " ")):
        with pytest.raises(ConfigError, match="It has 2 classes: terrible/great"):
            with_label_words(task, words)
    write_official(tmp_path, "squad")
    with pytest.raises(ConfigError, match="question answering, without classes"):
        with_label_words(load_prompts("squad", data=tmp_path), ("a", "b"))


@pytest.mark.parametrize(
    ("name", "file", "line", "message"),
    [
        ("boolq", "train.jsonl", '{"question": "is it", "passage": "no"', "Line 11 is not JSON"),
        ("boolq", "train.jsonl", "[1]", "Line 11 is not a JSON object"),
        ("boolq", "train.jsonl", '{"question": "is it", "label": true}', "line 11, lacks a field.*passage"),
        (
            "boolq",
            "train.jsonl",
            '{"question": "is it", "passage": "no", "label": "maybe"}',
            "line 11, has the label 'maybe'",
        ),
        ("boolq", "train.jsonl", '{"question": "is it", "passage": "no"}', "line 11, has no label"),
        (
            "copa",
            "val.jsonl",
            '{"premise": "a", "choice1": "b", "choice2": "c", "question": "why", "label": 0}',
            "the question 'why'",
        ),
        (
            "winogrande",
            "dev.jsonl",
            '{"sentence": "No gap.", "option1": "a", "option2": "b", "answer": "1"}',
            "without a blank",
        ),
        ("multirc", "val.jsonl", '{"passage": "flat"}', "line 11, lacks a field"),
    ],
)
def test_malformed_files_name_the_line(tmp_path: Path, name: str, file: str, line: str, message: str) -> None:
    write_official(tmp_path, name)
    path = tmp_path / FOLDERS[name] / file
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_prompts(name, data=tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"BoolQ/ holds train\.jsonl and val\.jsonl"):
        load_prompts("boolq", data=tmp_path)
    with pytest.raises(ConfigError, match="Did you mean 'winogrande'"):
        load_prompts("winogrand")
    (tmp_path / "dev-v1.1.json").write_text("{}")
    with pytest.raises(MissingDataError, match="was to be read as SQuAD"):
        load_prompts("squad", data=tmp_path)
    write_rows(tmp_path / "val.jsonl", ROWS["boolq"][:1])
    write_rows(tmp_path / "train.jsonl", ROWS["boolq"][:1])
    with pytest.raises(ConfigError, match="validation split has 0 samples"):
        load_prompts("boolq", data=tmp_path)


@pytest.mark.skipif(
    real_data("squad") is None, reason="set WORKBENCH_TEST_DATA to a folder that holds glue/MRPC and squad"
)
@pytest.mark.parametrize(("name", "place"), [("mrpc", ""), ("squad", "squad")])
def test_the_papers_sampling_of_the_real_files(name: str, place: str) -> None:
    task = load_prompts(name, data=real_data("squad") / place, **PAPER_SAMPLES)
    assert sizes(task) == [1000, 500, 1000]
    assert name == "squad" or 0.4 < sum(task.train.labels) / 1000 < 0.75
