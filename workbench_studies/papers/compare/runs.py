"""The executed runs of the comparison, and the stored results of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from workbench import experiment
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.job import Job, Mode
from workbench.core.report import Report
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import text_digest, to_json
from workbench.core.summary import device_j, energy_j
from workbench.runs.advice import COMPUTED
from workbench_studies.papers.result import Settings

Ways = dict[str, tuple[str, dict[str, Any]]]
"""A method and its options by name."""
LORA = {"technique": "lora"}
TRAININGS: Ways = {
    "LoRA (one device)": ("fine_tuning", {**LORA, "paradigm": "standalone"}),
    "PAC+ (one device)": ("pac_plus", {"paradigm": "standalone"}),
    "RingAda": ("ringada", {}),
    "FedAvg": ("ringada", {"federated": True}),
    "Confidant (LoRA)": ("confidant", {**LORA, "partition": "any_order"}),
    "Confidant (all weights)": ("confidant", {"partition": "any_order"}),
    "P-RGE": ("p_rge", {}),
}
"""The executed runs: method and options by name."""
SAME_LEARNING: Ways = {
    "LoRA (data parallel)": ("LoRA (one device)", {**LORA, "paradigm": "data_parallel"}),
    "LoRA (pipeline)": ("LoRA (one device)", {**LORA, "paradigm": "pipeline_parallel"}),
    "PAC+": ("PAC+ (one device)", {}),
}
"""Plans by which devices share an executed training: they learn the same, so they are simulated."""
SERVING: Mapping[str, str] = {
    "one device": "local",
    "pipeline (EdgeShard)": "edgeshard",
    "tensor parallel (Megatron-LM)": "megatron_lm",
    "sequence parallel": "sequence_parallel",
    "Galaxy+": "galaxy_plus",
}
"""Systems of Galaxy+'s part, which answers requests: simulated."""
TRAINING_JOB = Job(train_samples=320, validation_samples=200, test_samples=16, epochs=4)
SERVING_JOB = Job(method="galaxy_plus", test_samples=16)
CLUSTER = "laptop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of one run for the comparison.

    scores: validation accuracy after each epoch, per cent; empty if it is simulated.  epochs_s, predicted_s: measured
    and simulated seconds of each epoch; of serving, of each request.  other_s: measured seconds between epochs
    (redistribution, snapshots).  memory_bytes: the largest values of a device in a step, counted.  sent_bytes: by all
    devices, in all steps.  joules: modelled.  in_pace: whether the host kept pace with the emulated devices; measured
    seconds mean little where not.
    """

    name: str
    seed: int
    devices: tuple[str, ...]
    scores: tuple[float, ...] = ()
    epochs_s: tuple[float, ...] = ()
    predicted_s: tuple[float, ...]
    other_s: float = 0.0
    memory_bytes: int
    sent_bytes: int
    joules: float
    dilation: float
    in_pace: bool

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Return the seconds at the end of each epoch: measured if the host kept pace, simulated otherwise."""
        return tuple(accumulate(self.epochs_s if self.is_measured else self.predicted_s))

    @property
    def is_measured(self) -> bool:
        """Return whether its seconds are measured."""
        return self.in_pace and bool(self.epochs_s)


def training(name: str, seed: int, shape: Job, settings: Settings) -> Run:
    """Return a training, remembered or executed now."""
    method, options = TRAININGS[name]
    job = replace(shape, method=method, options=options, seed=seed)
    digest = text_digest(to_json(job.identity) + to_json(load_cluster(CLUSTER)), 12)
    return settings.remember(f"methods/{method}-{seed}-{digest}.json", Run, partial(_run, name, job, "execute"))


def simulated(shape: Job) -> dict[str, Run]:
    """Return every training, every other plan of one, and every system that answers requests, simulated."""
    learners = {name: (TRAININGS[learner][0], options) for name, (learner, options) in SAME_LEARNING.items()}
    jobs = {
        name: replace(shape, method=method, options=options)
        for name, (method, options) in (TRAININGS | learners).items()
    }
    serving = {
        name: replace(SERVING_JOB, model=shape.model, options={"system": system}) for name, system in SERVING.items()
    }
    return {name: _run(name, job, "simulate") for name, job in (jobs | serving).items()}


def computed_costs(job: Job, cluster: Cluster) -> Any:
    """Return costs from sizes, which are the same for all methods, however busy this machine is."""
    return experiment.profile(job, cluster.with_devices(model=COMPUTED))


def report_of(job: Job, cluster: Cluster, mode: Mode, **settings: Any) -> Report:
    """Run a job with computed costs, in a folder that does not stay."""
    with scratch_folder() as folder:
        costs = computed_costs(job, cluster)
        return experiment.run(job, cluster, mode, costs=costs, workdir=folder / "run", **settings)


def _run(name: str, job: Job, mode: Mode) -> Run:
    cluster = load_cluster(CLUSTER)
    report = report_of(job, cluster, mode)
    parts: dict[str, Any] = _serving(report) if report.plan.inference is not None else _training(report)
    timelines = report.timelines.values()
    return Run(
        name=name,
        seed=job.seed,
        devices=tuple(cluster.devices[rank].name for rank in report.plan.busy_ranks),
        memory_bytes=max(timeline.highest_peak_bytes for timeline in timelines),
        dilation=report.dilation,
        in_pace=report.valid,
        **parts,
    )


def _training(report: Report) -> dict[str, Any]:
    def predicted(epoch: int) -> float:
        return sum(step.predicted_s or 0.0 for step in report.steps if step.epoch == epoch)

    parts: dict[str, Any] = {
        "predicted_s": tuple(predicted(epoch.epoch) for epoch in report.epochs),
        "sent_bytes": sum(_sent_bytes(report, step.cached) for step in report.steps),
        "joules": sum(energy_j(report).values()),
    }
    if report.mode == "execute":
        parts["scores"] = tuple(100 * epoch.metrics["accuracy"] for epoch in report.epochs)
        parts["epochs_s"] = tuple(epoch.seconds for epoch in report.epochs)
        parts["other_s"] = sum(spent_s for name, spent_s in report.phases_s.items() if not name.endswith("predicted"))
    return parts


def _serving(report: Report) -> dict[str, Any]:
    timeline, devices = next(iter(report.timelines.values())), report.cluster.devices
    by_name = {device.name: device for device in devices}
    each_j = sum(device_j(timeline, rank, by_name[name]) for rank, name in enumerate(timeline.device_names))
    return {
        "predicted_s": tuple(step.predicted_s or 0.0 for step in report.steps),
        "sent_bytes": timeline.all_sent_bytes * len(report.steps),
        "joules": each_j * len(report.steps),
    }


def _sent_bytes(report: Report, cached: bool) -> int:
    """Return the bytes that all devices send in a typical step."""
    kind = "cached epoch" if cached else "first epoch"
    timeline = report.timelines.get(f"{kind}, measured") or report.timelines.get(f"{kind}, predicted")
    return 0 if timeline is None else timeline.all_sent_bytes
