"""Several compute streams of a device, collectives beside them, and where a failing operation is marked."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from gloo_pairs import on_executors, on_ranks, program
from small_operations import WIDTH, ones, op, small, value

from tests.waiting import LIMIT_S
from workbench.core.costs import Spec
from workbench.core.errors import ScheduleError
from workbench.core.schedule import ALLGATHER, ALLREDUCE, NONE, REDUCESCATTER, Op, Schedule, Value, recv, send
from workbench.core.timeline import Span
from workbench.profiler.processors import Place
from workbench.runtime.executor import Contents, Execution, Executor
from workbench.runtime.pacing import Pacer
from workbench.runtime.transport import Transport
from workbench.schedules import check
from workbench.schedules.tensor import split_heads
from workbench.simulator import simulate


def only(executions: list[Execution]) -> Execution:
    (execution,) = executions
    return execution


def test_two_streams_of_a_device_compute_at_the_same_time() -> None:
    """Each waits for the other's operation to have begun, and then sleeps as long as the other: this ends only if they
    overlap."""
    schedule, now_s = split_heads((1, 1)), [0.0]
    both = threading.Barrier(2, timeout=LIMIT_S)

    def sleep(seconds: float) -> None:
        end_s = now_s[0] + seconds
        both.wait()
        now_s[0] = max(now_s[0], end_s)

    def attend(made: Op, reads: Contents) -> Contents:
        both.wait()
        return ones(made, reads)

    def work(rank: int, transport: Transport) -> Execution:
        pacer = Pacer(1.0, clock=lambda: now_s[0], sleep=sleep)
        return Executor(rank, transport, pacer).run(executed_program, handlers, inputs)

    executed_program = program(schedule, small, ATTN=0.05)
    inputs = {Value("hidden", 0, 0): torch.ones(WIDTH), Value("ghidden", 1, 0): torch.ones(WIDTH)}
    handlers = {"ATTN": attend, "MLP": ones, "MLPB": ones, "ATTNB": ones}
    done = only(on_ranks(1, work))
    first, second = (span for span in done.spans if span.op.kind == "ATTN")
    assert {first.op.stream, second.op.stream} == {"compute", "compute1"}
    assert (first.start_s, first.end_s) == (second.start_s, second.end_s) == (0.0, 0.05), "paced side by side"


def test_a_collective_overlaps_with_compute() -> None:
    """The sum needs rank 1's operation, which waits until rank 0 computes beside the collective."""
    part, total, other, end = value("part"), value("sum"), value("other"), value("end")
    reduce = Op(ALLREDUCE, 0, NONE, NONE, (part,), (total,), (0, 1), "collective")
    computing = threading.Event()
    schedule = Schedule(
        ops=(
            (op("PART", (), (part,)), reduce, op("LONG", (), (other,)), op("END", (total, other), (end,))),
            (op("WAIT", (), (part,)), reduce),
        ),
        outputs=((end,), (total,)),
    )

    def long(made: Op, reads: Contents) -> Contents:
        computing.set()
        return ones(made, reads)

    def wait(made: Op, reads: Contents) -> Contents:
        assert computing.wait(LIMIT_S), "rank 0 did not compute while it waited for the sum"
        return ones(made, reads)

    handlers = {"PART": ones, "LONG": long, "WAIT": wait, "END": lambda made, reads: (reads[0] + reads[1],)}
    handlers[ALLREDUCE] = lambda made, reads: reads
    first, second = on_executors(2, lambda executor: executor.run(program(schedule, small), handlers, {}))
    assert first.outputs[end].tolist() == [3.0] * WIDTH and second.outputs[total].tolist() == [2.0] * WIDTH


@pytest.mark.parametrize("rows", [(1, 1), (3, 1, 2), (2, 0, 5, 1)])
@pytest.mark.parametrize("order", ["ascending", "rotated"])
def test_all_gather_and_reduce_scatter_of_unequal_parts(rows: tuple[int, ...], order: str) -> None:
    size = len(rows)
    ranks = tuple(range(size)) if order == "ascending" else (*range(1, size), 0)
    tokens = [Value("part", rank) for rank in range(size)]
    blocks, gathered = [Value("block", rank) for rank in range(size)], value("whole")
    schedule = Schedule(
        ops=tuple(
            (
                Op(ALLGATHER, 0, NONE, NONE, (tokens[rank],), (gathered,), ranks, "collective"),
                Op(REDUCESCATTER, 0, NONE, NONE, (gathered,), (blocks[rank],), ranks, "collective"),
            )
            for rank in range(size)
        ),
        inputs=tuple((token,) for token in tokens),
        outputs=tuple((gathered, block) for block in blocks),
    )
    check(schedule)

    def spec(value: Value) -> Spec:
        return Spec((rows[value.stage] if value.name != "whole" else sum(rows), WIDTH))

    parts = [torch.randn(count, WIDTH) for count in rows]
    handlers = {ALLGATHER: lambda made, reads: reads, REDUCESCATTER: lambda made, reads: (reads[0].clone(),)}

    def work(executor: Executor) -> Execution:
        return executor.run(program(schedule, spec), handlers, {tokens[executor.rank]: parts[executor.rank]})

    reference = torch.cat([parts[rank] for rank in ranks])
    sums = dict(zip(ranks, (size * reference).split([rows[rank] for rank in ranks]), strict=True))
    for rank, done in enumerate(on_executors(size, work)):
        torch.testing.assert_close(done.outputs[gathered], reference)
        torch.testing.assert_close(done.outputs[blocks[rank]], sums[rank])
        simulated = simulate(program(schedule, spec))
        sent = [
            [span.nbytes for span in spans if span.rank == rank and span.op.kind == ALLGATHER]
            for spans in (done.spans, simulated.spans)
        ]
        assert sent[0] == sent[1]


@pytest.mark.parametrize("stream", ["compute", "compute1"])
def test_a_failing_operation_is_marked_in_the_grid(stream: str) -> None:
    first, second = value("first"), value("second")
    schedule = Schedule(
        ops=((op("GOOD", (), (first,)), op("BAD", (first,), (second,), stream, 7)),), outputs=((second,),)
    )

    def bad(made: Op, reads: Contents) -> Contents:
        raise ValueError("it was odd")

    def work(executor: Executor) -> None:
        executor.run(program(schedule, small), {"GOOD": ones, "BAD": bad}, {}, name="epoch 1, step 3")

    with pytest.raises(ValueError, match="odd") as caught:
        on_executors(1, work)
    (note,) = caught.value.__notes__
    assert "Device 'd0' (rank 0), epoch 1, step 3, operation 0BAD7" in note and ">0BAD7<" in note and "0GOOD" in note


def test_collectives_of_the_same_ranks_on_two_streams_have_no_order() -> None:
    part, sums = value("part"), [value("sum", 0), value("sum", 1)]
    reduces = tuple(Op(ALLREDUCE, 0, m, NONE, (part,), (sums[m],), (0, 1), f"collective{m}") for m in range(2))
    schedule = Schedule(ops=(reduces, reduces), inputs=((part,), (part,)))
    with pytest.raises(ScheduleError, match="order"):
        on_executors(2, lambda executor: executor.run(program(schedule, small), {}, {}))


def accelerators() -> list[str]:
    kinds = [name for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)) if backend.is_available()]
    return ["cpu", *kinds]


@pytest.mark.parametrize("kind", accelerators())
def test_a_stream_on_an_accelerator_gives_the_same_values(kind: str) -> None:
    """Values cross the links through host memory, whatever device their stream computes on."""
    torch.manual_seed(0)
    source, passed, result = value("in"), value("act"), value("out")
    schedule = Schedule(
        ops=(
            (op("FIRST", (source,), (passed,), "accelerator"), send(passed, 0, 1)),
            (recv(passed, 0, 1), op("SECOND", (passed,), (result,))),
        ),
        inputs=((source,), ()),
        outputs=((), (result,)),
    )
    weight, rows = torch.randn(WIDTH, WIDTH), torch.randn(2, WIDTH)
    places = {"accelerator": Place(torch.device(kind), tuple(range(os.cpu_count() or 1)))}

    def first(made: Op, reads: Contents) -> Contents:
        assert reads[0].device.type == kind
        return (reads[0] @ weight.to(kind),)

    def second(made: Op, reads: Contents) -> Contents:
        assert reads[0].device.type == "cpu"
        return (reads[0] @ weight,)

    def work(executor: Executor) -> tuple[Execution, list[Span]]:
        executor.place(places)
        done = executor.run(
            program(schedule, lambda value: Spec((2, WIDTH))), {"FIRST": first, "SECOND": second}, {source: rows}
        )
        return done, done.spans

    _, (last, _) = on_executors(2, work)
    torch.testing.assert_close(last.outputs[result], rows @ weight @ weight, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
def test_streams_run_on_the_cores_of_their_processors() -> None:
    """Until the executor is closed, and other streams on those of stream "compute"."""
    before = os.sched_getaffinity(0)
    host, first, last = torch.device("cpu"), min(before), max(before)
    streams = {"compute": first, "compute1": last, "other": first}
    results = {stream: value(stream) for stream in streams}
    ops = tuple(op("WHERE", (), (results[stream],), *(() if stream == "compute" else (stream,))) for stream in streams)
    schedule = Schedule(ops=(ops,), outputs=(tuple(results.values()),))

    def where(made: Op, reads: Contents) -> Contents:
        return (os.sched_getaffinity(0),)

    def work(executor: Executor) -> tuple[dict[Value, Any], set[int]]:
        executor.place({stream: Place(host, (core,)) for stream, core in list(streams.items())[:2]})
        result = executor.run(program(schedule, small), {"WHERE": where}, {}).outputs
        executor.close()
        return result, os.sched_getaffinity(0)

    [(found, after)] = on_executors(1, work)
    assert found == {results[stream]: {core} for stream, core in streams.items()} and after == before
