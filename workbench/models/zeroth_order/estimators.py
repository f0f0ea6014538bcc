"""P-RGE: a zeroth-order gradient from 2q forward passes, side by side or one after another (section 3, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.seeds import query_seed
from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import ZerothOrderConfig
from workbench.models.zeroth_order.losses import PromptLike
from workbench.models.zeroth_order.perturbation import Perturbation, passes_of
from workbench.models.zeroth_order.precision import warn_of_rounding
from workbench.models.zeroth_order.step_log import StepLog, gradients_of, make_log
from workbench.models.zeroth_order.trainables import HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step that was made.  log: its seeds and scalars.  losses: (2q,) float32, of query i at 2i (plus) and 2i + 1 (minus)."""

    log: StepLog
    losses: Tensor

    @property
    def loss(self) -> float:
        """Return the mean over all passes, close to the loss of theta itself."""
        return float(self.losses.mean())


class Prge:
    """The estimator over a model, whole or a pipeline stage, and over all of a step's queries or some.

    Its four executions give the same losses up to rounding, and from the same scalars the very same update.
    """

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        """Raise ConfigError for a model that trains its own parameters, of which it cannot have several.

        Warns (PrecisionWarning) if the compute type rounds away perturbations as small as config.epsilon.
        """
        if model.trainables.flat is None:
            raise ConfigError(
                "P-RGE over all parameters was asked for.",
                "Every part of a pass would need a model of its own.",
                "Train by LoRA-FA, or by Mezo, which perturbs all parameters in place.",
            )
        assert model.trainables.is_whole, "a model that was copied or moved after it was made: load it anew"
        self.model, self.config = model, config
        warn_of_rounding(model, config.epsilon)

    def step(self, batch: PromptLike, step: int, *, learning_rate: float | None = None) -> StepResult:
        """Make a step: 2q losses, q scalars, theta's update.  learning_rate: None is the configuration's.

        Raises DivergedError if a loss is not finite; theta is then as before.
        """
        losses = self.losses(batch, step)
        log = make_log(self.config, step, gradients_of(losses, self.config.epsilon), learning_rate)
        self.model.trainables.apply(log)
        return StepResult(log=log, losses=losses)

    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return losses (2n,) float32 of some of a step's queries (None: of all), of queries[j] at 2j (plus) and 2j + 1 (minus)."""
        numbers = range(self.config.queries) if queries is None else queries
        return self.arranged(self.forward_stage(None, batch, step, numbers), len(numbers))

    def forward_stage(self, incoming: Sequence[Tensor] | None, batch: PromptLike, step: int, queries: Sequence[int]) -> list[Tensor]:
        """Run a pipeline stage's part of the passes of some of a step's queries.

        incoming: the hidden states of each pass that the stage before returned; None for the first stage.
        Returns each pass's hidden states (P*E, t, d), of the last stage its losses (P,).  Passes stand as in `passes_of`.
        """
        seeds = [query_seed(self.config.seed, step, query) for query in queries]
        passes = passes_of(self.config.execution, len(queries))
        # One after another, each pass reads and dequantizes all weights for itself; else all go through a layer before the next.
        size = 1 if self.config.execution == "sequential" else len(passes)
        results: list[Tensor] = []
        with torch.inference_mode():
            try:
                for at in range(0, len(passes), size):
                    own = None if incoming is None else incoming[at : at + size]
                    results += self._group(own, batch, seeds, passes[at : at + size])
            finally:
                self.model.trainables.bind(None)
        # Values of inference mode cannot be used in autograd later; small as the losses are, they are copied.
        return [result.clone() for result in results] if self.model.is_last else results

    def arranged(self, losses: Sequence[Tensor], num_queries: int) -> Tensor:
        """Return losses (2n,) in the order of parts from those of each pass."""
        arranged = torch.empty(2 * num_queries)
        for parts, found in zip(passes_of(self.config.execution, num_queries), losses, strict=True):
            arranged[[2 * query + (sign < 0) for query, sign in parts]] = found
        return arranged

    def _group(
        self, incoming: Sequence[Tensor] | None, batch: PromptLike, seeds: Sequence[int], passes: list[list[tuple[int, int]]]
    ) -> list[Tensor]:
        model, count = self.model, len(passes[0])
        perturbation = Perturbation(
            model.trainables, seeds, passes, epsilon=self.config.epsilon, dtype=model.dtype, kept=self.config.copies == "kept"
        )
        states = [model.start(batch, count)] * len(passes) if incoming is None else list(incoming)
        states = model.run_passes(states, batch, count, [partial(perturbation.enter, number) for number in range(len(passes))])
        if not model.is_last:
            return states
        results = []
        for number, hidden in enumerate(states):
            perturbation.enter(number, HEAD)
            results.append(model.finish(hidden, batch, count))
        return results
