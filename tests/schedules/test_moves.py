"""Moves of a state: every rank gets what it lacks, nothing else travels, and the links share the work."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise

import pytest

from tests.clusters import cluster_of
from workbench.core import Cluster
from workbench.core.costs import Spec
from workbench.core.errors import ConfigError, StateError
from workbench.core.plan import Homes
from workbench.core.schedule import SEND
from workbench.schedules import check
from workbench.schedules.moves import CHUNK_BYTES, ROUND_BYTES, Move, moves
from workbench.simulator import simulate

MEGABYTE = 1_000_000


def linked(*bytes_per_s: float) -> Cluster:
    """One device for each rate of an access link."""
    return cluster_of(len(bytes_per_s), bytes_per_s=list(bytes_per_s))


def delivered(rounds: tuple[Move, ...], held: Homes) -> dict[tuple[str, int], set[tuple[int, int]]]:
    """What every rank has received of each tensor, after checking that a sender has what it sends."""
    results: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for move in rounds:
        check(move.program.schedule)
        for rank, values in enumerate(move.program.schedule.inputs):
            for value in values:
                assert all(rank in held[piece.name] for piece in move.chunks[value.microbatch])
        for rank, values in enumerate(move.program.schedule.outputs):
            for value in values:
                for piece in move.chunks[value.microbatch]:
                    assert (piece.start, piece.stop) not in results.get((piece.name, rank), ()), "sent twice"
                    results.setdefault((piece.name, rank), set()).add((piece.start, piece.stop))
    return results


def seconds(rounds: tuple[Move, ...]) -> float:
    return sum(simulate(move.program, memory=False).makespan_s for move in rounds)


def lower_bound_s(wanted: Homes, held: Homes, specs: Mapping[str, Spec], cluster: Cluster) -> float:
    """No rank receives faster than its link, and what only some ranks hold must leave these once."""
    rates = [device.link.bytes_per_s for device in cluster.devices]
    received, left = [0] * cluster.world_size, dict.fromkeys(map(frozenset, held.values()), 0)
    for name, ranks in wanted.items():
        missing = set(ranks) - set(held[name])
        for rank in missing:
            received[rank] += specs[name].nbytes
        left[frozenset(held[name])] += specs[name].nbytes if missing else 0
    leaving_s = (nbytes / sum(rates[rank] for rank in ranks) for ranks, nbytes in left.items())
    return max(*(nbytes / rate for nbytes, rate in zip(received, rates, strict=True)), *leaving_s)


@pytest.mark.parametrize("seed", range(40))
def test_random_moves_deliver_every_byte_once(seed: int) -> None:
    """Of what a rank lacks, and nothing that it holds, in rounds of bounded size, in at most twice the links' lower
    bound."""
    rng = random.Random(seed)
    size = rng.randint(2, 8)
    cluster = linked(*(rng.choice((1e6, 4e6, 16e6)) for _ in range(size)))
    names = [f"tensor.{number}" for number in range(rng.randint(1, 60))]
    large = rng.random() < 0.5
    specs = {
        name: Spec((rng.randint(0, 3_000_000 if large else 3000),), rng.choice(("uint8", "float32"))) for name in names
    }
    values = {name: tuple(rng.sample(range(size), rng.randint(1, size))) for name in names}
    expected = {name: tuple(rng.sample(range(size), rng.randint(0, size))) for name in names}
    rounds = moves(expected, values, specs, cluster)
    result = delivered(rounds, values)
    for name in names:
        for rank in range(size):
            pieces = sorted(result.get((name, rank), ()))
            total = sum(stop - start for start, stop in pieces)
            assert total == (specs[name].nbytes if rank in expected[name] and rank not in values[name] else 0)
            assert all(before[1] == after[0] for before, after in pairwise(pieces))
    for move in rounds:
        sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in move.chunks]
        assert max(sizes) <= CHUNK_BYTES
        for rank in range(size):
            assert (
                sum(sizes[value.microbatch] for value in move.program.schedule.outputs[rank])
                < ROUND_BYTES + CHUNK_BYTES
            )
    if large and rounds:
        assert seconds(rounds) <= 2.0 * lower_bound_s(expected, values, specs, cluster)


def test_nothing_to_move_takes_no_round() -> None:
    """All is where it is wanted; a tensor that nobody wants stays; empty ones need no message."""
    specs = {"a": Spec((4,)), "empty": Spec((0,))}
    assert moves({"a": (0,), "empty": (1,)}, {"a": (0, 1), "empty": (0,), "b": (1,)}, specs, linked(1e6, 1e6)) == ()


def test_tensors_travel_together() -> None:
    """A thousand small ones in one message."""
    specs = {f"t{number}": Spec((8,)) for number in range(1000)}
    (move,) = moves(dict.fromkeys(specs, (1,)), dict.fromkeys(specs, (0,)), specs, linked(1e6, 1e6))
    assert [op.kind for op in move.program.schedule.ops[0]] == [SEND]
    assert seconds((move,)) == pytest.approx(0.032)


def test_two_holders_share_the_sending() -> None:
    """In proportion to their links: 3 + 1 MB/s towards a fast receiver take a quarter of the slower one's time."""
    specs = {f"t{number}": Spec((MEGABYTE,), "uint8") for number in range(12)}
    rounds = moves(dict.fromkeys(specs, (2,)), dict.fromkeys(specs, (0, 1)), specs, linked(3e6, 1e6, 3e6))
    assert seconds(rounds) <= 12 / 3 + 1.1
    both = moves(dict.fromkeys(specs, (2, 3)), dict.fromkeys(specs, (0, 1)), specs, linked(*[1e6] * 4))
    assert seconds(both) <= 12 + 1.1


def test_receivers_pass_on_what_they_have() -> None:
    """One holder, seven receivers: far from the seven times its bytes that the holder alone would send."""
    specs = {f"t{number}": Spec((MEGABYTE,), "uint8") for number in range(14)}
    rounds = moves(dict.fromkeys(specs, tuple(range(8))), dict.fromkeys(specs, (0,)), specs, linked(*[1e6] * 8))
    assert seconds(rounds) <= 2.0 * 14


def test_lost_tensors_and_foreign_ranks_are_refused() -> None:
    """Named, with what to do."""
    specs = {"layer.3.down": Spec((4,)), "step": Spec((1,))}
    with pytest.raises(StateError, match=r"No device holds 'layer\.3\.down'\. Resume from the last snapshot"):
        moves({"layer.3.down": (1,), "step": (0,)}, {"layer.3.down": (), "step": (0,)}, specs, linked(1e6, 1e6))
    with pytest.raises(ConfigError, match=r"'step' to or from rank 2 .* has 2 devices"):
        moves({"step": (2,)}, {"step": (0,)}, specs, linked(1e6, 1e6))
