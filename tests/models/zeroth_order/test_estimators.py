"""Every entry of the estimator table makes the step of its paper's formulas, written a second time here."""

from __future__ import annotations

from dataclasses import replace
from statistics import pstdev

import pytest
import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.estimator_table import ESTIMATORS
from workbench.methods.p_rge.options import PRGEOptions
from workbench.methods.p_rge.seeds import query_seed, subspace_seed
from workbench.methods.p_rge.zeroth_order import (
    Mezo,
    Prge,
    StepLog,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    make_log,
)

from .prompts import Naive, perturb, prompts

STEP, Q, ETA, EPSILON = 7, 3, 0.05, 0.05
CONFIG = ZerothOrderConfig(
    queries=Q, epsilon=EPSILON, learning_rate=ETA, seed=5, direction_rank=2, subspace_steps=3, estimator="two_point"
)


def started(technique: str = "lora_fa", family: str = "llama"):
    model = load_causal_model(
        f"tiny-{family}-2", TrainableConfig(technique=technique, rank=4, alpha=8, num_outputs=3), dtype=torch.float64
    )
    perturb(model)
    return model


def normal(model, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.empty(size).normal_(generator=generator) for size in model.trainables.sizes]).double()


def signs(model, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.empty(size).random_(0, 2, generator=generator) for size in model.trainables.sizes]
    return torch.cat(bits).double() * 2 - 1


def low_rank(model, seed: int, subspace: int) -> Tensor:
    own, shared = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(subspace)
    parts = []
    for rows, columns in model.trainables.shapes:
        u = torch.empty(rows, 2).normal_(generator=own).double()
        v = torch.empty(columns, 2).normal_(generator=shared).double()
        parts.append((u @ v.T).flatten())
    return torch.cat(parts)


def two_point(model, loss, theta) -> Tensor:
    directions = [normal(model, query_seed(5, STEP, query)) for query in range(Q)]
    slopes = [(loss(theta + EPSILON * z) - loss(theta - EPSILON * z)) / (2 * EPSILON) for z in directions]
    return ETA / Q * sum(slope * z for slope, z in zip(slopes, directions, strict=True))


def one_sided(model, loss, theta) -> Tensor:
    directions = [signs(model, query_seed(5, STEP, query)) for query in range(1, Q + 1)]
    losses, base = [loss(theta + EPSILON * u) for u in directions], loss(theta)
    return ETA / (Q * pstdev(losses)) * sum((each - base) * u for each, u in zip(losses, directions, strict=True))


def lozo(model, loss, theta) -> Tensor:
    subspace = subspace_seed(5, STEP // 3)
    directions = [low_rank(model, query_seed(5, STEP, query), subspace) for query in range(Q)]
    slopes = [(loss(theta + EPSILON * z) - loss(theta - EPSILON * z)) / (2 * EPSILON) for z in directions]
    return ETA / Q * sum(slope * z / 2 for slope, z in zip(slopes, directions, strict=True))  # U V^T / r, r = 2


def forward_gradient(model, loss, theta) -> Tensor:
    """With the exact gradient, by backpropagation through the model itself."""
    model.part_losses(prompts())[0].backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.trainables.parameters.values()]).double()
    directions = [normal(model, query_seed(5, STEP, query)) for query in range(Q)]
    return ETA / Q * sum((gradient @ v) * v for v in directions)


WRITTEN = {"two_point": two_point, "one_sided": one_sided, "low_rank": lozo, "jvp": forward_gradient}
WRITTEN["low_rank_momentum"] = lambda model, loss, theta: 0.1 * lozo(model, loss, theta)  # beta = .9, from rest


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_step_is_that_of_the_formulas(name: str) -> None:
    """In every execution, in place, and by devices that share the queries."""
    model, naive, rule = started(), Naive("tiny-llama-2"), ESTIMATORS[name]
    theta, config = model.trainables.flat.double(), replace(CONFIG, estimator=name, execution="both")

    def loss(values: Tensor) -> float:
        slots = model.trainables.slots
        named = {
            slot.name: part.view(slot.shape)
            for slot, part in zip(slots, torch.split(values, model.trainables.sizes), strict=True)
        }
        return naive.loss(model, named, prompts())

    moved = WRITTEN[name](model, loss, theta)
    assert moved.abs().max() > 1e-3
    # Losses are float32 numbers of about 7.
    close = {"rtol": 1e-3, "atol": 1e-4 * float(moved.abs().max()) + 2e-6}

    def step_of(made, batch=None) -> Tensor:
        with torch.no_grad():
            model.trainables.flat.copy_(theta)
        model.trainables.momentum = None
        result = made.step(prompts(), STEP)
        assert len(result.losses) == rule.num_passes(Q) and len(result.log.seeds) == Q
        assert result.log.nbytes == 8 * Q + 4 * name.startswith("low_rank")
        assert result.loss == pytest.approx(loss(theta), rel=0.05)
        return theta - model.trainables.flat.detach().double()

    for execution in rule.executions:
        for copies in ("per_layer", "kept"):
            actual = step_of(Prge(model, replace(config, execution=execution, copies=copies)))
            torch.testing.assert_close(actual, moved, **close)
    with torch.no_grad():
        model.trainables.flat.copy_(theta)
    numbers = range(rule.num_queries(Q))
    shared = [Prge(model, config).losses(prompts(), STEP, part) for part in (numbers[:2], numbers[2:])]
    model.trainables.momentum = None
    model.trainables.apply(make_log(config, STEP, torch.cat(shared).tolist()))
    torch.testing.assert_close(theta - model.trainables.flat.double(), moved, **close)
    if rule.tangent:
        with pytest.raises(ConfigError, match="perturbs nothing in place"):
            Mezo(model, config)
    else:
        torch.testing.assert_close(step_of(Mezo(model, config)), moved, **close | {"atol": 1e-3})


@pytest.mark.parametrize(
    ("family", "technique"), [("gpt2", "lora"), ("bert", "lora_fa"), ("opt", "vera"), ("t5", "lora_fa")]
)
def test_derivatives_are_those_of_backpropagation(family: str, technique: str) -> None:
    model, config = started(technique, family), replace(CONFIG, estimator="jvp")
    result = Prge(model, config).losses(prompts(family), STEP).view(-1, 2)
    loss = model.part_losses(prompts(family))[0]
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.trainables.parameters.values()])
    exact = [float(gradient @ model.trainables.noise(query_seed(5, STEP, query))) for query in range(Q)]
    torch.testing.assert_close(result[:, 0], loss.detach().float().expand(Q), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[:, 1], torch.tensor(exact), rtol=1e-4, atol=1e-4)


def test_directions_of_low_rank_stay_in_a_subspace_for_some_steps() -> None:
    model, config = started(), replace(CONFIG, estimator="low_rank")
    [slot, *_] = model.trainables.slots

    def matrix(step: int, query: int) -> Tensor:
        [seed] = config.seeds(step, [query])
        return model.trainables.noise(seed, config.directions(step))[: slot.size].view(slot.shape)

    def rank_of(*steps: int) -> int:
        return int(torch.linalg.matrix_rank(torch.cat([matrix(step, query) for step in steps for query in range(Q)])))

    assert rank_of(0) == rank_of(0, 1, 2) == rank_of(3, 5) == 2
    assert rank_of(2, 3) == 4


def test_momentum_is_that_of_whole_matrices_projected_into_each_subspace() -> None:
    """Written again with whole matrices M = N V^T instead of factors, over several subspaces; and of vectors."""
    model, config = started("dora"), replace(CONFIG, estimator="low_rank_momentum", momentum=0.6)
    theta, momenta = model.trainables.flat.double(), [torch.zeros(shape).double() for shape in model.trainables.shapes]
    gradients = torch.linspace(-1.0, 2.0, Q).tolist()
    for step in range(7):
        seeds = config.seeds(step, range(Q))
        shared = torch.Generator().manual_seed(subspace_seed(5, step // 3))
        own = [torch.Generator().manual_seed(seed) for seed in seeds]
        moves = []
        for index, shape in enumerate(model.trainables.shapes):
            if len(shape) == 1:
                drawn = [torch.empty(shape).normal_(generator=one).double() for one in own]
                kept = momenta[index]
            else:
                us = [torch.empty(shape[0], 2).normal_(generator=one).double() for one in own]
                v = torch.empty(shape[1], 2).normal_(generator=shared).double()
                drawn = [u @ v.T for u in us]
                kept = momenta[index] @ v @ v.T / shape[1] if step and step % 3 == 0 else momenta[index]
            mean = sum(gradient * one for gradient, one in zip(gradients, drawn, strict=True)) / Q
            momenta[index] = 0.6 * kept + 0.4 * mean
            moves.append(momenta[index].flatten())
        theta = theta - ETA * torch.cat(moves)
        log = StepLog(
            step=step,
            seeds=seeds,
            gradients=tuple(gradients),
            learning_rate=ETA,
            directions=config.directions(step),
        )
        model.trainables.apply(log)
        torch.testing.assert_close(model.trainables.flat.double(), theta, rtol=1e-4, atol=1e-5)
    kept = model.trainables.momentum
    sizes = [shape[0] * (2 if len(shape) == 2 else 1) for shape in model.trainables.shapes]
    assert kept is not None and kept.nbytes == 4 * sum(sizes) <= 4 * model.trainables.num_values


def test_equal_losses_make_no_step() -> None:
    log = make_log(replace(CONFIG, estimator="one_sided"), 0, [2.0] * (Q + 1))
    assert log.gradients == (0.0,) * Q and log.loss == 2.0
    with pytest.raises(ConfigError, match="needs more of them"):
        make_log(replace(CONFIG, estimator="one_sided"), 0, [2.0, 3.0], [1, 2])


def test_the_options_are_the_table() -> None:
    from typing import get_args, get_type_hints

    assert get_args(get_type_hints(PRGEOptions)["estimator"]) == tuple(ESTIMATORS)
