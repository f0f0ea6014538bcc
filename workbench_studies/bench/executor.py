"""`workbench bench executor`: measured time of programs on emulated devices over the simulated time of the same
programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch.distributed as dist

from workbench.core.cluster import Cluster
from workbench.core.costs import TableCosts
from workbench.core.program import Program, chained
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.core.timeline import late_share_of
from workbench.runs.made_up import begin_together, content_of, made_up_handlers, subgroups_of
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.executor import Executor
from workbench.runtime.pacing import Pacer, RankLinks, asked_dilation
from workbench.runtime.process_group import group
from workbench.runtime.transport import Transport
from workbench.simulator import simulate
from workbench_studies.bench.executor_programs import (
    CROSSING,
    LONG,
    MBIT_PER_S,
    SECONDS,
    SIZES,
    WORDS,
    Case,
    cases,
    cluster_of,
)
from workbench_studies.bench.frame import Figures, Progress, line_of, require_kernel_links, require_words

ROUNDS = 15
NUM_OPS = 2000
"""Number of operations in the chain whose unpaced time is the executor's overhead."""


def bench(
    progress: Progress = print,
    only: Sequence[str] = (),
    *,
    sizes: Sequence[int] = (),
    rounds: int = ROUNDS,
    dilation: float | None = None,
) -> Figures:
    """Return measured over simulated time of every program by network and size, and the executor's own overhead.

    only: some of WORDS, the networks.  rounds: a third of them measures LONG networks.
    dilation: how much slower devices and links are emulated, for a busy machine; None: WORKBENCH_DILATION.
    Raises RuntimeSetupError if the kernel does not shape links.
    """
    points: list[Figures] = []
    executor_s: list[float] = []
    dilation = dilation or asked_dilation() or 1.0
    require_words(only, WORDS)
    networks = [network for network in WORDS if not only or network in only]
    for network, size in ((each, size) for each in networks for size in sizes or SIZES[each]):
        chosen_rounds = max(1, rounds // 3) if network in LONG else rounds
        cluster, make_cases = cluster_of(size, network), partial(cases, size, network)
        measured, own_s = measure(cluster, make_cases, dilation=dilation, rounds=chosen_rounds)
        for point in measured:
            points.append(point | {"network": network})
            progress(line_of(points[-1]))
        executor_s += own_s
    return {
        "label": "emulated, kernel links",
        "what": f"time of a program measured / simulated, {rounds} rounds (a third of slow wires and unequal "
        "stations), programs taking turns; late: share of the time for which the host held up a device",
        "dilation": dilation,
        "mbit_per_s": {network: MBIT_PER_S[network] for network in networks},
        "message_bytes": CROSSING.nbytes,
        "own_cost_us": 1e6 * median(executor_s),
        "median_ratio": {
            network: median(point["ratio"] for point in points if point["network"] == network) for network in networks
        },
        "points": points,
    }


def measure(
    cluster: Cluster, make_cases: Callable[[], dict[str, Case]], *, dilation: float, rounds: int, warm: bool = True
) -> tuple[list[Figures], list[float]]:
    """Execute programs in turn on emulated devices; return a point for each, and the executors' seconds an operation.

    make_cases: makes the programs by name; it is called on each device, too.  rounds: how often each is measured.
    warm: run each once before.  Raises RuntimeSetupError if the kernel does not shape links.
    """
    with EngineCluster.start(cluster) as engines:
        require_kernel_links(engines, "executor")
        engines.dilate(dilation)
        results = engines.run(run_rank, [(make_cases, rounds, warm)] * cluster.world_size)
    points = [_point(name, case, [result["rounds"][name] for result in results]) for name, case in make_cases().items()]
    return points, [result["own_s"] for result in results]


def run_rank(context: RankContext, payload: tuple[Callable[[], dict[str, Case]], int, bool]) -> Figures:
    """Run every program in turn; return by name this rank's (begin, end, late, paced) seconds of each round, and the
    overhead.

    payload: what makes the programs, the number of rounds, and whether one more comes before them (see measure).
    """
    make_cases, num_rounds, warm = payload
    rounds: dict[str, list[tuple[float, float, float, float]]] = {}
    with group(context, 30.0) as process_group:
        chosen = make_cases()
        subgroups = subgroups_of([case.program for case in chosen.values()])
        pacer, executors = Pacer(1.0, dilation=context.dilation), dict[str, Executor]()
        with ExitStack() as opened:
            for case in chosen.values():
                if case.cluster.name not in executors:
                    links = RankLinks(
                        cluster=case.cluster, rank=context.rank, fidelity=context.fidelity, dilation=context.dilation
                    )
                    transport = Transport(
                        process_group, context.rank, subgroup=lambda ranks: subgroups[tuple(sorted(ranks))], links=links
                    )
                    executors[case.cluster.name] = opened.enter_context(Executor(context.rank, transport, pacer))
            own_s = _own_cost(next(iter(executors.values())))
            for turn in range(-warm, num_rounds):
                for name, case in chosen.items():
                    pacer.reset()
                    begin, end = _time(executors[case.cluster.name], case.program, case.num_steps)
                    if turn >= 0:
                        ends = begin / context.dilation, end / context.dilation
                        rounds.setdefault(name, []).append((*ends, pacer.late_s, pacer.paced_s))
    return {"rounds": rounds, "own_s": own_s}


def _time(executor: Executor, program: Program, num_steps: int) -> tuple[float, float]:
    """Run a program's steps on this rank; return when all ranks began, and when this one ended (the machine's monotonic
    clock).
    """
    rank = executor.rank
    handlers = made_up_handlers(program)
    inputs = {value: content_of(program, value) for value in program.schedule.inputs[rank]}
    begin_s = begin_together()
    executor.idle(begin_s)
    step = executor.begin(program, handlers, inputs)
    for _ in range(num_steps - 1):
        former, step = step, executor.begin(program, handlers, inputs)
        former.finish()
    return begin_s, max(begin_s, step.finish().ended_s)


def _own_cost(executor: Executor) -> float:
    """Return the executor's overhead per operation in seconds, from a chain of operations that compute nothing."""
    values = [Value("act", number) for number in range(NUM_OPS + 1)]
    chain = tuple(Op("F", number, NONE, NONE, (values[number],), (values[number + 1],)) for number in range(NUM_OPS))
    world = dist.get_world_size()
    mine = [chain if rank == executor.rank else () for rank in range(world)]
    inputs = tuple((values[0],) if ops else () for ops in mine)
    schedule = Schedule(ops=tuple(mine), inputs=inputs, outputs=tuple((values[-1],) if ops else () for ops in mine))
    program = Program(schedule=schedule, costs=TableCosts(seconds_by_kind=SECONDS), devices=("d",) * world)
    factor, executor.pacer.factor = executor.pacer.factor, 0.0
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        executor.run(program, {"F": lambda op, reads: reads}, {values[0]: None})
        seconds.append((time.perf_counter() - begin) / NUM_OPS)
    executor.pacer.factor = factor
    return min(seconds)


def _point(name: str, case: Case, by_rank: Sequence[Sequence[tuple[float, float, float, float]]]) -> Figures:
    simulated_s = max(span.end_s for span in simulate(chained([case.program] * case.num_steps), memory=False).spans)
    measured = [max(end for _, end, _, _ in turn) - turn[0][0] for turn in zip(*by_rank, strict=True)]
    ratios = sorted(seconds / simulated_s for seconds in measured)
    held_up = [(sum(entry[2] for entry in entries), sum(entry[3] for entry in entries)) for entries in by_rank]
    return {
        "program": name,
        "devices": len(by_rank),
        "simulated_ms": 1e3 * simulated_s,
        "measured_ms": 1e3 * median(measured),
        "ratio": median(ratios),
        "least": ratios[0],
        "p95": ratios[round(0.95 * (len(ratios) - 1))],
        "late": late_share_of(held_up),
    }
