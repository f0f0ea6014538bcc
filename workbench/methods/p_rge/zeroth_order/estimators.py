"""Training steps from forward passes: P-RGE's 2q in parallel or in sequence, MeZO's in place (section 3, Algorithms 1
and 3).

MeZO: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023, Algorithm 1.  The references
by backpropagation, FO-SGD and FO-Adam (sections 4.1, Appendix E), train the same values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from workbench.core.errors import ConfigError, check_choice
from workbench.methods.p_rge.options import Execution
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel, PromptLike
from workbench.methods.p_rge.zeroth_order.rounding import warn_of_rounding
from workbench.methods.p_rge.zeroth_order.step_log import StepLog, ZerothOrderConfig, gradients_of, make_log
from workbench.methods.p_rge.zeroth_order.trainables import HEAD, Trainables, fill

Optimizer = Literal["sgd", "adam"]

Part = tuple[int, int]
"""(index of the query among the requested ones; sign, 1 or -1)."""


def passes_of(execution: Execution, num_queries: int) -> list[list[Part]]:
    """Return the parts of each pass of a step.  All passes have the same number of parts."""
    queries = range(num_queries)
    if execution == "sequential":
        return [[(query, sign)] for query in queries for sign in (1, -1)]
    if execution == "outer":
        return [[(query, sign) for query in queries] for sign in (1, -1)]
    if execution == "inner":
        return [[(query, 1), (query, -1)] for query in queries]
    return [[(query, sign) for query in queries for sign in (1, -1)]]


class Perturbation:
    """theta + sign * epsilon * noise for each part of a group of passes that go through each layer together.

    seeds: one for each query.  passes: the parts of each pass.  keeps_noise: make all copies at once (2q d values in
    memory) instead of making a layer's copies when the first pass reaches it.  A query's noise is drawn once for all
    passes.
    """

    def __init__(
        self,
        trainables: Trainables,
        seeds: Sequence[int],
        passes: Sequence[Sequence[Part]],
        *,
        epsilon: float,
        dtype: torch.dtype,
        keeps_noise: bool,
    ) -> None:
        assert trainables.flat is not None
        self._trainables, self._theta, self._epsilon, self._kept = trainables, trainables.flat, epsilon, keeps_noise
        used = sorted({query for parts in passes for query, _ in parts})
        self._generators = {query: trainables.generator(seeds[query]) for query in used}
        self._places = {
            query: [
                (number, row, sign)
                for number, parts in enumerate(passes)
                for row, (part_query, sign) in enumerate(parts)
                if part_query == query
            ]
            for query in used
        }
        self._ranges = trainables.ranges
        width = (
            trainables.num_values
            if keeps_noise
            else max((last - first for first, last, _ in self._ranges.values()), default=0)
        )
        self._scratch = torch.empty(width)
        self._copies = [torch.empty(len(parts), width, dtype=dtype) for parts in passes]
        self._layer: int | None = None
        if keeps_noise:
            self._make(0, width, trainables.sizes)

    def enter(self, number: int, layer: int) -> None:
        """Bind a pass's copies for a layer.  Layers come in stack order; the first pass to reach one makes the copies
        for all passes.
        """
        if self._kept:
            self._trainables.bind(self._copies[number])
            return
        first, last, sizes = self._ranges.get(layer, (0, 0, ()))
        if layer != self._layer:
            self._make(first, last, sizes)
            self._layer = layer
        self._trainables.bind(self._copies[number], first)

    def _make(self, first: int, last: int, sizes: Sequence[int]) -> None:
        width = last - first
        drawn, theta = self._scratch[:width], self._theta[first:last]
        for query, generator in self._generators.items():
            fill(drawn, generator, sizes)
            for number, row, sign in self._places[query]:
                torch.add(theta, drawn, alpha=sign * self._epsilon, out=self._copies[number][row, :width])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step.

    log: its seeds and scalars.  losses: (2q,) float32, query i's at 2i (plus) and 2i + 1 (minus).
    """

    log: StepLog
    losses: Tensor

    @property
    def loss(self) -> float:
        """Return the mean loss over all passes, which is close to the loss of theta."""
        return float(self.losses.mean())


class Estimator(ABC):
    """A zeroth-order estimator for a model.  Warns (PrecisionWarning) if config.epsilon is too small for the compute
    dtype.
    """

    def __init__(self, model: CausalModel, config: ZerothOrderConfig) -> None:
        self.model, self.config = model, config
        warn_of_rounding(model, config.epsilon)

    @abstractmethod
    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return losses (2n,) float32 for some of a step's queries (None: all), those of queries[j] at 2j (plus) and 2j
        + 1 (minus).
        """

    def step(self, batch: PromptLike, step: int) -> StepResult:
        """Run a step: 2q losses, q scalars, theta's update.

        Raises DivergedError if a loss is not finite; theta is then unchanged.
        """
        losses = self.losses(batch, step)
        log = make_log(self.config, step, gradients_of(losses, self.config.epsilon))
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
        numbers = range(self.config.queries) if queries is None else queries
        return self.arranged(self.forward_stage(None, batch, step, numbers), len(numbers))

    def forward_stage(
        self, incoming: Sequence[Tensor] | None, batch: PromptLike, step: int, queries: Sequence[int]
    ) -> list[Tensor]:
        """Run a pipeline stage's part of the passes for some of a step's queries.

        incoming: the hidden states of each pass from the previous stage; None for the first stage.
        Returns each pass's hidden states (P*E, t, d), or its losses (P,) on the last stage.  Passes are ordered as in
        `passes_of`.
        """
        seeds = [query_seed(self.config.seed, step, query) for query in queries]
        passes = passes_of(self.config.execution, len(queries))
        # In sequence, each pass reads and dequantizes all weights; otherwise all passes go through a layer before the
        # next.
        size = 1 if self.config.execution == "sequential" else len(passes)
        results: list[Tensor] = []
        with torch.inference_mode():
            try:
                for start in range(0, len(passes), size):
                    group_inputs = None if incoming is None else incoming[start : start + size]
                    results += self._group(group_inputs, batch, seeds, passes[start : start + size])
            finally:
                self.model.trainables.bind(None)
        # Values from inference mode cannot be used in autograd later, so the small losses are copied.
        return [result.clone() for result in results] if self.model.is_last else results

    def arranged(self, losses: Sequence[Tensor], num_queries: int) -> Tensor:
        """Return losses (2n,) in the order of parts, given those of each pass."""
        arranged = torch.empty(2 * num_queries)
        for parts, pass_losses in zip(passes_of(self.config.execution, num_queries), losses, strict=True):
            arranged[[2 * query + (sign < 0) for query, sign in parts]] = pass_losses
        return arranged

    def _group(
        self,
        incoming: Sequence[Tensor] | None,
        batch: PromptLike,
        seeds: Sequence[int],
        passes: list[list[tuple[int, int]]],
    ) -> list[Tensor]:
        model, count = self.model, len(passes[0])
        perturbation = Perturbation(
            model.trainables,
            seeds,
            passes,
            epsilon=self.config.epsilon,
            dtype=model.dtype,
            keeps_noise=self.config.copies == "kept",
        )
        states = [model.start(batch, count)] * len(passes) if incoming is None else list(incoming)
        states = model.run_passes(
            states, batch, count, [partial(perturbation.enter, number) for number in range(len(passes))]
        )
        if not model.is_last:
            return states
        results = []
        for number, hidden in enumerate(states):
            perturbation.enter(number, HEAD)
            results.append(model.finish(hidden, batch, count))
        return results


class Mezo(Estimator):
    """MeZO as published: perturb all trainable values in place, regenerate the noise from its seed, restore.

    Works with any trainable values: LoRA-FA's, or all of a model's parameters.  Each query passes over theta four
    times.  Restored values differ from the original ones by rounding; `replay` reproduces that too.  The settings'
    execution and copies have no effect.
    """

    def losses(self, batch: PromptLike, step: int, queries: Sequence[int] | None = None) -> Tensor:
        """Return the losses (see Estimator).  theta is restored up to rounding."""
        losses = []
        *moves, back = _walk(self.config.epsilon)
        for query in range(self.config.queries) if queries is None else queries:
            seed = query_seed(self.config.seed, step, query)
            for scale in moves:
                self.model.trainables.move(seed, scale)
                with torch.inference_mode():
                    losses.append(self.model.part_losses(batch).clone())
            self.model.trainables.move(seed, back)
        return torch.cat(losses)


def replay(trainables: Trainables, logs: Iterable[StepLog], *, in_place_epsilon: float | None = None) -> int:
    """Repeat the steps of a log, starting from the run's initial values; return the number of steps.

    The result equals the run's values bit for bit.  in_place_epsilon: epsilon of a run with Mezo, whose rounding is
    reproduced.
    """
    count = 0
    for log in logs:
        for seed in log.seeds if in_place_epsilon is not None else ():
            for scale in _walk(in_place_epsilon or 0.0):
                trainables.move(seed, scale)
        trainables.apply(log)
        count += 1
    return count


def _walk(epsilon: float) -> tuple[float, float, float]:
    return epsilon, -2 * epsilon, epsilon


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
