"""A distributed PAC+ run gives what one plain process gives: losses, gradients, weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.methods.builders import CACHED, LEARNING_RATE, PLANS, initial_adapter, losses_of, made_up_split, make_rank_job
from tests.methods.conftest import four_devices
from workbench.methods.pac_plus.cached_epochs import cached_steps, shard_owners
from workbench.methods.pac_plus.worker import run_rank
from workbench.models.loading import load_stack
from workbench.models.reference import reference_loss, train_reference
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.engines import EngineCluster
from workbench.tasks.batching import epoch_batches
from workbench.tasks.tokenize import collate

MODELS = ("tiny-bert", "tiny-gpt2", "tiny-llama", "all-MiniLM-L6-v2")
SAMPLES = 22  # not a multiple of the mini-batch: the last one is smaller and cannot be cut as planned
EPOCHS = 3


def reference_batches(epoch: int) -> list:
    """Return the mini-batches of an epoch as one process would see them: whole, in the same order."""
    split = made_up_split(SAMPLES)
    if epoch == 0:
        return [collate(split, batch) for batch in epoch_batches(split.lengths, 8, 0, 0)]
    owners = shard_owners(CACHED, split.lengths, 4, 0)
    steps = cached_steps(CACHED, owners, split.lengths, 4, seed=0, epoch=epoch)
    return [collate(split, [sample for samples in per_rank for sample in samples]) for _, per_rank in steps]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[dict[tuple[int, int], float], dict[str, torch.Tensor]]]:
    """Return each model's losses and final weights from a plain loop over the uncached backbone."""
    found = {}
    for model in MODELS:
        stack = load_stack(model)
        adapter = initial_adapter(stack, made_up_split(SAMPLES))
        losses: dict[tuple[int, int], float] = {}
        for epoch, loss in train_reference(stack, adapter, reference_batches, EPOCHS, learning_rate=LEARNING_RATE):
            losses[epoch, sum(1 for known, _ in losses if known == epoch)] = loss
        found[model] = losses, {name: tensor.detach().clone() for name, tensor in adapter.named_parameters()}
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_weights_equal_one_process(model: str, name: str, engines: EngineCluster, tmp_path: Path, expected) -> None:
    """First epoch through any split, then cached epochs: every loss and every weight, against uncached single-process training."""
    job = make_rank_job(load_stack(model), model, PLANS[name], four_devices(), tmp_path, samples=SAMPLES, epochs=EPOCHS)
    losses = losses_of(engines.run(run_rank, [job] * 4))
    reference, weights = expected[model]
    assert set(losses) == set(reference)
    for step, loss in reference.items():
        # AdamW divides by gradients' own size, which carries float noise of tiny gradients into later steps.
        assert losses[step] == pytest.approx(loss, rel=1e-5 if step[0] == 0 else 1e-4), step
    trained = load_file(tmp_path / "checkpoints" / f"epoch-{EPOCHS - 1}.safetensors")
    for parameter, tensor in weights.items():
        if parameter.endswith("query_key_value.bias"):
            continue  # softmax does not see the keys' bias: its gradient is float noise, which AdamW blows up to the learning rate
        torch.testing.assert_close(trained[f"weight/{parameter}"], tensor, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("split", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_one_process(model: str, split: str, engines: EngineCluster, tmp_path: Path) -> None:
    """AdamW's first moment after one step is a tenth of the gradient."""
    stack = load_stack(model)
    job = make_rank_job(stack, model, PLANS[split], four_devices(), tmp_path, samples=8, epochs=1)
    engines.run(run_rank, [job] * 4)
    adapter = initial_adapter(stack, job.split).train()
    (batch,) = epoch_batches(job.split.lengths, 8, 0, 0)
    reference_loss(stack, adapter, collate(job.split, batch), 0).backward()
    moments = load_file(tmp_path / "checkpoints" / "epoch-0.safetensors")
    gradients = {name: parameter.grad for name, parameter in adapter.named_parameters()}
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, f"{name} got no gradient"
        torch.testing.assert_close(moments[f"exp_avg/{name}"] * 10, gradient, rtol=1e-5, atol=1e-6 * scale)


def test_the_cache_holds_what_the_backbone_gives(engines: EngineCluster, tmp_path: Path) -> None:
    """Every owner's records equal the backbone's activations of its samples, bit for bit in the cache's type."""
    model = "tiny-bert"
    stack = load_stack(model)
    job = make_rank_job(stack, model, PLANS["[2, 2, 2] on [2-1-1]"], four_devices(), tmp_path, samples=SAMPLES, epochs=2)
    engines.run(run_rank, [job] * 4)
    seen = set()
    for rank in CACHED.ranks:
        cache = ActivationCache.open(tmp_path / f"rank-{rank}" / "cache", fingerprint=f"test/{rank}")
        for sample in cache.manifest.samples:
            batch = collate(job.split, [sample])
            with torch.no_grad():
                _, taps = stack(batch.input_ids, batch.attention_mask)
            expected_taps = torch.stack([tap[0, : job.split.lengths[sample]] for tap in taps])
            torch.testing.assert_close(torch.stack(cache.read(sample)), expected_taps, rtol=1e-5, atol=1e-5)
            seen.add(sample)
    assert seen == set(range(SAMPLES))


def test_a_resumed_run_equals_an_uninterrupted_one(engines: EngineCluster, tmp_path: Path) -> None:
    """Two of three epochs, then the third from checkpoint and kept cache: the losses go on as if nothing had happened."""
    model, stages = "tiny-bert", PLANS["[3, 3] on [2-2]"]
    stack = load_stack(model)
    whole = make_rank_job(stack, model, stages, four_devices(), tmp_path / "whole", samples=SAMPLES, epochs=3)
    expected_losses = losses_of(engines.run(run_rank, [whole] * 4))
    (tmp_path / "whole" / "checkpoints" / "epoch-2.safetensors").unlink()
    resumed = make_rank_job(stack, model, stages, four_devices(), tmp_path / "whole", samples=SAMPLES, epochs=3, start_epoch=2)
    results = engines.run(run_rank, [resumed] * 4)
    assert losses_of(results) == pytest.approx(expected_losses, rel=1e-6)
    assert not [note for result in results for note in result.notes]


def test_a_corrupted_cache_is_noticed_and_filled_again(engines: EngineCluster, tmp_path: Path) -> None:
    """One flipped byte on one device: the run says so, runs the backbone again, and ends with the same losses."""
    model, stages = "tiny-bert", PLANS["[3, 3] on [2-2]"]
    stack = load_stack(model)
    whole = make_rank_job(stack, model, stages, four_devices(), tmp_path / "whole", samples=SAMPLES, epochs=3)
    expected_losses = losses_of(engines.run(run_rank, [whole] * 4))
    (tmp_path / "whole" / "checkpoints" / "epoch-2.safetensors").unlink()
    data = tmp_path / "whole" / "rank-1" / "cache" / "taps.bin"
    content = bytearray(data.read_bytes())
    content[100] ^= 255
    data.write_bytes(content)
    resumed = make_rank_job(stack, model, stages, four_devices(), tmp_path / "whole", samples=SAMPLES, epochs=3, start_epoch=2)
    results = engines.run(run_rank, [resumed] * 4)
    assert any("checksum" in note for note in results[1].notes)
    assert "filling the cache again" in results[0].phases_s
    assert losses_of(results) == pytest.approx(expected_losses, rel=1e-6)
