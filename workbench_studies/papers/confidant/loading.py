"""What a device with too little memory reads and writes if it loads a model in parts (Confidant, section 5.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from workbench.core.plan import Plan
from workbench.core.summary import device_j
from workbench.core.timeline import Timeline
from workbench.planners.equation3 import Equation3
from workbench.simulator.steps import mini_batches
from workbench_studies.papers.confidant.phones import (
    ALL_BATCH_SIZES,
    MINI_BATCHES,
    PROCESSORS,
    Fullest,
    Stage,
    both_plans,
    full_costs,
    fullest,
    largest_alone,
    mah,
    need_bytes,
    num_tokens,
    stages_of,
)
from workbench_studies.papers.confidant.testbed import PAPER
from workbench_studies.papers.result import printed


class Flash(NamedTuple):
    """A phone's storage: sequential rates, bytes/s."""

    read_bytes_per_s: float
    write_bytes_per_s: float


FLASH = {"UFS 3.1": Flash(2100e6, 1200e6), "UFS 2.1": Flash(860e6, 255e6)}
"""The fastest and the slowest that phones of these years have, by Samsung's announcement of eUFS 3.1 (March 2020)."""


def segments(costs: Equation3, stage: Stage) -> Iterator[Stage]:
    """Yield the parts of a stage, each of as many layers as fit into the device's memory, or of one."""
    budget, start = costs.cluster.devices[stage.rank].memory_bytes, stage.start
    while start < stage.stop:
        fitting = [
            part
            for stop in range(start + 1, stage.stop + 1)
            if need_bytes(costs, part := stage._replace(start=start, stop=stop)) <= budget
        ]
        part = fitting[-1] if fitting else stage._replace(start=start, stop=start + 1)
        yield part
        start = part.stop


def moved_bytes(costs: Equation3, stage: Stage) -> tuple[int, int]:
    """Return the bytes that a stage reads and writes for each mini-batch; none if it fits.

    One segment is in memory at a time.  The first one stays from the backward to the next forward pass, the last one
    from the forward to the backward pass; all others are loaded for each pass.  A segment that is released after its
    forward pass leaves its activations in the storage.  The backward pass reads the optimizer's state, and the older
    version of the weights if the stage has one, and writes the trained weights and the state.
    """
    parts = list(segments(costs, stage))
    if len(parts) == 1:
        return 0, 0
    needs = [
        costs.need(part.rank, 0, part.start, part.stop, num_stages=1) for part in parts
    ]  # of one mini-batch and one version
    weights = [need.weights_bytes for need in needs]
    trained, optimizer = sum(need.gradient_bytes for need in needs), sum(need.optimizer_bytes for need in needs)
    contexts = sum(need.context_bytes for need in (needs if stage.behind else needs[:-1]))
    read = sum(weights[1:]) + sum(weights[:-1]) + optimizer + contexts + (trained if stage.behind else 0)
    return read, trained + optimizer + contexts


def loading_s(costs: Equation3, stage: Stage, flash: Flash) -> float:
    """Return the seconds for which a stage waits for its storage in each mini-batch, in which it computes nothing."""
    read, written = moved_bytes(costs, stage)
    return read / flash.read_bytes_per_s + written / flash.write_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Ten mini-batches on devices that load what does not fit in parts.  whole_s: LARGEST alone, as if it had the
    memory.  alone_s, alone_mah: LARGEST loading, busy while it waits for its storage.  seconds: by partition.
    together_mah: of all devices by Eq. 3's partition.
    """

    whole_s: float
    alone_s: float
    alone_mah: float
    seconds: dict[str, float]
    together_mah: float

    def speedup(self, way: str) -> float:
        """Return a partition's speedup over LARGEST, for Confidant the bound (see speedup)."""
        return (PROCESSORS if way == "Confidant" else 1) * self.alone_s / self.seconds[way]

    @property
    def over_ftpipehd(self) -> float:
        """Return Confidant's bound over FTPipeHD."""
        return self.speedup("Confidant") / self.speedup("FTPipeHD")


@cache
def loaded(model: str, devices: int, batch: int, storage: str) -> Loaded:
    """Simulate both partitions where devices load what does not fit from a storage of FLASH."""
    costs, flash = full_costs(model, devices, batch), FLASH[storage]
    cluster, largest = costs.cluster, largest_alone(costs)

    def computing_s(stage: Stage) -> float:
        return float(costs.seconds(stage.rank)[stage.start, stage.stop])

    def pipeline(plan: Plan) -> Timeline:
        slower = {stage.rank: 1 + loading_s(costs, stage, flash) / computing_s(stage) for stage in stages_of(plan)}
        profile = costs.profile.part(range(devices), slower)
        return mini_batches(profile, cluster, plan, tokens=num_tokens(), count=MINI_BATCHES)

    timelines = {way: pipeline(plan) for way, plan in both_plans(model, devices, batch).items()}
    alone_s = MINI_BATCHES * (computing_s(largest) + loading_s(costs, largest, flash))
    return Loaded(
        whole_s=MINI_BATCHES * computing_s(largest),
        alone_s=alone_s,
        alone_mah=mah(alone_s * cluster.devices[largest.rank].watts_busy),
        seconds={way: timeline.makespan_s for way, timeline in timelines.items()},
        together_mah=mah(
            sum(device_j(timelines["Confidant"], rank, device) for rank, device in enumerate(cluster.devices))
        ),
    )


def rooms(model: str, devices: int, batch: int) -> dict[str, Fullest]:
    """Return the memory of LARGEST alone, and of the fullest device of FTPipeHD's partition."""
    costs = full_costs(model, devices, batch)
    stages = stages_of(both_plans(model, devices, batch)["FTPipeHD"])
    return {"alone": fullest(costs, largest_alone(costs)), "FTPipeHD": fullest(costs, *stages)}


def without_room() -> list[tuple[str, int, int]]:
    """Return model, devices and batch size, of Table 6's, where LARGEST alone or FTPipeHD's partition lacks memory."""
    settings = [
        (model, devices, batch)
        for model, batches in ALL_BATCH_SIZES.items()
        for batch, devices in product(batches, (3, 4))
    ]
    return [setting for setting in settings if not all(room.fits for room in rooms(*setting).values())]


def loading_words() -> dict[str, Any]:
    """Return what devices that load in parts change, for the texts: ranges over the storages."""
    settings, bounds, ratios = without_room(), printed(PAPER, "fastest"), printed(PAPER, "fig4")
    needs = [rooms(*setting) for setting in settings]
    runs = [tuple(loaded(*setting, storage) for storage in FLASH) for setting in settings]
    labels = [(model, f"{devices}") for model, devices, _ in settings]
    slower = [run.alone_s / run.whole_s for each in runs for run in each]
    is_within = [
        [run.speedup("Confidant") >= bounds[*label, "Confidant"] for run in each]
        for label, each in zip(labels, runs, strict=True)
    ]

    def ranges(ours: Callable[[Loaded], float], paper: Callable[[tuple[str, str]], float] | None = None) -> str:
        words = []
        for label, each in zip(labels, runs, strict=True):
            low, high = sorted(map(ours, each))
            words.append(f"{low:.2f} to {high:.2f}x" + ("" if paper is None else f" ({paper(label):.2f}x)"))
        return " and ".join(words)

    return {
        "open": " and ".join(dict.fromkeys(f"{model} in mini-batches of {batch}" for model, _, batch in settings)),
        "alone_needs": max(need["alone"].used_gb for need in needs),
        "largest_has": needs[0]["alone"].room_gb,
        "ftpipehd_needs": " and ".join(f"{need['FTPipeHD'].used_gb:.1f}" for need in needs),
        "slower_least": min(slower),
        "slower_most": max(slower),
        "over": ranges(lambda run: run.over_ftpipehd, lambda label: ratios[label]),
        "bound": ranges(lambda run: run.speedup("Confidant"), lambda label: bounds[*label, "Confidant"]),
        "plain_over": ranges(lambda run: run.over_ftpipehd / PROCESSORS),
        "within_fast": sum(fast for fast, _ in is_within),
        "within_slow": sum(slow for _, slow in is_within),
        "settings": len(settings),
    }
