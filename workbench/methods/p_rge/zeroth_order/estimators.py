"""Training steps from forward passes: P-RGE's in parallel or in sequence, MeZO's in place (section 3, Algorithms 1
and 3).  Every entry of the estimator table makes its steps in these ways.

MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023, Algorithm 1.  The references
by backpropagation, FO-SGD and FO-Adam (sections 4.1, Appendix E), train the same values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from workbench.core.errors import ConfigError, check_choice
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel, PromptLike
from workbench.methods.p_rge.zeroth_order.perturbation import Part, Perturbation, differentiating, passes_of
from workbench.methods.p_rge.zeroth_order.rounding import warn_of_rounding
from workbench.methods.p_rge.zeroth_order.step_log import StepLog, ZerothOrderConfig, make_log
from workbench.methods.p_rge.zeroth_order.trainables import HEAD, Trainables

Optimizer = Literal["sgd", "adam"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step.

    log: its seeds and scalars.  losses: (n,) float32, the parts of all queries: two_point's query i at 2i (plus) and
    2i + 1 (minus).
    """

    log: StepLog
    losses: Tensor

    @property
    def loss(self) -> float:
        """Return the mean loss over all passes, which is close to the loss of theta."""
        assert self.log.loss is not None
        return self.log.loss


class Estimator(ABC):
    """A zeroth-order estimator for a model.  Warns (PrecisionWarning) if config.epsilon is too small for the compute
    dtype.
    """

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        self.model, self.config = model, config
        if not config.rule.tangent:
            warn_of_rounding(model, config.epsilon)

    @abstractmethod
    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return the parts (p n,) float32 of some n of a step's queries (None: all), p for each: of two_point the
        losses of queries[j] at 2j (plus) and 2j + 1 (minus).
        """

    def step(self, batch: PromptLike, step: int) -> StepResult:
        """Run a step: losses, q scalars, theta's update.

        Raises DivergedError if a loss is not finite; theta is then unchanged.
        """
        losses = self.losses(batch, step)
        log = make_log(self.config, step, losses.tolist())
        self.model.trainables.apply(log)
        return StepResult(log=log, losses=losses)


class Prge(Estimator):
    """P-RGE for a whole model or a pipeline stage, and for all or some of a step's queries.

    Its four executions give the same losses up to rounding, and exactly the same update from the same scalars.
    """

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        """Raise ConfigError for a model that trains its own parameters, which cannot have several copies."""
        if model.trainables.flat is None:
            raise ConfigError(
                "P-RGE over all parameters was asked for.",
                "Every part of a pass would need a separate model.",
                "Train by LoRA-FA, or by Mezo, which perturbs all parameters in place.",
            )
        assert model.trainables.is_whole, "a model that was copied or moved after it was made: load it again"
        super().__init__(model, config)

    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return the losses (see Estimator)."""
        numbers = range(self.config.num_queries) if queries is None else queries
        return self.arranged(self.forward_stage(None, batch, step, numbers), len(numbers))

    def forward_stage(
        self, incoming: Sequence[Tensor] | None, batch: PromptLike, step: int, queries: Sequence[int]
    ) -> list[Tensor]:
        """Run a pipeline stage's part of the passes for some of a step's queries.

        incoming: the hidden states of each pass from the previous stage; None for the first stage.
        Returns each pass's hidden states (P*E, t, d), or its losses (P,) on the last stage, with 'jvp' losses and
        derivatives (P, 2).  Passes are ordered as in `passes_of`.
        """
        config, model = self.config, self.model
        passes = self._passes(len(queries))
        # In sequence, each pass reads and dequantizes all weights; otherwise all passes go through a layer before the
        # next.
        size = 1 if config.execution == "sequential" else len(passes)
        results: list[Tensor] = []
        if config.rule.tangent:
            assert model.is_first and model.is_last, "derivatives are not sent from stage to stage"
        with differentiating() if config.rule.tangent else torch.inference_mode():
            try:
                for start in range(0, len(passes), size):
                    group, inputs = passes[start : start + size], incoming and incoming[start : start + size]
                    perturbation = Perturbation(model.trainables, config, step, queries, group, model.dtype)
                    results += self._group(inputs, batch, perturbation, len(group), len(group[0]))
            finally:
                model.trainables.bind(None)
        # Values from inference mode cannot be used in autograd later, so the small losses are copied.
        return [result.clone() for result in results] if model.is_last else results

    def arranged(self, losses: Sequence[Tensor], num_queries: int) -> Tensor:
        """Return the parts (p n,) of n queries in their order, given the results of each pass."""
        rule, passes = self.config.rule, self._passes(num_queries)
        if rule.tangent:
            return torch.cat([pass_losses.flatten() for pass_losses in losses])  # a query's loss and derivative
        arranged = torch.empty(rule.query_parts * num_queries)
        for parts, pass_losses in zip(passes, losses, strict=True):
            arranged[[rule.query_parts * query + part for query, part in parts]] = pass_losses
        return arranged

    def _passes(self, num_queries: int) -> list[list[Part]]:
        return passes_of(self.config.execution, num_queries, len(self.config.rule.signs))

    def _group(
        self,
        incoming: Sequence[Tensor] | None,
        batch: PromptLike,
        perturbation: Perturbation,
        num_passes: int,
        count: int,
    ) -> list[Tensor]:
        model = self.model
        states = [model.start(batch, count)] * num_passes if incoming is None else list(incoming)
        states = model.run_passes(
            states, batch, count, [partial(perturbation.enter, number) for number in range(num_passes)]
        )
        if not model.is_last:
            return states
        results = []
        for number, hidden in enumerate(states):
            perturbation.enter(number, HEAD)
            losses = model.finish(hidden, batch, count)
            if self.config.rule.tangent:
                value, derivative = forward_ad.unpack_dual(losses)
                losses = torch.stack([value, derivative], dim=1)
            results.append(losses)
        return results


class Mezo(Estimator):
    """MeZO as published: perturb all trainable values in place, regenerate the noise from its seed, restore.

    Works with any trainable values: LoRA-FA's, or all of a model's parameters.  Each query of two_point passes over
    theta four times.  Restored values differ from the original ones by rounding; `replay` reproduces that too.  The
    settings' execution and copies have no effect.
    """

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        """Raise ConfigError for the estimator 'jvp', which perturbs nothing."""
        if config.rule.tangent:
            raise ConfigError(
                "MeZO with the estimator 'jvp' was asked for.",
                "It computes derivatives, and perturbs nothing in place.",
                "Train by P-RGE.",
            )
        super().__init__(model, config)

    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return the losses (see Estimator).  theta is restored up to rounding."""
        config, losses = self.config, []
        directions = config.directions(step)
        for query in range(config.num_queries) if queries is None else queries:
            [seed] = config.seeds(step, [query])
            *moves, back = _walk(config, query)
            for scale in moves:
                if scale:
                    self.model.trainables.move(seed, scale, directions)
                with torch.inference_mode():
                    losses.append(self.model.part_losses(batch).clone())
            if back:
                self.model.trainables.move(seed, back, directions)
        return torch.cat(losses)


def replay(trainables: Trainables, logs: Iterable[StepLog], *, in_place: ZerothOrderConfig | None = None) -> int:
    """Repeat the steps of a log, starting from the run's initial values; return the number of steps.

    The result equals the run's values bit for bit.  in_place: the settings of a run with Mezo, whose rounding is
    reproduced.
    """
    count = 0
    for log in logs:
        for seed in log.seeds if in_place is not None else ():
            assert in_place is not None
            for scale in _walk(in_place, int(in_place.rule.has_base)):
                trainables.move(seed, scale, log.directions)
        trainables.apply(log)
        count += 1
    return count


def _walk(config: ZerothOrderConfig, query: int) -> tuple[float, ...]:
    """Return the moves along a query's direction before each of its losses, and back."""
    places = [config.epsilon * config.rule.sign(query, part) for part in range(config.rule.query_parts)]
    return tuple(there - here for here, there in pairwise((0.0, *places, 0.0)))


class FirstOrder:
    """SGD, or Adam with betas .9 and .999, both without momentum and weight decay.

    Raises ConfigError for another optimizer and a learning rate that is not above 0.
    """

    def __init__(self, model: CausalModel, optimizer: Optimizer, learning_rate: float) -> None:
        check_choice("optimizer", optimizer, get_args(Optimizer))
        if not 0 < learning_rate < math.inf:
            raise ConfigError(
                f"learning_rate = {learning_rate} was asked for.",
                "Training would go nowhere, or uphill.",
                "Give a number above 0.",
            )
        self.model = model
        optimizer_type = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
        self.optimizer: torch.optim.Optimizer = optimizer_type(
            list(model.trainables.parameters.values()), lr=learning_rate
        )

    def step(self, batch: PromptLike, step: int = 0) -> float:
        """Run a step and return the loss before it.  step: has no effect."""
        loss = self.model.part_losses(batch)[0]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
