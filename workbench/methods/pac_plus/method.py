"""PAC+ as a Method: what experiment.run calls, in the order in which it calls it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.report import SweepPoint
from workbench.methods.base import Engines, Event, Notify, Outcome, Prediction, ignore
from workbench.methods.common import records
from workbench.methods.common.folder import ADAPTER, JOURNALS, begin_folder, disk_bytes, rank_folders
from workbench.methods.common.layers import BATCH_SIZES
from workbench.methods.common.limits import HOST_MODELS, REAL_TIMEOUT_S, SILENT_AFTER_STEPS
from workbench.methods.common.scaling import describe_facts, scale_to_cluster
from workbench.methods.common.session import RankResult
from workbench.methods.pac_plus import launch
from workbench.methods.pac_plus.folder import finished_epochs
from workbench.methods.pac_plus.initial import initial_adapter
from workbench.methods.pac_plus.kept import activation_key, find_kept, keep
from workbench.methods.pac_plus.measure import measure_layers
from workbench.methods.pac_plus.planning import plan_job
from workbench.methods.pac_plus.predict import predict
from workbench.methods.pac_plus.prepare import PreparedJob, check_shape, prepare, require_known
from workbench.methods.pac_plus.programs import adapter_bytes
from workbench.methods.pac_plus.sweep_plans import sweep_plans
from workbench.methods.pac_plus.worker import run_rank
from workbench.models.evaluation import Predictions
from workbench.models.evaluation import predict as predict_split
from workbench.models.loading import load_stack
from workbench.models.quantization import quantize
from workbench.models.saving import AdapterDescription, save_adapter
from workbench.planners.memory import check as check_memory
from workbench.planners.memory import check_cached
from workbench.profiler.analytic import LayerCost, analytic_profile, layer_costs
from workbench.profiler.cache import cached_profile
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.context import RankContext
from workbench.runtime.kept_caches import require_fits
from workbench.runtime.work_folder import full_disk_told
from workbench.schedules.plan_costs import plan_resident_bytes
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import evaluation_batches


class PacPlus:
    """Parallel Adapters with an activation cache, planned for unequal devices."""

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Refuse what does not exist (see Method)."""
        require_known(job)

    def prepare(self, job: Job, notify: Notify) -> PreparedJob:
        """Find model and data (see Method)."""
        require_known(job)
        notify(Event("phase", message=f"Loading {job.task} and {job.model}"))
        prepared = prepare(job)
        if not prepared.options.keep_cache:
            return prepared
        key = activation_key(prepared, load_stack(job.model))
        kept, note = find_kept(prepared, key)
        return replace(prepared, activation_key=key, from_kept=kept is not None, notes=(note,) if note else ())

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
            return Profile(model=prepared.job.model, method="pac_plus", source="measured", layers=tuple(rows))
        if emulated or all(device.model in HOST_MODELS and device.host_share for device in cluster.devices):
            return scale_to_cluster(self.host_layers(prepared, notify, refresh=refresh), cluster, model=prepared.job.model)
        return analytic_profile(
            describe_facts(prepared.facts),
            cluster,
            technique="parallel_adapters",
            reduction=prepared.options.reduction,
            num_labels=prepared.task.num_outputs,
            sequence_lengths=tuple(sorted({8, prepared.typical_length, 2 * prepared.typical_length, max(prepared.train.lengths)})),
        )

    def host_layers(self, prepared: PreparedJob, notify: Notify, *, refresh: bool = False) -> tuple[LayerProfile, ...]:
        """Return every layer's cost on one unslowed core of this host, measured now or kept from before."""
        key = {
            "model": prepared.job.model,
            # The name alone may be a folder in which another model lies by now.
            "shape": asdict(prepared.facts),
            "batch_sizes": BATCH_SIZES,
            "adapter": str(replace(prepared.adapter, seed=0, label_mean=0.0, label_std=1.0)),
            "cache_dtype": prepared.options.cache_dtype,
            "side network": "hand-written 2",
            "backbone": prepared.options.quantization.description,
            "max_length": max(prepared.train.lengths),
        }

        def measure() -> Profile:
            notify(Event("phase", message="Profiling this machine (once)"))
            backbone = quantize(load_stack(prepared.job.model), prepared.options.quantization)
            longest = max(prepared.train.lengths)
            layers = measure_layers(backbone, prepared.adapter, dtype=prepared.options.cache_dtype, max_length=longest)
            return Profile(model=prepared.job.model, method="pac_plus", source="measured", layers=(layers,))

        profile, note = cached_profile(key, measure, refresh=refresh)
        notify(Event("note", message=note))
        return profile.layers[0]

    def layer_costs(self, prepared: PreparedJob, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's analytic FLOPs and bytes (see Method)."""
        costs = layer_costs(
            describe_facts(prepared.facts),
            "parallel_adapters",
            batch=batch,
            sequence_length=sequence_length,
            reduction=prepared.options.reduction,
            num_labels=prepared.task.num_outputs,
        )
        share = cache_dtype(prepared.options.cache_dtype).itemsize / 4  # computed in fp32
        return tuple(replace(cost, tap_bytes_per_token=round(share * cost.tap_bytes_per_token)) for cost in costs)

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Plan the first epoch in the job's paradigm, and the cached epochs (see Method)."""
        return plan_job(prepared, profile, cluster)

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Refuse what would end the run later (see Method)."""
        check_shape(prepared, cluster, plan)
        if plan.cached is None and prepared.job.epochs > 1:
            raise ConfigError(
                f"A plan for {prepared.job.epochs} epochs was asked for.",
                "It has no shares for those that run from the cache.",
                "Add them (planners.plan_cached), or train 1 epoch.",
            )
        if folder is None:
            return
        longest = max(prepared.train.lengths)
        check_memory(profile, cluster, plan, sequence_length=longest)
        if plan.cached is not None:
            check_cached(profile, cluster, plan.cached, sequence_length=longest)
        if plan.cached is not None and not prepared.from_kept:
            # Tapes and shards lie beside each other while they are redistributed; what is there already is used again or replaced.
            needed = 2 * prepared.cache_bytes - disk_bytes(rank_folders(folder))
            require_fits(needed, prepared.options.disk_budget_bytes, folder)

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
        job = prepared.job
        is_real = engines.fidelity == "real"
        if is_real and prepared.options.keep_cache:
            raise ConfigError(
                "The option keep_cache was asked for on real devices.",
                "Each would keep its own part on its own disk, where no later run finds it.",
                "Leave it out.",
            )
        stack = load_stack(job.model)
        identity = launch.fingerprint(prepared, stack, plan)
        finished = finished_epochs(folder, identity, job, cluster.world_size) if resume else None
        if finished:
            notify(Event("phase", message=_resumed(finished, 0, job.epochs)))
        if finished is None:
            begin_folder(folder, identity, job)
            launch.save_initial(initial_adapter(prepared, stack, notify), folder)
        else:
            quantize(stack, prepared.options.quantization)
        prediction = predict(prepared, profile, cluster, plan)
        message = launch.rank_job(
            prepared, cluster, plan, profile, folder=folder, identity=identity, start_epoch=finished or 0, resumes=finished is not None
        )
        # A peer counts as silent when it takes far longer than a step should.
        slowest_s = max(step.predicted_s or 0.0 for step in prediction.steps)
        message = replace(message, timeout_s=REAL_TIMEOUT_S if is_real else max(message.timeout_s, SILENT_AFTER_STEPS * slowest_s))
        notify(Event("phase", message=f"Training on {cluster.world_size} devices, {engines.fidelity} links"))
        results = engines.run(run_rank, [message] * cluster.world_size, on_event=records.Progress(plan, notify))

        notes = prepared.notes
        if resume:
            notes += (_resumed(finished, _resumed_step(results), job.epochs),)
        steps = records.measured_steps(results, prediction.steps)
        epochs = list(records.epoch_records(steps))
        notify(Event("phase", message="Scoring every epoch on the validation split"))
        adapters = [launch.load_checkpoint(prepared, folder, epoch) for epoch in range(job.epochs)]
        for epoch, predictions in enumerate(predict_split(stack, adapters, evaluation_batches(prepared.validation))):
            epochs[epoch] = replace(epochs[epoch], metrics=_score(prepared, predictions))
        best = max(range(job.epochs), key=lambda epoch: epochs[epoch].metrics[prepared.task.metrics[0]])
        notify(Event("phase", message="Scoring the chosen epoch on the test split"))
        metrics = _score(prepared, predict_split(stack, [adapters[best]], evaluation_batches(prepared.test))[0])
        description = AdapterDescription(
            config=prepared.adapter, model=job.model, task=job.task, max_length=job.max_length, notes={"epoch": best + 1, **metrics}
        )
        saved = save_adapter(folder / ADAPTER, adapters[best].state_dict(), description)

        if prepared.activation_key and not prepared.from_kept:
            notes += (keep(prepared, prepared.activation_key, folder),)
        for left in rank_folders(folder):
            shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(folder / JOURNALS, ignore_errors=True)  # emptied by the ranks
        paced = 0.0 if is_real else sum(result.paced_s for result in results)  # a real device has no deadlines to miss
        ranks = range(cluster.world_size)
        stays = partial(plan_resident_bytes, profile, plan)
        resident = {cached: [of(rank) for rank in ranks] for cached, of in ((False, stays), (True, partial(adapter_bytes, profile)))}
        return Outcome(
            fidelity=engines.fidelity,
            steps=steps,
            epochs=tuple(epochs),
            timelines=records.measured_timelines(results, cluster, prediction, engines.fidelity, resident),
            metrics=metrics | {"chosen epoch": best + 1},
            phases_s={name: seconds for name, seconds in records.phase_seconds(results).items() if name.startswith(("sharing", "filling"))},
            bytes=_bytes(results, cluster),
            overrun_share=sum(result.late_s for result in results) / paced if paced else 0.0,
            notes=(*notes, *(note for result in results for note in result.notes)),
            artifacts={"adapter": str(saved)},
        )

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
        """Simulate, and on engines measure, some steps of the first epoch under each plan (see Method)."""
        return sweep_plans(
            prepared,
            profile,
            cluster,
            plans,
            engines,
            num_steps=num_steps,
            folder=folder,
        )


def _resumed(finished: int | None, steps: int, epochs: int) -> str:
    """Return what a resumed run begins with, in words.  steps: completed in the epoch that was interrupted."""
    if not finished and not steps:
        return "Nothing to resume: the run starts over." if finished is None else "Resumed in epoch 1: none of its steps can be used."
    if finished == epochs:
        return f"Resumed: all {epochs} epochs were finished, so none is trained again."
    at = f"step {steps} of epoch {(finished or 0) + 1}" if steps else f"epoch {finished}"
    return f"Resumed after {at} of {epochs}; the times of what was finished are the interrupted run's."


def _resumed_step(results: Sequence[RankResult]) -> int:
    return max((result.resumed_at[1] for result in results if result.resumed_at is not None), default=0)


def measure_rank(context: RankContext, asked: tuple[PreparedJob, bool]) -> tuple[LayerProfile, ...]:
    """Return what this device's own core takes for every layer.  asked: the job, and whether to measure again."""
    prepared, refresh = asked
    return PacPlus().host_layers(prepared, ignore, refresh=refresh)


def _score(prepared: PreparedJob, predictions: Predictions) -> dict[str, float]:
    return compute(prepared.task.metrics, predictions.answers(prepared.task.kind), predictions.references())


def _bytes(results: Sequence[RankResult], cluster: Cluster) -> dict[str, int]:
    """Return every rank's readings by name."""
    return {f"{cluster.devices[result.rank].name}: {name}": nbytes for result in results for name, nbytes in result.nbytes.items()}
