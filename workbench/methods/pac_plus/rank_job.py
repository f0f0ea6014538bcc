"""What a rank is told of a PAC+ run, and its two phases: the pipeline that fills the activation cache, and the epochs that run from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.methods.common.folder import INITIAL
from workbench.methods.pac_plus.layout import cached_steps, shard_owners
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.programs import Programs
from workbench.methods.pac_plus.redistribution import adapter_moves, shard_moves, tape_moves
from workbench.methods.pac_plus.taps import record_layout
from workbench.methods.training.phases import Phase, RankJob
from workbench.methods.training.steps import PlannedStep, cut_mini_batch
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.runtime.activation_records import RecordLayout
from workbench.runtime.kept_caches import KeptCaches
from workbench.schedules.moves import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusRankJob(RankJob):
    """All that a rank is told of a PAC+ run.  The folder also holds the initial adapter.

    kept: folder and key of a kept activation cache that serves all epochs; None fills one in the first epoch.
    """

    adapter: ParallelAdapterConfig
    cache_dtype: str
    kept: tuple[Path, str] | None = None

    @property
    def record_layout(self) -> RecordLayout:
        """Return the shape of a sample's record in the activation cache."""
        return record_layout(self.adapter, self.cache_dtype)

    @property
    def owners(self) -> tuple[int, ...]:
        """Return which rank keeps each sample's activations."""
        assert self.plan.cached is not None, "a plan without shares for cached epochs"
        return shard_owners(self.plan.cached, self.split.lengths, self.cluster.world_size, self.job.seed)

    def programs(self) -> Programs:
        """Return the programs of this run."""
        hidden = self.quantization.compute
        return Programs(self.profile, self.cluster, self.plan, self.adapter, hidden_dtype=hidden, schedule=self.schedule)

    def phases(self) -> tuple[Phase, ...]:
        """Return the first epoch, no epoch at all with a kept cache, and the cached epochs (see RankJob)."""
        programs, first_cached = self.programs(), 0 if self.kept else 1
        has_cached = self.job.epochs > first_cached
        first = Phase(
            epochs=range(first_cached),
            steps=self.planned_epoch,
            program=programs.hybrid,
            moves=self._moves if has_cached and first_cached else dict,
            nbytes={"activation cache": self.record_layout.total_bytes(self.split.lengths) if has_cached else 0},
        )
        if self.plan.cached is None:
            return (first,)
        cached, owners, lengths = self.plan.cached, self.owners, self.split.lengths

        def steps(epoch: int) -> Sequence[PlannedStep]:
            return cached_steps(cached, owners, lengths, self.cluster.world_size, seed=self.job.seed, epoch=epoch)

        return first, Phase(epochs=range(first_cached, self.job.epochs), cached=True, steps=steps, program=programs.cached)

    def adapter_moves(self) -> tuple[Move, ...]:
        """Return what brings the whole adapter to every device (section V-B)."""
        return adapter_moves(self.adapter, self.plan, self.cluster)

    def filling_steps(self, samples: Sequence[int]) -> tuple[PlannedStep, ...]:
        """Return the steps in which the backbone computes the activations of some samples again: all as in the first epoch."""
        if len(samples) == len(self.split):
            return self.planned_epoch(0)
        lengths, size = self.split.lengths, self.plan.mini_batch_size
        ordered = sorted(samples, key=lambda sample: lengths[sample])
        batches = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return tuple(PlannedStep.of(cut_mini_batch(batch, self.plan.num_micro_batches), lengths) for batch in batches)

    def shard_moves(self, holders: Mapping[int, Sequence[int]]) -> tuple[Move, ...]:
        """Return what brings the activations that some ranks have to the devices that keep them.  holders: by sample."""
        return shard_moves(self.adapter, self.cluster, holders, self.owners, self.split.lengths, self.record_layout)

    def tape_moves(self, steps: Sequence[PlannedStep]) -> tuple[Move, ...]:
        """Return what brings the activations that some steps have taped to the devices that keep them (section V-B)."""
        return tape_moves(self.adapter, self.plan, self.cluster, steps, self.owners, self.split.lengths, self.record_layout)

    def _moves(self) -> Mapping[str, Iterable[Program]]:
        adapter, tapes = self.adapter_moves(), self.tape_moves(self.planned_epoch(0))
        return {"sharing the adapter": [one.program for one in adapter], "sharing the activations": [one.program for one in tapes]}

    def taken_over(self, former: RankJob, places: Mapping[int, int]) -> Iterable[Program]:
        """Return what brings the devices the activations that they keep from now on, and what computes those that are lost."""
        assert isinstance(former, PacPlusRankJob)
        if not any(phase.cached and self.start_epoch in phase.epochs for phase in self.phases()) or not former.plan.cached or self.kept:
            return ()
        holders = {sample: (places[owner],) for sample, owner in enumerate(former.owners) if owner in places}
        steps = self.filling_steps([sample for sample in range(len(self.split)) if sample not in holders])
        programs = self.programs()
        filling = [programs.hybrid(step.shape, backbone_only=True) for step in steps]
        return (*filling, *(move.program for move in (*self.shard_moves(holders), *self.tape_moves(steps))))

    def begins_with(self) -> tuple[Path, ...]:
        """Return the initial adapter's file (see RankJob)."""
        return (self.folder / INITIAL,)


def rank_job(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> PacPlusRankJob:
    """Return what every rank is told of a run under a plan."""
    return PacPlusRankJob(
        job=prepared.job,
        cluster=cluster,
        plan=plan,
        profile=profile,
        split=prepared.train,
        adapter=prepared.adapter,
        cache_dtype=prepared.options.cache_dtype,
        quantization=prepared.options.quantization,
        schedule=prepared.options.schedule,
        kept=(KeptCaches().root, prepared.activation_key) if prepared.from_kept else None,
    )
