"""Results of every kind of task, saved without a training: they answer, and are scored, as their task asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_report import report
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.tasks.prompts.official_files import write_official
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.common.result import LoadedResult, load_result
from workbench.methods.common.result_file import write_result
from workbench.methods.common.text_model import load_text_model
from workbench.methods.fine_tuning import prepare as fine_tuning_prepare
from workbench.methods.p_rge import prepare as p_rge_prepare
from workbench.methods.p_rge import worker as p_rge_worker
from workbench.methods.p_rge.zeroth_order.loading import load_trained as load_prompted
from workbench.methods.p_rge.zeroth_order.loading import save_for_peft
from workbench.methods.p_rge.zeroth_order.loading import save_trained as save_prompted
from workbench.methods.pac_plus import prepare as pac_plus_prepare
from workbench.models.evaluation import attach_head
from workbench.models.generation import Sampling
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.saving import TrainedDescription, load_adapter, load_trained, save_adapter, save_trained
from workbench.models.techniques import TechniqueStage
from workbench.tasks import load_task
from workbench.tasks.prompts.encoding import EncodedRow
from workbench.tasks.prompts.scoring import batch_of

METRICS = {"classification": "accuracy", "regression": "pearson", "sequence_to_sequence": "accuracy"}


def saved(folder: Path, job: Job) -> LoadedResult:
    """Return the result of a job whose training changed nothing."""
    prepared: Any
    if job.method == "pac_plus":
        prepared = pac_plus_prepare.prepare(job)
        save_adapter(
            folder,
            ParallelAdapter(prepared.adapter).state_dict(),
            TrainedDescription(config=prepared.adapter, model=job.model),
        )
    elif job.method == "fine_tuning":
        prepared = fine_tuning_prepare.prepare(job)
        stack = load_stack(job.model, with_head=prepared.task.kind == "text_generation")
        model = TechniqueStage(stack.stage(0, stack.num_layers), prepared.config)
        quantization = prepared.quantization
        save_trained(
            folder, model, TrainedDescription(config=prepared.config, model=job.model, quantization=quantization)
        )
    else:
        prepared = p_rge_prepare.prepare(job)
        values = p_rge_worker.load_model(prepared).trainables.state()
        save_prompted(
            folder / "trained.safetensors", values, TrainedDescription(config=prepared.trainable, model=job.model)
        )
    metrics = {METRICS.get(prepared.task.kind, "accuracy"): 0.5}
    result = replace(report(), job=job, artifacts={"adapter": str(folder)}, metrics=metrics, chosen_epoch=2)
    write_result(result, prepared, "lora")
    assert "after epoch 2, the best on" in (folder / "README.md").read_text()
    return load_result(folder)


def test_numbers_for_pairs_over_a_backbone_in_few_bits(tmp_path: Path) -> None:
    data = tmp_path / "pairs.csv"
    rows = [f"a film,{'the film ' * (row % 7 + 1)},{row % 7 / 2}" for row in range(60)]
    data.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
    options = {"technique": "lora", "backbone_dtype": "int8"}
    model = saved(
        tmp_path / "result",
        Job(method="fine_tuning", model="tiny-bert-2", task="regression", data=str(data), options=options),
    )
    reference = saved(tmp_path / "float32", replace(model.about.job, options={"technique": "lora"}))
    [answer] = model.predict([("a film", "the film")])
    assert isinstance(answer.answer, float) and answer.probabilities == {}
    assert 0 < abs(answer.answer - float(reference.predict([("a film", "the film")])[0].answer)) < 0.1
    other = tmp_path / "other.csv"
    other.write_text("one,two,stars\na film,the film,1\nnews,people,2.5\ntown,a town,3\n")
    evaluation = model.evaluate(str(other), "text=one,pair=two,label=stars")
    assert (set(evaluation.metrics), evaluation.samples, evaluation.source) == ({"pearson"}, 3, "other.csv")
    assert model.read(str(other), "text=one,pair=two")[1] == ("news", "people")
    assert model.evaluate(samples=4).samples == 4
    other.write_text("one,two\na film,the film\n")
    assert model.read(str(other), "text=one,pair=two,label=stars,source=who") == [("a film", "the film")], (
        "a prediction needs no label"
    )
    with pytest.raises(ConfigError, match=r"is text and pair. Give 2 for each sample"):
        model.predict(["a film"])
    card = (tmp_path / "result" / "README.md").read_text()
    assert "`tiny-bert-2` is a random model" in card and "Only by the workbench" in card


def test_words_that_a_decoder_writes(tmp_path: Path) -> None:
    write_official(tmp_path / "data", "sst2")
    job = Job(model="tiny-t5-2", task="sst2", data=str(tmp_path / "data"), options={"target": "text"})
    model = saved(tmp_path / "result", job)
    [answer] = model.predict(["a film"])
    assert answer.answer in ("negative", "positive") and sum(answer.probabilities.values()) == pytest.approx(1)
    assert model.evaluate().samples == 10


@pytest.mark.parametrize("task", ["copa", "squad", "boolq"])
def test_prompts_of_every_kind(task: str, tmp_path: Path) -> None:
    write_official(tmp_path / "data", task)
    job = Job(
        method="p_rge",
        model="tiny-llama-2",
        task=task,
        data=str(tmp_path / "data"),
        max_length=128,
        options={"rank": 2},
    )
    model = saved(tmp_path / "result", job)
    names = {"copa": ("premise", "conjunction", "candidate1", "candidate2"), "squad": ("title", "context", "question")}
    assert model.about.texts == names.get(task, ("passage", "question"))
    texts = ["a film", "because", "it was good", "it was bad"][: len(model.about.texts)]
    (tmp_path / "some.csv").write_text("\n".join([",".join(model.about.texts), ",".join(texts)]) + "\n")
    assert model.read(str(tmp_path / "some.csv")) == [tuple(texts)]
    [answer] = model.predict([texts])
    assert isinstance(answer.answer, str)
    if task == "copa":
        assert answer.answer in texts[2:]
    if task == "boolq":
        assert tuple(answer.probabilities) == ("No", "Yes")
    else:
        with pytest.raises(ConfigError, match="Its answers are texts, not classes"):
            model.evaluate(str(tmp_path / "some.csv"))
    assert model.evaluate(samples=2).samples == 2


def test_pictures_are_scored_and_not_read_from_sentences(tmp_path: Path) -> None:
    job = Job(model="tiny-vit-2", task="digits", test_samples=20)
    model = saved(tmp_path / "result", job)
    assert model.evaluate().samples == 20
    with pytest.raises(ConfigError, match="A sample of 'digits' is a picture"):
        model.predict(["a seven"])


def test_rows_that_may_have_been_trained_on_are_not_scored(tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    lines = [
        "text,label",
        *(f"{'bad' if row % 2 else 'nice'} lamp {row},{'neg' if row % 2 else 'pos'}" for row in range(40)),
    ]
    data.write_text("\n".join(lines) + "\n")
    model = saved(tmp_path / "result", Job(model="tiny-bert-2", task="classification", data=str(data)))
    assert (model.evaluate().samples, model.evaluate(split="validation").samples) == (8, 4)
    for more in ("nice lamp 40,pos", "nice lamp 40,average\nbad lamp 41,average"):
        data.write_text("\n".join([*lines, more]) + "\n")
        with pytest.raises(
            ConfigError,
            match=r"have changed since, so rows of it may have been trained on|the classes are 'neg', 'pos'",
        ):
            model.evaluate()
    data.write_text("\n".join(lines) + "\n")
    assert model.evaluate().samples == 8
    (tmp_path / "new.csv").write_text("text,label\na lamp,neg\na lamp,neg\n")
    assert model.evaluate(str(tmp_path / "new.csv")).samples == 2, "of a file with one of the classes alone"
    for text, told in (
        ("text,label\na,0\nb,1\n", "the classes are 'neg', 'pos'"),
        ("text\na\n", "Wanted is one of label"),
        ("prompt,completion\na,b\n", r"Wanted is one of [^.]*\. Name them"),  # no other task can be chosen here
    ):
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(ConfigError, match=told):
            model.evaluate(str(tmp_path / "new.csv"))
    (tmp_path / "new.txt").write_text("\n  \n")
    with pytest.raises(ConfigError, match="It has none"):
        model.read(str(tmp_path / "new.txt"))
    (tmp_path / "new.txt").write_text("a\u2028lamp\x0bhere\r\nb\n")
    assert model.read(str(tmp_path / "new.txt")) == [("a\u2028lamp\x0bhere",), ("b",)]


@pytest.mark.filterwarnings("ignore")
def test_tags_of_later_data_are_matched_by_name(tmp_path: Path) -> None:
    def write(name: str, rows: list[tuple[list[str], list[Any]]]) -> str:
        (tmp_path / name).write_text(
            "".join(json.dumps({"tokens": words, "tags": tags}) + "\n" for words, tags in rows)
        )
        return str(tmp_path / name)

    rows: list[tuple[list[str], list[Any]]] = [(["Emma", "left", f"R{n}"], ["B-PER", "O", "B-LOC"]) for n in range(20)]
    job = Job(model="tiny-bert-2", task="token_classification", data=write("a.jsonl", rows))
    model = saved(tmp_path / "result", job)
    assert model.about.class_names == ("O", "B-LOC", "B-PER")
    fewer = write("b.jsonl", [(words[:2], tags[:2]) for words, tags in rows[:2]])
    split = load_task("token_classification", data=fewer, class_names=model.about.class_names, whole=True).test
    assert [[word.label for word in words] for words in split.spans or ()] == [[2, 0]] * 2
    assert model.evaluate(fewer).samples == 2
    texts = model.read(fewer)
    assert texts == [("Emma left",)] * 2
    with pytest.raises(
        ConfigError, match=r"has 'B-ORG'\. The data hold 'B-ORG', 'O'; the classes are 'O', 'B-LOC', 'B-PER'"
    ):
        model.evaluate(write("c.jsonl", [(["Emma", "left"], ["B-ORG", "O"])]))
    [answer] = model.predict(["10\xa0km away"])
    assert str(answer.answer).count("/") == 2, "a no-break space divides no words"


def trained(folder: Path, data: Path, names: tuple[str, str] = ("bad", "good")) -> Path:
    """Write the result of a classification of two classes, of Parallel Adapters."""
    data.write_text("text,label\n" + "".join(f'film {row},"{names[row % 2]}"\n' for row in range(40)))
    saved(folder, Job(model="tiny-bert-2", task="classification", data=str(data)))
    return folder


def field(file: str, **changes: Any) -> Any:
    """Return what changes fields of one of a result's JSON files."""

    def change(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))

    return change


def integers(folder: Path) -> None:
    path = folder / "adapter.safetensors"
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(path).items()}, path)


CHANGED: dict[str, tuple[Any, str]] = {
    "another base model in adapter.json": (
        field("adapter.json", model="tiny-gpt2-2"),
        "trained for the base model tiny-gpt2-2",
    ),
    "integer weights": (integers, "holds integers"),
    "an unknown kind": (field("result.json", kind="zzz"), "kind = 'zzz'"),
    "another kind": (field("result.json", kind="question_answering"), "trained for the kind classification"),
    "another version": (field("result.json", schema_version=99), "Another version of the workbench wrote it"),
    "no class": (field("result.json", class_names=["bad"]), "number of classes 2"),
    "a class more": (field("result.json", class_names=["bad", "good", "so"]), "names 3"),
    "a class twice": (field("result.json", class_names=["bad", "bad"]), "Two are named 'bad'"),
    "an unknown field": (field("result.json", words_=[]), "no field 'words_' there. Did you mean 'words'"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_result_whose_files_contradict_each_other_is_refused(name: str, tmp_path: Path) -> None:
    folder = trained(tmp_path / "result", tmp_path / "films.csv")
    change, result = CHANGED[name]
    change(folder)
    with pytest.raises(ConfigError, match=result) as caught:
        load_result(folder)
    assert "\n" not in str(caught.value)


def test_a_model_card_shows_class_names_and_does_nothing_with_them(tmp_path: Path) -> None:
    names = ("<img src=x onerror=alert(1)>", "a\n# Injected\n```python\n[b](c)")
    folder = trained(tmp_path / "result", tmp_path / "<b>films.csv", names)
    card = (folder / "README.md").read_text()
    body = card.split("---\n", 2)[2].split("## How to load it")[0]
    assert "# Injected" not in body.splitlines() and "```" not in body
    assert r"\<img src=x" in body and r"\[b\](c)" in body and r"\<b\>films" in body


@pytest.mark.parametrize("model", ["tiny-llama-2", "tiny-gpt2-2"])
@pytest.mark.parametrize("technique", ["lora", "adapters", "serial", "pac_plus", "lora_fa"])
def test_a_result_writes_the_text_that_its_trained_values_compute(technique: str, model: str, tmp_path: Path) -> None:
    """The writer keeps keys and values where it can; here every token computes the whole text with the values that
    training would have made."""
    method = {"pac_plus": "pac_plus", "lora_fa": "p_rge"}.get(technique, "fine_tuning")
    write_official(tmp_path / "data", "boolq")
    rows = [{"instruction": f"Say {number}.", "output": "yes"} for number in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = {"task": "instruction_tuning", "data": str(tmp_path / "rows.json")}
    if method == "p_rge":
        data = {"task": "boolq", "data": str(tmp_path / "data")}
    options: dict[str, Any] = {"fine_tuning": {"technique": technique}, "p_rge": {"rank": 2}}.get(method, {})
    job = Job(method=method, model=model, max_length=120, options=options, **data)
    saved(tmp_path / "run", job)
    for path in (tmp_path / "run").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            described = file.metadata()
        generator = torch.Generator().manual_seed(0)
        state = {key: value + torch.randn(value.shape, generator=generator) for key, value in load_file(path).items()}
        save_file(state, path, described)
    if method == "p_rge":
        trained, _ = load_prompted(tmp_path / "run")
        save_for_peft(tmp_path / "run", trained, name=model)

    def logits_after(ids: list[int]) -> torch.Tensor:
        given, mask = torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64)
        with torch.inference_mode():
            if method == "fine_tuning":
                stage, _ = load_trained(tmp_path / "run")
                return stage.eval().logits(stage(given, mask)[1], mask, torch.zeros(1), 0)[0, -1]
            if method == "p_rge":
                row = EncodedRow(ids=tuple(ids), targets=(0,), first_position=len(ids) - 1)
                return trained.logits_at(batch_of([row], [0], 0, [0]))[0, 0]
            adapter, _ = load_adapter(tmp_path / "run")
            stack = load_stack(model, with_head=True)
            attach_head(stack, adapter.eval())
            taps = stack(given, mask)[1]
            return adapter.head(adapter(None, taps, mask), taps[-1], mask, torch.zeros(1), 0)[0, -1]

    loaded = load_text_model(str(tmp_path / "run"))
    ids = loaded.tokenizer.instruct("Say it.")
    written = list(loaded.writer.write(ids, 4, Sampling()))
    assert written == [int(logits_after([*ids, *written[:number]]).argmax()) for number in range(len(written))]
    assert written != list(load_text_model(model).writer.write(ids, 4, Sampling()))
    drafted = load_text_model(str(tmp_path / "run"), "layers:1")
    assert list(drafted.writer.write(ids, 4, Sampling())) == written and drafted.passes
    with pytest.raises(ConfigError, match="It has other tokens"):
        load_text_model(str(tmp_path / "run"), "SmolLM2-135M")


def test_a_result_that_answers_with_classes_writes_no_text(tmp_path: Path) -> None:
    saved(tmp_path / "run", Job(method="fine_tuning", model="tiny-gpt2-2", options={"technique": "lora"}))
    with pytest.raises(ConfigError, match="Its head gives classes or numbers"):
        load_text_model(str(tmp_path / "run"))
