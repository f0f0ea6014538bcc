"""A model that trains inside ExecuTorch does what it does in PyTorch: losses, trained values, predictions."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_process import answer, call
from safetensors.torch import load_file

from workbench.core.errors import ConfigError, DivergedError
from workbench.methods.p_rge.inference_engine import (
    EngineTrainer,
    direction,
    export_program,
    philox_noise,
    replayed,
)
from workbench.methods.p_rge.inference_engine.config import EnginePrompts
from workbench.methods.p_rge.inference_engine.modules import TrainStep, engine_attention, exportable
from workbench.methods.p_rge.zeroth_order import TrainableConfig, load_causal_model, load_trained, read_log
from workbench.models.saving import TrainedDescription

from ..memory_growth import least_growth
from .prompts import CONFIG, batch, needs_executorch

RATE = 1e-2
CHOICES = (150, 9, 77)


def among(seed: int, choices: tuple[int, ...]) -> SimpleNamespace:
    """Return the same prompts with targets among some tokens."""
    given = batch(seed)
    given.choices = torch.tensor(choices)
    given.targets = given.choices[given.targets % len(choices)]
    return given


class Eager:
    """The same steps in PyTorch, theta kept beside the perturbed copies."""

    def __init__(self, name: str) -> None:
        self.model = load_causal_model(name, TrainableConfig(rank=4))
        self.model.packs, self.theta = False, self.model.trainables.flat
        self.gradients = torch.zeros(CONFIG.queries)

    @torch.no_grad()
    def step(self, given: SimpleNamespace, noise: torch.Tensor) -> torch.Tensor:
        moved = CONFIG.epsilon * noise
        self.model.trainables.bind(torch.stack([self.theta + moved, self.theta - moved], dim=1).flatten(0, 1))
        losses = self.model.part_losses(given, 2 * len(noise))
        self.model.trainables.bind(None)
        self.gradients = (losses[0::2] - losses[1::2]) / (2 * CONFIG.epsilon)
        self.theta -= RATE / len(noise) * self.gradients @ noise
        return losses


def noise_of(log, size: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([philox_noise(seed, size) for seed in log.seeds]))


@pytest.mark.parametrize("name", ["tiny-llama-2", "tiny-gpt2-2", "tiny-opt-2"])
def test_what_is_exported_computes_as_the_model(name: str) -> None:
    eager = Eager(name)
    written = exportable(load_causal_model(name, TrainableConfig(rank=4)))
    size = eager.model.trainables.num_values
    step = TrainStep(written, CONFIG, torch.zeros(4, size))
    gradients = torch.zeros(2)
    for number in range(3):
        given, noise = batch(number), torch.randn(2, size, generator=torch.Generator().manual_seed(number))
        weights = -(given.target_mask / given.target_mask.sum(dim=1, keepdim=True) / 3).view(-1, 1)
        with torch.no_grad(), engine_attention(written):
            losses = step(
                given.input_ids, given.targets, given.positions, weights, gradients, torch.tensor([RATE]), noise
            )
        torch.testing.assert_close(losses.view(2, 2).T.flatten(), eager.step(given, noise), rtol=1e-5, atol=1e-6)
        gradients = eager.gradients


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return an exported program and the model that it was made from.  Of one layer: to export takes ten seconds for
    each."""
    path = tmp_path_factory.mktemp("engine") / "llama.pte"
    model = load_causal_model("tiny-llama-1", TrainableConfig(rank=4))
    return export_program(model, path, CONFIG, name="tiny-llama-1"), model


@pytest.fixture(scope="module")
def one_sided(program, tmp_path_factory):
    """Return a program of the same model with another estimator, whose loss is among some tokens."""
    config = replace(CONFIG, queries=3, estimator="one_sided", choices=CHOICES)
    return export_program(program[1], tmp_path_factory.mktemp("engine") / "some.pte", config, name="tiny-llama-1")


@needs_executorch
@pytest.mark.parametrize("estimator", ["one_sided", "low_rank"])
def test_other_estimators_train_as_their_formulas_say(estimator: str, program, request, tmp_path) -> None:
    """With directions from the same stream and losses from PyTorch, one-sided among some tokens; a training goes on
    from its log."""
    config = replace(CONFIG, queries=3, estimator="low_rank", subspace_steps=2)
    if estimator == "one_sided":
        prompts, result = partial(among, choices=CHOICES), request.getfixturevalue("one_sided")
    else:
        prompts, result = batch, export_program(program[1], tmp_path / "low_rank.pte", config, name="tiny-llama-1")
    trainer, model = EngineTrainer(result.path), load_causal_model("tiny-llama-1", TrainableConfig(rank=4))
    model.packs, theta, logs = False, np.zeros(model.trainables.num_values, dtype=np.float32), []
    slots = trainer.description.slots
    for number in range(4):
        outcome = trainer.step(prompts(number), RATE)
        logs.append(outcome.log)
        rows = [direction(seed, outcome.log.directions, slots) for seed in outcome.log.seeds]
        places = [0 * rows[0], *rows] if estimator == "one_sided" else [sign * z for z in rows for sign in (1, -1)]
        model.trainables.bind(torch.from_numpy(theta + np.float32(config.epsilon) * np.stack(places)))
        with torch.no_grad():
            expected = model.part_losses(prompts(number), len(places)).numpy()
        np.testing.assert_allclose(outcome.losses, expected, rtol=1e-4)
        losses = np.asarray(outcome.losses, dtype=np.float64)
        if estimator == "one_sided":
            assert set(np.unique(rows)) == {-1, 1}
            factors = (losses[1:] - losses[0]) / losses[1:].std()
        else:
            matrix = np.concatenate([row[: slots[0].size].reshape(slots[0].shape) for row in rows])
            assert np.linalg.matrix_rank(matrix) == 2
            factors = (losses[0::2] - losses[1::2]) / (2 * config.epsilon) / 2
        np.testing.assert_allclose(outcome.gradients, factors, rtol=1e-4)
        theta -= np.float32(RATE / 3) * (factors @ np.stack(rows)).astype(np.float32)
        np.testing.assert_allclose(trainer.theta(), theta, atol=1e-4)
    assert logs[0].directions == logs[1].directions
    assert (logs[1].directions == logs[2].directions) == (estimator == "one_sided")
    again = EngineTrainer(result.path)
    again.resume(logs[:3])
    np.testing.assert_allclose(again.step(prompts(3), RATE).losses, outcome.losses, rtol=1e-4)


@needs_executorch
def test_a_file_for_some_tokens_holds_no_others(program, one_sided, tmp_path) -> None:
    reference, model = program
    rows = model.head.weight
    assert reference.file_bytes - one_sided.file_bytes > 0.9 * 4 * rows.numel() * (1 - len(CHOICES) / len(rows))
    trainer = EngineTrainer(one_sided.path)
    assert trainer.config.choices == CHOICES
    given = among(0, CHOICES)
    given.targets[0, 0] = 10
    with pytest.raises(ConfigError, match=r"towards token 10 was .* among the tokens 150, 9, 77 alone"):
        trainer.step(given, RATE)
    with pytest.raises(ConfigError, match=f"The model knows {len(rows)} tokens"):
        export_program(model, tmp_path / "wrong.pte", replace(CONFIG, choices=(3, len(rows))))


@needs_executorch
@pytest.mark.slow
def test_engine_trains_as_pytorch_and_its_values_predict_the_same_there(program) -> None:
    result, model = program
    trainer, eager = EngineTrainer(result.path, threads=1), Eager("tiny-llama-1")
    size = trainer.description.num_values
    logs = []
    for number in range(100):
        outcome = trainer.step(batch(number), RATE)
        logs.append(outcome.log)
        expected = eager.step(batch(number), noise_of(outcome.log, size))
        np.testing.assert_allclose(outcome.losses, expected.numpy(), rtol=1e-4)
    theta = trainer.theta()
    assert np.abs(theta).max() > 0.01
    np.testing.assert_allclose(theta, eager.theta.numpy(), atol=1e-4)
    np.testing.assert_allclose(theta, replayed(np.zeros(size), logs, trainer.description.slots), atol=1e-4)
    # Back in PyTorch: the values by name, and the losses of the program's own perturbed copies.
    model.trainables.load_state({name: torch.from_numpy(values.copy()) for name, values in trainer.named().items()})
    given = batch(1000)
    trained, own = model.part_losses(given), torch.from_numpy(trainer.copies())
    before = load_causal_model("tiny-llama-1", TrainableConfig(rank=4)).part_losses(given)
    assert (trained - before).abs() > 1e-3
    last = trainer.step(given, RATE)
    model.trainables.bind(torch.from_numpy(trainer.copies()))
    np.testing.assert_allclose(model.part_losses(given, 4).detach().numpy(), last.losses, rtol=1e-4)
    model.trainables.bind(None)
    assert not torch.equal(own, torch.from_numpy(trainer.copies()))


@needs_executorch
@pytest.mark.slow
def test_memory_does_not_grow_with_steps(program) -> None:
    result, _ = program
    gc.freeze()  # what the export left is looked at by no collection
    trainer, given = EngineTrainer(result.path, threads=1), batch(0)
    for _ in range(20):
        trainer.step(given, 1e-6)
    assert least_growth(lambda: trainer.step(given, 1e-6)) < 512


@needs_executorch
def test_interrupted_run_goes_on_from_its_log_and_from_its_values(program) -> None:
    result, _ = program
    reference = EngineTrainer(result.path, seed=5)
    results = [reference.step(batch(number), RATE) for number in range(6)]
    resumed = EngineTrainer(result.path, seed=5)
    resumed.resume([step.log for step in results[:4]])
    for number in (4, 5):
        np.testing.assert_allclose(resumed.step(batch(number), RATE).losses, results[number].losses, rtol=1e-5)
    np.testing.assert_allclose(resumed.theta(), reference.theta(), atol=1e-6)
    copied = EngineTrainer(result.path)
    copied.set_theta(reference.theta())
    np.testing.assert_allclose(copied.theta(), reference.theta(), atol=1e-7)
    with pytest.raises(ConfigError, match="other seeds"):
        EngineTrainer(result.path, seed=6).resume([step.log for step in results])
    with pytest.raises(ConfigError, match="trained values"):
        copied.set_theta(np.zeros(3))


@needs_executorch
def test_batches_that_do_not_fit_are_refused(program) -> None:
    result, _ = program
    trainer = EngineTrainer(result.path)
    short = trainer.step(batch(0, length=8), RATE)
    assert all(np.isfinite(short.losses))
    for wrong in (batch(0, count=2), batch(0, length=13)):
        with pytest.raises(ConfigError, match="takes 3 prompts of up to 12 tokens"):
            trainer.step(wrong, RATE)
    foreign = batch(0)
    foreign.input_ids[0, 0] = 10**6
    with pytest.raises(ConfigError, match="knows"):
        trainer.step(foreign, RATE)
    with pytest.raises(ConfigError, match="learning rate"):
        trainer.step(batch(0), 0.0)
    trainer.set_theta(np.full(trainer.description.num_values, np.nan))
    with pytest.raises(DivergedError, match="losses are"):
        trainer.step(batch(0), RATE)


@needs_executorch
def test_train_command_goes_on_from_its_log(program, tmp_path) -> None:
    result, model = program
    given = batch(0, count=20)
    fields = {name: getattr(given, name).numpy() for name in ("input_ids", "targets", "positions", "target_mask")}
    EnginePrompts(**fields).write(tmp_path / "prompts.npz")
    words = ["train", result.path, str(tmp_path / "prompts.npz"), "--learning-rate", "0.01"]
    runs = []
    for more in (["--steps", "4"], ["--steps", "6"], ["--steps", "6", "--log", "another"]):
        log = ["--log", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "b.safetensors")]
        if "another" in more:
            log, more = ["--log", str(tmp_path / "whole.jsonl")], more[:2]
        runs.append(answer(*words, *more, *log)["losses"])
    np.testing.assert_allclose(runs[0] + runs[1], runs[2], rtol=1e-5)
    tensors = load_file(tmp_path / "b.safetensors")
    assert {name: tuple(values.shape) for name, values in tensors.items()} == {
        slot.name: slot.shape for slot in model.trainables.slots
    }
    refused = call(*words[:3], "--seed", "1", "--log", tmp_path / "log.jsonl")
    assert refused.exit_code == 2
    assert "another run's" in refused.stderr


@needs_executorch
@pytest.mark.slow
def test_a_model_is_exported_trained_and_scored_by_commands_alone(tmp_path) -> None:
    """What the engine has trained comes back with its own rank, alpha and A, and predicts what its log makes PyTorch
    predict."""

    program, rows, out, log = (
        str(tmp_path / name) for name in ("opt.pte", "sentiment.npz", "trained.safetensors", "log.jsonl")
    )
    shape = (
        "--queries=2",
        "--batch-size=2",
        "--max-length=64",
        "--rank=2",
        "--alpha=6",
        "--seed=7",
        "--loss=label_words",
    )
    exported = answer("export", program, "--model", "tiny-opt-1", *shape, "--prompts", rows, "--train-samples", "30")
    assert exported["description"]["trainable"]["alpha"] == 6
    assert len(exported["description"]["config"]["choices"]) == 2
    trained = answer("train", program, rows, "--steps", "5", "--learning-rate", "0.05", "--log", log, "--out", out)
    assert trained["steps"] == len(trained["losses"]) == 5
    assert max(trained["losses"]) < 2  # of two words; over all tokens it is above 5
    loaded, description = load_trained(out)
    assert description == TrainedDescription(config=TrainableConfig(rank=2, alpha=6, seed=7), model="tiny-opt-1")
    again = load_causal_model("tiny-opt-1", description.config)
    _, steps = read_log(tmp_path / "log.jsonl")
    replayed_values = replayed(np.zeros(again.trainables.num_values), steps, again.trainables.slots)
    again.trainables.flat.copy_(torch.from_numpy(replayed_values))
    given = batch(1, length=40)
    torch.testing.assert_close(loaded.logits_at(given), again.logits_at(given), rtol=1e-4, atol=1e-4)
    assert (
        loaded.logits_at(given) - load_causal_model("tiny-opt-1", description.config).logits_at(given)
    ).abs().max() > 2e-3
    score = answer("evaluate", out, "--samples", "12", "--max-length", "64")
    assert (score["model"], score["samples"]) == (str(out), 12)
    refused = call("export", program, "--model", "tiny-opt-1", "--max-length", "200")
    assert refused.exit_code == 2
    assert "'tiny-opt-1' reads 128. Lower --max-length." in refused.stderr


@needs_executorch
def test_program_that_draws_its_own_noise(tmp_path) -> None:
    model = load_causal_model("tiny-gpt2-1", TrainableConfig(rank=4))
    config = replace(CONFIG, noise="drawn", backend="portable")
    result = export_program(model, tmp_path / "gpt2.pte", config)
    assert result.delegated == 0
    trainer = EngineTrainer(result.path)
    drawn = []
    for number in range(20):
        outcome = trainer.step(batch(number), RATE)
        assert outcome.log is None
        copies = torch.from_numpy(trainer.copies())
        drawn.append(((copies[0::2] - copies[1::2]) / (2 * config.epsilon)).flatten())
        # Nobody can draw that noise again, but the copies say what was computed.
        model.trainables.bind(copies)
        np.testing.assert_allclose(outcome.losses, model.part_losses(batch(number), 4).detach().numpy(), rtol=1e-4)
    values = torch.cat(drawn)
    # Standard errors: 1 / sqrt(N) of the mean, sqrt(2 / N) of the variance.
    assert abs(values.mean()) < 5 * len(values) ** -0.5
    assert abs(values.var() - 1) < 5 * (2 / len(values)) ** 0.5
    assert torch.corrcoef(torch.stack(drawn[:3])).triu(1).abs().max() < 5 * len(drawn[0]) ** -0.5
    with pytest.raises(ConfigError, match="no log holds"):
        trainer.resume([])


@needs_executorch
def test_exporting_leaves_no_stand_in_and_no_changed_model(program) -> None:
    _, model = program
    assert not any(name.startswith("torchao") for name in sys.modules)
    assert type(model.backbone.final).__name__ == "LlamaRMSNorm"
    assert {layer.self_attn.config._attn_implementation for layer in model.backbone.layers.values()} == {"sdpa"}
