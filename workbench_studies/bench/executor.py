"""`workbench bench executor`: measured time of programs on emulated devices over the simulated time of the same
programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any, Literal, get_args

import torch.distributed as dist

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.costs import MESSAGE_S, Spec, TableCosts
from workbench.core.medium import Medium
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan, Share, Stage
from workbench.core.program import Program, chained
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.core.timeline import late_share_of
from workbench.methods.pac_plus.rank_job import backbone_part
from workbench.runs.made_up import begin_together, content_of, made_up_handlers, subgroups_of
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.executor import Executor
from workbench.runtime.pacing import Pacer, RankLinks, asked_dilation
from workbench.runtime.process_group import group
from workbench.runtime.transport import Transport
from workbench.schedules import (
    asynchronous_1f1b,
    backpropagation,
    gpipe_order,
    hybrid_1f1b,
    insert_transfers,
    ring_allgather_gemm,
    split_heads,
)
from workbench.simulator import simulate
from workbench_studies.bench.frame import Figures, Progress, line_of, require_kernel_links, require_words

Network = Literal["switch", "slow", "wifi", "unequal"]
"""Wires of a switch, slow wires, Wi-Fi stations of equal rates, and Wi-Fi stations of unequal rates."""
WORDS: tuple[Network, ...] = get_args(Network)
SIZES: dict[Network, tuple[int, ...]] = {
    "switch": (2, 3, 4),
    "slow": (2, 4),
    "wifi": (2, 3, 4, 6),
    "unequal": (2, 3, 4, 6),
}
MICRO_BATCHES = 8
MBIT_PER_S: dict[Network, tuple[int, ...]] = {
    "switch": (500,),
    "slow": (20,),
    "wifi": (200,),
    "unequal": (200, 100, 50),
}
"""Rates of the devices' links, in turn.  On Wi-Fi two equal stations get half of it, which all that send at once share.
"""
DIRECT_MBIT_PER_S = 150
"""Between the last two of four or more unequal stations, which talk past the access point."""
LONG: tuple[Network, ...] = ("slow", "unequal")
"""Networks on which programs take long: there a third of the rounds and SELECTED are measured."""
SELECTED = ("1F1B", "ring all-gather", "forward-only chain", "incast", "all-reduce")
CROSSING = Spec((4, 32, 128))
"""The value that crosses a boundary: 64 KB, 1.05 ms on the switch, 5.2 ms on Wi-Fi while nobody else sends.
Between stations of 200 and 50 Mbit/s it takes 13.1 ms."""
GRADIENT, LARGE_GRADIENT = Spec((25_000,)), Spec((250_000,))
"""The gradients that are summed over all devices: 100 KB, and on slow wires 1 MB."""
LATENCIES_MS = (1, 5)
"""Latencies of a path in the programs that wait mostly for latency; all others have that of the cluster 'laptop'."""
SMALL = Spec((4, 128))
"""The value that crosses a boundary in those programs: 2 KB, 0.03 ms on the link."""
SMALL_GEMM_S = 1e-3
TILES = 8
"""Number of tiles of each device in the ring of many tiles."""
SECONDS = {
    "F": 6e-3,
    "SF": 2e-3,
    "B": 9e-3,
    "SB": 3e-3,
    "STEP": 1e-3,
    "GEMM": 8e-3,
    "ATTN": 6e-3,
    "MLP": 5e-3,
    "MLPB": 9e-3,
    "ATTNB": 8e-3,
}
SENT_VALUES = frozenset({"act", "grad", "side", "sgrad", "tile"})
ROUNDS = 15
LAYERS = 4
STEPS = 4
"""Number of steps of the pipeline that does not drain between its steps."""
NUM_OPS = 2000
"""Number of operations in the chain whose unpaced time is the executor's overhead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program that is measured.  num_steps: steps that follow without a pause.  cluster: whose links it runs on."""

    program: Program
    num_steps: int = 1
    cluster: Cluster


def case_of(program: Program, cluster: Cluster) -> Case:
    """Return a program with a tensor for each value that is sent or summed; values that stay on a device are empty."""
    costs = program.costs
    assert isinstance(costs, TableCosts)
    sent = {
        value.name
        for ops in program.schedule.ops
        for op in ops
        if op.is_communication
        for value in (*op.reads, *op.writes)
    }

    def numbers(value: Value) -> Spec:
        return Spec((program.costs.spec(value).nbytes // FP32_BYTES,))

    without = replace(costs, bytes_by_name=dict.fromkeys(sent, numbers))
    return Case(program=Program.on(cluster, program.schedule, without), cluster=cluster)


def costs_on(
    cluster: Cluster,
    crossing: Spec = CROSSING,
    seconds: Mapping[str, float] = SECONDS,
    gradient: Spec = GRADIENT,
) -> TableCosts:
    """Return seconds by kind, and transfers by the cluster's links.

    crossing: the value that crosses a boundary.  gradient: what all-reduces sum.
    """
    nbytes = dict.fromkeys(SENT_VALUES, crossing) | {"gsum": gradient}
    return TableCosts(seconds_by_kind=seconds, bytes_by_name=nbytes, cluster=cluster, message_s=MESSAGE_S)


def schedules_of(size: int, micro_batches: int = MICRO_BATCHES) -> dict[str, Schedule]:
    """Return the schedules for this many devices by name.  In two of them all devices send at once."""
    plan = _plan([(rank,) for rank in range(size)], micro_batches)
    sizes = (1,) * micro_batches
    groups = _plan([*((rank,) for rank in range(size - 2)), (size - 2, size - 1)], micro_batches)
    alone = split_heads((1, 1), num_layers=LAYERS)
    return {
        "1F1B": insert_transfers(backpropagation(plan, sizes)),
        "GPipe": insert_transfers(backpropagation(plan, sizes, order=gpipe_order)),
        "hybrid": insert_transfers(hybrid_1f1b(groups, (2,) * micro_batches)),
        "ring all-gather": _in_turn([ring_allgather_gemm(size, layer=layer) for layer in range(LAYERS)]),
        "two streams": Schedule(ops=alone.ops * size, inputs=alone.inputs * size, outputs=alone.outputs * size),
        "forward-only chain": backbone_part(insert_transfers(backpropagation(plan, sizes, order=gpipe_order))),
        "asynchronous 1F1B": insert_transfers(asynchronous_1f1b(plan, 2 * micro_batches)),
        "incast": _incast(size, micro_batches),
        "all-reduce": _all_reduces(size, micro_batches),
    }


def cases(size: int, network: Network = "switch") -> dict[str, Case]:
    """Return the programs for this many devices by name, on a network."""
    cluster = cluster_of(size, network)
    schedules = schedules_of(size)
    costs = costs_on(cluster, gradient=LARGE_GRADIENT if network == "slow" else GRADIENT)
    cases_by_name = {
        name: Case(program=Program.on(cluster, schedule, costs), cluster=cluster)
        for name, schedule in schedules.items()
        if network not in LONG or name in SELECTED
    }
    if network in LONG:
        return cases_by_name
    cases_by_name["not draining"] = replace(cases_by_name["forward-only chain"], num_steps=STEPS)
    rings = [ring_allgather_gemm(size, layer=tile) for tile in range(TILES)]
    by_latency = {"forward-only chain": schedules["forward-only chain"], "ring of many tiles": _side_by_side(rings)}
    for latency_ms in LATENCIES_MS:
        slow = cluster_of(size, network, latency_ms)
        costs = costs_on(slow, SMALL, {**SECONDS, "GEMM": SMALL_GEMM_S})
        for name, schedule in by_latency.items():
            cases_by_name[f"{name}, {latency_ms} ms"] = Case(program=Program.on(slow, schedule, costs), cluster=slow)
    return cases_by_name


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

    given: what makes the programs, the number of rounds, and whether one more comes before them (see measure).
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


def cluster_of(size: int, network: Network, latency_ms: float | None = None) -> Cluster:
    """Return the devices of the cluster 'laptop', and copies of them, with links of MBIT_PER_S.

    latency_ms: the latency of each path; None: the cluster's.
    """
    laptop, rates = load_cluster("laptop"), MBIT_PER_S[network]
    devices = []
    for rank in range(size):
        device = laptop.devices[rank % laptop.world_size]
        link = replace(device.link, bytes_per_s=MEGABIT_BYTES * rates[rank % len(rates)])
        devices.append(replace(device, name=f"device-{rank}", link=link))
    pairs = {}
    if network == "unequal" and size >= 4:
        direct = Link(bytes_per_s=MEGABIT_BYTES * DIRECT_MBIT_PER_S, latency_s=devices[-1].link.latency_s)
        pairs = {f"device-{a}>device-{b}": direct for a, b in ((size - 2, size - 1), (size - 1, size - 2))}
    medium: Medium = "switch" if network in ("switch", "slow") else "wifi"
    cluster = replace(laptop, devices=tuple(devices), pairs=pairs, medium=medium)
    if latency_ms is None:
        return cluster
    slow = cluster.with_links(lambda link: replace(link, latency_s=latency_ms / 2e3))
    return replace(slow, name=f"{cluster.name}, {latency_ms:g} ms")


def _plan(groups: Sequence[Sequence[int]], micro_batches: int) -> Plan:
    size = max(map(len, groups))
    stages = tuple(
        Stage(
            start=number, stop=number + 1, shares=tuple(Share(rank=rank, samples=size // len(ranks)) for rank in ranks)
        )
        for number, ranks in enumerate(groups)
    )
    return Plan(method="bench", stages=stages, micro_batch_size=size, num_micro_batches=micro_batches)


def _incast(size: int, micro_batches: int) -> Schedule:
    """Return a schedule in which all devices send to the first one at once, several times."""
    text = "rank 0\n"
    names = [f"act:{rank}.{number}" for number in range(micro_batches) for rank in range(1, size)]
    for number in range(micro_batches):
        for rank in range(1, size):
            text += f"0RECV{number}.{rank} {rank}>0 () -> (act:{rank}.{number}) @recv\n"
    text += f"0F ({' '.join(names)}) -> ()\n"
    for rank in range(1, size):
        text += f"rank {rank}\n"
        for number in range(micro_batches):
            text += f"0F{number} () -> (act:{rank}.{number})\n"
            text += f"0SEND{number}.{rank} {rank}>0 (act:{rank}.{number}) -> () @send\n"
    return Schedule.from_text(text)


def _all_reduces(size: int, micro_batches: int) -> Schedule:
    """Return a schedule in which the gradients of each of some micro-batches are summed over all devices."""
    ranks = "+".join(map(str, range(size)))
    text = ""
    for rank in range(size):
        text += f"rank {rank}\n"
        for number in range(micro_batches):
            text += f"0B{number} () -> (grad:0.{number}.{rank})\n"
            text += f"0ALLREDUCE{number} {ranks} (grad:0.{number}.{rank}) -> (gsum:0.{number}.{rank}) @collective\n"
    return Schedule.from_text(text)


def _in_turn(schedules: Sequence[Schedule]) -> Schedule:
    """Return one schedule after another on each rank."""

    def joined(by_schedule: Iterable[tuple[tuple[Any, ...], ...]]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(chain.from_iterable(parts)) for parts in zip(*by_schedule, strict=True))

    fields = ("ops", "inputs", "outputs")
    return Schedule(**{name: joined(getattr(schedule, name) for schedule in schedules) for name in fields})


def _side_by_side(schedules: Sequence[Schedule]) -> Schedule:
    """Return the first operation of every schedule on each rank, then the second of every schedule, and so on."""
    ops = tuple(
        tuple(chain.from_iterable(zip(*in_turn, strict=True)))
        for in_turn in zip(*(schedule.ops for schedule in schedules), strict=True)
    )
    return replace(_in_turn(schedules), ops=ops)
