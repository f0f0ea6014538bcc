"""The same schedule simulated and executed: same order on every rank, values of the unsplit computation, paced
times."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from gloo_pairs import cluster_of_two, on_executors, on_ranks, on_two_ranks, program

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench.core.costs import Spec
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import SEND, Op, Schedule, Value
from workbench.runtime.context import RankContext
from workbench.runtime.executor import Contents, Execution, Executor
from workbench.runtime.pacing import Pacer, RankLinks
from workbench.runtime.process_group import require_one_program
from workbench.runtime.step_values import nbytes
from workbench.runtime.transport import Transport
from workbench.schedules import backpropagation, insert_transfers

MICRO_BATCHES, SAMPLES, WIDTH = 4, 2, 3
FORWARD_S, BACKWARD_S = 0.004, 0.008


def pipeline() -> Schedule:
    """Two stages of one rank each."""
    plan = staged_plan((1, {0: SAMPLES}), (1, {1: SAMPLES}), micro_batches=MICRO_BATCHES)
    return insert_transfers(backpropagation(plan, (SAMPLES,) * MICRO_BATCHES))


def group_of_two() -> Schedule:
    """One stage on both ranks, gradients summed."""
    plan = staged_plan((1, {0: 1, 1: 1}), micro_batches=MICRO_BATCHES)
    return insert_transfers(backpropagation(plan, (SAMPLES,) * MICRO_BATCHES))


class Layer:
    """A stage of a chain of linear layers: what F, B, ALLREDUCE and STEP do on one rank."""

    def __init__(self, schedule: Schedule, rank: int, weights: torch.Tensor, inputs: torch.Tensor) -> None:
        self.weight = weights.clone().requires_grad_()
        self.weight.grad = torch.zeros_like(weights)
        self._rank, self._inputs, self._last = (
            rank,
            inputs,
            not any(op.kind == SEND and op.reads[0].name == "act" for op in schedule.ops[rank]),
        )

    def table(self) -> dict[str, Any]:
        return {
            "F": self._forward,
            "B": self._backward,
            "STEP": self._step,
            "ALLREDUCE": lambda op, reads: (self.weight.grad,),
        }

    def _forward(self, op: Op, reads: Contents) -> Contents:
        arrived = [content for value, content in zip(op.reads, reads, strict=True) if value.name == "act"]
        source = arrived[0].clone().requires_grad_() if arrived else self._inputs[op.microbatch]
        output = source @ self.weight
        outcome = output.square().sum() if self._last else output
        context = (source, outcome)
        return tuple(context if value.name == "ctx" else outcome.detach() for value in op.writes)

    def _backward(self, op: Op, reads: Contents) -> Contents:
        named = dict(zip((value.name for value in op.reads), reads, strict=True))
        source, outcome = named["ctx"]
        torch.autograd.backward(outcome, named.get("grad"))
        return tuple(source.grad if value.name == "grad" else None for value in op.writes)

    def _step(self, op: Op, reads: Contents) -> Contents:
        return (None,) * len(op.writes)


LONE = cluster_of(("device",), memory_bytes=1)


def test_with_time_dilation_what_is_reported_is_in_the_devices_own_seconds() -> None:
    values = [Value("act", stage=number) for number in range(5)]
    ops = tuple(Op("F", stage=number, reads=(values[number],), writes=(values[number + 1],)) for number in range(4))
    schedule = Schedule(ops=(ops,), inputs=((values[0],),), outputs=((values[4],),))
    context = RankContext(rank=0, world_size=1, device=LONE.devices[0], cluster=LONE, fidelity="paced", dilation=4.0)
    before_s, here_s = context.now_s(), time.monotonic()

    def work(rank: int, transport: Transport) -> Execution:
        with Executor(rank, transport, Pacer(1.0, dilation=context.dilation)) as executor:
            handlers = {"F": lambda op, reads: (torch.ones(1),)}
            paced = program(schedule, lambda value: Spec((1,)), F=0.01)
            return executor.run(paced, handlers, {values[0]: torch.ones(1)}).in_device_time(context.dilation)

    [done] = on_ranks(1, work)
    elapsed_s = time.monotonic() - here_s
    assert elapsed_s >= 4 * 4 * 0.01 - 0.005
    assert before_s <= done.spans[0].start_s < done.spans[-1].end_s <= context.now_s()
    assert done.spans[-1].end_s - done.spans[0].start_s <= elapsed_s / 4
    assert all(before_s <= sample.time_s <= context.now_s() for sample in done.memory)
    assert done.memory


def run(
    schedule: Schedule, weights: list[torch.Tensor], inputs: list[torch.Tensor], factor: float = 1.0
) -> list[tuple[Execution, Layer]]:
    cluster = cluster_of_two(bytes_per_s=4 * SAMPLES * WIDTH / 0.002)  # 2 ms a message

    def work(executor: Executor) -> tuple[Execution, Layer]:
        rank = executor.rank
        layer = Layer(schedule, rank, weights[rank], inputs[rank])
        executed_program = program(schedule, lambda value: Spec((SAMPLES, WIDTH)), F=FORWARD_S, B=BACKWARD_S)
        return executor.run(executed_program, layer.table(), dict.fromkeys(schedule.inputs[rank])), layer

    return on_executors(
        2, work, factor=factor, links=lambda rank: RankLinks(cluster=cluster, rank=rank, fidelity="paced")
    )


def made_up() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, WIDTH, WIDTH, generator=generator), torch.randn(
        MICRO_BATCHES, SAMPLES, WIDTH, generator=generator
    )


def test_a_pipeline_gives_the_losses_and_gradients_of_the_unsplit_chain() -> None:
    weights, samples = made_up()
    schedule = pipeline()
    (_, first), (second_done, second) = run(schedule, [weights[0], weights[1]], [samples, samples])
    reference = [weight.clone().requires_grad_() for weight in weights]
    losses = [(sample @ reference[0] @ reference[1]).square().sum() for sample in samples]
    sum(losses).backward()
    for m, loss in enumerate(losses):
        torch.testing.assert_close(second_done.outputs[Value("loss", 1, m, 1)], loss.detach())
    torch.testing.assert_close(first.weight.grad, reference[0].grad)
    torch.testing.assert_close(second.weight.grad, reference[1].grad)


def test_a_group_sums_its_gradients() -> None:
    weights, samples = made_up()
    halves = [samples[:, :1], samples[:, 1:]]
    done = run(group_of_two(), [weights[0], weights[0]], halves)
    reference = weights[0].clone().requires_grad_()
    (samples @ reference).square().sum().backward()
    for _, layer in done:
        torch.testing.assert_close(layer.weight.grad, reference.grad)


def test_paced_operations_last_as_long_as_on_the_device() -> None:
    weights, samples = made_up()
    for execution, _ in run(pipeline(), [weights[0], weights[1]], [samples, samples], factor=2.0):
        spans = [span for span in execution.spans if span.op.kind in "FB"]
        # An overshoot is taken off the next deadline, so it is the sum that holds.
        total = sum({"F": FORWARD_S, "B": BACKWARD_S}[span.op.kind] for span in spans) * 2.0
        assert sum(span.end_s - span.start_s for span in spans) >= 0.95 * total
        assert max(span.end_s for span in spans) - min(span.start_s for span in spans) >= 0.95 * total


def test_memory_goes_back_to_what_stays() -> None:
    weights, samples = made_up()
    for execution, _ in run(pipeline(), [weights[0], weights[1]], [samples, samples]):
        assert max(sample.nbytes for sample in execution.memory) > 0
        left = sum(nbytes(content) for content in execution.outputs.values())
        assert execution.memory[-1].nbytes == left


def test_bytes_of_contents() -> None:
    assert nbytes((torch.zeros(3), [torch.zeros(2, dtype=torch.bfloat16)])) == 16
    assert nbytes(None) == 0


def test_ranks_with_different_programs_do_not_begin() -> None:
    """Both are told which operation differs; equal programs go on."""
    same, other = (
        program(schedule, lambda value: Spec((SAMPLES, WIDTH)), F=FORWARD_S)
        for schedule in (pipeline(), group_of_two())
    )
    slower = program(pipeline(), lambda value: Spec((SAMPLES, WIDTH)), F=2 * FORWARD_S)

    def work(programs: tuple[Program, Program], rank: int, transport: Transport) -> str:
        try:
            require_one_program(transport._group, programs[rank].to_text())
        except ScheduleError as error:
            return error.found
        return ""

    assert on_two_ranks(partial(work, (same, same))) == ["", ""]
    for programs, named in (((same, slower), "F0"), ((same, other), "rank 0")):
        first, second = on_two_ranks(partial(work, programs))
        assert first == second and named in first and "rank 1 has" in first
