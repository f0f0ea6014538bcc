"""Speedups over the fastest single device, and what ten mini-batches take from the batteries (Confidant, sections 5.2.2
and 5.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

from workbench.core.summary import device_j
from workbench.simulator.steps import mini_batches
from workbench_studies.papers.confidant.loading import FLASH, loaded, loading_words, rooms, without_room
from workbench_studies.papers.confidant.phones import (
    ALL_BATCH_SIZES,
    BATCH_SIZES,
    LARGEST,
    MINI_BATCHES,
    PROCESSORS,
    Fullest,
    both_plans,
    full_costs,
    fullest,
    mah,
    num_tokens,
    stages_of,
)
from workbench_studies.papers.confidant.testbed import PAPER
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Ten mini-batches.  alone_s, alone_mah: on each device alone, as if it had the memory.  seconds, mah: by
    partition, mah by device.  busy_mah: Confidant's without idle watts.  fullest: of FTPipeHD's partition.
    """

    names: tuple[str, ...]
    alone_s: tuple[float, ...]
    alone_mah: tuple[float, ...]
    seconds: dict[str, float]
    mah: dict[str, tuple[float, ...]]
    busy_mah: tuple[float, ...]
    fullest: Fullest


@cache
def trained(model: str, devices: int) -> Trained:
    """Simulate both partitions on Table 4's devices, in full fine-tuning as Table 6 has it."""
    batch = BATCH_SIZES[model]
    costs, plans, tokens = full_costs(model, devices, batch), both_plans(model, devices, batch), num_tokens()
    profile, cluster = costs.profile, costs.cluster
    alone_s = [MINI_BATCHES * float(costs.seconds(rank)[0, -1]) for rank in range(devices)]
    timelines = {
        way: mini_batches(profile, cluster, plan, tokens=tokens, count=MINI_BATCHES) for way, plan in plans.items()
    }
    return Trained(
        fullest=fullest(costs, *stages_of(plans["FTPipeHD"])),
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
    memory: list[Row] = [
        (model, batch, devices, *room["alone"], *room["FTPipeHD"])
        for model, batches in ALL_BATCH_SIZES.items()
        for batch, devices in product(batches, (3, 4))
        for room in [rooms(model, devices, batch)]
    ]
    ratios, over = item.printed, printed(PAPER, "fig4")
    loading: list[Row] = [
        (
            *setting,
            storage,
            run.alone_s / run.whole_s,
            *(number for way in ("FTPipeHD", "Confidant") for number in (ratios[*labels, way], run.speedup(way))),
            over[labels],
            run.over_ftpipehd,
        )
        for setting in without_room()
        for storage in FLASH
        for run, labels in [(loaded(*setting, storage), (setting[0], f"{setting[1]}"))]
    ]
    fullest_gb = max(trained(model, count).fullest for model in BATCH_SIZES for count in (3, 4))
    return item.result(
        comparisons,
        tables={"bounds": rows, "memory": memory, "loading": loading},
        sums=" and ".join(f"{row[2]:.2f}" for row in rows[:2]),
        tokens=num_tokens(),
        used=fullest_gb.used_gb,
        room=fullest_gb.room_gb,
        broken=sum(comparison.how == "refuted upper bound" for comparison in comparisons),
        count=sum(comparison.kind == "upper bound" for comparison in comparisons),
        **loading_words(),
    )


def transmission(item: Item) -> Result:
    """Compare the share of sending a stage's output in the stage's time."""
    shares = list[float]()
    for devices in (3, 4):
        batch = BATCH_SIZES["BERT-Base"]
        costs = full_costs("BERT-Base", devices, batch)
        stages = both_plans("BERT-Base", devices, batch)["Confidant"].stages
        for stage, after in pairwise(stages):
            [rank], [target] = stage.ranks, after.ranks
            nbytes = costs.profile.layers[rank][stage.stop - 1].output_bytes(costs.batch_size, num_tokens())
            sent_s = costs.cluster.link(rank, target).transfer_s(nbytes)
            shares.append(100 * sent_s / float(costs.seconds(rank)[stage.start, stage.stop]))
    bounds = {"least": min(shares), "most": max(shares)}
    return item.result(
        item.compare(lambda _, bound: bounds[bound]), holds={"covered": max(shares) < 100}, most=max(shares)
    )


def acceleration(item: Item) -> Result:
    """Compare the least and the largest acceleration."""
    runs = [trained(model, devices) for model in BATCH_SIZES for devices in (3, 4)]
    bounds = {
        "least": min(run.seconds["FTPipeHD"] / run.seconds["Confidant"] for run in runs),
        "most": max(PROCESSORS * min(run.alone_s) / run.seconds["Confidant"] for run in runs),
    }
    return item.result(item.compare(lambda bound: bounds[bound]), **loading_words())


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
    loading: list[Row] = [
        (model, batch, storage, run.together_mah / run.alone_mah)
        for model, devices, batch in without_room()
        if devices == 3
        for storage in FLASH
        for run in [loaded(model, devices, batch, storage)]
    ]
    return item.result(
        cells,
        tables={"charged": rows, "loading": loading},
        holds={"total": max(totals) < 1},
        least=min(totals),
        most=max(totals),
        over_largest=" and ".join(f"{ratio:.2f}" for ratio in over_largest),
        over_loading=" to ".join(f"{row[-1]:.2f}" for row in reversed(loading)),
        **loading_words(),
    )
