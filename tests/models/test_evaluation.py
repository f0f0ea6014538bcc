"""Calibration, prediction and the plain training loop."""

import math

import pytest
import torch

from workbench.core.errors import DivergedError
from workbench.models.evaluation import Predictions, calibrate, predict, set_statistics
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage

from .helpers import small_batch, small_config
from .plain_training import train_reference


@pytest.fixture(scope="module")
def stack():
    return load_stack("tiny-distilbert")


def test_statistics_are_those_of_the_real_tokens(stack):
    batches = [small_batch(seed=0), small_batch(seed=1)]
    statistics = calibrate(stack, batches)
    taps = [stack(batch.input_ids, batch.attention_mask)[1][4][batch.attention_mask.bool()] for batch in batches]
    tokens = torch.cat(taps).double()
    torch.testing.assert_close(statistics.mean[4], tokens.mean(dim=0).float())
    deviation = tokens.std(dim=0, correction=0)
    clamped = torch.maximum(deviation, 0.05 * deviation.median())
    torch.testing.assert_close(statistics.inverse_std[4], (1 / clamped).float(), rtol=1e-4, atol=0)


def test_constant_channels_do_not_blow_up(stack):
    batch = small_batch(lengths=(1, 1))  # one token each, and the same: every channel is constant
    batch.input_ids[:] = 5
    statistics = calibrate(stack, [batch])
    assert statistics.inverse_std.isfinite().all()


def test_stages_get_their_own_statistics(stack):
    statistics = calibrate(stack, [small_batch()])
    reference, stage = ParallelAdapter(small_config(stack)), ParallelAdapterStage(small_config(stack), 3, 6)
    set_statistics(reference, statistics)
    set_statistics(stage, statistics)
    for name, tensor in stage.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    assert torch.equal(reference.first.mean, statistics.mean[0]) and torch.equal(stage.last.mean, statistics.mean[6])


def test_adapters_share_one_pass(stack):
    batches = [small_batch(seed=0), small_batch(lengths=(4, 4), seed=1, first_id=8)]
    adapters = [ParallelAdapter(small_config(stack, seed=seed)) for seed in (0, 1)]
    calls = []
    handle = stack.register_forward_hook(lambda *_: calls.append(1))
    together = predict(stack, adapters, reversed(batches))
    handle.remove()
    assert len(calls) == 2
    for one, adapter in zip(together, adapters, strict=True):
        assert one.sample_ids.tolist() == list(range(10))
        (alone,) = predict(stack, [adapter], batches)
        torch.testing.assert_close(one.logits, alone.logits)
        assert one.answers("classification") == one.logits.argmax(dim=1).tolist()
    assert together[0].references() == torch.cat([batch.labels for batch in batches]).tolist()


def test_the_reference_loop_learns(stack):
    batches = [small_batch(seed=seed, first_id=8 * seed) for seed in range(4)]
    adapter = ParallelAdapter(small_config(stack, dropout=0.0))
    set_statistics(adapter, calibrate(stack, batches))
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    losses = [loss for _, loss in train_reference(stack, adapter, lambda epoch: batches, 15, learning_rate=5e-3)]
    assert len(losses) == 60 and sum(losses[-4:]) < 0.2 * sum(losses[:4])
    assert all(torch.equal(tensor, before[name]) for name, tensor in stack.state_dict().items())


def test_learning_rate_warms_up_and_decays_to_above_zero():
    rates = [learning_rate_at(step, 100, 1.0, 0.06) for step in range(100)]
    assert rates[:7] == pytest.approx([1 / 7, 2 / 7, 3 / 7, 4 / 7, 5 / 7, 6 / 7, 1.0])
    assert rates.index(max(rates)) == 6
    assert rates[6:] == sorted(rates[6:], reverse=True) and rates[-1] == pytest.approx(1 / 94)
    assert learning_rate_at(0, 1, 1.0, 0.06) == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_outputs_that_are_no_numbers_are_no_answers(kind, value):
    outputs = 1 if kind == "regression" else 2
    logits = [torch.zeros(2, outputs), torch.full((1, outputs), value)]
    predictions = Predictions(logits, [torch.zeros(2), torch.zeros(1)], [torch.arange(2), torch.tensor([2])])
    with pytest.raises(DivergedError, match=r"not numbers.*Lower the learning rate"):
        predictions.answers(kind)
