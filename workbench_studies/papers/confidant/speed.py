"""Speedups over the fastest single device, and what ten mini-batches take from the batteries (Confidant, sections 5.2.2
and 5.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

from workbench.core.catalogue import load_cluster
from workbench.core.plan import Plan
from workbench.core.summary import BATTERY_V, device_j
from workbench.planners.asynchronous import asynchronous_plan, partition_in_order, plan_asynchronous
from workbench.planners.equation3 import Equation3
from workbench.simulator.steps import mini_batches
from workbench_studies.papers.confidant.memory import GB, READINGS, frozen_embedding
from workbench_studies.papers.confidant.testbed import PAPER, stages_bytes
from workbench_studies.papers.items import Item, each_cell
from workbench_studies.papers.result import Number, Result, Row, read_constants

MINI_BATCHES = 10
"""Number of mini-batches, as in section 5.2.2."""
BATCH_SIZES = {"BERT-Base": 8, "GPT2-Medium": 4}
LARGEST = "redmi-k50"
"""The phone that holds the whole of both models (Table 6)."""
READING = READINGS["AdamW"]
PROCESSORS = 2
"""A device's processors, equal, that share heads and columns at no cost: the bound for Confidant's scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Ten mini-batches.  alone_s, alone_mah: on each device alone, as if it had the memory.  seconds, mah: by
    partition, mah by device.  busy_mah: Confidant's without idle watts.  used_gb, room_gb: of the device that
    FTPipeHD's partition, which does not look at memory, leaves the least room.
    """

    names: tuple[str, ...]
    alone_s: tuple[float, ...]
    alone_mah: tuple[float, ...]
    seconds: dict[str, float]
    mah: dict[str, tuple[float, ...]]
    busy_mah: tuple[float, ...]
    used_gb: float
    room_gb: float


def mah(joules: float) -> float:
    """Return the charge of a phone's battery."""
    return joules / 3.6 / BATTERY_V


def num_tokens() -> int:
    """Return the sequence length, which is Table 6's."""
    return read_constants(PAPER, dict[str, int], "table6")[READING.tokens]


def full_costs(model: str, devices: int) -> Equation3:
    """Return the costs of full fine-tuning on Table 4's devices as Table 6 has it: AdamW, the embedding frozen."""
    cluster = load_cluster(f"confidant-{devices}")
    return frozen_embedding(model, cluster, num_tokens(), BATCH_SIZES[model], READING)


@cache
def trained(model: str, devices: int) -> Trained:
    """Simulate both partitions on Table 4's devices, in full fine-tuning as Table 6 has it."""
    costs, tokens = full_costs(model, devices), num_tokens()
    profile, cluster = costs.profile, costs.cluster
    alone_s = [MINI_BATCHES * float(costs.seconds(rank)[0, -1]) for rank in range(devices)]
    by_speed = partition_in_order(costs, range(devices), in_memory=False)
    plans: dict[str, Plan] = {"FTPipeHD": asynchronous_plan(costs, by_speed, method=PAPER, check_memory=False)}
    plans["Confidant"] = plan_asynchronous(costs, searches=False, method=PAPER)
    timelines = {
        way: mini_batches(profile, cluster, plan, tokens=tokens, count=MINI_BATCHES) for way, plan in plans.items()
    }
    needs = stages_bytes(costs, plans["FTPipeHD"])
    budgets = [cluster.devices[stage.ranks[0]].memory_bytes for stage in plans["FTPipeHD"].stages]
    _, used, room = max((need / budget, need, budget) for need, budget in zip(needs, budgets, strict=True))
    return Trained(
        used_gb=used / GB,
        room_gb=room / GB,
        names=tuple(device.model for device in cluster.devices),
        alone_s=tuple(alone_s),
        alone_mah=tuple(
            mah(seconds * device.watts_busy) for seconds, device in zip(alone_s, cluster.devices, strict=True)
        ),
        seconds={way: timeline.makespan_s for way, timeline in timelines.items()},
        mah={
            way: tuple(mah(device_j(timeline, rank, device)) for rank, device in enumerate(cluster.devices))
            for way, timeline in timelines.items()
        },
        busy_mah=tuple(
            mah(device.watts_busy * timelines["Confidant"].busy_s(rank)) for rank, device in enumerate(cluster.devices)
        ),
    )


def speedup(model: str, devices: str, way: str) -> float:
    """Return a partition's speedup over the fastest device; for Confidant the bound with PROCESSORS processors."""
    simulated = trained(model, int(devices))
    return (PROCESSORS if way == "Confidant" else 1) * min(simulated.alone_s) / simulated.seconds[way]


def fastest(item: Item) -> Result:
    """Compare the speedups over the fastest single device."""
    comparisons = item.compare(speedup)
    rows = []
    for model in BATCH_SIZES:
        for devices in (3, 4):
            simulated, best_s = trained(model, devices), min(trained(model, devices).alone_s)
            rows.append(
                (
                    model,
                    devices,
                    sum(best_s / device_s for device_s in simulated.alone_s),
                    *(best_s / way_s for way_s in simulated.seconds.values()),
                )
            )
    fullest = max((trained(model, count) for model in BATCH_SIZES for count in (3, 4)), key=lambda run: run.used_gb)
    return item.result(
        comparisons,
        tables={"bounds": rows},
        sums=" and ".join(f"{row[2]:.2f}" for row in rows[:2]),
        tokens=num_tokens(),
        used=fullest.used_gb,
        room=fullest.room_gb,
        broken=sum(comparison.how == "refuted upper bound" for comparison in comparisons),
        count=sum(comparison.kind == "upper bound" for comparison in comparisons),
    )


def transmission(item: Item) -> Result:
    """Compare the share of sending a stage's output in the stage's time."""
    shares = list[float]()
    for devices in (3, 4):
        costs = full_costs("BERT-Base", devices)
        stages = plan_asynchronous(costs, searches=False, method=PAPER).stages
        for stage, after in pairwise(stages):
            [rank], [target] = stage.ranks, after.ranks
            nbytes = costs.profile.layers[rank][stage.stop - 1].output_bytes(costs.batch_size, num_tokens())
            sent_s = costs.cluster.link(rank, target).transfer_s(nbytes)
            shares.append(100 * sent_s / float(costs.seconds(rank)[stage.start, stage.stop]))
    bounds = {"least": min(shares), "most": max(shares)}
    return item.result(
        item.compare(lambda _, bound: bounds[bound]), holds={"covered": max(shares) < 100}, most=max(shares)
    )


@each_cell
def acceleration(bound: str) -> Number:
    """Return the least or the largest acceleration."""
    runs = [trained(model, devices) for model in BATCH_SIZES for devices in (3, 4)]
    if bound == "least":
        return min(run.seconds["FTPipeHD"] / run.seconds["Confidant"] for run in runs)
    return max(PROCESSORS * min(run.alone_s) / run.seconds["Confidant"] for run in runs)


def fig8(item: Item) -> Result:
    """Compute the charge that ten mini-batches take on single devices and on three together."""
    cells, totals, rows = [], list[float](), list[Row]()
    over_largest = []
    for model in BATCH_SIZES:
        simulated = trained(model, 3)
        together = simulated.mah["Confidant"]
        each = dict(zip(simulated.names, simulated.alone_mah, strict=True))
        each |= {f"{name}, Confidant": charge for name, charge in zip(simulated.names, together, strict=True)}
        each["all three, Confidant"] = sum(together)
        cells += [item.cell((model, name), None, value) for name, value in each.items()]
        totals.append(sum(together) / min(simulated.alone_mah))
        over_largest.append(sum(together) / simulated.alone_mah[simulated.names.index(LARGEST)])
        for processors, (idle, charges) in product(
            (1, PROCESSORS), (("charged", together), ("not", simulated.busy_mah))
        ):
            rows.append((model, processors, idle, sum(charges) / processors / min(simulated.alone_mah)))
    return item.result(
        cells,
        tables={"charged": rows},
        holds={"total": max(totals) < 1},
        least=min(totals),
        most=max(totals),
        over_largest=" and ".join(f"{ratio:.2f}" for ratio in over_largest),
    )
