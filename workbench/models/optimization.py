"""Backpropagation from a gradient, and AdamW with warm-up and linear decay: the learning rate depends only on the step
number.

No gradient clipping by global norm, because stages on different devices would have to agree on the norm in every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError


class _Seed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def backpropagate(output: Tensor, gradient: Tensor | None) -> None:
    """Backpropagate like torch.autograd.backward(output, gradient), but without torch's comparison of the two shapes.

    For this comparison torch imports an algebra system at the first gradient, which takes 37 MB and 0.5 to 1.5 s.
    """
    (output if gradient is None else _Seed.apply(output, gradient)).backward()


def learning_rate_at(step: int, num_steps: int, peak: float, warmup_fraction: float) -> float:
    """Return the learning rate of step `step` (from 0) of `num_steps`.

    It rises linearly to `peak` during warm-up, then falls linearly; the last step's rate is still above zero.
    """
    if not 0 <= step < num_steps:
        raise ConfigError(
            f"The learning rate of step {step} was asked for.", f"There are {num_steps}.", "Count the steps again."
        )
    warmup = int(warmup_fraction * num_steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * (num_steps - step) / (num_steps - warmup)


def make_optimizer(module: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters of a stage or model.  Set its rate in each step with
    set_learning_rate.

    Weight decay applies only to matrices, not to biases, norms and lambdas.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
