"""HetPipe executed: four ranks over gloo give the weights and losses that the staleness of every mini-batch says, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from gloo_pairs import on_ranks, program
from torch import nn

from workbench.core.costs import Spec
from workbench.core.plan import Plan, Share, Stage
from workbench.core.schedule import Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.models.loading import load_model
from workbench.runtime.executor import Execution, execute
from workbench.runtime.pacing import Pacer
from workbench.runtime.transport import Transport
from workbench.runtime.virtual_worker import VirtualWorkerStage
from workbench.schedules import check, hetpipe, insert_transfers

SAMPLES, WIDTH, LEARNING_RATE, LAYERS = 2, 3, 0.1, 3


def workers_of(cuts: tuple[tuple[int, ...], ...], in_flight: int, clock_distance: int) -> VirtualWorkers:
    pipelines, rank = [], 0
    for counts in cuts:
        stages, at = [], 0
        for count in counts:
            stages.append(Stage(start=at, stop=at + count, shares=(Share(rank=rank, samples=SAMPLES),)))
            at, rank = at + count, rank + 1
        pipelines.append(Plan(method="test", stages=tuple(stages), micro_batch_size=SAMPLES, num_micro_batches=in_flight))
    return VirtualWorkers(pipelines=tuple(pipelines), in_flight=in_flight, clock_distance=clock_distance)


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]


def loss_of(hidden: torch.Tensor) -> torch.Tensor:
    """Return something to make small: of a norm's output, whose squares always add up to the same, one half."""
    return hidden.square().sum() if hidden.shape[-1] == WIDTH else hidden[..., ::2].square().mean()


class Encoder(nn.Module):
    """A layer of a real model, hidden state to hidden state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.layer(hidden)
        return output[0] if isinstance(output, tuple) else output


def tiny_bert() -> list[nn.Module]:
    """Return the embeddings and the layers of a tiny BERT, all trained."""
    model = load_model("tiny-bert-2").eval().requires_grad_(True)
    return [model.embeddings, *(Encoder(layer) for layer in model.encoder.layer)]


def run(
    workers: VirtualWorkers,
    num_waves: int,
    batches: torch.Tensor,
    make: Callable[[], list[nn.Module]] = chain,
    boundary: tuple[int, ...] = (SAMPLES, WIDTH),
) -> list[tuple[Execution, list[nn.Module]]]:
    schedule = check(insert_transfers(hetpipe(workers, num_waves)))
    stages = {stage.ranks[0]: stage for plan in workers.pipelines for stage in plan.stages}

    def work(rank: int, transport: Transport) -> tuple[Execution, list[nn.Module]]:
        own = stages[rank]
        layers = copy.deepcopy(model[own.start : own.stop])

        def compute(call, batch, source):
            hidden = batches[batch] if source is None else source
            for index in range(len(layers)):
                hidden = call(index, hidden)
            return loss_of(hidden) if own.stop == LAYERS else hidden

        stage = VirtualWorkerStage(
            workers,
            rank,
            layers,
            compute,
            step=lambda weights, gradient: weights - LEARNING_RATE * gradient,
            boundary=lambda value: Spec(boundary),
        )
        done = execute(
            program(schedule, stage.spec),
            rank,
            handlers=stage.handlers(),
            transport=transport,
            inputs=stage.inputs(schedule, rank),
            pacer=Pacer(1.0),
        )
        stage.load(next(content for value, content in done.outputs.items() if value.name == "weight"))
        return done, layers

    model = make()
    return on_ranks(len(workers.ranks), work)


def expected(
    workers: VirtualWorkers, num_waves: int, batches: torch.Tensor, make: Callable[[], list[nn.Module]] = chain
) -> tuple[dict[int, float], list[list[torch.Tensor]]]:
    """Return the loss of each batch and the last parameters, in one process, from which updates each mini-batch sees.

    On stage i of k: its own virtual worker's but the min(k - i, N_m) - 1 last, and of every other one the waves that WSP demands.
    """
    model = make()
    count = len(workers.pipelines)
    updates: dict[tuple[int, int], list[list[torch.Tensor]]] = {}  # [virtual worker, mini-batch][layer]
    losses = {}
    for p in range(num_waves * workers.in_flight):
        for worker, plan in enumerate(workers.pipelines):
            seen = copy.deepcopy(model)
            for index, stage in enumerate(plan.stages):
                behind = min(len(plan.stages) - index, workers.in_flight) - 1
                for (other, q), update in updates.items():
                    limit = p - behind if other == worker else workers.waves_needed(p) * workers.in_flight
                    if q < limit:
                        add(seen[stage.start : stage.stop], update[stage.start : stage.stop])
            batch = p * count + worker
            loss = loss_of(nn.Sequential(*seen)(batches[batch]))
            loss.backward()
            losses[batch] = loss.item()
            updates[worker, p] = [[-LEARNING_RATE * parameter.grad for parameter in layer.parameters()] for layer in seen]
    for update in updates.values():
        add(model, update)
    return losses, [[parameter.detach() for parameter in layer.parameters()] for layer in model]


def add(layers: list[nn.Module], update: list[list[torch.Tensor]]) -> None:
    with torch.no_grad():
        for layer, changes in zip(layers, update, strict=True):
            for parameter, change in zip(layer.parameters(), changes, strict=True):
                parameter += change


@pytest.mark.parametrize(
    ("cuts", "in_flight", "clock_distance"),
    [(((2, 1), (1, 2)), 2, 0), (((2, 1), (1, 2)), 2, 1), (((1, 1, 1), (3,)), 3, 0), (((3,), (3,)), 1, 0), (((1, 1, 1),), 2, 0)],
)
def test_losses_and_weights_are_those_of_one_process(cuts, in_flight, clock_distance) -> None:
    workers, num_waves = workers_of(cuts, in_flight, clock_distance), 3
    batches = torch.randn(
        len(cuts) * num_waves * in_flight, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)
    )  # batch p V + v is mini-batch p of virtual worker v
    losses, parameters = expected(workers, num_waves, batches)
    results = run(workers, num_waves, batches)
    found = {value.microbatch: float(content) for done, _ in results for value, content in done.outputs.items() if value.name == "loss"}
    assert found == pytest.approx(losses, rel=1e-5)
    stages = [stage for plan in workers.pipelines for stage in plan.stages]
    for (_, layers), stage in zip(results, stages, strict=True):
        for layer, wanted in zip(layers, parameters[stage.start : stage.stop], strict=True):
            for parameter, tensor in zip(layer.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.detach(), tensor)


def test_a_real_model_on_two_virtual_workers() -> None:
    """A BERT cut behind its embeddings in one virtual worker and before its last layer in the other, one wave of distance."""
    workers, num_waves = workers_of(((1, 2), (2, 1)), 2, 1), 3
    drawn = torch.Generator().manual_seed(1)
    batches = torch.randint(5, 60, (2 * num_waves * 2, SAMPLES, 6), generator=drawn)
    losses, parameters = expected(workers, num_waves, batches, tiny_bert)
    results = run(workers, num_waves, batches, tiny_bert, (SAMPLES, 6, 32))
    found = {value.microbatch: float(content) for done, _ in results for value, content in done.outputs.items() if value.name == "loss"}
    assert found == pytest.approx(losses, rel=1e-5)
    assert max(losses.values()) > 1.01 * min(losses.values())  # it learns something
    stages = [stage for plan in workers.pipelines for stage in plan.stages]
    for (_, layers), stage in zip(results, stages, strict=True):
        for layer, wanted in zip(layers, parameters[stage.start : stage.stop], strict=True):
            for parameter, tensor in zip(layer.parameters(), wanted, strict=True):
                torch.testing.assert_close(parameter.detach(), tensor, rtol=1e-4, atol=1e-5)


def test_one_mini_batch_a_wave_without_distance_is_synchronous_training() -> None:
    """Both add their updates to the same weights, which is one step on both batches' sum."""
    workers = workers_of(((3,), (3,)), 1, 0)
    batches = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(*chain())
    model(batches.flatten(0, 1)).square().sum().backward()
    for done, layers in run(workers, 1, batches):
        assert Value("loss", 0, 0) in done.outputs or Value("loss", 1, 1) in done.outputs
        for parameter, first in zip(nn.Sequential(*layers).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), first.detach() - LEARNING_RATE * first.grad)
