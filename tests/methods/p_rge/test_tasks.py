"""Tasks of every kind, trained by forward passes on devices from their official files, and what a run leaves of
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_process import answer, call
from safetensors.torch import save_file

from methods.p_rge.worlds import E, in_one_process, one_pace, prepared_job, run, shared, theta, trained_by
from tests.tasks.prompts.official_files import write_official
from workbench.core.errors import ConfigError
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.worker import load_model
from workbench.methods.p_rge.zeroth_order import Prge, load_trained
from workbench.runtime.engines import EngineCluster
from workbench.tasks.prompts import evaluate, training_batch


@pytest.mark.parametrize("task", ["copa", "winogrande", "squad", "boolq"])
def test_a_task_of_every_kind_trains_on_devices_and_what_is_left_of_it_answers_the_same(
    task: str, engines: EngineCluster, tmp_path: Path
) -> None:
    """Multiple choice, questions with answers of several tokens, passages: the weights of one process, and its
    score."""
    write_official(tmp_path / "data", task)
    prepared = prepared_job("tiny-llama-2", task=task, data=str(tmp_path / "data"))
    expected, _, _ = in_one_process(prepared)
    with one_pace():
        outcome = run(prepared, engines, shared(3, 1, layers=2), tmp_path / "run")
    torch.testing.assert_close(theta(trained_by(outcome, prepared)[0]), theta(expected), atol=2e-5, rtol=1e-4)
    metric = "f1" if task == "squad" else "accuracy"
    assert outcome.metrics.keys() == {metric}
    loaded, description = load_trained(outcome.artifacts["adapter"])
    assert (description.model, description.config) == ("tiny-llama-2", prepared.trainable)
    encoder = model_encoder(prepared.task.prompt, "tiny-llama-2", prepared.job.max_length)
    score = evaluate(loaded.logits_at, prepared.task.test.prompts, encoder)
    assert score.value == outcome.metrics[metric]
    assert {"adapter_config.json", "adapter_model.safetensors"} < {
        path.name for path in (tmp_path / "run" / "adapter").iterdir()
    }
    words = [
        "evaluate",
        str(tmp_path / "run"),
        "--task",
        task,
        "--data",
        str(tmp_path / "data"),
        "--samples",
        "4",
    ]
    assert answer(*words, "--max-length", prepared.job.max_length) == {
        "model": str(tmp_path / "run"),
        "metrics": {metric: score.value},
        "samples": 4,
        "source": f"the test split of {task}",
    }


def test_a_loss_among_the_label_words_trains_on_devices_as_in_one_process(
    engines: EngineCluster, tmp_path: Path
) -> None:
    """MeZO's loss for classifications; a task without label words has none."""
    among, reference = prepared_job("tiny-llama-2", loss="label_words"), prepared_job("tiny-llama-2")
    expected, logs, losses = in_one_process(among)
    assert (
        float(losses[0].mean()) < 1.5 < float(in_one_process(reference)[2][0].mean())
    )  # near ln 2, and near ln of the vocabulary
    with one_pace():
        outcome = run(among, engines, shared(1, 3, layers=2), tmp_path / "run")
    trained, records = trained_by(outcome, among)
    assert [record.seeds for record in records] == [log.seeds for log in logs]
    torch.testing.assert_close(theta(trained), theta(expected), atol=2e-5, rtol=1e-4)
    assert among.identity()["prompts"] != reference.identity()["prompts"]
    write_official(tmp_path / "data", "copa")
    with pytest.raises(ConfigError, match="has no label words"):
        prepared_job("tiny-llama-2", task="copa", data=str(tmp_path / "data"), loss="label_words")


def test_mobizos_prompts_are_what_a_run_trains_on_and_its_result_answers_by(tmp_path: Path) -> None:
    write_official(tmp_path, "wsc")
    ours, theirs = (
        prepared_job("tiny-llama-2", task="wsc", data=str(tmp_path), prompts=prompts) for prompts in ("p_rge", "mobizo")
    )
    assert theirs.task.template.text.endswith("Yes or No?") and theirs.task.template.words == (" No", " Yes")
    assert ours.identity()["prompts"] != theirs.identity()["prompts"]
    assert len(ours.train) == len(theirs.train)


def test_mobizos_evaluation_is_the_best_of_all_epochs_on_one_split(engines: EngineCluster, tmp_path: Path) -> None:
    """As its code scores: after every so many steps, here an epoch, of which the largest score is reported."""
    settings = {"steps": 20, "train_samples": 10, "test_samples": 24, "learning_rate": 0.5}
    prepared = prepared_job("tiny-llama-2", evaluation="mobizo", **settings)
    encoder = model_encoder(prepared.task.prompt, "tiny-llama-2", prepared.job.max_length)
    model = load_model(prepared)
    estimator, accuracies = Prge(model, prepared.zeroth_order(prepared.setting)), []
    for step in range(prepared.num_steps):
        estimator.step(training_batch(prepared.train, E, prepared.job.seed, step), step)
        if (step + 1) % prepared.steps_per_epoch == 0:
            accuracies.append(evaluate(model.logits_at, prepared.task.test.prompts, encoder).value)
    with one_pace():
        outcome = run(prepared, engines, shared(3, 1, layers=2), tmp_path / "run")
    assert [epoch.metrics["accuracy"] for epoch in outcome.epochs] == accuracies and len(set(accuracies)) > 1
    assert outcome.metrics == {"accuracy": max(accuracies)}
    assert "best of all epochs" in prepared.all_notes[0]
    ours = prepared_job("tiny-llama-2", **settings)
    assert not ours.all_notes and ours.identity() == prepared.identity()
    write_official(tmp_path / "data", "squad")
    answers = [
        {
            len(sample.answers)
            for sample in prepared_job(task="squad", data=str(tmp_path / "data"), evaluation=rule).task.test.prompts
        }
        for rule in ("p_rge", "mobizo")
    ]
    assert answers == [{2}, {1}]


def test_a_prompt_that_will_not_fit_when_it_is_scored_is_refused_before_the_training(tmp_path: Path) -> None:
    """An answer is generated behind a prompt: it needs room that training does not."""
    write_official(tmp_path, "squad")
    assert len(prepared_job("tiny-llama-2", task="squad", data=str(tmp_path), max_length=128).train) == 10
    with pytest.raises(
        ConfigError, match=r"Sample .* does not fit even with one word of its context left. Raise max_length"
    ):
        prepared_job("tiny-llama-2", task="squad", data=str(tmp_path), max_length=64)


def test_scores_without_training_and_what_cannot_be_scored(tmp_path: Path) -> None:
    def invoke(*words: str) -> tuple[int, str]:
        done = call("evaluate", *words)
        return done.exit_code, done.stdout if done.exit_code == 0 else done.stderr

    plain, calibrated = (
        invoke("tiny-llama-2", "--samples", "20"),
        invoke("tiny-llama-2", "--samples", "20", "--calibration", "mean_prior"),
    )
    assert plain[0] == calibrated[0] == 0
    assert "20 samples: the test split of sentiment)" in plain[1]
    assert plain[1] != calibrated[1]
    (tmp_path / "trained.safetensors").write_bytes(b"nothing")
    for words, message in (
        (("nosuch",), "The model 'nosuch' was asked for"),
        (("tiny-bert",), "predicts no words"),
        ((str(tmp_path),), "damaged"),
        (("tiny-llama-2", "--task", "sentimental"), "Did you mean 'sentiment'"),
    ):
        code, text = invoke(*words)
        assert code == 2
        assert message in text
    with pytest.raises(ConfigError, match=r"no trained\.safetensors in such a folder"):
        load_trained(tmp_path / "none")
    save_file(
        {"B": torch.zeros(1)},
        tmp_path / "trained.safetensors",
        {"workbench": '{"model": "tiny-llama-2", "trainable": {}}'},
    )
    with pytest.raises(ConfigError, match=r"an earlier version wrote it\. Train again"):
        load_trained(tmp_path)
