"""`workbench bench ringada`: RingAda, with and without its cache, and its baselines, on four emulated devices, interleaved.

Whole runs as a user starts them, in the paper's proportions: one more layer after each sixth of the first 62 % of the mini-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from workbench.bench.frame import Progress, turns
from workbench.bench.inference_parts import SIZES, save_model
from workbench.bench.ringada_tables import Side, depth_table, loss_table, measured_s, side_table
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.experiment import run
from workbench.fetch import cache_folder
from workbench.methods import load_method
from workbench.methods.base import Event, ignore
from workbench.reproduce.ringada.executed import kept_curves
from workbench.runtime.memory import read_memory
from workbench.runtime.run_folder import scratch_folder
from workbench.simulator import simulate

BERT_BASE = "bert-base"
POINTS = ("equal,1000", "equal,125", "unequal,1000", f"{BERT_BASE},1000")
"""Devices and Mbit/s of their links; the first is the default.  bert-base: a model of its size with random weights, on equal devices."""
SHARES = {"equal": (0.3, 0.3, 0.3, 0.3), "unequal": (0.3, 0.3, 0.16, 0.08), BERT_BASE: (0.3, 0.3, 0.3, 0.3)}
"""Fractions of a core: four devices at once leave the host time for their links.  The unequal ones have the ratios of cluster 'laptop'."""
MINI_BATCHES, EPOCHS, BATCH_SIZE = 32, 4, 32
"""One more layer is trained every four mini-batches: all six from the twentieth on, as in the paper 12 from the 440th of 700 on."""
JOB = Job(
    method="ringada",
    epochs=EPOCHS,
    batch_size=BATCH_SIZE,
    micro_batches=8,
    max_length=32,
    train_samples=BATCH_SIZE * MINI_BATCHES // EPOCHS,
    validation_samples=32,
    test_samples=32,
)
RING = {"local_iterations": 1, "unfreeze_every": 4, "depth": 1}
SIDES = {
    "RingAda": replace(JOB, options=RING),
    "RingAda cached": replace(JOB, options=RING | {"cache": True}),
    "Parallel Adapters": replace(JOB, options=RING | {"technique": "parallel"}),
    "FedAvg": replace(JOB, options={"local_iterations": 1, "federated": True}),
    "PipeAdapter": replace(JOB, options={"local_iterations": 1, "unfreezing": "all"}),
    "PipeAdapter stashing": replace(
        JOB, method="fine_tuning", micro_batches=1, options={"technique": "serial", "schedule": "asynchronous_1f1b"}
    ),
    "Single": replace(JOB, method="fine_tuning", options={"technique": "serial", "paradigm": "standalone"}),
    "Parallel Adapters cached, one device": replace(JOB, method="pac_plus", options={"paradigm": "standalone"}),
}
"""Both PipeAdapters train all adapters: one without stale weights, one with weight stashing that never drains.
Parallel Adapters (PAC+) need no backward pass through the model, and after the first epoch no forward pass either."""
SMALL_BATCH = 8
OF_BERT_BASE = ("RingAda", "PipeAdapter", "PipeAdapter stashing", "Single")
"""Mini-batches of eight samples in four parts, two more layers in each round of four: Single would take over eight minutes otherwise."""


class Watch:
    """Measure, after each step of a run, the private memory that the largest process has needed since the training began.

    It is the peak of each step if the system can reset a process's peak (Linux).
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}
        self.peak_bytes: list[int] = []

    def __call__(self, event: Event) -> None:
        """Read the memory of the devices' processes when the training begins, and after each step."""
        if event.stage == "train":
            children = [child.pid for child in psutil.Process().children(recursive=True)]
            self._before = {pid: read_memory(pid).anonymous_bytes for pid in children if self._peak(pid)}
        elif event.kind == "step":
            self.peak_bytes.append(max((self._peak(pid) - before for pid, before in self._before.items()), default=0))

    def _peak(self, pid: int) -> int:
        found = read_memory(pid)
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        return found.anonymous_bytes + max(0, found.peak_rss_bytes - found.rss_bytes)


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = 1) -> dict[str, Any]:
    """Return each side's seconds of training and memory, measured and simulated, and RingAda's by the number of trained layers.

    only: of POINTS, as DEVICES,RATE or one of both words; none is the first of POINTS.  Raises ConfigError for another word.
    """
    known = {word for point in POINTS for word in point.split(",")}
    unknown = [word for word in only if word not in known]
    if unknown:
        asked = f"Only '{unknown[0]}' of the benchmark was asked for."
        raise ConfigError(asked, f"There are {'; '.join(POINTS)} (Mbit/s).", "Name one of these words, or two.")
    points, depths, losses = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    curves = kept_curves(cache_folder() / "reproduce" / "ringada")
    for name in [name for name in POINTS if set(only) <= set(name.split(","))][: None if only else 1]:
        with ExitStack() as stack:
            jobs = SIDES
            if name.startswith(BERT_BASE):
                folder = Path(stack.enter_context(scratch_folder()))
                save_model(SIZES["BERT-base"], folder)
                jobs = small_jobs(str(folder))
            sides = measure(f"{name} Mbit/s", jobs, cluster_of(name), rounds, progress)
        points += side_table(name, sides)
        depths += depth_table(name, sides)
        losses += loss_table(name, sides, curves) if name in POINTS[:3] else []
    return {
        "name": "ringada",
        "label": "emulated; MB of the largest device, simulated and measured",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size} ({BERT_BASE}: {SMALL_BATCH}), training alone",
        "rounds": rounds,
        "points": points,
        "trained layers": depths,
        "loss": losses or "no trainings are kept; `workbench reproduce ringada fig3` makes them",
    }


def small_jobs(model: str) -> dict[str, Job]:
    """Return the jobs of the larger model, which train a quarter of the samples."""
    found = {}
    for name in OF_BERT_BASE:
        job = SIDES[name]
        samples, parts = (job.train_samples or 0) * SMALL_BATCH // BATCH_SIZE, min(4, job.micro_batches)
        options = job.options | ({"unfreeze_every": 2} if "unfreeze_every" in job.options else {})
        found[name] = replace(job, model=model, batch_size=SMALL_BATCH, micro_batches=parts, train_samples=samples, options=options)
    return found


def measure(
    name: str, jobs: Mapping[str, Job], cluster: Cluster, rounds: int, progress: Progress, plans: Mapping[str, Plan] | None = None
) -> dict[str, Side]:
    """Run the sides of a point in turn.  plans: of the sides that do not plan themselves."""
    reports: dict[str, list[Report]] = {side: [] for side in jobs}
    watched: dict[str, list[list[int]]] = {side: [] for side in jobs}
    for turn, side in turns(jobs, range(rounds)):
        watch = Watch()
        with scratch_folder() as folder:
            report = run(jobs[side], cluster, workdir=Path(folder) / "run", chosen_plan=(plans or {}).get(side), progress=watch)
        reports[side].append(report)
        watched[side].append(watch.peak_bytes)
        progress(f"{name}, round {turn + 1}, {side}: {measured_s(report):.1f} s{'' if report.valid else ' (host too busy)'}")
    found = {}
    for side, job in jobs.items():
        busiest_s, peaks = bounds(job, cluster, reports[side][0].plan)
        found[side] = Side(reports=reports[side], watched=watched[side], busiest_s=busiest_s, peaks=peaks)
    return found


def bounds(job: Job, cluster: Cluster, plan: Plan) -> tuple[float, dict[int, tuple[int, int]]]:
    """Return the compute seconds of the busiest device in a run, and by trained layers the maximum bytes on one device, both simulated.

    The bytes are those of everything, and of everything but the embeddings.
    """
    method: Any = load_method(job.method)
    prepared = method.prepare(job, ignore)
    phases = method.rank_job(prepared, method.profile(prepared, cluster, ignore), cluster, plan).phases()
    shapes = [(phase, Counter(planned.shape for epoch in phase.epochs for planned in phase.steps(epoch))) for phase in phases]
    found = [(simulate(phase.program(shape)), shape, count) for phase, counts in shapes for shape, count in counts.items()]
    ranks = range(cluster.world_size)
    embedding, holders = 4 * prepared.facts.embedding_parameters, ranks if job.method == "ringada" else plan.stages[0].ranks
    peaks: dict[int, tuple[int, int]] = {}
    for timeline, shape, _ in found:
        nbytes = [timeline.peak_bytes(rank) for rank in ranks]
        bare = [most - embedding * (rank in holders) for rank, most in enumerate(nbytes)]
        depth = plan.num_layers - (shape.lowest_trained or 0)
        former = peaks.get(depth, (0, 0))
        peaks[depth] = max(former[0], *nbytes), max(former[1], *bare)
    return max(sum(count * timeline.busy_s(rank) for timeline, _, count in found) for rank in ranks), peaks


def cluster_of(name: str) -> Cluster:
    """Return the devices of a point."""
    kind, rate = name.split(",")
    link = Link(bytes_per_s=int(rate) * 125_000, latency_s=0.0)
    cluster = load_cluster("laptop-equal")
    devices = tuple(replace(one, link=link, host_share=share) for one, share in zip(cluster.devices, SHARES[kind], strict=True))
    return replace(cluster, name=f"{kind}-{rate}", devices=devices)
