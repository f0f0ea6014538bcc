"""MeZO as published: perturb all trainable values in place, regenerate the noise from its seed, restore (P-RGE, Algorithm 3).

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023, Algorithm 1.  theta is walked through four times
for each query.  What is restored differs from what was by rounding; `replay` repeats that too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from workbench.core.seeds import query_seed
from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import ZerothOrderConfig
from workbench.models.zeroth_order.estimators import StepResult
from workbench.models.zeroth_order.losses import PromptLike
from workbench.models.zeroth_order.precision import warn_of_rounding
from workbench.models.zeroth_order.step_log import StepLog, gradients_of, make_log
from workbench.models.zeroth_order.trainables import Trainables


class Mezo:
    """The estimator over any trainable values: LoRA-FA's, or all of a model's parameters.  config.execution and copies mean nothing."""

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        """Warn (PrecisionWarning) if the compute type rounds away perturbations as small as config.epsilon."""
        self.model, self.config = model, config
        warn_of_rounding(model, config.epsilon)

    def step(self, batch: PromptLike, step: int, *, learning_rate: float | None = None) -> StepResult:
        """Make a step; as Prge.step."""
        losses = self.losses(batch, step)
        log = make_log(self.config, step, gradients_of(losses, self.config.epsilon), learning_rate)
        self.model.trainables.apply(log)
        return StepResult(log=log, losses=losses)

    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return losses (2n,) float32 of some of a step's queries; as Prge.losses.  theta comes back up to rounding."""
        found = []
        for query in range(self.config.queries) if queries is None else queries:
            seed = query_seed(self.config.seed, step, query)
            for scale in _walk(self.config.epsilon)[:2]:
                self.model.trainables.move(seed, scale)
                with torch.inference_mode():
                    found.append(self.model.part_losses(batch).clone())
            self.model.trainables.move(seed, _walk(self.config.epsilon)[2])
        return torch.cat(found)


def replay(trainables: Trainables, logs: Iterable[StepLog], *, in_place_epsilon: float | None = None) -> int:
    """Make the steps of a log once more, from the values that the run began with, and return how many there were.

    The values become those of the run, to the bit.  in_place_epsilon: of a run by Mezo, whose rounding is repeated.
    """
    count = 0
    for log in logs:
        if in_place_epsilon is not None:
            for seed in log.seeds:
                for scale in _walk(in_place_epsilon):
                    trainables.move(seed, scale)
        trainables.apply(log)
        count += 1
    return count


def _walk(epsilon: float) -> tuple[float, float, float]:
    return epsilon, -2 * epsilon, epsilon
