"""`workbench bench ringada`: RingAda, with and without its cache, and its baselines, on four emulated devices,
interleaved.

Whole runs as a user starts them, in the paper's proportions: one more layer after each sixth of the first 62 % of the
mini-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import psutil

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Report, StepRecord
from workbench.core.run_folder import scratch_folder
from workbench.experiment import run
from workbench.methods import load_method
from workbench.methods.base import Event, ignore
from workbench.runtime.memory import read_memory, reset_peak
from workbench.simulator import simulate
from workbench_studies.bench.frame import Figures, Progress, jobs_of, ratios, require_words, turns
from workbench_studies.bench.inference_parts import SIZES, save_model

PAPERS_SHARE = 0.36
"""RingAda's memory over Single's (Table I: 373.056 and 1035.04 MB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The runs of a side.  watched: the measured peak of each step of each run.  busiest_s, peaks: see bounds."""

    reports: Sequence[Report]
    watched: Sequence[Sequence[int]]
    busiest_s: float
    peaks: Mapping[int, tuple[int, int]]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each run."""
        return [report.measured_s for report in self.reports]

    @property
    def peak_bytes(self) -> int:
        """Return the measured peak of the largest device."""
        return max((nbytes for run in self.watched for nbytes in run), default=0)

    def off(self) -> list[float]:
        """Return by how much the measured seconds of each step deviate from the simulated ones, in order of size."""
        return sorted(abs(_over_predicted(step) - 1) for report in self.reports for step in report.steps)

    def by_depth(self) -> dict[int, tuple[float, float, int]]:
        """Return by trained layers: median seconds of a mini-batch, measured over simulated, and the largest device's
        measured bytes.
        """
        steps_by_depth: dict[int, list[tuple[StepRecord, int]]] = {}
        for report, watched in zip(self.reports, self.watched, strict=True):
            for step, nbytes in zip(report.steps, [*watched, *[0] * len(report.steps)], strict=False):
                steps_by_depth.setdefault(report.plan.num_layers - (step.lowest_trained or 0), []).append(
                    (step, nbytes)
                )
        size = self.reports[0].job.batch_size
        return {
            depth: (
                median((step.measured_s or 0.0) * size / step.samples for step, _ in depth_steps),
                median(_over_predicted(step) for step, _ in depth_steps),
                max(nbytes for _, nbytes in depth_steps),
            )
            for depth, depth_steps in sorted(steps_by_depth.items())
        }


def _over_predicted(step: StepRecord) -> float:
    return (step.measured_s or 0.0) / (step.predicted_s or 1.0)


def side_table(name: str, sides: Mapping[str, Side]) -> list[Figures]:
    """Return a row for each side of a point.

    step_off: median and 95 % of the steps' deviations from the simulated seconds.  over_bound: over the busiest
    device's compute.
    """
    rows, ring = [], sides["RingAda"].seconds
    for side, measured in sides.items():
        seconds, off = measured.seconds, measured.off()
        ratio = ratios(seconds, ring)
        rows.append(
            {
                "point": name,
                "side": side,
                "s": median(seconds),
                "over_RingAda": ratio["ratio"],
                "spread": f"{ratio['ratio_min']:.2f}-{ratio['ratio_max']:.2f}",
                "over_simulated": median(seconds) / measured.reports[0].predicted_s,
                "step_off": median(off),
                "step_off_p95": off[round(0.95 * (len(off) - 1))],
                "over_bound": median(seconds) / measured.busiest_s,
                "MB": max(measured.peaks.values())[0] / 1e6,
                "MB_measured": measured.peak_bytes / 1e6,
                "valid": all(report.valid for report in measured.reports),
            }
        )
    return rows


def depth_table(name: str, sides: Mapping[str, Side]) -> list[Figures]:
    """Return a row for each number of layers that RingAda trained: times, other sides' mini-batches over its own, and
    memory.

    MB: simulated / measured.  of_Single: simulated, and without the embeddings; at_most_.36: both against PAPERS_SHARE.
    """
    ring, others, rows = sides["RingAda"], ("PipeAdapter", "PipeAdapter stashing", "Single"), []
    full = {side: measured.by_depth()[max(measured.peaks)] for side, measured in sides.items()}
    single = sides["Single"].peaks[max(ring.peaks)]
    for depth, (seconds, over_predicted, nbytes) in ring.by_depth().items():
        row: Figures = {"point": name, "trained": depth, "s": seconds, "over_simulated": over_predicted}
        row |= {f"{side} over it": full[side][0] / seconds for side in others}
        row["MB"] = f"{ring.peaks[depth][0] / 1e6:.0f} / {nbytes / 1e6:.0f}"
        row |= {
            f"{side} MB": f"{max(sides[side].peaks.values())[0] / 1e6:.0f} / {sides[side].peak_bytes / 1e6:.0f}"
            for side in others
        }
        of_single, of_bare = (memory / total for memory, total in zip(ring.peaks[depth], single, strict=True))
        row |= {"of_Single": of_single, "of_Single_without_embedding": of_bare}
        rows.append(
            row
            | {"at_most_.36": " / ".join("yes" if share <= PAPERS_SHARE else "no" for share in (of_single, of_bare))}
        )
    return rows


BERT_BASE = "bert-base"
POINTS = ("equal,1000", "equal,125", "unequal,1000", f"{BERT_BASE},1000")
"""Devices and Mbit/s of their links; the first is the default.  bert-base: a model of its size with random weights, on
equal devices."""
WORDS = tuple(dict.fromkeys(word for point in POINTS for word in point.split(",")))
SHARES = {"equal": (0.3, 0.3, 0.3, 0.3), "unequal": (0.3, 0.3, 0.16, 0.08), BERT_BASE: (0.3, 0.3, 0.3, 0.3)}
"""Fractions of a core: four devices at once leave the host time for their links.  The unequal ones have the ratios of
cluster 'laptop'."""
SIDES = jobs_of("ringada")
JOB = SIDES["RingAda"]
BATCH_SIZE, MINI_BATCHES = JOB.batch_size, JOB.epochs * (JOB.train_samples or 0) // JOB.batch_size
SMALL_BATCH = 8
OF_BERT_BASE = ("RingAda", "PipeAdapter", "PipeAdapter stashing", "Single")
"""Mini-batches of eight samples in four parts, two more layers in each round of four: Single would take over eight
minutes otherwise."""


class Watch:
    """Measure, after each step of a run, the private memory that the largest process has needed since the training
    began.

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
        reading = read_memory(pid)
        reset_peak(pid)
        return reading.anonymous_bytes + max(0, reading.peak_rss_bytes - reading.rss_bytes)


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = 1) -> Figures:
    """Return each side's seconds of training and memory, measured and simulated, and RingAda's by the number of trained
    layers.

    only: points of POINTS, as DEVICES,RATE or one of both words; none: the first of POINTS.  Raises ConfigError for
    another word.
    """
    require_words(only, WORDS)
    points, depths = list[Figures](), list[Figures]()
    for name in [name for name in POINTS if set(only) <= set(name.split(","))][: None if only else 1]:
        with ExitStack() as stack:
            jobs = SIDES
            if name.startswith(BERT_BASE):
                folder = stack.enter_context(scratch_folder())
                save_model(SIZES["BERT-base"], folder)
                jobs = small_jobs(str(folder))
            sides = measure(f"{name} Mbit/s", jobs, cluster_of(name), rounds, progress)
        points += side_table(name, sides)
        depths += depth_table(name, sides)
    return {
        "label": "emulated; MB of the largest device, simulated and measured",
        "what": f"{MINI_BATCHES} mini-batches of {JOB.batch_size} ({BERT_BASE}: {SMALL_BATCH}), training alone",
        "rounds": rounds,
        "points": points,
        "trained layers": depths,
    }


def small_jobs(model: str) -> dict[str, Job]:
    """Return the jobs of the larger model, which train a quarter of the samples."""
    jobs = {}
    for name in OF_BERT_BASE:
        job = SIDES[name]
        samples, parts = (job.train_samples or 0) * SMALL_BATCH // BATCH_SIZE, min(4, job.micro_batches)
        options = job.options | ({"unfreeze_every": 2} if "unfreeze_every" in job.options else {})
        jobs[name] = replace(
            job, model=model, batch_size=SMALL_BATCH, micro_batches=parts, train_samples=samples, options=options
        )
    return jobs


def measure(
    name: str,
    jobs: Mapping[str, Job],
    cluster: Cluster,
    rounds: int,
    progress: Progress,
    plans: Mapping[str, Plan] | None = None,
) -> dict[str, Side]:
    """Run the sides of a point in turn.  plans: plans for the sides that do not plan themselves."""
    reports: dict[str, list[Report]] = {side: [] for side in jobs}
    watched: dict[str, list[list[int]]] = {side: [] for side in jobs}
    for turn, side in turns(jobs, range(rounds)):
        watch = Watch()
        with scratch_folder() as folder:
            report = run(
                jobs[side], cluster, workdir=folder / "run", chosen_plan=(plans or {}).get(side), progress=watch
            )
        reports[side].append(report)
        watched[side].append(watch.peak_bytes)
        progress(
            f"{name}, round {turn + 1}, {side}: {report.measured_s:.1f} s{'' if report.valid else ' (host too busy)'}"
        )
    measured = {}
    for side, job in jobs.items():
        busiest_s, peaks = bounds(job, cluster, reports[side][0].plan)
        measured[side] = Side(reports=reports[side], watched=watched[side], busiest_s=busiest_s, peaks=peaks)
    return measured


def bounds(job: Job, cluster: Cluster, plan: Plan) -> tuple[float, dict[int, tuple[int, int]]]:
    """Return the compute seconds of the busiest device in a run, and by trained layers the maximum bytes on one device,
    both simulated.

    The bytes are those of everything, and of everything but the embeddings.
    """
    method: Any = load_method(job.method)
    prepared = method.prepare(job, ignore)
    phases = method.rank_job(prepared, method.profile(prepared, cluster, ignore), cluster, plan).phases()
    shapes = [
        (phase, Counter(planned.shape for epoch in phase.epochs for planned in phase.steps(epoch))) for phase in phases
    ]
    simulated = [
        (simulate(phase.program(shape)), shape, count) for phase, counts in shapes for shape, count in counts.items()
    ]
    ranks = range(cluster.world_size)
    embedding, holders = (
        4 * prepared.facts.embedding_parameters,
        ranks if job.method == "ringada" else plan.stages[0].ranks,
    )
    peaks: dict[int, tuple[int, int]] = {}
    for timeline, shape, _ in simulated:
        nbytes = [timeline.peak_bytes(rank) for rank in ranks]
        bare = [most - embedding * (rank in holders) for rank, most in enumerate(nbytes)]
        depth = plan.num_layers - (shape.lowest_trained or 0)
        former = peaks.get(depth, (0, 0))
        peaks[depth] = max(former[0], *nbytes), max(former[1], *bare)
    return max(sum(count * timeline.busy_s(rank) for timeline, _, count in simulated) for rank in ranks), peaks


def cluster_of(name: str) -> Cluster:
    """Return the devices of a point."""
    kind, rate = name.split(",")
    link = Link(bytes_per_s=int(rate) * MEGABIT_BYTES, latency_s=0.0)
    cluster = load_cluster("laptop-equal")
    devices = tuple(
        replace(device, link=link, host_share=share)
        for device, share in zip(cluster.devices, SHARES[kind], strict=True)
    )
    return replace(cluster, name=f"{kind}-{rate}", devices=devices)
