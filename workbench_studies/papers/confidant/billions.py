"""LoRA on models of billions of parameters, simulated (Confidant, section 5.7, Table 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from workbench.core.catalogue import load_cluster
from workbench.planners.asynchronous import plan_asynchronous
from workbench.profiler.analytic import TechniqueSizes
from workbench_studies.papers.confidant.testbed import PAPER, costs_of, description, pace_s, stages_bytes
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Number, Result, read_constants

CLUSTER, LORA_RANK, GB = "confidant-llm", 8, 1e9
WARM_UP, TIMED = 8, 10
"""Mini-batches: the paper times ten (section 5.2.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """constants.toml, [table8].  tokens: tokens of a sample.  pace: device speed, relative to the catalogue."""

    tokens: int
    pace: float


class BestPlan(NamedTuple):
    """time: seconds of a mini-batch.  memory: GB, the mean of the devices.  blocks: each device's blocks.  used: each
    device's GB.
    """

    time: float
    memory: float
    blocks: tuple[int, ...]
    used: tuple[float, ...]


def trained(model: str, batch: int, constants: Constants) -> BestPlan:
    """Simulate an asynchronous pipeline in float32 over the three devices in their order, partitioned by Eq. 3."""
    cluster = load_cluster(CLUSTER).with_each(
        lambda device: replace(device, flops_per_s=constants.pace * device.flops_per_s)
    )
    tokens, sizes = constants.tokens, TechniqueSizes(lora_rank=LORA_RANK)
    costs = costs_of(model, cluster, batch=batch, tokens=tokens, technique="lora", sizes=sizes)
    plan = plan_asynchronous(costs, searches=False, method=PAPER)
    used_gb = tuple(nbytes / GB for nbytes in stages_bytes(costs, plan))
    seconds = pace_s(costs.profile, cluster, plan, tokens=tokens, first=WARM_UP, count=TIMED)
    return BestPlan(seconds, fmean(used_gb), tuple(stage.num_layers for stage in plan.stages), used_gb)


def table8(item: Item) -> Result:
    """Predict times and memory with two constants, each fitted to one cell."""
    constants, paper = read_constants(PAPER, Constants, "table8"), item.printed
    simulated = {(model, batch): trained(model, int(batch), constants) for model, batch, _ in paper}

    def ours(model: str, batch: str, quantity: str) -> Number:
        return float(getattr(simulated[model, batch], quantity))

    models = tuple(dict.fromkeys(model for model, *_ in paper))
    per_sample = {model: 3 * (paper[model, "2", "memory"] - paper[model, "1", "memory"]) for model in models}
    own_sample = {model: 3 * (simulated[model, "2"].memory - simulated[model, "1"].memory) for model in models}
    times = {model: paper[model, "2", "time"] / paper[model, "1", "time"] for model in models}
    phi, llama = models
    rows = [
        (model, batch, ", ".join(map(str, run.blocks)), ", ".join(f"{gb:.1f}" for gb in run.used))
        for (model, batch), run in simulated.items()
    ]
    return item.result(
        item.compare(ours),
        tables={"plans": rows},
        tokens=constants.tokens,
        pace=constants.pace,
        phi=times[phi],
        llama=times[llama],
        phi_ours=simulated[phi, "2"].time / simulated[phi, "1"].time,
        llama_ours=simulated[llama, "2"].time / simulated[llama, "1"].time,
        last_one=simulated[llama, "1"].blocks[-1],
        last_two=simulated[llama, "2"].blocks[-1],
        phi_sample=per_sample[phi],
        llama_sample=per_sample[llama],
        phi_own=own_sample[phi],
        llama_own=own_sample[llama],
        weights=4 * description(llama).params / GB,
    )
