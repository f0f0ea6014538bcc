"""PAC+ as a Method: its specifics and its plan (section V)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.once import once
from workbench.core.plan import Plan
from workbench.core.profile import Layers, Profile
from workbench.core.run_files import DEVICES, INITIAL
from workbench.methods.base import MAX_SIMULATIONS, SCORED, Notify, counting, ignore
from workbench.methods.common.folder import disk_bytes
from workbench.methods.common.scaling import number_format
from workbench.methods.pac_plus.epochs import begin, phases_on
from workbench.methods.pac_plus.measure import measure_layers
from workbench.methods.pac_plus.prepare import PreparedJob, check_plan, prepare, record_layout, require_known
from workbench.methods.pac_plus.rank_job import PacPlusRankJob, Programs, rank_job
from workbench.methods.training.backpropagation import AnalyticTechnique, BackpropagationMethod
from workbench.methods.training.profiled import Measurement
from workbench.methods.training.state_costs import planning_problem, with_room
from workbench.models.evaluation import Predictions
from workbench.models.evaluation import predict as predict_split
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.saving import TrainedDescription, kept_name, save_adapter, save_tokenizer
from workbench.models.stack import LayerStack
from workbench.planners import (
    Problem,
    candidates,
    data_parallel,
    pipeline_parallel,
    plan_cached,
    refine_on_any_count,
    standalone,
)
from workbench.planners.memory import check as check_memory
from workbench.profiler.analytic import TechniqueSizes
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.state import load_state
from workbench.runtime.work_folder import require_disk
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches


@once
def _taping(profile: Profile) -> Profile:
    """Return the profile of an epoch that fills the activation cache."""
    return profile.with_layers(lambda layer, *_: layer.with_times({"F": layer.times["F"].plus(layer.times["TAPE"])}))


PARADIGMS = {"standalone": standalone, "data_parallel": data_parallel, "pipeline_parallel": pipeline_parallel}


def plan_job(prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan of all epochs.  Raises PlanError if nothing fits."""
    problem = planning_problem(prepared, profile, cluster)
    chosen = _first_epoch(prepared, problem)
    order = [rank for stage in chosen.stages for rank in stage.ranks]
    if prepared.options.paradigm == "hybrid" and prepared.options.order == "all" and order != sorted(order):
        names = ", ".join(cluster.devices[rank].name for rank in order)
        note = f"The devices are not in the cluster's order: {names}. The option order=given keeps that order."
        chosen = replace(chosen, notes=(*chosen.notes, note))
    if prepared.job.epochs == 1:
        return chosen
    ranks = chosen.stages[0].ranks if prepared.options.paradigm == "standalone" else None
    return replace(chosen, cached=plan_cached(problem, ranks=ranks))


def _first_epoch(prepared: PreparedJob, problem: Problem) -> Plan:
    """Run Algorithm 1; of its W_s take the best by the objective, or (by default) the plan with the shortest simulated
    step.
    """
    options = prepared.options
    if options.paradigm != "hybrid":
        return PARADIGMS[options.paradigm](problem)
    plans = candidates(
        problem,
        order="all" if options.order == "all" else None,
        objective="bottleneck" if options.objective == "simulated" else options.objective,
    )
    if options.objective != "simulated":
        return plans[0]
    step = prepared.typical_step(problem.micro_batches)

    def simulated_s(plan: Plan) -> float:
        run = rank_job(prepared, problem.profile, problem.cluster, plan)
        return run.predictor(run.first_epoch).seconds(step)

    def least_s(plan: Plan) -> float:
        return Programs(rank_job(prepared, problem.profile, problem.cluster, plan)).least_s(step.shape)

    return refine_on_any_count(
        plans, problem, simulated_s, method="pac_plus", max_prices=MAX_SIMULATIONS, least=least_s
    )


class Trained:
    """The adapter after each epoch."""

    def __init__(self, prepared: PreparedJob, stack: LayerStack, job: PacPlusRankJob) -> None:
        self._prepared, self._stack, self._job = prepared, stack, job

    def predict(self, epochs: Sequence[int], split: TokenizedSplit, notify: Notify = ignore) -> list[Predictions]:
        """Return the predictions after each of some epochs, with one pass over the backbone for all of them."""
        batches = evaluation_batches(split, report=counting(notify, SCORED))
        return predict_split(self._stack, [self._adapter(epoch) for epoch in epochs], batches)

    def save(self, folder: Path, epoch: int) -> Path:
        """Write the adapter as it was after an epoch."""
        job = self._prepared.job
        about = TrainedDescription(
            config=self._prepared.adapter, model=kept_name(job.model), quantization=self._job.quantization
        )
        save_tokenizer(job.model, folder)
        return save_adapter(folder, self._adapter(epoch).state_dict(), about)

    def _adapter(self, epoch: int) -> ParallelAdapter:
        adapter = ParallelAdapter(self._prepared.adapter)
        initial = load_state([self._job.folder / INITIAL], self._job.fingerprint)
        adapter.load_state_dict({**initial, **self._job.trained(epoch)})
        return adapter.eval()


class PacPlus(BackpropagationMethod[PreparedJob]):
    """Parallel Adapters with an activation cache, planned for heterogeneous devices."""

    name = "pac_plus"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    check_plan = staticmethod(check_plan)
    rank_job = staticmethod(rank_job)
    phases_on = staticmethod(phases_on)
    trained = Trained
    begin = staticmethod(begin)

    def num_trained(self, prepared: PreparedJob) -> int:
        """Return the number of the adapters' weights (see Method)."""
        return prepared.adapter.num_parameters

    def holds_whole_model(self, prepared: PreparedJob) -> bool:
        """Return whether the initial adapter is made from the model's original weights (see Method)."""
        return prepared.options.initialization in ("pruned", "torch_pruned", "distilled")

    def profile(self, prepared: PreparedJob, cluster: Cluster, notify: Notify, **settings: Any) -> Profile:
        """Return the costs (see ProfiledMethod).  If epochs from the cache follow, the backbone's forward pass writes
        its activations to the device's storage.
        """
        profile = super().profile(prepared, cluster, notify, **settings)
        return profile if prepared.job.epochs == 1 else _taping(profile)

    def measured(self, prepared: PreparedJob) -> Measurement:
        """Return the settings that affect layer costs, and a function that measures them (see LayerMethod)."""
        options = prepared.options
        key = {
            "adapter": str(replace(prepared.adapter, seed=0, label_mean=0.0, label_std=1.0)),
            "cache_dtype": options.cache_dtype,
            "side network": "hand-written 2",
            "cache": "written",
            "backbone": prepared.quantization.description,
        }

        def measure(max_length: int) -> Layers:
            backbone = self.measured_stack(prepared, prepared.quantization)
            return measure_layers(backbone, prepared.adapter, dtype=options.cache_dtype, max_length=max_length)

        return key, measure

    def technique(self, prepared: PreparedJob) -> AnalyticTechnique:
        """Return the adapters' sizes (see BackpropagationMethod)."""
        options = prepared.options
        stored = record_layout(prepared.adapter, options.cache_dtype)
        taps = float(cache_dtype(options.cache_dtype).itemsize), stored.row_bytes / stored.width
        numbers = number_format(prepared.facts, options.compute_dtype, prepared.quantization, taps=taps)
        sizes = TechniqueSizes(reduction=options.reduction, predicts_words=prepared.predicts_words)
        return AnalyticTechnique("parallel_adapters", sizes, numbers)

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        if plan.cached is None and prepared.job.epochs > 1:
            raise ConfigError(
                f"A plan for {prepared.job.epochs} epochs was asked for.",
                "It has no shares for those that run from the cache.",
                "Add them (planners.plan_cached), or train 1 epoch.",
            )
        if folder is None:
            return
        profile = with_room(profile, prepared.job)
        check_memory(profile, cluster, plan, sequence_length=prepared.longest, order=prepared.options.schedule)
        if plan.cached is not None:
            # Tapes and shards exist at the same time during redistribution; existing files are reused or replaced.
            layout = record_layout(prepared.adapter, prepared.options.cache_dtype)
            require_disk(folder, 2 * layout.total_bytes(prepared.train.lengths) - disk_bytes(folder / DEVICES))
