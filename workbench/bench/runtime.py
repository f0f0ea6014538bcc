"""`workbench bench runtime`: our executor against torch.distributed.pipelining's Schedule1F1B, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from workbench.bench.stages import OurPipeline, PipelineBench, TorchPipeline, TrainedStage
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import RuntimeSetupError
from workbench.core.plan import Plan, Share, Stage
from workbench.models.loading import model_facts
from workbench.profiler.timing import time_calls
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group
from workbench.runtime.transport import Transport
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import one_f_one_b

MODEL = "all-MiniLM-L6-v2"
LAYERS = (2, 2, 1, 1)
MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, SEQUENCE_LENGTH = 4, 8, 32
MBIT_PER_S = (125, 250, 500, 1000)
ROUNDS, STEPS = 5, 2
PACE_MARGIN = 1.15
"""Costs are rounded up by this factor, so that neither side overruns its deadlines."""


def bench(progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Return the step times of both sides at several bandwidths, and the ratio ours / torch with its spread.

    Raises RuntimeSetupError where the kernel does not shape links: torch's side cannot be paced by us.
    """
    layer_forward_s, layer_backward_s = _layer_costs()
    points = []
    for mbit in MBIT_PER_S:
        cluster = _cluster(mbit)
        job = _job(cluster, layer_forward_s, layer_backward_s)
        with EngineCluster.start(cluster, fidelity="auto") as engines:
            if engines.fidelity != "kernel":
                raise RuntimeSetupError(
                    "The runtime benchmark was asked for.",
                    f"Links have {engines.fidelity} fidelity here: {engines.fidelity_reason}.",
                    "Run it as root on Linux, or where user namespaces are allowed (see `workbench doctor`).",
                )
            results = engines.run(run_rank, [job] * cluster.world_size)
        ours, torchs, late = _merge(results)
        ratios = [a / b for a, b in zip(ours, torchs, strict=True)]
        point = {
            "mbit_per_s": mbit,
            "ours_s": median(ours),
            "torch_s": median(torchs),
            "ratio": median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "overrun_share": late,
            "losses": results[-1]["losses"],
        }
        progress(
            f"{mbit:5d} Mbit/s: ours {point['ours_s'] * 1e3:.1f} ms, torch {point['torch_s'] * 1e3:.1f} ms, "
            f"ratio {point['ratio']:.3f} ({point['ratio_min']:.3f} to {point['ratio_max']:.3f}), late {late:.1%}"
        )
        points.append(point)
    return {
        "name": "runtime",
        "label": "emulated, kernel links",
        "what": "step time of our executor / torch.distributed.pipelining Schedule1F1B; same model, split, links and pacing, interleaved",
        "model": MODEL,
        "layers": list(LAYERS),
        "micro_batches": NUM_MICRO_BATCHES,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "points": points,
        "median_ratio": median(point["ratio"] for point in points),
    }


def run_rank(context: RankContext, job: PipelineBench) -> dict[str, Any]:
    """Run both sides in turn on this rank and return the monotonic begin and end of every round of each."""
    with group(context, 60.0) as everyone:
        module = TrainedStage(job.model, job.plan.stages[context.rank].start, job.plan.stages[context.rank].stop)
        pacer = Pacer(context.device.host_share or 1.0, clock=time.monotonic)
        with Transport(dist.new_group(list(range(context.world_size))), context.rank, subgroup=lambda ranks: everyone) as transport:
            sides: dict[str, OurPipeline | TorchPipeline] = {
                "ours": OurPipeline(job, context.rank, module, pacer, transport),
                "torch": TorchPipeline(job, context.rank, module, pacer),
            }
            losses = {name: side.step() for name, side in sides.items()}  # also the warm-up
            pacer.reset()
            spans: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            for _ in range(job.rounds):
                for name, side in sides.items():
                    dist.barrier()
                    begin = time.monotonic()
                    for _ in range(job.steps):
                        side.step()
                    spans[name].append((begin, time.monotonic()))
        return {"spans": spans, "losses": losses, "late_s": pacer.late_s, "paced_s": pacer.paced_s}


def _merge(results: list[dict[str, Any]]) -> tuple[list[float], list[float], float]:
    seconds = {
        name: [
            (max(end for _, end in turn) - min(begin for begin, _ in turn)) / STEPS
            for turn in zip(*(result["spans"][name] for result in results), strict=True)
        ]
        for name in ("ours", "torch")
    }
    late = sum(result["late_s"] for result in results) / sum(result["paced_s"] for result in results)
    return seconds["ours"], seconds["torch"], late


def _cluster(mbit_per_s: float) -> Cluster:
    laptop = load_cluster("laptop")
    link = Link(bytes_per_s=mbit_per_s * 125_000, latency_s=0.0)
    return replace(laptop, devices=tuple(replace(device, link=link, memory_bytes=2_000_000_000) for device in laptop.devices))


def _job(cluster: Cluster, forward_s: float, backward_s: float) -> PipelineBench:
    stages, at = [], 0
    for rank, count in enumerate(LAYERS):
        stages.append(Stage(start=at, stop=at + count, shares=(Share(rank=rank, samples=MICRO_BATCH_SIZE),)))
        at += count
    plan = Plan(method="pipeline", stages=tuple(stages), micro_batch_size=MICRO_BATCH_SIZE, num_micro_batches=NUM_MICRO_BATCHES)
    return PipelineBench(
        model=MODEL,
        plan=plan,
        cluster=cluster,
        schedule=insert_transfers(one_f_one_b(plan, (MICRO_BATCH_SIZE,) * NUM_MICRO_BATCHES)),
        sequence_length=SEQUENCE_LENGTH,
        hidden_size=model_facts(MODEL).hidden_size,
        forward_s=PACE_MARGIN * forward_s,
        backward_s=PACE_MARGIN * backward_s,
        rounds=ROUNDS,
        steps=STEPS,
    )


def _layer_costs() -> tuple[float, float]:
    """Return the seconds of one layer's forward and backward pass of a micro-batch on one core."""
    module = TrainedStage(MODEL, 2, 3)
    hidden = torch.randn(MICRO_BATCH_SIZE, SEQUENCE_LENGTH, module.stage.hidden_size, requires_grad=True)

    def forward() -> torch.Tensor:
        return module(hidden)

    timings = time_calls({"F": forward, "B": (forward, lambda output: output.sum().backward())})
    return timings["F"].seconds, timings["B"].seconds
