"""After a move every rank holds exactly what the new plan says, bit for bit, whoever was lost; states as files and in
memory."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_pairs import on_executors
from torch import Tensor

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench.core import Plan
from workbench.core.errors import StateError
from workbench.core.plan import held_by, homes_of, whole_states, with_neighbours
from workbench.core.sealed import owner_of
from workbench.methods.training.rank_snapshots import KeptInMemory
from workbench.models.sealed_tensors import save_sealed
from workbench.runtime.executor import Executor
from workbench.runtime.snapshot import Position
from workbench.runtime.state import carry_out, load_state, spec_of
from workbench.runtime.step_values import empty
from workbench.schedules.moves import moves

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


class Case:
    """A random state under a plan, devices that are lost, and another plan for those that are left."""

    def __init__(self, seed: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.size = rng.randint(2, 8)
        num_layers = rng.randint(1, 6)
        self.cluster = cluster_of(self.size, bytes_per_s=1e8)
        self.layers: dict[str, tuple[int, ...]] = {
            "step": (),
            "shared": tuple(sorted(rng.sample(range(num_layers), min(2, num_layers)))),
        }
        for layer in range(num_layers):
            self.layers |= {
                f"layer.{layer}.{kind}": (layer,)
                for kind in ("down", "down.exp_avg", "up", "bias")[: rng.randint(1, 4)]
            }
        self.whole = {name: self._tensor(rng, generator) for name in self.layers}
        before = random_plan(rng, list(range(self.size)), num_layers)
        self.homes = with_neighbours(
            homes_of(before, self.layers), [rank for stage in before.stages for rank in stage.ranks]
        )
        self.left = sorted(rng.sample(range(self.size), rng.randint(1, self.size)))
        self.after = random_plan(rng, self.left, num_layers)
        self.held = held_by({rank: self.names(rank) for rank in self.left})
        self.lost = [name for name in self.layers if name not in self.held]

    def names(self, rank: int) -> tuple[str, ...]:
        """What a rank holds before the move."""
        return tuple(name for name, ranks in self.homes.items() if rank in ranks)

    def wanted(self) -> dict[str, tuple[int, ...]]:
        return homes_of(self.after, self.layers)

    def rounds(self) -> Any:
        return moves(
            self.wanted(),
            self.held,
            {name: spec_of(tensor) for name, tensor in self.whole.items()},
            self.cluster,
            chunk_bytes=3001,
            round_bytes=20_000,
        )

    def move(self, rank: int, run: Any) -> dict[str, Tensor]:
        """What a rank holds after the move; nothing for one that is lost."""
        if rank not in self.left:
            return {}
        values = {name: self.whole[name].clone() for name in self.names(rank)}
        into = {name: empty(spec_of(self.whole[name])) for name, ranks in self.wanted().items() if rank in ranks}
        carry_out(self.rounds(), rank, run, values, into)
        return into

    def check(self, results: list[dict[str, Tensor]]) -> None:
        for rank, result in enumerate(results):
            assert set(result) == {name for name, ranks in self.wanted().items() if rank in ranks}
            for name, tensor in result.items():
                same_bits(tensor, self.whole[name])

    @staticmethod
    def _tensor(rng: random.Random, generator: torch.Generator) -> Tensor:
        shape = tuple(rng.randint(0, 40) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice(DTYPES)
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).to(dtype)
        raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)  # NaNs among them
        return raw.view(dtype).reshape(shape)


def random_plan(rng: random.Random, ranks: list[int], num_layers: int) -> Plan:
    """Stages of random length on random groups; some ranks may stay idle."""
    ranks = rng.sample(ranks, len(ranks))
    num_stages = rng.randint(1, min(len(ranks), num_layers))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    used = rng.randint(num_stages, len(ranks))
    groups = [[rank] for rank in ranks[:num_stages]]
    for rank in ranks[num_stages:used]:
        rng.choice(groups).append(rank)
    layers = (stop - start for start, stop in pairwise(cuts))
    return staged_plan(*((count, dict.fromkeys(group, 1)) for count, group in zip(layers, groups, strict=True)))


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("seed", range(48))
def test_random_moves_over_gloo(seed: int) -> None:
    """Small messages and rounds, so that tensors are cut; where no holder is left, the tensors are named."""
    case = Case(seed)
    if case.lost:
        with pytest.raises(StateError) as caught:
            case.rounds()
        assert all(name in str(caught.value) for name in case.lost[:4])
        return
    case.check(on_executors(case.size, lambda executor: case.move(executor.rank, executor.run)))


def test_snapshots_survive_a_device_that_is_lost_while_they_travel() -> None:
    """Owner and neighbour go back to the last snapshot of which both, or one of them, has everything."""
    layers = {"a": (0,), "b": (1,), "c": (2,)}
    plan = staged_plan(*((1, {rank: 1}) for rank in range(3)))
    cluster = cluster_of("xyz", bytes_per_s=1e8)
    homes = homes_of(plan, layers)
    doubled = with_neighbours(homes, (0, 1, 2))

    def work(executor: Executor) -> KeptInMemory:
        rank, kept = executor.rank, KeptInMemory()
        weight = torch.full((5,), float(rank))
        own = {name: weight for name, ranks in homes.items() if rank in ranks}
        for step in (1, 2, 3):
            weight += 100
            into = {name: empty(spec_of(weight)) for name, ranks in doubled.items() if rank in ranks}
            carry_out(
                moves(doubled, homes, dict.fromkeys(layers, spec_of(weight)), cluster), rank, executor.run, own, into
            )
            kept.keep(Position(0, step), into)
        return kept

    kept = on_executors(3, work)
    second, third = Position(0, 2), Position(0, 3)
    assert {at: set(names) for at, names in kept[1].names().items()} == {second: {"a", "b"}, third: {"a", "b"}}
    kept[1].forget_after(second)  # the third never arrived there, and rank 0 is gone
    left = {rank: kept[rank].names() for rank in (1, 2)}
    values = {at: held_by({rank: names.get(at, ()) for rank, names in left.items()}) for at in (second, third)}
    assert list(whole_states(values, layers)) == [second]
    assert kept[1].at(second)["a"].tolist() == [200.0] * 5
    assert kept[2].at(second)["c"].tolist() == [202.0] * 5
    assert kept[1].at(third) == {}


def test_files_are_read_by_name(tmp_path: Path) -> None:
    """From any division among files, only what is asked for; what is missing is named."""
    reference = {f"layer.{number}": torch.randn(4, 3).to(dtype) for number, dtype in enumerate(DTYPES[:4])}
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path, names in zip(paths, (["layer.0", "layer.3"], ["layer.1", "layer.2"]), strict=True):
        save_sealed(path, owner_of("run", path), {name: reference[name] for name in names})
    for names in (["layer.1", "layer.3"], None):
        into = None if names is None else {name: torch.zeros_like(reference[name]) for name in names}
        result = load_state(paths, "run", into)
        assert set(result) == set(names or reference)
        assert all(result[name] is tensor for name, tensor in (into or {}).items())
        for name, tensor in result.items():
            same_bits(tensor, reference[name])
    with pytest.raises(StateError, match=r"layer\.9 missing.*without --resume"):
        load_state(paths, "run", {"layer.0": torch.zeros_like(reference["layer.0"]), "layer.9": torch.zeros(4, 3)})
    with pytest.raises(StateError, match=r"layer\.1 missing"):  # of another shape
        load_state(paths, "run", {"layer.1": torch.zeros(3, 4)})
