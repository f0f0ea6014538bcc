"""Federated averaging next to Flower: its clients train what our devices train, and its average is ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.methods.conftest import four_devices
from tests.methods.ring_builders import ring_job, train_on_ring, whole_plan
from tests.weights import same_weights
from workbench.core.errors import ConfigError
from workbench.methods.ringada.rank_job import RingRankJob
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare import flower
from workbench_studies.papers.compare.clients import WEIGHT, Client, State
from workbench_studies.papers.result import shipped_result

MODEL = "tiny-bert"


def federated_job(folder: Path) -> RingRankJob:
    """Return a run of three rounds on four devices with mini-batches of one size, because Flower weights by samples."""
    settings: dict[str, Any] = {"unfreezing": "all", "local_iterations": 1, "epochs": 1, "samples": 96}
    return ring_job(MODEL, whole_plan(MODEL), four_devices(), folder, federated=True, **settings)


def check_weights(ours: dict[str, torch.Tensor], state: State) -> None:
    """Compare every weight."""
    weights = {name: tensor for name, tensor in state.items() if name.startswith(f"{WEIGHT}/")}
    same_weights({f"{WEIGHT}/{name}": one for name, one in ours.items()}, weights, noise="key_value.bias")


def test_the_mean_of_clients_that_train_by_themselves_is_our_devices(tmp_path: Path) -> None:
    job = federated_job(tmp_path)
    assert job.num_rounds > 2
    losses, weights, _ = train_on_ring(job)
    clients = [Client(job.on_rank(rank)) for rank in range(4)]
    state, theirs = clients[0].state(), list[float]()
    for number in range(job.num_rounds):
        for rank, client in enumerate(clients):
            client.load(state, number * job.options.local_iterations)
            theirs.append(client.train(rank, number)[1])
        states = [client.state() for client in clients]
        state = {name: torch.stack([each[name] for each in states]).mean(dim=0) for name in state}
    assert theirs == pytest.approx(losses, rel=1e-5)
    check_weights(weights, state)


def test_flower_averages_as_our_devices_do_and_moments_that_stay_are_no_bytes(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the studies' extra 'flower'")
    from workbench_studies.papers.compare.flower_grid import federated

    job, states = federated_job(tmp_path), list[State]()
    losses, weights, _ = train_on_ring(job)
    theirs, sent = federated(job, True, True, lambda number, state: states.append(dict(state)))
    assert theirs == pytest.approx([sum(losses[at : at + 4]) / 4 for at in range(0, len(losses), 4)], rel=1e-5)
    check_weights(weights, states[-1])
    fresh = federated(job, False, False, lambda number, state: None)
    stay = federated(job, False, True, lambda number, state: None)
    assert fresh[1] == stay[1] == [pytest.approx(nbytes / 3, rel=0.01) for nbytes in sent]
    assert fresh[0][:1] == stay[0][:1] == pytest.approx(theirs[:1])
    assert stay[0][-1] != fresh[0][-1]


def test_without_flower_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "workbench_studies.papers.compare.flower_grid", None)
    with pytest.raises(ConfigError, match="pip install flwr"):
        flower.run_by_flower(flower.EQUAL, flower.QUICK)


def test_what_ships_has_every_way_and_equal_losses() -> None:
    result = shipped_result(COMPARE, "flower")
    ways, runs = result.tables
    names = [*flower.RINGS, *flower.CLIENTS]
    assert [row[0] for row in ways.rows] == names
    losses = {(row[0], row[1]): [float(value) for value in row[3].split(", ")] for row in runs.rows}
    seeds = sorted({seed for _, seed in losses})
    assert len(losses) == len(names) * len(seeds) and ways.rows[0][-1] == len(seeds)
    for seed in seeds:
        assert losses[flower.OURS, seed] == pytest.approx(losses[flower.EQUAL, seed], rel=1e-3)
        assert losses[flower.OURS, seed][0] == pytest.approx(losses["Flower, new moments", seed][0], rel=1e-3)
    sent = {row[0]: row[1] for row in ways.rows}
    # Server and four clients send 2 x 4 times a state, an all-reduce on a ring 2 x 3 times.
    assert sent[flower.OURS] / sent[flower.EQUAL] == pytest.approx(3 / 4, rel=0.02)
    assert all(check.holds for check in result.checks)
    assert find_item(COMPARE, "flower").draw(result)


def test_every_way_has_a_line_of_its_own_in_the_shipped_picture():
    [drawn] = find_item(COMPARE, "flower").draw(shipped_result(COMPARE, "flower"))
    assert len({trace.name for trace in drawn.figure.data}) == len(flower.RINGS) + len(flower.CLIENTS)
