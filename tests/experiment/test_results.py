"""From a CSV of a hundred rows in three classes to a predicted sentence, by every method; by peft or transformers alone
where they can."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from in_process import answer, call
from tiny_job import two_devices

from tests.experiment.running import run
from workbench import experiment
from workbench.core import Job
from workbench.core.errors import ConfigError
from workbench.methods.common.result import LoadedResult, load_result
from workbench.methods.pac_plus import method as pac_plus
from workbench.models.loading import load_model
from workbench.models.saving import save_tokenizer

CLASSES = ("bad", "fine", "good")
SENTENCES = ("the film was bad", "a fine town", "good people and good news")
FORMS = {
    "pac_plus": ("edge-llm-workbench", "parallel_adapters"),
    "lora": ("peft", "lora"),
    "full": ("transformers", "full"),
    "adapters": ("edge-llm-workbench", "adapters"),
    "p_rge": ("peft", "lora_fa"),
    "ringada": ("edge-llm-workbench", "adapters"),
}
SETTINGS: dict[str, Any] = {"epochs": 2, "batch_size": 10, "micro_batches": 2, "learning_rate": 1e-2}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft and transformers


def write_csv(path: Path, count: int, seed: int) -> Path:
    chance = random.Random(seed)
    rows = [(chance.choice(CLASSES), chance.randrange(2, 9)) for _ in range(count)]
    words = ("film", "story", "town", "news", "people")
    lines = [f"{' '.join([*chance.choices(words, k=length), label])},{label}" for label, length in rows]
    path.write_text("\n".join(["review,verdict", *lines]) + "\n")
    return path


def files_in(folder: Path) -> set[str]:
    # Unlike Path.rglob, os.walk goes on where a folder vanishes while the run works in it.
    return {
        (Path(place) / name).relative_to(folder).as_posix() for place, _, names in os.walk(folder) for name in names
    }


class Kept(NamedTuple):
    """A row of the table of docs/runs.md.  methods: that always leave the file.  perhaps: that may."""

    file: re.Pattern[str]
    methods: set[str]
    perhaps: set[str]
    stays: bool

    @classmethod
    def of(cls, line: str) -> Kept:
        name, source, _, _, removed = (cell.strip() for cell in line.strip("| ").split("|"))
        pattern = re.sub(
            r"(?<=-)[A-Z](?=[-.])", r"\\d+", re.escape(name.strip("`")).replace(r"\-", "-").replace(r"\.", ".")
        )
        methods = {TITLES[one] for one in source.split("; ") if one in TITLES}
        if source.startswith("all"):
            methods = {*TITLES.values()} - {method for title, method in TITLES.items() if source == f"all but {title}"}
        perhaps = methods | {method for title, method in TITLES.items() if f"{title} with" in source}
        return cls(
            re.compile(pattern.replace("NAME", "[^/]+") + (".*" if pattern.endswith("/") else "")),
            methods,
            perhaps,
            removed[:5] == "stays",
        )


TITLES = {"PAC+": "pac_plus", "P-RGE": "p_rge", "RingAda": "ringada", "fine-tuning": "fine_tuning"}
TABLE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
ROWS = [Kept.of(line) for line in TABLE.splitlines() if line.startswith("| `")]


class Trained:
    """Every method's run of one job, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, base = folder, write_csv(folder / "reviews.csv", 100, 0), folder / "base"
        load_model("tiny-gpt2-2").save_pretrained(base)
        save_tokenizer("tiny-gpt2-2", base)
        self.base, self._loaded = base, dict[str, LoadedResult]()
        self.seen: dict[str, set[str]] = {}
        """By form, the files that were in the run's folder at any of its events."""

    def job(self, form: str) -> Job:
        settings: dict[str, Any] = {
            "model": str(self.base),
            "task": "classification",
            "data": str(self.data),
        }
        options: dict[str, Any] = {"technique": form} if form in ("lora", "full", "adapters") else {}
        method = "fine_tuning" if options else form
        options |= {"local_iterations": 1} if form == "ringada" else {}  # several rounds in an epoch
        return Job(method=method, columns="text=review,label=verdict", options=options, **settings, **SETTINGS)

    def __getitem__(self, form: str) -> LoadedResult:
        if form not in self._loaded:
            seen = self.seen[form] = set[str]()
            report = run(
                self.job(form), self.folder / form, progress=lambda event: seen.update(files_in(self.folder / form))
            )
            assert (
                sum(report.spent_s.values()) > 0
                and {"load", "profile", "plan", "train", "evaluate"} <= report.spent_s.keys()
            )
            self._loaded[form] = load_result(self.folder / form)
            assert self._loaded[form].about.metrics == report.metrics
        return self._loaded[form]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("form", FORMS)
def test_a_run_leaves_what_the_docs_say(form: str, trained: Trained) -> None:
    """Every file in its folder, while it runs and afterwards, has a row, and every row a file."""
    assert trained[form] and len(ROWS) == 13
    method, left = trained.job(form).method, files_in(trained.folder / form)
    seen = {name for name in trained.seen[form] | left if not name.endswith(".part")}
    row_of = {name: next(row for row in ROWS if row.file.fullmatch(name)) for name in seen}
    assert all(method in row.perhaps for row in row_of.values())
    assert all(row in row_of.values() for row in ROWS if method in row.methods)
    assert {name for name, row in row_of.items() if row.stays} == left


@pytest.mark.parametrize("form", FORMS)
def test_from_a_csv_to_a_predicted_sentence(form: str, trained: Trained, tmp_path: Path) -> None:
    """The same answers on the command line, from a file and in Python; the run's own score again; other data scored."""
    model, folder = trained[form], str(trained.folder / form)
    assert (model.about.technique, model.about.class_names, model.about.job.method) == (
        FORMS[form][1],
        CLASSES,
        trained.job(form).method,
    )
    answers = answer("predict", folder, *SENTENCES)
    assert [answer["answer"] for answer in answers] == [answer.answer for answer in model.predict(SENTENCES)]
    for one in answers:
        assert tuple(one["probabilities"]) == CLASSES and sum(one["probabilities"].values()) == pytest.approx(1)
        assert one["answer"] == max(one["probabilities"], key=one["probabilities"].get)
    (tmp_path / "some.txt").write_text("\n".join(SENTENCES) + "\n")
    (tmp_path / "some.csv").write_text("\n".join(["id,review", *(f"7,{text}" for text in SENTENCES)]) + "\n")
    for name in ("some.txt", "some.csv"):
        assert [one["answer"] for one in answer("predict", folder, "--file", str(tmp_path / name))] == [
            answer["answer"] for answer in answers
        ]
    again = answer("evaluate", folder)
    assert again["metrics"] == pytest.approx(model.about.metrics) and again["samples"] == 20
    other = write_csv(tmp_path / "other.csv", 40, 1)
    rows = [line.rsplit(",", 1) for line in other.read_text().splitlines()[1:]]
    right = [
        answer.answer == label
        for answer, (_, label) in zip(model.predict([text for text, _ in rows]), rows, strict=True)
    ]
    scored = answer("evaluate", folder, "--data", str(other))
    assert (scored["samples"], scored["metrics"]["accuracy"]) == (40, pytest.approx(sum(right) / 40))


@pytest.mark.parametrize("form", FORMS)
def test_the_cards_code_loads_the_result_by_the_library_that_it_names(
    form: str, trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = trained[form], trained.folder / form / "adapter"
    card = (folder / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    library = FORMS[form][0]
    assert (
        f"library_name: {library}\n" in card
        and "name: reviews.csv, columns review, verdict; 70 training samples" in card
    )
    monkeypatch.chdir(folder)
    results: dict[str, Any] = {}
    exec(code, results)
    assert any(name in capsys.readouterr().out for name in CLASSES)
    if library != "edge-llm-workbench":
        assert "workbench" not in code
        for text, answer in zip(SENTENCES, model.predict(SENTENCES), strict=True):
            assert results["predict"](text) == pytest.approx(answer.probabilities, abs=1e-5)


def test_what_cannot_be_predicted_is_told(trained: Trained, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        done = call(*words)
        assert done.exit_code == 2, done.output
        return " ".join(done.stderr.split())

    folder, data = str(trained.folder / "lora"), str(tmp_path / "some.csv")
    assert trained["lora"].predict([]) == []
    (tmp_path / "some.csv").write_text("words,verdict\na film,awful\n")
    for words, told in (
        (("predict", folder), "sentences 0, second texts 0, file ''"),
        (("predict", str(tmp_path), "a film"), "There is no result.json"),
        (("predict", folder, "a film", "--pair", "a town"), "is text. Give 1 for each sample"),
        (("predict", folder, "--file", data), "The data have the columns 'words', 'verdict'"),
        (
            ("evaluate", folder, "--data", data, "--columns", "text=words,label=verdict"),
            "has 'awful'. The data hold 'awful'; the classes are 'bad', 'fine', 'good'",
        ),
        (("evaluate", folder, "--calibration", "mean_prior"), "A head answers here, no prompt"),
        (("evaluate", folder, "--task", "mrpc"), "It has those of its training"),
    ):
        assert told in refused(*words)


def test_a_base_model_that_has_changed_is_told(trained: Trained) -> None:
    assert trained["pac_plus"].about.base_digest
    weights = trained.base / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        with pytest.raises(ConfigError, match=r"base model .* have changed since"):
            load_result(trained.folder / "pac_plus")
    finally:
        weights.write_bytes(content)


def test_data_of_about_the_same_length_are_profiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile is kept up to the next power of two; the lengths between are interpolated."""
    measured: list[int] = []
    measure = pac_plus.measure_layers

    def counted(*args: Any, max_length: int, **settings: Any) -> Any:
        measured.append(max_length)
        return measure(*args, max_length=max_length, **settings)

    monkeypatch.setattr(pac_plus, "measure_layers", counted)
    for words in (5, 9, 12, 40):
        rows = [f"{'film ' * (words if row % 3 else 2)}{CLASSES[row % 3]},{CLASSES[row % 3]}" for row in range(60)]
        (tmp_path / "some.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        job = Job(model="tiny-bert-3", task="classification", data=str(tmp_path / "some.csv"))
        for _ in range(2):
            plan = experiment.plan(job, two_devices())
            assert plan.num_layers == 3
    assert measured == [16, 32, 64]
