"""Lab 'Write the simulator': an event loop for lists of operations, and two pipelines as lists of operations.

Pipelines: GPipe (Huang et al., 2019) and 1F1B (PipeDream-flush; Narayanan et al., 2021).  The judge is the workbench's
own simulator: no answer travels with the course.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S, Spec, TableCosts
from workbench.core.job import Fidelity
from workbench.core.plan import Plan, one_device_stages
from workbench.core.program import Program
from workbench.core.schedule import Op, Schedule
from workbench.core.timeline import Timeline
from workbench.runs.made_up import execute_program
from workbench.runtime.engines import default_pool
from workbench.schedules import insert_transfers
from workbench.schedules.pipeline import Slot, backpropagation, gpipe_order, one_f_one_b_order
from workbench.simulator import simulate
from workbench.simulator.memory import live_counts
from workbench.widgets.tables import Table
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
)
from workbench_labs.exercises.judging import Function, code_exercise, in_virtual_time

OrderOf = Callable[[int, int, int], Sequence[str]]
"""(stages, stage, micro-batches) -> the stage's operations in order, such as ["F0", "F1", "B0", "B1"]."""
Both = tuple[Timeline, Timeline]
"""A program simulated, and executed."""
CASES = 25
CLOSE = 1e-9
BACKWARD = 2.0
"""A backward pass takes so many times as long as a forward pass."""
_OPERATION = re.compile(r"([FB])(\d{1,4})")


def slots_of(operations: Any, num_micro_batches: int) -> list[Slot]:
    """Return a stage's operations, each micro-batch's forward and backward pass once.  Raises WrongAnswerError."""
    texts = require_list(operations, "A stage's order", 2 * num_micro_batches)
    slots = [(match[1], int(match[2])) for match in map(_OPERATION.fullmatch, map(str, texts)) if match is not None]
    expected = {(kind, micro_batch) for kind in "FB" for micro_batch in range(num_micro_batches)}
    if len(slots) != len(texts) or set(slots) != expected:
        raise WrongAnswerError(
            f"Of {num_micro_batches} micro-batches each has F and B once, such as F0 and B0; this is "
            f"{', '.join(map(str, texts)):.120}."
        )
    return slots


def schedule_of(order: OrderOf, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the mini-batch of a pipeline in a student's order, one device for each stage, with its transfers.

    Raises WrongAnswerError if an operation is missing or waits for one that comes later.
    """
    stages = one_device_stages(range(num_stages), range(num_stages + 1), 1)
    plan = Plan(method="a student's", stages=stages, micro_batch_size=1, num_micro_batches=num_micro_batches)

    def slots(stages: int, stage: int, count: int) -> list[Slot]:
        return slots_of(order(stages, stage, count), count)

    return insert_transfers(backpropagation(plan, (1,) * num_micro_batches, order=slots))


def simulated(schedule: Schedule, seconds: Mapping[str, Sequence[float]]) -> Timeline:
    """Return the schedule in virtual time, with free links.  seconds: kind -> seconds of each stage.

    Raises WrongAnswerError if its operations wait for each other.
    """

    def of_stage(rank: int, op: Op) -> float:
        return seconds[op.kind][op.stage]

    return in_virtual_time(schedule, TableCosts(seconds_by_kind=dict.fromkeys("FB", of_stage)))


def _random_case(draws: Random) -> tuple[list[list[str]], dict[str, list[float]], Timeline]:
    """Return a pipeline's lists of operations, seconds by kind and stage, and the simulator's timeline."""
    num_stages, num_micro_batches = draws.randint(1, 5), draws.randint(1, 7)
    order = draws.choice([gpipe_order, one_f_one_b_order])
    texts = named(order)
    seconds = {kind: [draws.randint(1, 9) / 2 for _ in range(num_stages)] for kind in "FB"}
    lists = [list(texts(num_stages, stage, num_micro_batches)) for stage in range(num_stages)]
    return lists, seconds, simulated(schedule_of(texts, num_stages, num_micro_batches), seconds)


def judge_event_loop(answer: Function, draws: Random) -> str:
    """Compare a student's event loop with the simulator, on random pipelines, and on lists that can never end."""
    for _ in range(CASES):
        lists, seconds, expected = _random_case(draws)
        answered = require_list(answer(lists, seconds["F"], seconds["B"]), "The result", len(lists))
        for stage, operations in enumerate(lists):
            times = require_list(answered[stage], f"The result of stage {stage}", len(operations))
            spans = [span for span in expected.spans if span.rank == stage and span.op.kind in "FB"]
            for operation, time, span in zip(operations, times, spans, strict=True):
                begin, end = map(number_of, require_list(time, f"The time of {operation}", 2))
                if abs(begin - span.start_s) > CLOSE or abs(end - span.end_s) > CLOSE:
                    rows = [
                        (name, *(f"{number_of(value):g}" for value in time), f"{span.start_s:g}", f"{span.end_s:g}")
                        for name, time, span in zip(operations, times, spans, strict=True)
                    ]
                    columns = ("operation", "your start (s)", "your end (s)", "start (s)", "end (s)")
                    costs = "; ".join(
                        f"{kind}: {', '.join(map('{:g}'.format, stage_s))} s" for kind, stage_s in seconds.items()
                    )
                    raise WrongAnswerError(
                        f"{len(lists)} stages, {len(operations) // 2} micro-batches ({costs}): {operation} of stage "
                        f"{stage} goes from {span.start_s:g} to {span.end_s:g} s, yours from {begin:g} to {end:g} s.",
                        comparison(f"Stage {stage}, all times in seconds (simulated)", columns, rows),
                    )
    try:
        stuck = answer([["B0", "F0"]], [1.0], [1.0])
    except ValueError:
        return f"It equals the workbench's simulator in {CASES} random pipelines, and notices a deadlock."
    raise WrongAnswerError(f"Stage 0 does B0 before F0: that never ends. Raise ValueError; it returned {stuck!r:.80}.")


def _judge_order(answer: OrderOf, draws: Random, *, most_contexts: Callable[[int, int, int], int]) -> str:
    """Check an order by its properties: it ends, it is as short as the formula says, it keeps as few as it may."""
    for _ in range(CASES):
        stages, count = draws.randint(1, 6), draws.randint(1, 9)
        forward_s, backward_s = draws.randint(1, 6), draws.randint(1, 6)
        schedule = schedule_of(answer, stages, count)
        timeline = simulated(schedule, {"F": [forward_s] * stages, "B": [backward_s] * stages})
        case = f"{stages} stages, {count} micro-batches, F {forward_s} s, B {backward_s} s"
        expected_s = (count + stages - 1) * (forward_s + backward_s)
        if timeline.makespan_s > expected_s + CLOSE:
            raise WrongAnswerError(
                f"{case}: it takes {timeline.makespan_s:g} s; {expected_s:g} s are possible.",
                comparison(
                    "Your orders",
                    ("stage", "operations"),
                    [(stage, " ".join(answer(stages, stage, count))) for stage in range(stages)],
                ),
            )
        for stage, contexts in enumerate(live_counts(schedule, timeline.spans, "ctx")):
            least = most_contexts(stages, stage, count)
            if contexts > least:
                raise WrongAnswerError(
                    f"{case}: stage {stage} keeps the activations of {contexts} micro-batches at once; {least} are "
                    "enough.",
                    comparison(f"Stage {stage}", ("operations",), [(" ".join(answer(stages, stage, count)),)]),
                )
    return f"It is as short as (M + p - 1)(F + B) in {CASES} random pipelines, and keeps no activations too long."


def judge_gpipe(answer: OrderOf, draws: Random) -> str:
    """Check GPipe: as short as the formula, and no backward pass before the last forward pass of its stage."""
    sentence = _judge_order(answer, draws, most_contexts=lambda stages, stage, count: count)
    stages, count = draws.randint(3, 9), draws.randint(4, 24)
    for stage in range(stages):
        kinds = "".join(kind for kind, _ in slots_of(answer(stages, stage, count), count))
        if kinds != "F" * count + "B" * count:
            raise WrongAnswerError(
                f"GPipe begins its backward passes when all forward passes are done; this is {kinds}."
            )
    return sentence


def judge_one_f_one_b(answer: OrderOf, draws: Random) -> str:
    """Check 1F1B: as short as GPipe, and stage s of p keeps at most p - s micro-batches' activations."""
    return _judge_order(answer, draws, most_contexts=lambda stages, stage, count: min(stages - stage, count))


def judge_bubble(answer: Any, numbers: Numbers) -> str:
    """Compare with the share of the time in which a device of a balanced pipeline waits: (p - 1) / (M + p - 1)."""
    stages, count = numbers["stages"], numbers["micro_batches"]
    share = (stages - 1) / (count + stages - 1)
    return require_number(
        answer, share, 0.01, f"(p - 1) / (M + p - 1) = {stages - 1} / {count + stages - 1} = {share:.1%}."
    )


def named(order: Callable[[int, int, int], list[Slot]]) -> OrderOf:
    """Return an order of ours as texts."""
    return lambda stages, stage, count: [f"{kind}{number}" for kind, number in order(stages, stage, count)]


EXERCISES = (
    code_exercise(
        name="event_loop",
        question="""**Write the event loop** (10 points). `event_loop(orders, forward_s, backward_s)` gets for each \
stage the list of its operations, such as `["F0", "F1", "B0", "B1"]`, and the seconds of a forward and \
of a backward pass of each stage. It returns for each stage a list of `[start, end]` in seconds, one for each operation.

Stage *s* runs on device *s*, one operation at a time, in the order of its list. `Fm` waits for `Fm` of the stage \
before; `Bm` waits for `Bm` of the stage after, and for `Fm` of its own stage. Messages take no time. If no operation \
can ever start again, raise `ValueError`.""",
        points=10,
        hints=(
            "Keep one place in each list (what comes next) and one clock for each device (when it is free).",
            "An operation can start when the ends of all operations that it waits for are known. Its start is the "
            "latest of these ends and of its device's clock.",
            "Go over the stages again and again; start what can start. If a whole round starts nothing and something "
            "is left, it is a deadlock.",
        ),
        judge=judge_event_loop,
    ),
    code_exercise(
        name="gpipe",
        question="""**Write GPipe** (5 points). `gpipe(num_stages, stage, num_micro_batches)` returns the operations \
of one stage as texts: all forward passes, then all backward passes.""",
        points=5,
        hints=(
            "The order is the same on every stage.",
            "`[f'F{m}' for m in range(n)]` are the forward passes.",
            "The backward passes of which micro-batch can begin first? Any order that is the same on all stages works.",
        ),
        judge=judge_gpipe,
    ),
    code_exercise(
        name="one_f_one_b",
        question="""**Write 1F1B** (10 points). `one_f_one_b(num_stages, stage, num_micro_batches)` returns the \
operations of one stage. It must be as short as GPipe, but stage *s* of *p* may keep the activations of at most \
*p - s* micro-batches at the same time.""",
        points=10,
        hints=(
            "The last stage does F0 B0 F1 B1 ...: it keeps one micro-batch.",
            "A stage before it begins with a few forward passes, so that the stages behind have work: how many?",
            "p - s - 1 forward passes first, then one forward and one backward in turn, then the backward passes left.",
        ),
        judge=judge_one_f_one_b,
        stand_in=named(one_f_one_b_order),
    ),
    Exercise(
        name="bubble",
        question="""**The bubble** (2 points). A balanced pipeline has {stages} stages and {micro_batches} \
micro-batches, and links are free. During which share of the time does a device wait, to 1 % of it?""",
        points=2,
        hints=(
            "How long does the whole mini-batch take, and how long does one device work?",
            "A device works for M (F + B). Filling and draining takes p - 1 turns more.",
            "(p - 1) / (M + p - 1).",
        ),
        draw=lambda draws: {"stages": draws.randint(3, 9), "micro_batches": draws.randint(4, 24)},
        judge=judge_bubble,
    ),
)


CROSSING = Spec((4, 32, 128))
"""The value that crosses a boundary between stages: 64 KB."""


def program_on(
    cluster: Cluster,
    schedule: Schedule,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    message_s: float = MESSAGE_S,
) -> Program:
    """Return a pipeline as a program on a cluster, with its links.  forward_s, backward_s: by stage."""
    seconds = {"F": forward_s, "B": backward_s}

    def of_stage(rank: int, op: Op) -> float:
        return seconds[op.kind][op.stage]

    costs = TableCosts(
        seconds_by_kind={"F": of_stage, "B": of_stage, "STEP": 0.0},
        bytes_by_name={"act": CROSSING, "grad": CROSSING},
        cluster=cluster,
        message_s=message_s,
    )
    return Program.on(cluster, schedule, costs)


def both_ways(program: Program, cluster: Cluster, fidelity: Fidelity) -> Both:
    """Return a program simulated, and executed by emulated devices with made-up contents."""
    return simulate(program), execute_program(program, default_pool().acquire(cluster, fidelity))


def run_both(
    order: OrderOf,
    *,
    cluster_name: str = "laptop-equal",
    fidelity: Fidelity = "auto",
    num_micro_batches: int = 8,
    forward_s: float = 0.02,
    backward_s: float = 0.04,
) -> Both:
    """Return a pipeline simulated, and executed by emulated devices with made-up contents; both with the links."""
    cluster = load_cluster(cluster_name)
    size = cluster.world_size
    schedule = schedule_of(order, size, num_micro_batches)
    return both_ways(program_on(cluster, schedule, [forward_s] * size, [backward_s] * size), cluster, fidelity)


def both_table(expected: Timeline, executed: Timeline) -> Table:
    """Return when each device ends and how long it computes, simulated next to executed."""
    rows = []
    for rank, name in enumerate(expected.device_names):
        ends = [max(span.end_s for span in timeline.spans if span.rank == rank) for timeline in (expected, executed)]
        busy = [timeline.busy_s(rank) for timeline in (expected, executed)]
        rows.append((name, *(f"{1e3 * seconds:.0f}" for seconds in (*ends, *busy))))
    columns = ("device", "end, simulated", "end, executed", "computes, simulated", "computes, executed")
    late = executed.makespan_s / expected.makespan_s - 1
    note = f"The executed mini-batch takes {abs(late):.1%} {'more' if late >= 0 else 'less'} than the simulated one."
    return Table(columns, rows, title=f"Milliseconds ({expected.label}; {executed.label})", note=note)


def gpipe_over_1f1b(num_stages: int, num_micro_batches: int) -> float:
    """Return the makespan of GPipe over that of 1F1B, with equal stages and free links (simulated)."""
    seconds = {"F": [1.0] * num_stages, "B": [BACKWARD] * num_stages}
    gpipe_s, one_f_one_b_s = (
        simulated(schedule_of(named(order), num_stages, num_micro_batches), seconds).makespan_s
        for order in (gpipe_order, one_f_one_b_order)
    )
    return gpipe_s / one_f_one_b_s
