"""ZeroOrderTrainer makes the very steps of the method's own run in one process, and leaves what others can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback, TrainingArguments

from methods.p_rge import worlds
from workbench.core.errors import ConfigError
from workbench.methods.p_rge.trainer import IGNORED, ZeroOrderArguments, ZeroOrderTrainer, prompts_of
from workbench.methods.p_rge.zeroth_order import load_trained
from workbench.models.loading import load_model
from workbench.models.lora import import_peft
from workbench.models.saving import save_tokenizer

Q, E = worlds.Q, worlds.E
SETTINGS: dict[str, Any] = {
    "max_steps": worlds.STEPS,
    "learning_rate": 5e-3,
    "per_device_train_batch_size": E,
    "queries": Q,
    "rank": 2,
    "seed": 0,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the method's tiny model, as transformers saves a causal one."""
    base, folder = load_model("tiny-llama"), tmp_path_factory.mktemp("model")
    model = LlamaForCausalLM(base.config)
    model.model.load_state_dict(base.state_dict())
    model.lm_head.weight = torch.nn.Parameter(base.embed_tokens.weight.clone())
    model.save_pretrained(folder)
    save_tokenizer("tiny-llama", folder)
    return folder


def samples() -> list[dict[str, list[int]]]:
    """Return the training samples of the method's job as transformers has them: a label is a token of the text."""
    results = []
    for row in worlds.prepared_job().train.rows:
        ids = [*row.ids, *row.targets]
        labels = [IGNORED] * len(row.ids) + list(row.targets)
        results.append({"input_ids": ids, "labels": labels})
    return results


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows) + 3
    fills = {"input_ids": 0, "labels": IGNORED, "attention_mask": 0}
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
        for name, fill in fills.items()
    }


def trainer(folder: Path, out: Path, arguments: type[TrainingArguments] = ZeroOrderArguments, **more: Any) -> Any:
    settings = SETTINGS | {"output_dir": str(out)} | more.pop("settings", {})
    if arguments is TrainingArguments:
        settings = {name: value for name, value in settings.items() if name not in ("queries", "rank")}
    model = AutoModelForCausalLM.from_pretrained(folder)
    return ZeroOrderTrainer(
        model, arguments(**settings), **({"train_dataset": samples(), "data_collator": collate} | more)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimator": "one_sided"},
        {"estimator": "low_rank", "subspace_steps": 3},
        {"estimator": "low_rank_momentum", "subspace_steps": 3, "momentum": 0.5},
    ],
)
def test_every_step_is_the_methods_own(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    result = trainer(folder, tmp_path, settings=options)
    result.train()
    model, logs, losses = worlds.in_one_process(worlds.prepared_job(**options))
    assert result.step_logs == logs  # seeds and scalars, bit for bit
    assert torch.equal(worlds.theta(result.trained), worlds.theta(model))
    logged = [record["loss"] for record in result.state.log_history if "loss" in record]
    assert logged == pytest.approx([float(step.mean()) for step in losses], abs=1e-4)


def test_a_training_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(folder: Path, tmp_path: Path) -> None:
    reference = trainer(folder, tmp_path / "whole")
    reference.train()
    begun = trainer(folder, tmp_path / "cut", settings={"max_steps": 6, "save_strategy": "steps", "save_steps": 3})
    begun.train()
    resumed = trainer(folder, tmp_path / "cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-6"))
    assert resumed.step_logs == reference.step_logs[6:]
    assert torch.equal(worlds.theta(resumed.trained), worlds.theta(reference.trained))
    moving = trainer(folder, tmp_path / "cut", settings={"estimator": "low_rank_momentum"})
    with pytest.raises(ConfigError, match="A checkpoint has no momentum"):
        moving.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-6"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_what_it_saves_is_loaded_by_the_workbench_and_by_peft(folder: Path, tmp_path: Path) -> None:
    result = trainer(folder, tmp_path, eval_dataset=samples())
    before = result.evaluate()["eval_loss"]
    result.train()
    after = result.evaluate()["eval_loss"]
    assert after < before
    result.save_model(str(tmp_path / "saved"))
    ours, described = load_trained(tmp_path / "saved")
    assert described.model == str(folder) and torch.equal(worlds.theta(ours), worlds.theta(result.trained))
    theirs = import_peft().PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved")
    batch = collate(samples()[:3])
    with torch.no_grad():
        assert float(theirs(**batch).loss) == pytest.approx(float(result.model(**batch).loss), abs=1e-5)


def test_transformers_own_arguments_metrics_and_callbacks(folder: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    class Seen(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)

    def metrics(prediction: Any) -> dict[str, float]:
        return {"rows": float(len(prediction.predictions))}

    result = trainer(
        folder,
        tmp_path,
        TrainingArguments,
        settings={"max_steps": 2, "lr_scheduler_type": "linear"},
        eval_dataset=samples()[:4],
        compute_metrics=metrics,
        callbacks=[Seen()],
    )
    result.train()
    assert seen == [1, 2] and result.evaluate()["eval_rows"] == 4
    assert result.predict(samples()[:3]).metrics["test_rows"] == 3
    assert [log.learning_rate for log in result.step_logs] == [5e-3, 2.5e-3]  # the scheduler's


def test_labels_become_targets_at_the_positions_before_them() -> None:
    batch = prompts_of(
        collate([{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, -100, 8]}, {"input_ids": [9, 4], "labels": [9, 4]}])
    )
    assert batch.targets.tolist() == [[6, 8], [4, 0]] and batch.target_mask.tolist() == [[True, True], [True, False]]
    assert batch.positions.tolist() == [[0, 2], [0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]


LEFT = {"input_ids": torch.ones(1, 2), "labels": torch.ones(1, 2), "attention_mask": torch.tensor([[0, 1]])}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (LEFT, "padded on the left"),
        ({"input_ids": torch.ones(1, 2), "labels": torch.ones(1)}, "no label for each token"),
        ({"input_ids": torch.ones(1, 2), "labels": torch.tensor([[1, -100]])}, "no token to predict"),
    ],
)
def test_batches_that_cannot_be_used_are_refused(inputs: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prompts_of(inputs)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("tiny-llama", {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
        ("tiny-bert", {}, "A 'bert' model does not predict the next word"),
        ("tiny-llama", {"epsilon": 0.0}, "epsilon"),
    ],
)
def test_what_cannot_be_trained_is_refused(model: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    arguments = ZeroOrderArguments(**(SETTINGS | {"output_dir": str(tmp_path)} | settings))
    with pytest.raises(ConfigError, match=words):
        ZeroOrderTrainer(load_model(model), arguments)


def test_the_example_of_the_page_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/zero-order-trainer.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    assert "HuggingFaceTB/SmolLM2-135M" in code
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(code.replace("HuggingFaceTB/SmolLM2-135M", str(folder)).replace("max_steps=20", "max_steps=2"), scope)
    assert len(scope["trainer"].step_logs) == 2
    assert load_trained(tmp_path / "trained")[1].model == str(folder)
