"""RingAda as a Method: its specifics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.base import ignore
from workbench.methods.common.session import RankResult
from workbench.methods.fine_tuning import method as fine_tuning
from workbench.methods.pac_plus import method as pac_plus
from workbench.methods.ringada.measure import from_adapters, measure_layers
from workbench.methods.ringada.phases import phases_on
from workbench.methods.ringada.planning import plan_job, rank_job, require_memory
from workbench.methods.ringada.prepare import PreparedJob, check_plan, prepare, require_known
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.methods.training.method import AnalyticTechnique, TrainingMethod, nothing
from workbench.methods.training.worker import TrainingWorker, train
from workbench.models.loading import load_stack
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.profiler.analytic import TechniqueSizes
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import serve_device
from workbench.tasks.batching import check_rule


def run_rank(context: RankContext, rank_job: RingRankJob) -> RankResult:
    """Do this rank's part of a run."""
    return train(context, rank_job, phases_on)


def serve_rank(context: RankContext, address: str) -> None:
    """Do the parts of a run that the coordinator at `address` commands."""
    serve_device(context, address, TrainingWorker(phases_on, context.dilation))


def measure_rank(context: RankContext, asked: tuple[PreparedJob, bool]) -> tuple[LayerProfile, ...]:
    """Return every layer's cost on this device's core.  asked: the job, and whether to measure again."""
    prepared, refresh = asked
    return RingAda().host_layers(prepared, ignore, refresh=refresh)


class TrainedSide(pac_plus.Trained):
    """Parallel Adapters after each epoch; they begin from weights that only their names and the seed determine."""

    def _adapter(self, epoch: int) -> ParallelAdapter:
        adapter = ParallelAdapter(self._prepared.adapter)
        adapter.load_state_dict(adapter.state_dict() | self._job.trained(epoch))
        return adapter.eval()


class RingAda(TrainingMethod[PreparedJob]):
    """Adapters, unfrozen from the top, on a ring of devices that keep their data local."""

    name = "ringada"
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    plan = staticmethod(plan_job)
    check_plan = staticmethod(check_plan)
    rank_job = staticmethod(rank_job)
    run_rank = staticmethod(run_rank)
    serve_rank = staticmethod(serve_rank)
    measure_rank = staticmethod(measure_rank)
    trained = staticmethod(lambda prepared, *rest: (TrainedSide if prepared.adapter else fine_tuning.Trained)(prepared, *rest))
    begin = staticmethod(nothing)
    keep = staticmethod(nothing)

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Reject unknown names, and an impossible split of the data (see Method)."""
        check_rule(require_known(job).data, cluster.world_size)

    def measured(self, prepared: PreparedJob) -> tuple[dict[str, Any], Callable[[int], tuple[LayerProfile, ...]]]:
        """Return the settings that affect layer costs, and a function that measures them (see TrainingMethod)."""
        config = prepared.adapter or prepared.config
        caches = prepared.options.cache
        key: dict[str, Any] = {f"{prepared.options.technique} adapters": asdict(replace(config, seed=0, label_mean=0.0, label_std=1.0))}
        key |= {"cache": True} if caches else {}
        return key, lambda max_length: measure_layers(load_stack(prepared.job.model), config, max_length=max_length, caches=caches)

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return every layer's cost from the catalogue's figures (see ProfiledMethod)."""
        return from_adapters(super().catalogue(prepared, cluster), cluster, 4 * prepared.facts.embedding_parameters)

    def technique(self, prepared: PreparedJob) -> AnalyticTechnique:
        """Return the adapters' sizes (see TrainingMethod)."""
        options = prepared.options
        if options.technique == "parallel":
            return AnalyticTechnique("parallel_adapters", TechniqueSizes(reduction=options.reduction))
        return AnalyticTechnique("adapters", TechniqueSizes(bottleneck=options.bottleneck, adapters_per_layer=1))

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        if folder is not None:
            require_memory(prepared, profile, cluster, plan)
