"""Speedups over the fastest single device, and what ten mini-batches take from the batteries (Confidant, sections 5.2.2
and 5.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from workbench.core.catalogue import load_cluster
from workbench.core.plan import Plan
from workbench.core.summary import BATTERY_V, device_j
from workbench.planners import Problem
from workbench.planners.asynchronous import Equation3, asynchronous_plan, partition_in_order, plan_asynchronous
from workbench.profiler.analytic import analytic_profile
from workbench.simulator.steps import mini_batches
from workbench_studies.papers.confidant.testbed import PAPER, description, load_constants
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Settings

MINI_BATCHES = 10
"""As in section 5.2.2."""
BATCH_SIZES = {"BERT-Base": 8, "GPT2-Medium": 4}
PROCESSORS = 2
"""A device's processors, equal, that share heads and columns at no cost: the bound for Confidant's scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Ten mini-batches.  alone_s, alone_mah: on each device alone, as if it had the memory.  seconds, mah: by
    partition, mah by device.
    """

    names: tuple[str, ...]
    alone_s: tuple[float, ...]
    alone_mah: tuple[float, ...]
    seconds: dict[str, float]
    mah: dict[str, tuple[float, ...]]


def mah(joules: float) -> float:
    """Return the charge of a phone's battery."""
    return joules / 3.6 / BATTERY_V


@cache
def trained(model: str, devices: int) -> Trained:
    """Simulate both partitions on Table 4's devices, in full fine-tuning with Table 1's sequence length."""
    cluster, tokens, batch = load_cluster(f"confidant-{devices}"), load_constants().tokens, BATCH_SIZES[model]
    profile = analytic_profile(
        description(model), cluster, technique="full", batch_sizes=(batch,), sequence_lengths=(tokens,)
    )
    costs = Equation3(Problem(profile, cluster, batch_size=batch, sequence_length=tokens))
    alone_s = [MINI_BATCHES * float(costs.seconds(rank)[0, -1]) for rank in range(devices)]
    by_speed = partition_in_order(costs, range(devices), in_memory=False)
    plans: dict[str, Plan] = {"FTPipeHD": asynchronous_plan(costs, by_speed, method=PAPER, check_memory=False)}
    plans["Confidant"] = plan_asynchronous(costs, searches=False, method=PAPER)
    timelines = {
        way: mini_batches(profile, cluster, plan, tokens=tokens, count=MINI_BATCHES) for way, plan in plans.items()
    }
    return Trained(
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
    )


def speedup(model: str, devices: str, way: str) -> float:
    """Return a partition's speedup over the fastest device; for Confidant the bound with PROCESSORS processors."""
    simulated = trained(model, int(devices))
    return (PROCESSORS if way == "Confidant" else 1) * min(simulated.alone_s) / simulated.seconds[way]


def fastest(item: Item, settings: Settings) -> Result:
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
    bounds: dict[tuple[str, ...], float] = {(str(row[0]), str(row[1])): float(row[2]) for row in rows}
    return item.result(
        comparisons,
        tables={"bounds": rows},
        holds={
            "one": all(
                float(comparison.paper or 0) <= bounds[comparison.labels[:2]]
                for comparison in comparisons
                if comparison.labels[2] == "FTPipeHD"
            ),
            "two": all(
                float(comparison.paper or 0) <= PROCESSORS * bounds[comparison.labels[:2]] for comparison in comparisons
            ),
        },
        tokens=load_constants().tokens,
    )


def fig8(item: Item, settings: Settings) -> Result:
    """Compute the charge that ten mini-batches take on single devices and on three together."""
    cells, shares, totals = [], [], []
    for model in BATCH_SIZES:
        simulated = trained(model, 3)
        together = simulated.mah["Confidant"]
        each = dict(zip(simulated.names, simulated.alone_mah, strict=True))
        each |= {f"{name}, Confidant": charge for name, charge in zip(simulated.names, together, strict=True)}
        each["all three, Confidant"] = sum(together)
        cells += [item.cell((model, name), None, value) for name, value in each.items()]
        shares += [charge < alone for charge, alone in zip(together, simulated.alone_mah, strict=True)]
        totals.append(sum(together) / min(simulated.alone_mah))
    return item.result(
        cells, holds={"each": all(shares), "total": max(totals) < 1}, least=min(totals), most=max(totals)
    )
