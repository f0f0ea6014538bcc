"""Dropout masks depend on sample and epoch only."""

import pytest
import torch

from workbench.models.side_layers import keep_mask, stateless_dropout

IDS = torch.arange(2000)


def test_any_division_of_a_batch_gives_the_same_masks():
    reference = keep_mask(IDS, 64, rate=0.1, seed=1, epoch=2)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([keep_mask(part, 64, rate=0.1, seed=1, epoch=2) for part in order.split(7)])
    assert torch.equal(parts, reference[order])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_features_are_dropped_at_the_rate_and_independently(rate):
    keep = keep_mask(IDS, 64, rate=rate, seed=0, epoch=0).double()
    assert keep.mean().item() == pytest.approx(1 - rate, abs=0.005)
    bound = 4.5 * (rate * (1 - rate) / 2000) ** 0.5
    assert (keep.mean(dim=0) - (1 - rate)).abs().max() < bound
    correlation = torch.corrcoef(keep.T) - torch.eye(64)
    assert correlation.abs().max() < 0.11
    across = torch.corrcoef(torch.stack([keep[:-1].flatten(), keep[1:].flatten()]))[0, 1]
    assert abs(across) < 0.02


def test_seed_epoch_and_sample_change_the_mask():
    def mask(seed, epoch, first):
        return keep_mask(IDS[first : first + 100], 64, rate=0.5, seed=seed, epoch=epoch)

    base = mask(0, 0, 0)
    for other in (mask(1, 0, 0), mask(0, 1, 0), mask(0, 0, 100)):
        assert (base == other).double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_scaling_keeps_the_mean_and_rate_zero_does_nothing():
    ones = torch.ones(2000, 64)
    dropped = stateless_dropout(ones, IDS, rate=0.25, seed=0, epoch=0)
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.01)
    assert stateless_dropout(ones, IDS, rate=0.0, seed=0, epoch=0) is ones
