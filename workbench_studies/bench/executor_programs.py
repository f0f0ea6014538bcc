"""Programs and networks on which `workbench bench executor` compares measured with simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.costs import MESSAGE_S, Spec, TableCosts
from workbench.core.medium import Medium
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan, Share, Stage
from workbench.core.program import Program
from workbench.core.schedule import Schedule, Value
from workbench.methods.pac_plus.rank_job import backbone_part
from workbench.schedules import (
    asynchronous_1f1b,
    backpropagation,
    gpipe_order,
    hybrid_1f1b,
    insert_transfers,
    ring_allgather_gemm,
    split_heads,
)

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
LAYERS = 4
STEPS = 4
"""Number of steps of the pipeline that does not drain between its steps."""


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
