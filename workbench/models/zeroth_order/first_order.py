"""First-order references by backpropagation: FO-SGD and FO-Adam over the same trainable values (P-RGE, sections 4.1, Appendix E)."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import check_choice, check_positive
from workbench.models.zeroth_order.losses import PromptLike

Optimizer = Literal["sgd", "adam"]


class FirstOrder:
    """SGD, or Adam with betas .9 and .999, neither with momentum nor weight decay beside it.

    Raises ConfigError for another optimizer and a learning rate that is not above 0.
    """

    def __init__(self, model: CausalModel, optimizer: Optimizer, learning_rate: float) -> None:
        check_choice("optimizer", optimizer, get_args(Optimizer))
        check_positive("learning_rate", learning_rate, "Training would go nowhere, or uphill.")
        self.model = model
        parameters = list(model.trainables.parameters.values())
        made = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
        self.optimizer: torch.optim.Optimizer = made(parameters, lr=learning_rate)

    def step(self, batch: PromptLike, step: int = 0, *, learning_rate: float | None = None) -> float:
        """Make a step, whose number changes nothing, and return the loss before it.  learning_rate: None leaves it as it is."""
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        loss = self.model.part_losses(batch)[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
