"""`workbench bench runtime`: our executor against torch.distributed.pipelining's Schedule1F1B, interleaved."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from workbench.bench.stages import Ours, PipelineBench, Torchs
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import RuntimeSetupError
from workbench.core.job import Job
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import LayerProfile
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import scale_to_cluster
from workbench.methods.common.session import RankSession
from workbench.methods.pac_plus.building import build_stage, save_initial
from workbench.methods.pac_plus.measure import measure_layers
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.training.steps import PlannedStep, cut_mini_batch
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import import_family, load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.process_group import group
from workbench.simulator import simulate
from workbench.tasks.tokenize import TokenizedSplit

MODEL = "all-MiniLM-L6-v2"
LAYERS = (2, 2, 1, 1)
MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, SEQUENCE_LENGTH = 4, 8, 32
MBIT_PER_S = (125, 250, 500, 1000)
ROUNDS, STEPS = 7, 3
SHARE_PER_LAYER = 0.22
"""Of a core: every device is as fast as its stage needs, so that no stage waits for a slower one; six layers take 1.3 cores."""
PACE_MARGIN = 1.1
"""Costs are rounded up by this factor, so that neither side overruns its deadlines."""


def bench(progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Return the step times of both sides at several bandwidths, and the ratio ours / torch with its spread.

    Raises RuntimeSetupError where the kernel does not shape links: torch's side cannot be paced by us.
    """
    stack = load_stack(MODEL)
    adapter = ParallelAdapterConfig(hidden_size=stack.hidden_size, num_layers=stack.num_layers, dropout=0.0)
    host_layers = tuple(
        _unpaced_step(layer.scaled(PACE_MARGIN))
        for layer in measure_layers(
            stack,
            adapter,
            dtype="float32",
            max_length=SEQUENCE_LENGTH,
            batch_sizes=(MICRO_BATCH_SIZE,),
            lengths=(SEQUENCE_LENGTH,),
            is_fast=False,
        )
    )
    points = []
    for mbit in MBIT_PER_S:
        cluster = _cluster(mbit)
        with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder, EngineCluster.start(cluster) as engines:
            if engines.fidelity != "kernel":
                raise RuntimeSetupError(
                    "The runtime benchmark was asked for.",
                    f"Links have {engines.fidelity} fidelity here: {engines.fidelity_reason}.",
                    "Run it as root on Linux, or where user namespaces are allowed (see `workbench doctor`).",
                )
            save_initial(ParallelAdapter(adapter), Path(folder))
            job = _job(cluster, adapter, host_layers, Path(folder))
            points.append(_point(mbit, _bound_s(job), engines.run(run_rank, [job] * cluster.world_size)))
        progress(_line(points[-1]))
    return {
        "name": "runtime",
        "label": "emulated, kernel links",
        "what": "a step of PAC+'s first epoch: our executor / torch.distributed.pipelining Schedule1F1B; "
        "same model, split, links, pacing and optimizer, interleaved; bound: the simulated step",
        "model": MODEL,
        "layers": list(LAYERS),
        "micro_batches": NUM_MICRO_BATCHES,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "rounds": ROUNDS,
        "steps_per_round": STEPS,
        "points": points,
        "median_ratio": median(point["ratio"] for point in points),
    }


def run_rank(context: RankContext, job: PipelineBench) -> dict[str, Any]:
    """Run both sides in turn on this rank; return every round's monotonic begin and end, and every step's loss, by side."""
    import_family(job.rank_job.job.model)
    with group(context, 60.0) as process_group, RankSession(context, job.rank_job, process_group) as session:
        sides: dict[str, Ours | Torchs] = {}
        for name, kind in (("ours", Ours), ("torch", Torchs)):
            index = job.rank_job.plan.stage_of(context.rank)
            assert index is not None
            # torch's side needs autograd, so both have it.
            compute, optimizer = build_stage(job.rank_job, index, 1000, is_fast=False)
            sides[name] = kind(job, session, compute, optimizer)
        losses = {name: [side.step()] for name, side in sides.items()}  # the warm-up
        session.pacer.reset()
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(job.rounds):
            # Who goes first changes from round to round.
            for name in sorted(sides, reverse=bool(turn % 2)):
                session.barrier()
                dist.barrier()
                begin = time.monotonic()
                losses[name] += [sides[name].step() for _ in range(job.steps)]
                spans[name].append((begin, time.monotonic()))
    return {"spans": spans, "losses": losses, "late_s": session.pacer.late_s, "paced_s": session.pacer.paced_s}


def _bound_s(job: PipelineBench) -> float:
    """Return the seconds of the step that is simulated: what no overhead of either side is in."""
    program = job.rank_job.programs().hybrid(job.planned.shape)
    return max(span.end_s for span in simulate(program, memory=False).spans)


def _point(mbit: int, bound_s: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = {
        name: [
            (max(end for _, end in turn) - min(begin for begin, _ in turn)) / STEPS
            for turn in zip(*(result["spans"][name] for result in results), strict=True)
        ]
        for name in ("ours", "torch")
    }
    losses = {name: [sum(parts) for parts in zip(*(result["losses"][name] for result in results), strict=True)] for name in seconds}
    gap = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses["ours"], losses["torch"], strict=True))
    if gap > 1e-4:
        raise AssertionError(f"the two sides do not train the same: losses differ by {gap:.1e}")
    ratios = [ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True)]
    return {
        "mbit_per_s": mbit,
        "ours_s": median(seconds["ours"]),
        "torch_s": median(seconds["torch"]),
        "bound_s": bound_s,
        "ours_over_bound": median(seconds["ours"]) / bound_s,
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "overrun_share": sum(result["late_s"] for result in results) / sum(result["paced_s"] for result in results),
        "loss_gap": gap,
    }


def _line(point: dict[str, Any]) -> str:
    return (
        f"{point['mbit_per_s']:5d} Mbit/s: ours {point['ours_s'] * 1e3:.1f} ms, torch {point['torch_s'] * 1e3:.1f} ms, "
        f"ratio {point['ratio']:.3f} ({point['ratio_min']:.3f} to {point['ratio_max']:.3f}), late {point['overrun_share']:.1%}, "
        f"bound {point['bound_s'] * 1e3:.1f} ms, ours over it {point['ours_over_bound']:.3f}"
    )


def _unpaced_step(layer: LayerProfile) -> LayerProfile:
    """Return the layer with an optimizer step that takes as long as it does: torch's side does not pace its own."""
    return replace(layer, times={kind: grid for kind, grid in layer.times.items() if kind != STEP})


def _cluster(mbit_per_s: float) -> Cluster:
    laptop = load_cluster("laptop")
    link = Link(bytes_per_s=mbit_per_s * 125_000, latency_s=0.0)
    devices = tuple(
        replace(device, link=link, memory_bytes=2_000_000_000, host_share=SHARE_PER_LAYER * layers)
        for device, layers in zip(laptop.devices, LAYERS, strict=True)
    )
    return replace(laptop, devices=devices)


def _job(cluster: Cluster, adapter: ParallelAdapterConfig, host_layers: tuple[LayerProfile, ...], folder: Path) -> PipelineBench:
    stages, at = [], 0
    for rank, count in enumerate(LAYERS):
        stages.append(Stage(start=at, stop=at + count, shares=(Share(rank=rank, samples=MICRO_BATCH_SIZE),)))
        at += count
    plan = Plan(method="pac_plus", stages=tuple(stages), micro_batch_size=MICRO_BATCH_SIZE, num_micro_batches=NUM_MICRO_BATCHES)
    chance, count = random.Random(0), plan.mini_batch_size
    split = TokenizedSplit(
        ids=tuple(tuple(chance.randrange(1000, 20000) for _ in range(SEQUENCE_LENGTH)) for _ in range(count)),
        labels=tuple(chance.randrange(2) for _ in range(count)),
        sample_ids=tuple(range(count)),
        pad_id=0,
    )
    rank_job = PacPlusRankJob(
        job=Job(model=MODEL, batch_size=count, micro_batches=NUM_MICRO_BATCHES, epochs=1),
        cluster=cluster,
        plan=plan,
        profile=scale_to_cluster(host_layers, cluster, model=MODEL, method="pac_plus"),
        adapter=adapter,
        split=split,
        folder=folder,
        fingerprint="bench",
        cache_dtype="float32",
    )
    planned = PlannedStep.of(cut_mini_batch(range(count), NUM_MICRO_BATCHES), split.lengths)
    return PipelineBench(rank_job=rank_job, planned=planned, rounds=ROUNDS, steps=STEPS)
