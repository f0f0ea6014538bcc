"""Every builder's schedule, executed by real gloo ranks: each value is what one process computes, each dependency is
kept in time."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
import torch
from gloo_pairs import on_executors, program

from workbench.core.activities import activities
from workbench.core.costs import Spec
from workbench.core.schedule import BROADCAST, COLLECTIVES, RECV, RING, SEND, TRANSFERS, Op, Schedule, Value
from workbench.core.timeline import Span
from workbench.runtime.executor import Contents, Executor
from workbench.simulator import simulate

SIZE = 3
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.txt"))


def number(name: object) -> float:
    return int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:4], "big") / 2**32


def computed(op: Op, reads: Contents) -> Contents:
    """Return a tensor for each write that depends on the operation, on what it reads and on the order of that."""
    total = torch.full((SIZE,), number((op.kind, op.stage, op.microbatch, op.part)), dtype=torch.float64)
    for place, content in enumerate(reads):
        total = total + content / (place + 2)
    return tuple(total * (1 + number(value)) for value in op.writes)


def contribution(op: Op, reads: Contents) -> Contents:
    return (sum(reads, torch.zeros(SIZE, dtype=torch.float64)),)


def in_one_process(schedule: Schedule, inputs: list[dict[Value, torch.Tensor]]) -> list[dict[Value, torch.Tensor]]:
    """Return every value on every rank, by running each activity once all that it waits for has run."""
    graph, present = activities(schedule), [dict(values) for values in inputs]
    waits = list(graph.num_waits)
    ready = [activity for activity, count in enumerate(waits) if count == 0]
    while ready:
        activity = ready.pop()
        ops = [(rank, schedule.ops[rank][index]) for rank, index in graph.members[activity]]
        contents = [tuple(present[rank][value] for value in op.reads) for rank, op in ops]
        if ops[0][1].kind == SEND:
            present[ops[1][0]][ops[1][1].writes[0]] = contents[0][0]
        elif ops[0][1].kind in COLLECTIVES:
            parts = [contribution(op, read)[0] for (_, op), read in zip(ops, contents, strict=True)]
            root = next(place for place, (rank, op) in enumerate(ops) if rank == op.ranks[0])
            total = parts[root] if ops[0][1].kind == BROADCAST else sum(parts[1:], parts[0])
            for rank, op in ops:
                present[rank].update(dict.fromkeys(op.writes, total))
        else:
            (rank, op), read = ops[0], contents[0]
            present[rank].update(zip(op.writes, computed(op, read), strict=True))
        for successor in graph.successors(activity):
            waits[successor] -= 1
            if waits[successor] == 0:
                ready.append(successor)
    return present


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_executed_order_is_the_simulated_order(path: Path) -> None:
    schedule = Schedule.from_text(path.read_text(encoding="utf-8"))
    inputs = [
        {value: torch.full((SIZE,), number((rank, value)), dtype=torch.float64) for value in schedule.inputs[rank]}
        for rank in range(schedule.world_size)
    ]
    kinds = {op.kind for ops in schedule.ops for op in ops} - TRANSFERS
    executed_program = program(schedule, lambda value: Spec((SIZE,), "float64"), **dict.fromkeys(kinds, 1e-3))
    seen: list[dict[Value, torch.Tensor]] = [{} for _ in schedule.ops]

    def work(executor: Executor) -> list[Span]:
        own = seen[executor.rank]

        def handle(op: Op, reads: Contents) -> Contents:
            time.sleep(2e-4)  # another stream or rank would come first if it did not wait
            own.update(zip(op.reads, reads, strict=True))
            return (contribution if op.kind in COLLECTIVES else computed)(op, reads)

        done = executor.run(executed_program, dict.fromkeys(kinds, handle), inputs[executor.rank])
        own.update(done.outputs)
        return done.spans

    spans = on_executors(schedule.world_size, work, factor=0.0)
    for rank, present in enumerate(in_one_process(schedule, inputs)):
        for value, content in seen[rank].items():
            torch.testing.assert_close(content, present[value], msg=f"rank {rank}, {value}")

    simulated = simulate(executed_program, memory=False)
    of_op = [{id(op): index for index, op in enumerate(ops)} for ops in schedule.ops]
    placed = {(rank, of_op[rank][id(span.op)]): span for rank, own in enumerate(spans) for span in own}
    assert len(placed) == sum(map(len, schedule.ops)), "every operation has one span"
    for rank, ops in enumerate(schedule.ops):
        for stream in {op.stream for op in ops if op.kind not in TRANSFERS} - {RING}:
            listed = [op for op in ops if op.stream == stream]
            for source in (spans[rank], [span for span in simulated.spans if span.rank == rank]):
                own = sorted(
                    (span for span in source if span.op.stream == stream), key=lambda span: (span.start_s, span.end_s)
                )
                assert [span.op.label for span in own if span.op.stream == stream] == [op.label for op in listed], (
                    rank,
                    stream,
                )

    graph = activities(schedule)
    for activity, members in enumerate(graph.members):
        for successor in graph.successors(activity):
            for rank, index in graph.members[successor]:
                before = [place for place in members if place[0] == rank]
                for place in before:
                    former, later = placed[place], placed[rank, index]
                    if former.op.kind == SEND and later.op.kind == SEND:
                        assert former.start_s <= later.start_s, f"rank {rank}: {former.op} then {later.op}"
                    elif RECV in (former.op.kind, later.op.kind) and former.op.ranks == later.op.ranks:
                        assert former.end_s <= later.end_s, f"rank {rank}: {former.op} then {later.op}"
                    elif former.op.stream != RING or later.op.stream != RING:
                        assert former.end_s <= later.start_s, f"rank {rank}: {former.op} then {later.op}"
