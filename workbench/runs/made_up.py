"""Run any program once on emulated devices: operations take their written seconds, messages are real.

So a schedule that somebody has written is executed as it is simulated, without a model (docs/teach/grading.md).
Its values are made up, or are computed by functions of the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from workbench.core.costs import TOKEN
from workbench.core.program import Program
from workbench.core.schedule import Value
from workbench.core.timeline import Span, Timeline
from workbench.methods.common.records import measured_timeline
from workbench.runtime.context import RankContext
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import EngineCluster
from workbench.runtime.executor import Executor, Handler
from workbench.runtime.pacing import Pacer, RankLinks
from workbench.runtime.process_group import group, require_one_program
from workbench.runtime.step_values import empty
from workbench.runtime.transport import Transport

share_module(__name__)  # its functions run on devices


class Contents(NamedTuple):
    """Everything with which one rank computes.  inputs: the schedule's inputs on this rank.  handlers: by kind of
    operation.
    """

    inputs: Mapping[Value, Any]
    handlers: Mapping[str, Handler]


ContentsOf = Callable[[Program], Contents]
"""Makes a rank's contents; it is called on the device."""
Outputs = Mapping[Value, Any]
"""The schedule's outputs on one rank."""
Ended = tuple[float, list[tuple[int, float, float, int, float]], Outputs]
"""When all ranks began, a rank's spans (operation's index, start, end, bytes, seconds late), and its outputs."""


def made_up_handlers(program: Program) -> Mapping[str, Handler]:
    """Return handlers that compute nothing and write values of the right size."""
    contents: dict[Value, torch.Tensor | None] = {}

    def handle(op: Any, reads: tuple[Any, ...]) -> tuple[torch.Tensor | None, ...]:
        for value in op.writes:
            if value not in contents:
                contents[value] = content_of(program, value)
        return tuple(contents[value] for value in op.writes)

    return dict.fromkeys({op.kind for ops in program.schedule.ops for op in ops}, handle)


def content_of(program: Program, value: Value) -> torch.Tensor | None:
    """Return zeros of the value's size; None for a value that only orders operations."""
    spec = program.costs.spec(value)
    return None if spec == TOKEN else empty(spec).zero_()


def subgroups_of(programs: list[Program]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return a gloo group for all ranks that an operation of the programs joins.  Every rank must call this."""
    every_op = (op for program in programs for ops in program.schedule.ops for op in ops)
    return {
        ranks: dist.new_group(list(ranks), backend="gloo", timeout=timedelta(seconds=30))
        for ranks in sorted({tuple(sorted(op.ranks)) for op in every_op if len(op.ranks) > 1})
    }


def begin_together() -> float:
    """Wait until all ranks can begin; return that moment of the machine's monotonic clock."""
    latest = torch.tensor([time.monotonic() + 0.01], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    time.sleep(max(0.0, latest.item() - time.monotonic()))
    return latest.item()


def execute_program(program: Program, engines: EngineCluster) -> Timeline:
    """Run the program once on emulated devices with made-up contents; return what was measured (see execute_with)."""
    return execute_with(program, engines, [None] * engines.cluster.world_size)[0]


def execute_with(
    program: Program, engines: EngineCluster, contents: Sequence[ContentsOf | None]
) -> tuple[Timeline, tuple[Outputs, ...]]:
    """Run the program once on emulated devices, after one run that is not counted; return what was measured, and each
    rank's outputs.

    contents: by rank; None makes them up.  The program's ranks are the engines' ranks.  Raises ScheduleError if it
    cannot run.
    """
    size = engines.cluster.world_size
    text = program.to_text()
    results: list[Ended] = engines.run(_run_rank, [(text, contents_of) for contents_of in contents])
    begin_s = min(began for began, *_ in results)
    parts = [
        (
            [
                Span(rank, program.schedule.ops[rank][index], start_s, end_s, nbytes, late_s)
                for index, start_s, end_s, nbytes, late_s in spans
            ],
            (),
        )
        for rank, (_, spans, _) in enumerate(results)
    ]
    timeline = measured_timeline(
        parts, engines.cluster, engines.fidelity, begin_s=begin_s, resident=[0] * size, title=""
    )
    return timeline, tuple(outputs for *_, outputs in results)


def _run_rank(context: RankContext, payload: tuple[str, ContentsOf | None]) -> Ended:
    text, contents_of = payload
    program = Program.from_text(text)
    with group(context, 30.0) as process_group:
        require_one_program(process_group, program.to_text())
        subgroups = subgroups_of([program])
        links = RankLinks(
            cluster=context.cluster, rank=context.rank, fidelity=context.fidelity, dilation=context.dilation
        )
        transport = Transport(
            process_group, context.rank, subgroup=lambda ranks: subgroups[tuple(sorted(ranks))], links=links
        )
        inputs, handlers = contents_of(program) if contents_of else made_up(program, context.rank)
        index_of = {id(op): index for index, op in enumerate(program.schedule.ops[context.rank])}
        with Executor(context.rank, transport, Pacer(1.0, dilation=context.dilation)) as executor:
            for _ in range(2):  # the first run connects the devices
                began_s = begin_together()
                executor.idle(began_s)
                execution = executor.run(program, handlers, inputs)
        measured = execution.in_device_time(context.dilation)
        spans = [(index_of[id(span.op)], span.start_s, span.end_s, span.nbytes, span.late_s) for span in measured.spans]
        outputs = {} if contents_of is None else measured.outputs
        return began_s / context.dilation, spans, outputs


def made_up(program: Program, rank: int) -> Contents:
    """Return contents of the right size, and handlers that compute nothing."""
    inputs = {value: content_of(program, value) for value in program.schedule.inputs[rank]}
    return Contents(inputs, made_up_handlers(program))
