"""`workbench bench runtime`: our executor against torch.distributed.pipelining's Schedule1F1B, interleaved.

Both train the same stage computation on the same batches with the same pacing and optimizer, so their losses are equal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.job import Job
from workbench.core.plan import Plan, one_device_stages
from workbench.core.profile import Layers
from workbench.core.run_folder import scratch_folder
from workbench.core.schedule import STEP
from workbench.core.timeline import late_share_of
from workbench.methods.common.scaling import scale_to_cluster
from workbench.methods.common.session import RankSession
from workbench.methods.pac_plus.epochs import build_stage, save_initial
from workbench.methods.pac_plus.handlers import PacPlusHandlers, StageCompute
from workbench.methods.pac_plus.measure import measure_layers
from workbench.methods.pac_plus.rank_job import PacPlusRankJob, Programs
from workbench.methods.training.handlers import PlannedStep, cut_mini_batch, share_of
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.configuration import import_family
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.runtime.context import RankContext
from workbench.runtime.engines import EngineCluster
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group
from workbench.simulator import makespan_s
from workbench.tasks.tokenize import TokenizedSplit, collate
from workbench_studies.bench.frame import Figures, Progress, line_of, ratios, require_kernel_links, turns

MODEL = "all-MiniLM-L6-v2"
LAYERS = (2, 2, 1, 1)
MICRO_BATCH_SIZE, NUM_MICRO_BATCHES, SEQUENCE_LENGTH = 4, 8, 32
WORD_IDS = (1000, 20_000)
MBIT_PER_S = (125, 250, 500, 1000)
ROUNDS, STEPS = 7, 3
SHARE_PER_LAYER = 0.22
"""Share of a core per layer: every device has the speed that its stage needs, so no stage waits; six layers take 1.3
cores."""
PACE_MARGIN = 1.1
"""Costs are rounded up by this factor, so that neither side overruns its deadlines."""


Step = Callable[[], float]
"""Train one mini-batch; return its mean loss on the last stage, 0 elsewhere."""


def planned_of(rank_job: PacPlusRankJob) -> PlannedStep:
    """Return the repeated mini-batch: the whole split."""
    return PlannedStep.of(cut_mini_batch(range(len(rank_job.split)), NUM_MICRO_BATCHES), rank_job.split.lengths)


def our_step(session: RankSession[PacPlusRankJob], compute: StageCompute, optimizer: FlatAdamW, layers: Layers) -> Step:
    """Return a step of the workbench's executor on the hybrid 1F1B schedule.  layers: the stage's, on this device."""
    rank_job = session.rank_job
    programs, planned = Programs(rank_job), planned_of(rank_job)

    def step() -> float:
        share = share_of(session.rank, rank_job.plan, planned, rank_job.split)
        handlers = PacPlusHandlers(compute=compute, optimizer=optimizer, epoch=0, layers=layers, **share)
        outcome = session.run(programs.hybrid(planned.shape), handlers.table())
        return float(sum(content for value, content in outcome.outputs.items() if value.name == "loss"))

    return step


def torch_step(
    session: RankSession[PacPlusRankJob], compute: StageCompute, optimizer: FlatAdamW, layers: Layers
) -> Step:
    """Return a step of torch.distributed.pipelining's Schedule1F1B on the same stage computation."""
    rank_job, index = session.rank_job, session.rank
    planned, last = planned_of(rank_job), len(LAYERS) - 1
    kind, total = rank_job.adapter.kind, planned.shape.samples
    batches = [collate(rank_job.split, micro) for micro in planned.samples]
    ids, labels = torch.cat([batch.input_ids for batch in batches]), torch.cat([batch.labels for batch in batches])

    def seconds(kind: str) -> float:
        return sum(layer.seconds(kind, MICRO_BATCH_SIZE, planned.shape.lengths[0]) for layer in layers)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return task_loss(logits, labels, kind, reduction="sum") / total

    stage = _PacedStage(_StageModule(compute, is_last=index == last), index, len(LAYERS), torch.device("cpu"))
    stage.pace(session.pacer, seconds("F") + seconds("SF"), seconds("SB"))
    schedule = Schedule1F1B(stage, len(batches), loss_fn=loss_of, scale_grads=False)

    def step() -> float:
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": labels, "losses": losses} if index == last else {}
        schedule.step(*((ids,) if index == 0 else ()), **options)
        optimizer.step()
        return float(sum(losses)) if losses else 0.0

    return step


class _StageModule(nn.Module):
    """A stage in the form that torch's pipeline needs: ids -> (hidden, side) -> ... -> logits.  The hidden state
    carries no gradient.
    """

    def __init__(self, compute: StageCompute, *, is_last: bool) -> None:
        super().__init__()
        self.adapter = compute.adapter
        self._compute, self._is_last = compute, is_last

    def forward(self, hidden_or_ids: Tensor, side: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Run backbone and side network on a micro-batch without padding."""
        mask = torch.ones(hidden_or_ids.shape[:2], dtype=torch.int64)
        output, taps = self._compute.backbone_forward(hidden_or_ids, mask)
        side = self.adapter(side, taps, mask)
        if not self._is_last:
            return output, side
        return self.adapter.head(side, taps[-1], mask, torch.arange(len(mask)), 0)


class _PacedStage(PipelineStage):
    """torch's stage with its chunks paced like our operations."""

    def pace(self, pacer: Pacer, forward_s: float, backward_s: float) -> None:
        self._pacer, self._forward_s, self._backward_s = pacer, forward_s, backward_s

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pacer.run(
            lambda: super(_PacedStage, self).forward_one_chunk(*args, **options), self._forward_s
        ).result

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._pacer.run(
            lambda: super(_PacedStage, self).backward_one_chunk(*args, **options), self._backward_s
        ).result


def bench(progress: Progress = print) -> Figures:
    """Return the step times of both sides at several bandwidths, and the ratio ours / torch with its spread.

    Raises RuntimeSetupError if the kernel does not shape links: we cannot pace torch's side.
    """
    stack = load_stack(MODEL)
    adapter = ParallelAdapterConfig(hidden_size=stack.hidden_size, num_layers=stack.num_layers, dropout=0.0)
    sizes = {"max_length": SEQUENCE_LENGTH, "batch_sizes": (MICRO_BATCH_SIZE,), "lengths": (SEQUENCE_LENGTH,)}
    measured = measure_layers(stack, adapter, dtype="float32", is_fast=False, **sizes)  # type: ignore[arg-type]
    # Without a time for the optimizer step, it is not paced: torch's side does not pace its own.
    paced = ({kind: grid for kind, grid in layer.times.items() if kind != STEP} for layer in measured)
    host_layers = tuple(
        replace(layer, times=times).scaled(PACE_MARGIN) for layer, times in zip(measured, paced, strict=True)
    )
    points = []
    for mbit in MBIT_PER_S:
        cluster = _cluster(mbit)
        with scratch_folder() as folder, EngineCluster.start(cluster) as engines:
            require_kernel_links(engines, "runtime")
            save_initial(ParallelAdapter(adapter), folder, "bench")
            job = _job(cluster, adapter, host_layers, folder)
            # The simulated step contains no overhead of either side.
            bound_s = makespan_s(Programs(job).hybrid(planned_of(job).shape))
            points.append(_point(mbit, bound_s, engines.run(run_rank, [job] * cluster.world_size)))
        progress(line_of(points[-1]))
    return {
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


def run_rank(context: RankContext, rank_job: PacPlusRankJob) -> Figures:
    """Run both sides in turn on this rank; return every round's monotonic begin and end, and every step's loss, by
    side.
    """
    import_family(rank_job.job.model)
    with group(context, 60.0) as process_group, RankSession(context, rank_job, process_group) as session:
        stage = rank_job.plan.stages[session.rank]
        layers = rank_job.profile.layers[session.rank][stage.start : stage.stop]
        # torch's side needs autograd, so both have it.
        sides = {
            name: make(session, *build_stage(rank_job, session.rank, 1000, is_fast=False), layers)
            for name, make in (("ours", our_step), ("torch", torch_step))
        }
        losses = {name: [step()] for name, step in sides.items()}  # the warm-up
        session.pacer.reset()
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _, name in turns(sides, range(ROUNDS)):
            session.barrier()
            dist.barrier()
            begin = time.monotonic()
            losses[name] += [sides[name]() for _ in range(STEPS)]
            spans[name].append((begin, time.monotonic()))
    return {"spans": spans, "losses": losses, "late_s": session.pacer.late_s, "paced_s": session.pacer.paced_s}


def _point(mbit: int, bound_s: float, results: list[Figures]) -> Figures:
    seconds = {
        name: [
            (max(end for _, end in turn) - min(begin for begin, _ in turn)) / STEPS
            for turn in zip(*(result["spans"][name] for result in results), strict=True)
        ]
        for name in ("ours", "torch")
    }
    losses = {
        name: [sum(parts) for parts in zip(*(result["losses"][name] for result in results), strict=True)]
        for name in seconds
    }
    gap = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses["ours"], losses["torch"], strict=True))
    if gap > 1e-4:
        raise AssertionError(f"the two sides do not train the same: losses differ by {gap:.1e}")
    return {
        "mbit_per_s": mbit,
        "ours_s": median(seconds["ours"]),
        "torch_s": median(seconds["torch"]),
        "bound_s": bound_s,
        "ours_over_bound": median(seconds["ours"]) / bound_s,
        **ratios(seconds["ours"], seconds["torch"]),
        "overrun_share": late_share_of((result["late_s"], result["paced_s"]) for result in results),
        "loss_gap": gap,
    }


def _cluster(mbit_per_s: float) -> Cluster:
    laptop = load_cluster("laptop")
    link = Link(bytes_per_s=mbit_per_s * MEGABIT_BYTES, latency_s=0.0)
    devices = tuple(
        replace(device, link=link, memory_bytes=2_000_000_000, host_share=SHARE_PER_LAYER * layers)
        for device, layers in zip(laptop.devices, LAYERS, strict=True)
    )
    return replace(laptop, devices=devices)


def _job(cluster: Cluster, adapter: ParallelAdapterConfig, host_layers: Layers, folder: Path) -> PacPlusRankJob:
    stages = one_device_stages(range(len(LAYERS)), tuple(accumulate(LAYERS, initial=0)), MICRO_BATCH_SIZE)
    plan = Plan(
        method="pac_plus", stages=stages, micro_batch_size=MICRO_BATCH_SIZE, num_micro_batches=NUM_MICRO_BATCHES
    )
    chance, count = random.Random(0), plan.mini_batch_size
    split = TokenizedSplit(
        ids=tuple(tuple(chance.randrange(*WORD_IDS) for _ in range(SEQUENCE_LENGTH)) for _ in range(count)),
        labels=tuple(chance.randrange(2) for _ in range(count)),
        sample_ids=tuple(range(count)),
        pad_id=0,
    )
    return PacPlusRankJob(
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
