"""HetPipe: what the weights of every mini-batch contain, how far apart virtual workers get, what is in flight."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import peaks, workers_of

from tests.plans import staged_plan
from workbench.core.errors import ConfigError
from workbench.core.schedule import RECV, SEND, Op, Schedule, Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules import check, hetpipe, insert_transfers

Update = tuple[int, int]  # (virtual worker, its mini-batch)
Held = dict[tuple[int, Value], set[Update]]  # of (rank, value)
Read = dict[tuple[int, int, str], Value]  # of (rank, mini-batch, F or B)


def worker_of(workers: VirtualWorkers, rank: int) -> int:
    return next(number for number, plan in enumerate(workers.pipelines) if plan.stage_of(rank) is not None)


def updates_seen(workers: VirtualWorkers, schedule: Schedule) -> tuple[Held, Read]:
    """Replay the schedule with sets of updates in place of weights, whenever an operation's values are there.

    Returns what every value of every rank contains, and which weights F and B of (rank, mini-batch) read.
    """
    count = len(workers.pipelines)
    tensors: Held = {(rank, value): set() for rank, values in enumerate(schedule.inputs) for value in values}
    read: Read = {}
    waiting = [list(ops) for ops in schedule.ops]
    pushed: dict[int, set[Update]] = {rank: set() for rank in workers.ranks}

    def run(rank: int, op: Op) -> None:
        own = worker_of(workers, rank)
        contents = [tensors[rank, value] for value in op.reads]
        weights = [value for value in op.reads if value.name == "weight"]
        if op.kind == SEND:
            tensors[op.ranks[1], op.reads[0]] = contents[0]
            return
        if op.kind in ("F", "B"):
            read[rank, op.microbatch // count, op.kind] = weights[0]
        result: set[Update] = set().union(*contents)
        if op.kind == "STEP":
            result = tensors[rank, weights[0]] | {(own, op.microbatch // count)}
        elif op.kind == "PUSH":
            result = {update for update in contents[0] if update[0] == own} - pushed[rank]
            pushed[rank] |= result
        elif op.kind == "MERGE":
            assert sum(map(len, contents)) == len(result), "an update was merged twice"
        elif op.kind == "PULL":
            # The shards of a stage hold the same updates; its own that they lack are added.
            shards = [tensors[rank, value] for value in op.reads if value.name == "global"]
            assert all(shard == shards[0] for shard in shards)
            result = shards[0] | {update for update in tensors[rank, weights[0]] if update[0] == own}
        for value in op.writes:
            tensors[rank, value] = result

    progress = True
    while progress:
        progress = False
        for rank, ops in enumerate(waiting):
            while ops and (ops[0].kind == RECV or all((rank, value) in tensors for value in ops[0].reads)):
                op = ops.pop(0)
                if op.kind != RECV:
                    run(rank, op)
                progress = True
    assert not any(waiting), "run from top to bottom, without streams, the schedule stops"
    return tensors, read


def pieces(num_layers: int, cuts: set[int]) -> list[int]:
    """Return the layers between the cuts."""
    edges = [0, *sorted(cuts), num_layers]
    return [end - first for first, end in pairwise(edges)]


shapes = st.integers(2, 5).flatmap(
    lambda layers: st.lists(
        st.sets(st.integers(1, layers - 1)).map(lambda cuts: pieces(layers, cuts)), min_size=1, max_size=3
    )
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 4), st.integers(1, 4))
def test_staleness_is_bounded_and_all_end_with_the_same_weights(shape, in_flight, num_waves) -> None:
    """For every mini-batch of every virtual worker, on every stage: WSP's bounds (Park et al., section 5)."""
    workers = workers_of(*shape, in_flight=in_flight)
    schedule = check(insert_transfers(hetpipe(workers, num_waves)))
    assert Schedule.from_text(schedule.to_text()) == schedule
    values, read = updates_seen(workers, schedule)
    count, total = len(workers.pipelines), num_waves * in_flight
    everything = {(worker, p) for worker in range(count) for p in range(total)}
    for rank in workers.ranks:
        own = worker_of(workers, rank)
        for p in range(total):
            assert read[rank, p, "B"] == read[rank, p, "F"]
            seen = values[rank, read[rank, p, "F"]]
            for worker in range(count):
                allowed = in_flight - 1 if worker == own else 2 * in_flight - 2
                missing = {(worker, other) for other in range(p)} - seen
                assert len(missing) <= allowed
            assert all(other < p for worker, other in seen if worker == own)
        (last,) = (value for value in schedule.outputs[rank] if value.name == "weight")
        assert values[rank, last] == everything


def test_the_bound_is_reached() -> None:
    """So it is no looser than it need be: some mini-batch lacks exactly s_global of the other's."""
    workers = workers_of((1, 1), (2,), in_flight=2)
    values, read = updates_seen(workers, insert_transfers(hetpipe(workers, 6)))
    missing = [p - sum(worker == 1 for worker, _ in values[0, read[0, p, "F"]]) for p in range(12)]
    assert max(missing) == 2 * workers.in_flight - 2 == 2


@pytest.mark.parametrize(("in_flight", "expected"), [(1, [0, 1, 2]), (2, [0, 0, 0, 1, 1, 2])])
def test_waves_needed(in_flight, expected) -> None:
    """One mini-batch a wave is bulk-synchronous: each needs all before it."""
    workers = workers_of((1,), (1,), in_flight=in_flight)
    assert [workers.waves_needed(p) for p in range(len(expected))] == expected


def test_one_virtual_worker_is_an_asynchronous_pipeline_of_so_many_in_flight() -> None:
    """Contexts and weight versions: min(stages behind and this one, N_m)."""
    for in_flight in (1, 2, 3, 5):
        schedule = insert_transfers(hetpipe(workers_of((1, 1, 1), in_flight=in_flight), 4))
        assert {op.kind for ops in schedule.ops for op in ops} == {"F", "B", "STEP", SEND, RECV}
        expected = tuple(min(3 - stage, in_flight) for stage in range(3))
        assert peaks(schedule, "ctx", F=1.0, B=2.0) == expected
        assert peaks(schedule, "weight", F=1.0, B=2.0) == expected


def test_shards_lie_between_all_cuts_and_are_served_in_turn() -> None:
    workers = workers_of((3, 1), (2, 2))
    assert [(shard.start, shard.stop, shard.owners, shard.server) for shard in workers.shards()] == [
        (0, 2, (0, 2), 0),
        (2, 3, (0, 3), 3),
        (3, 4, (1, 3), 1),
    ]
    assert (workers.grouping(), workers.wave_samples, workers.ranks) == ("[2+2]", 8, (0, 1, 2, 3))


def test_every_layer_is_pushed_and_pulled_once_a_wave() -> None:
    """No byte more than the parameter server needs: per wave and shard, one push and one pull for each owner but the
    server."""
    workers = workers_of((3, 1), (2, 2), (4,), in_flight=3)
    schedule = insert_transfers(hetpipe(workers, 5))
    sent = [op.reads[0].name for ops in schedule.ops for op in ops if op.kind == SEND]
    shards = len(workers.shards())
    assert sent.count("push") == sent.count("global") == 5 * shards * 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"in_flight": 0}, "0 mini-batches"),
        ({"pipelines": ()}, "0 virtual workers"),
        ({"pipelines": workers_of((1, 1)).pipelines * 2}, "Rank 0 has more than one stage"),
        ({"pipelines": (*workers_of((1, 1)).pipelines, *workers_of((3,)).pipelines)}, r"\[2, 3\] layers"),
    ],
)
def test_what_cannot_be_meant_is_refused(change, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        replace(workers_of((1, 1)), **change)


def test_a_stage_has_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"ranks \(0, 1\)"):
        VirtualWorkers(pipelines=(staged_plan((1, {0: 1, 1: 1})),), in_flight=1)
