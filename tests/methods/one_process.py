"""Run a schedule's operations of all ranks in one process: what each rank computes, without devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.core.costs import Spec
from workbench.core.program import Program
from workbench.core.schedule import BROADCAST, COLLECTIVES, RECV, SEND, Op, Schedule, Value
from workbench.runtime.executor import Handler


def run_program(program: Program, tables: Mapping[int, Mapping[str, Handler]]) -> list[dict[Value, Any]]:
    """Return every rank's values at the end.  Received tensors must be what the program says."""
    tensors: list[dict[Value, Any]] = [dict.fromkeys(values) for values in program.schedule.inputs]
    return run_schedule(program.schedule, tables, tensors, program.costs.spec)


def run_schedule(
    schedule: Schedule,
    tables: Mapping[int, Mapping[str, Handler]],
    held: list[dict[Value, Any]],
    spec: Callable[[Value], Spec] | None = None,
) -> list[dict[Value, Any]]:
    """Return every rank's values at the end of a schedule.  held: those at the beginning.  spec: of received tensors,
    None is any."""
    at = [0] * schedule.world_size
    on_the_way: dict[tuple[int, int, Value], torch.Tensor] = {}
    waiting: dict[Op, dict[int, torch.Tensor]] = {}
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops):
                op, own = ops[at[rank]], held[rank]
                if op.kind == SEND:
                    on_the_way[(*op.ranks, op.reads[0])] = own[op.reads[0]].clone()
                elif op.kind == RECV:
                    key = (*op.ranks, op.writes[0])
                    if key not in on_the_way:
                        break
                    arrived = own[op.writes[0]] = on_the_way.pop(key)
                    result = Spec(tuple(arrived.shape), str(arrived.dtype).removeprefix("torch."))
                    assert spec is None or spec(op.writes[0]) == result, op.writes[0]
                elif op.kind in COLLECTIVES:
                    here = waiting.setdefault(Op(op.kind, op.stage, op.microbatch, op.part, ranks=op.ranks), {})
                    if rank not in here:
                        given = tables[rank][op.kind](op, tuple(own[value] for value in op.reads))[0]
                        here[rank] = torch.zeros_like(given) if op.kind == BROADCAST and not op.reads else given
                        if len(here) == len(op.ranks):
                            total = torch.stack(torch.broadcast_tensors(*here.values())).sum(dim=0)
                            for member, tensor in here.items():  # in place: gradients are summed where they are kept
                                here[member] = tensor.copy_(total) if tensor.shape == total.shape else total.clone()
                    if len(here) < len(op.ranks):
                        break
                    own.update(dict.fromkeys(op.writes, here[rank]))
                else:
                    results = tables[rank][op.kind](op, tuple(own[value] for value in op.reads))
                    own.update(zip(op.writes, results, strict=True))
                at[rank], moved = at[rank] + 1, True
    assert at == [len(ops) for ops in schedule.ops], "the ranks wait for each other"
    return held
