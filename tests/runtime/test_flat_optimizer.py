from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.weights import same_weights
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule

STEPS = 7
SCHEDULE = LinearSchedule(peak=0.02, num_steps=STEPS, warmup_fraction=0.3)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    module[0].bias.requires_grad_(False)
    return module


def train(module: nn.Module, step, first: int = 0, last: int = STEPS) -> None:
    for number in range(first, last):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        module(inputs).square().sum().backward()
        step(number)


def test_equals_torch_adamw_with_two_groups() -> None:
    mine, theirs = make_module(), make_module()
    flat = FlatAdamW(mine, learning_rate=SCHEDULE, weight_decay=0.1)
    train(mine, lambda number: flat.step())
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    others = [parameter for parameter in trained if parameter.ndim < 2]
    adamw = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

    def step(number: int) -> None:
        for group in adamw.param_groups:
            group["lr"] = SCHEDULE(number)
        adamw.step()
        adamw.zero_grad()

    train(theirs, step)
    torch.testing.assert_close([*mine.parameters()], [*theirs.parameters()])
    assert flat.num_steps == STEPS


def test_parameters_and_gradients_are_views_of_one_vector() -> None:
    module = make_module()
    flat = FlatAdamW(module, learning_rate=SCHEDULE, weight_decay=0.1)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert flat.parameters.numel() == sum(parameter.numel() for parameter in trainable)
    assert flat.state_bytes == 16 * flat.parameters.numel()
    train(module, lambda number: None, last=1)
    assert flat.gradients.abs().sum() > 0
    flat.gradients.fill_(2.0)  # what an all-reduce does
    assert all((parameter.grad == 2).all() for parameter in trainable)
    flat.gradients.zero_()
    assert all((parameter.grad == 0).all() for parameter in trainable)


def test_goes_on_from_what_was_saved() -> None:
    reference, first, second = make_module(), make_module(), make_module()
    uninterrupted = FlatAdamW(reference, learning_rate=SCHEDULE, weight_decay=0.1)
    train(reference, lambda number: uninterrupted.step())
    before = FlatAdamW(first, learning_rate=SCHEDULE, weight_decay=0.1)
    train(first, lambda number: before.step(), last=3)
    after = FlatAdamW(second, learning_rate=SCHEDULE, weight_decay=0.1)
    for name, view in after.named_tensors().items():
        view.copy_(before.named_tensors()[name])
    after.set_num_steps(3)
    train(second, lambda number: after.step(), first=3)
    same_weights(after.named_tensors(), uninterrupted.named_tensors(), 0.0, 0.0)


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [LinearSchedule(peak=1.0, num_steps=10, warmup_fraction=0.2)(step) for step in range(10)]
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) <= 2
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[2:]))
    assert min(rates) > 0
