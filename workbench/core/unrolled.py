"""Several steps of a program that follow without a pause, as one program: what an executor does that begins the next step early."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from workbench.core.costs import Costs, Spec
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import Op, Schedule, Value


def unrolled(program: Program, num_steps: int) -> Program:
    """Return the program of `num_steps` steps: value v of step k is v~k, and a carried input is the output of the step before.

    Raises ScheduleError for fewer than one step.
    """
    if num_steps < 1:
        raise ScheduleError(f"{num_steps} steps of a program were asked for.", "That is none.", "Ask for 1 or more.")
    schedule = program.schedule
    ops: list[list[Op]] = [[] for _ in schedule.ops]
    inputs: list[list[Value]] = [[] for _ in schedule.ops]
    outputs: list[list[Value]] = [[] for _ in schedule.ops]
    original_ops: dict[tuple[int, Op], Op] = {}
    original_values: dict[Value, Value] = {}
    for step in range(num_steps):
        for rank, own in enumerate(schedule.ops):
            carried = {given_as: output for output, given_as in schedule.carried[rank]}
            handed_on = {output for output, _ in schedule.carried[rank]}

            def name(value: Value, *, step: int = step, carried: dict[Value, Value] = carried) -> Value:
                at, found = (step - 1, carried[value]) if step and value in carried else (step, value)
                renamed = found._replace(name=f"{found.name}~{at}")
                original_values[renamed] = found
                return renamed

            for op in own:
                renamed = op._replace(reads=tuple(map(name, op.reads)), writes=tuple(map(name, op.writes)))
                original_ops[rank, renamed] = op
                ops[rank].append(renamed)
            inputs[rank] += [name(value) for value in schedule.inputs[rank] if not (step and value in carried)]
            is_last = step == num_steps - 1
            outputs[rank] += [name(value) for value in schedule.outputs[rank] if is_last or value not in handed_on]
    whole = Schedule(ops=tuple(map(tuple, ops)), inputs=tuple(map(tuple, inputs)), outputs=tuple(map(tuple, outputs)))
    return replace(program, schedule=whole, costs=_Repeated(costs=program.costs, ops=original_ops, values=original_values))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeated:
    """The costs of the program of one step: a Costs."""

    costs: Costs
    ops: dict[tuple[int, Op], Op] = field(repr=False)
    values: dict[Value, Value] = field(repr=False)

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of the operation in its step."""
        return self.costs.seconds(rank, self.ops[rank, op])

    def spec(self, value: Value) -> Spec:
        """Return the spec of the value in its step."""
        return self.costs.spec(self.values[value])

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that stay."""
        return self.costs.resident_bytes(rank)
