"""Hold all trainable parameters of a rank in one flat vector: one all-reduce, one fused AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from workbench.models.optimization import learning_rate_at

STATE_KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""The optimizer state of a parameter NAME: the tensors 'weight/NAME', 'exp_avg/NAME', 'exp_avg_sq/NAME'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSchedule:
    """Linear warm-up, then linear decay, over `num_steps` optimizer steps (see learning_rate_at)."""

    peak: float
    num_steps: int
    warmup_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate_at(step, self.num_steps, self.peak, self.warmup_fraction)


class Optimizer(Protocol):
    """The optimizer interface that snapshots use."""

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps taken so far."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and moments."""

    def state_vectors(self) -> tuple[Tensor, ...]:
        """Return the complete optimizer state (except num_steps) as flat vectors."""

    def set_num_steps(self, num_steps: int) -> None:
        """Set the step count, to continue from a saved state."""

    def give_up_step(self) -> None:
        """Forget what a step has left that was given up; parameters and moments are then restored from a saved
        state.
        """

    def named_tensors(self) -> dict[str, Tensor]:
        """Return views of parameters and moments by name, in the order of state_vectors."""


class FlatAdamW:
    """AdamW over a module's trainable parameters.  Parameters, gradients and moments become views of flat vectors.

    Decoupled weight decay applies to matrices, not to biases, norms and mixing weights.  The update of a parameter does
    not depend on other parameters, so updating two stages separately equals updating the whole model.
    """

    def __init__(self, module: nn.Module, *, learning_rate: LinearSchedule, weight_decay: float) -> None:
        self._schedule = learning_rate
        self._slots: dict[str, tuple[int, torch.Size]] = {}
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        decayed = sum(parameter.numel() for _, parameter in named if parameter.ndim >= 2)
        total = sum(parameter.numel() for _, parameter in named)
        self.parameters = torch.empty(total)  # (total,), those with weight decay first
        self.gradients = torch.zeros(total)  # (total,)
        self._moments = {"exp_avg": torch.zeros(total), "exp_avg_sq": torch.zeros(total)}
        self._of_module = dict(named)
        offset = 0
        for name, parameter in sorted(named, key=lambda item: item[1].ndim < 2):
            size, shape = parameter.numel(), parameter.shape
            self._slots[name] = (offset, shape)
            self.parameters[offset : offset + size].copy_(parameter.data.reshape(-1))
            parameter.data = self.parameters[offset : offset + size].view(shape)
            parameter.grad = self.gradients[offset : offset + size].view(shape)
            offset += size
        self._groups = [slice(0, decayed), slice(decayed, total)]
        self._leaves = [nn.Parameter(self.parameters[part]) for part in self._groups]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [leaf], "weight_decay": decay}
                for leaf, decay in zip(self._leaves, (weight_decay, 0.0), strict=True)
            ],
            lr=learning_rate.peak,
            fused=True,
        )
        for leaf, part in zip(self._leaves, self._groups, strict=True):
            leaf.grad = self.gradients[part]
            self._optimizer.state[leaf] = {"step": torch.zeros(())} | {
                name: flat[part] for name, flat in self._moments.items()
            }
        self.num_steps = 0  # taken so far

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and both moments."""
        return 4 * self.parameters.nbytes  # weights, gradients, two moments

    def keep_version(self) -> Tensor:
        """Return the current parameters, (total,), as a fixed version.  Later steps change a copy."""
        former, self.parameters = self.parameters, self.parameters.clone()
        for leaf, part in zip(self._leaves, self._groups, strict=True):
            leaf.data = self.parameters[part]
        return former

    def compute_with(self, version: Tensor) -> None:
        """Make the module compute with a version of the parameters, (total,), such as one from keep_version."""
        for name, (offset, shape) in self._slots.items():
            self._of_module[name].data = version[offset : offset + shape.numel()].view(shape)

    def step(self, learning_rate: float | None = None) -> None:
        """Update the parameters and clear the gradients.  learning_rate: None uses the schedule."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule(self.num_steps) if learning_rate is None else learning_rate
        self._optimizer.step()
        self.num_steps += 1
        self.gradients.zero_()

    def state_vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters and both moments, (total,) each: the complete state except num_steps."""
        return self.parameters, self._moments["exp_avg"], self._moments["exp_avg_sq"]

    def set_num_steps(self, num_steps: int) -> None:
        """Set the step count, to continue from a saved state."""
        self.num_steps = num_steps
        for leaf in self._leaves:
            self._optimizer.state[leaf]["step"].fill_(num_steps)

    def give_up_step(self) -> None:
        """Clear the gradients (see Optimizer), and let the module compute with the newest parameters."""
        self.gradients.zero_()
        self.compute_with(self.parameters)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return views of parameters and moments by name (see STATE_KINDS), in the order of state_vectors."""
        return {
            f"{kind}/{name}": vector[offset : offset + shape.numel()].view(shape)
            for kind, vector in zip(STATE_KINDS, self.state_vectors(), strict=True)
            for name, (offset, shape) in self._slots.items()
        }
