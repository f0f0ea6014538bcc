"""Train a language model's adapter with two functions of a student: a walk along noise from seeds, and a step as moves
(P-RGE, Algorithm 1; MeZO's seed trick).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.seeds import query_seed
from workbench.methods.p_rge.zeroth_order import CausalModel, TrainableConfig, load_causal_model
from workbench.trainings.queries import QueryTraining, Trial
from workbench.widgets.tables import Table
from workbench_labs.training_panel import frozen_and_trained

Walk = Callable[[list[float], list[list[float]]], Sequence[float]]
"""(theta, moves) -> theta after the moves, each a seed and a scale."""
MovesOf = Callable[[list[list[float]], list[int], float, float], Sequence[Sequence[float]]]
"""(losses, seeds, epsilon, learning rate) -> the moves of a step."""


RANK = 2
"""Rank of LoRA-FA.  It is small, because the time of a student's list grows with the number of values."""
SAMPLES = 64


def prepared(
    model: str, queries: int, batch_size: int, *, epsilon: float, learning_rate: float, seed: int
) -> QueryTraining:
    """Return an untrained model with LoRA-FA and its task: film reviews, the loss among both label words."""
    trial = Trial(
        model=model,
        method="P-RGE",
        seed=seed,
        queries=queries,
        batch_size=batch_size,
        learning_rate=learning_rate,
        epsilon=epsilon,
        rank=RANK,
        alpha=2.0 * RANK,
        max_length=64,
        samples=(SAMPLES, batch_size, batch_size),
        loss="label_words",
    )
    return QueryTraining(trial)


def in_bfloat16(training: QueryTraining) -> CausalModel:
    """Return the same untrained model, which computes in bfloat16."""
    settings = training.settings
    config = TrainableConfig(rank=settings.rank, alpha=settings.alpha, seed=settings.seed)
    return load_causal_model(settings.model, config, dtype=torch.bfloat16)


def about(training: QueryTraining) -> Table:
    """Return how many values are frozen and trained, and the loss of the first batch before the first step."""
    frozen, trained = frozen_and_trained(training.model)
    rows = [
        ("frozen values", f"{frozen:,}"),
        ("trained values: LoRA-FA's B", f"{trained:,}"),
        ("loss of the batch before the first step", f"{training.model.part_losses(training.batch(0)).item():.3f}"),
    ]
    return Table((training.settings.model, ""), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedTraining:
    """A training's result.  losses: (step, mean loss of its passes), counted from 1.  log: all moves.

    first, last: theta (d,) before and after.  replayed: theta by the log alone, in one go.  restored: the first theta
    after the moves epsilon, -2 epsilon, epsilon along one noise.
    """

    losses: tuple[tuple[int, float], ...]
    log: tuple[tuple[float, float], ...]
    first: tuple[float, ...]
    last: tuple[float, ...]
    replayed: tuple[float, ...]
    restored: tuple[float, ...]

    @property
    def changed_by_replay(self) -> int:
        """Return the number of values that a replay gives with other bits."""
        return _differing(self.replayed, self.last)

    @property
    def percent_not_restored(self) -> float:
        """Return the percentage of values that do not come back to their bits."""
        return 100 * _differing(self.restored, self.last) / len(self.last)

    def table(self) -> Table:
        """Return what a training leaves, and what can be made of it."""
        size = len(self.last)
        rows = [
            ("mean loss of the first step", f"{self.losses[0][1]:.3f}"),
            ("mean loss of the last step", f"{self.losses[-1][1]:.3f}"),
            ("the log: seeds and scalars", f"{8 * len(self.log):,} bytes"),
            ("the trained values", f"{4 * size:,} bytes"),
            ("values with other bits after a replay of the log", f"{self.changed_by_replay:,} of {size:,}"),
        ]
        return Table(("", ""), rows, title="Your training (measured in this process)")


def _differing(one: Sequence[float], other: Sequence[float]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def train(training: QueryTraining, walk: Walk, moves_of: MovesOf, *, steps: int) -> SeedTraining:
    """Train on the first batch of an untrained model, again and again.  The model itself keeps its values.

    All 2q copies of a step go through the model in one pass.  Raises ConfigError for no step, and if a walk returns
    another number of values.
    """
    settings, model, batch = training.settings, training.model, training.batch(0)
    if steps < 1:
        raise ConfigError(f"{steps} steps were asked for.", "1 is the least.", "Ask for more.")
    flat = model.trainables.flat
    assert flat is not None, "an adapter's values are one vector"
    first = flat.tolist()
    theta, log, losses = first, list[list[float]](), []
    for step in range(steps):
        seeds = [query_seed(settings.seed, step, query) for query in range(settings.queries)]
        scales = (settings.epsilon, -settings.epsilon)
        copies = [_walked(walk, theta, [[seed, scale]]) for seed in seeds for scale in scales]
        pairs = _losses(model, batch, copies)
        moves = [
            [int(seed), float(scale)]
            for seed, scale in moves_of(pairs, seeds, settings.epsilon, settings.learning_rate)
        ]
        theta = _walked(walk, theta, moves)
        log += moves
        losses.append((step + 1, sum(map(sum, pairs)) / (2 * len(pairs))))
    there_and_back = [[seeds[0], settings.epsilon], [seeds[0], -2 * settings.epsilon], [seeds[0], settings.epsilon]]
    return SeedTraining(
        losses=tuple(losses),
        log=tuple((seed, scale) for seed, scale in log),
        first=tuple(first),
        last=tuple(theta),
        replayed=tuple(_walked(walk, first, log)),
        restored=tuple(_walked(walk, theta, there_and_back)),
    )


def _walked(walk: Walk, theta: Sequence[float], moves: list[list[float]]) -> list[float]:
    walked: Any = walk(list(theta), moves)
    values = walked.tolist() if hasattr(walked, "tolist") else [float(value) for value in walked]
    if len(values) != len(theta):
        raise ConfigError(
            f"A walk from {len(theta)} values was asked for.", f"It has {len(values)}.", "Return as many as theta has."
        )
    return values


def _losses(model: Any, batch: Any, copies: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return [plus, minus] of each query: the losses of all copies, in one forward pass without autograd."""
    try:
        model.trainables.bind(torch.tensor(copies))
        with torch.inference_mode():
            losses = model.part_losses(batch, len(copies)).tolist()
    finally:
        model.trainables.bind(None)
    return [list(pair) for pair in zip(losses[::2], losses[1::2], strict=True)]
