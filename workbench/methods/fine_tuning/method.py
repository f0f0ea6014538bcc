"""Fine-tuning through the backbone as a Method: what experiment.run calls, in the order in which it calls it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.report import EpochRecord, SweepPoint
from workbench.methods.base import Engines, Event, Notify, Outcome, Prediction, ignore
from workbench.methods.common.folder import ADAPTER, CHECKPOINTS, JOURNALS, begin_folder
from workbench.methods.common.layers import BATCH_SIZES
from workbench.methods.common.limits import HOST_MODELS, REAL_TIMEOUT_S, SILENT_AFTER_STEPS
from workbench.methods.common.records import Progress, epoch_records, measured_steps, measured_timelines, records_of
from workbench.methods.common.scaling import describe_facts, scale_to_cluster
from workbench.methods.common.session import RankResult
from workbench.methods.fine_tuning.folder import finished_epochs, load_weights
from workbench.methods.fine_tuning.launch import fingerprint, rank_job
from workbench.methods.fine_tuning.measure import measure_layers
from workbench.methods.fine_tuning.planning import plan_job, typical_steps
from workbench.methods.fine_tuning.predict import predict, predictor_of
from workbench.methods.fine_tuning.prepare import PreparedJob, check_shape, prepare, require_known
from workbench.methods.fine_tuning.sweep import RankSweep, run_sweep
from workbench.methods.fine_tuning.worker import run_rank
from workbench.models.loading import load_stack
from workbench.models.stack import LayerStack
from workbench.models.technique_saving import TrainedDescription, save_trained, set_trained
from workbench.models.techniques import TechniqueStage
from workbench.models.techniques import predict as predict_split
from workbench.planners.memory import check as check_memory
from workbench.profiler.analytic import LayerCost, TechniqueSizes, analytic_profile, layer_costs
from workbench.profiler.cache import cached_profile
from workbench.runtime.context import RankContext
from workbench.runtime.work_folder import full_disk_told
from workbench.schedules.plan_costs import plan_resident_bytes
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches

METHOD = "fine_tuning"


class FineTuning:
    """Full fine-tuning, LoRA or Adapters, on one device or on several: what PAC+ is compared with."""

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Refuse what does not exist (see Method)."""
        require_known(job)

    def prepare(self, job: Job, notify: Notify) -> PreparedJob:
        """Find model and data (see Method)."""
        require_known(job)
        notify(Event("phase", message=f"Loading {job.task} and {job.model}"))
        return prepare(job)

    def profile(
        self,
        prepared: PreparedJob,
        cluster: Cluster,
        notify: Notify,
        *,
        emulated: bool = True,
        engines: Engines | None = None,
        refresh: bool = False,
    ) -> Profile:
        """Return the host's measured profile scaled to each device's share, or the catalogue's figures for devices of other makes.

        emulated: the cluster is to run here, so its devices are as fast as their host_share whatever their make.
        engines: real ones measure themselves, all at once.
        """
        if engines is not None and engines.fidelity == "real":
            notify(Event("phase", message=f"Profiling {cluster.world_size} devices"))
            rows = engines.run(measure_rank, [(prepared, refresh)] * cluster.world_size)
            return Profile(model=prepared.job.model, method=METHOD, source="measured", layers=tuple(rows))
        if emulated or all(device.model in HOST_MODELS and device.host_share for device in cluster.devices):
            scaled = scale_to_cluster(self.host_layers(prepared, notify, refresh=refresh), cluster, model=prepared.job.model)
            return replace(scaled, method=METHOD)
        lengths = {8, prepared.typical_length, 2 * prepared.typical_length, max(prepared.train.lengths)}
        return analytic_profile(
            describe_facts(prepared.facts),
            cluster,
            technique=prepared.config.technique,
            sizes=_sizes(prepared),
            num_labels=prepared.task.num_outputs,
            sequence_lengths=tuple(sorted(lengths)),
        )

    def host_layers(self, prepared: PreparedJob, notify: Notify, *, refresh: bool = False) -> tuple[LayerProfile, ...]:
        """Return every layer's cost on one unslowed core of this host, measured now or kept from before."""
        longest = max(prepared.train.lengths)
        key = {
            "model": prepared.job.model,
            # The name alone may be a folder in which another model lies by now.
            "shape": asdict(prepared.facts),
            "batch_sizes": BATCH_SIZES,
            "technique": asdict(replace(prepared.config, seed=0, label_mean=0.0, label_std=1.0)),
            "max_length": longest,
        }

        def measure() -> Profile:
            notify(Event("phase", message="Profiling this machine (once)"))
            layers = measure_layers(load_stack(prepared.job.model), prepared.config, max_length=longest)
            return Profile(model=prepared.job.model, method=METHOD, source="measured", layers=(layers,))

        profile, note = cached_profile(key, measure, refresh=refresh)
        notify(Event("note", message=note))
        return profile.layers[0]

    def layer_costs(self, prepared: PreparedJob, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's analytic FLOPs and bytes (see Method)."""
        return layer_costs(
            describe_facts(prepared.facts),
            prepared.config.technique,
            batch=batch,
            sequence_length=sequence_length,
            sizes=_sizes(prepared),
            num_labels=prepared.task.num_outputs,
        )

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Plan all epochs in the job's paradigm (see Method)."""
        return plan_job(prepared, profile, cluster)

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Refuse what would end the run later (see Method)."""
        check_shape(prepared, cluster, plan)
        if folder is not None:
            check_memory(profile, cluster, plan, sequence_length=max(prepared.train.lengths))

    def predict(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
        """Simulate every step (see Method)."""
        return predict(prepared, profile, cluster, plan)

    def execute(
        self,
        prepared: PreparedJob,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Train on the engines, choose the epoch on the validation split, score the test split once (see Method)."""
        with full_disk_told(folder):
            return self._execute(prepared, profile, cluster, plan, engines, folder, resume, notify)

    def _execute(
        self,
        prepared: PreparedJob,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        engines: Engines,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        job, is_real = prepared.job, engines.fidelity == "real"
        stack = load_stack(job.model)
        identity = fingerprint(prepared, stack, plan)
        sizes = {"world_size": cluster.world_size, "num_stages": len(plan.stages)}
        finished = finished_epochs(folder, identity, job, **sizes) if resume else None
        if finished is None:
            begin_folder(folder, identity, job)
        prediction = predict(prepared, profile, cluster, plan)
        message = rank_job(prepared, cluster, plan, profile, folder=folder, start_epoch=finished or 0, resumes=finished is not None)
        # A peer counts as silent when it takes far longer than a step should.
        slowest_s = max(step.predicted_s or 0.0 for step in prediction.steps)
        message = replace(message, timeout_s=REAL_TIMEOUT_S if is_real else max(message.timeout_s, SILENT_AFTER_STEPS * slowest_s))
        notify(Event("phase", message=f"Training on {cluster.world_size} devices, {engines.fidelity} links"))
        results = engines.run(run_rank, [message] * cluster.world_size, on_event=Progress(plan, notify))

        steps = measured_steps(results, prediction.steps)
        epochs, metrics, saved = self._evaluate(prepared, plan, stack, folder, epoch_records(steps), notify)
        shutil.rmtree(folder / JOURNALS, ignore_errors=True)  # emptied by the ranks
        for left in (folder / CHECKPOINTS).glob("moments-*"):
            left.unlink()
        paced = 0.0 if is_real else sum(result.paced_s for result in results)  # a real device has no deadlines to miss
        resident = [plan_resident_bytes(profile, plan, rank) for rank in range(cluster.world_size)]
        return Outcome(
            fidelity=engines.fidelity,
            steps=steps,
            epochs=epochs,
            timelines=measured_timelines(results, cluster, prediction, engines.fidelity, {False: resident, True: resident}),
            metrics=metrics,
            bytes={f"{cluster.devices[result.rank].name}: {name}": size for result in results for name, size in result.nbytes.items()},
            overrun_share=sum(result.late_s for result in results) / paced if paced else 0.0,
            notes=(*_notes(prepared, resume, finished, results), *(note for result in results for note in result.notes)),
            artifacts={"adapter": str(saved)},
        )

    def _evaluate(
        self, prepared: PreparedJob, plan: Plan, stack: LayerStack, folder: Path, epochs: Sequence[EpochRecord], notify: Notify
    ) -> tuple[tuple[EpochRecord, ...], dict[str, float], Path]:
        """Return the epochs with their validation metrics, the chosen epoch's on the test split, and the folder of what it trained."""
        job, stages = prepared.job, len(plan.stages)
        model = TechniqueStage(stack.stage(0, stack.num_layers), prepared.config)
        notify(Event("phase", message="Scoring every epoch on the validation split"))
        scored = []
        for record in epochs:
            set_trained(model, load_weights(folder, record.epoch, stages))
            scored.append(replace(record, metrics=_score(prepared, model, prepared.validation)))
        best = max(range(job.epochs), key=lambda epoch: scored[epoch].metrics[prepared.task.metrics[0]])
        notify(Event("phase", message="Scoring the chosen epoch on the test split"))
        set_trained(model, load_weights(folder, best, stages))
        metrics = _score(prepared, model, prepared.test)
        description = TrainedDescription(
            config=prepared.config, model=job.model, task=job.task, max_length=job.max_length, notes={"epoch": best + 1, **metrics}
        )
        return tuple(scored), metrics | {"chosen epoch": best + 1}, save_trained(folder / ADAPTER, model, description)

    def sweep(
        self,
        prepared: PreparedJob,
        profile: Profile,
        cluster: Cluster,
        plans: Mapping[str, Plan],
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
    ) -> tuple[SweepPoint, ...]:
        """Simulate, and on engines measure, some steps under each plan (see Method)."""
        points = []
        for name, plan in plans.items():
            check_shape(prepared, cluster, plan)
            steps, predictor = typical_steps(prepared, plan, num_steps), predictor_of(prepared, profile, cluster, plan)
            predicted = [predictor.seconds(step) for step in steps]
            point = SweepPoint(name=name, plan=plan, predicted_s=median(predicted), num_steps=num_steps)
            if engines is not None:
                folder.mkdir(parents=True, exist_ok=True)
                message = rank_job(prepared, cluster, plan, profile, folder=folder)
                results = engines.run(run_sweep, [RankSweep(rank_job=message, steps=steps)] * cluster.world_size)
                records = measured_steps(results, records_of(steps, predicted))
                paced = sum(result.paced_s for result in results)
                point = replace(
                    point,
                    measured_s=median(record.measured_s or 0.0 for record in records),
                    overrun_share=sum(result.late_s for result in results) / paced if paced else 0.0,
                )
            points.append(point)
        return tuple(points)


def measure_rank(context: RankContext, asked: tuple[PreparedJob, bool]) -> tuple[LayerProfile, ...]:
    """Return what this device's own core takes for every layer.  asked: the job, and whether to measure again."""
    prepared, refresh = asked
    return FineTuning().host_layers(prepared, ignore, refresh=refresh)


def _sizes(prepared: PreparedJob) -> TechniqueSizes:
    config = prepared.config
    return TechniqueSizes(
        lora_rank=config.lora_rank, lora_dropout=config.lora_dropout > 0, bottleneck=config.bottleneck, adapter_norms=config.train_norms
    )


def _score(prepared: PreparedJob, model: TechniqueStage, split: TokenizedSplit) -> dict[str, float]:
    predictions = predict_split(model, evaluation_batches(split))
    return compute(prepared.task.metrics, predictions.answers(prepared.task.kind), predictions.references())


def _notes(prepared: PreparedJob, resume: bool, finished: int | None, results: Sequence[RankResult]) -> tuple[str, ...]:
    """Return what a reader of the report should know."""
    notes = []
    epochs = prepared.job.epochs
    if resume:
        steps = max((result.resumed_at[1] for result in results if result.resumed_at is not None), default=0)
        if finished is None:
            notes.append("Nothing to resume: the run starts over.")
        elif finished == epochs:
            notes.append(f"Resumed: all {epochs} epochs were finished, so none is trained again.")
        else:
            notes.append(f"Resumed in epoch {finished + 1} of {epochs}, after {steps} of its steps.")
    if prepared.config.lora_dropout > 0:
        notes.append("Each device draws its own lora_dropout, so another plan gives other losses.")
    return tuple(notes)
