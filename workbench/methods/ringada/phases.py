"""The single phase of a RingAda run on a device."""

from __future__ import annotations

from dataclasses import replace

from workbench.methods.common.session import LOADING, RankResult, RankSession
from workbench.methods.ringada.compute import RingCompute, RingOptimizer
from workbench.methods.ringada.handlers import RingHandlers
from workbench.methods.ringada.prefix import PrefixCache
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.methods.ringada.rounds import Round, RoundShape
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import StagePhase
from workbench.planners.ringada import ring_homes
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import LinearSchedule
from workbench.runtime.memory import read_memory
from workbench.tasks.tokenize import collate


class RingPhase(StagePhase[RingRankJob]):
    """A block of layers with their adapters, embedding and head.

    With an adaptive policy, the earlier rounds determine each round's depth.
    """

    _prefix: PrefixCache | None = None

    def shape(self, planned: PlannedStep) -> RoundShape:
        """Return the next round with its current depth (see RankPhase)."""
        shape = planned.shape
        assert isinstance(shape, RoundShape)
        if not isinstance(self.optimizer, RingOptimizer) or self.optimizer.history is None:
            return shape
        lowest = self.rank_job.policy.adapted(self.optimizer.history[: self.optimizer.num_steps].tolist())[-1]
        return replace(shape, iterations=tuple(one._replace(first_unfrozen=lowest) for one in shape.iterations))

    def load(self, epoch: int) -> None:
        """Load the block (see RankPhase)."""
        self.session.progress.phase(LOADING)
        if self.index is not None:
            rank_job, job = self.rank_job, self.rank_job.job
            backbone = first = rank_job.load_backbone(*self.layers)
            if backbone.start > 0:
                first = rank_job.load_backbone(0, 1)
                first.layers.clear()  # on all devices but the first, only the embedding
            self.compute = RingCompute(rank_job.adapter or rank_job.config, backbone, first)
            self.optimizer = RingOptimizer(
                self.compute,
                LinearSchedule(peak=job.peak_learning_rate, num_steps=rank_job.num_steps, warmup_fraction=job.warmup_fraction),
                job.weight_decay,
                updates=rank_job.updates,
                keeps_head=rank_job.options.federated or self.session.rank == rank_job.initiators[0],
                num_noted=rank_job.num_rounds if rank_job.policy.is_adaptive else 0,
            )
            if rank_job.options.cache:
                folder = self.session.context.own_folder(rank_job.folder) / "prefix"
                self._prefix = PrefixCache(folder=folder, lengths=rank_job.lengths, crossing=rank_job.crossing, lowest=rank_job.lowest)
                if rank_job.cache_homes:
                    self._take_over(self._prefix)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def _take_over(self, prefix: PrefixCache) -> None:
        """Continue with the caches of former jobs, whose layers may have moved."""
        rank_job, rank, start_s = self.rank_job, self.session.rank, self.session.context.now_s()
        homes = ring_homes(rank_job.present.stages)
        moving = [(layer, rank_job.cache_homes[layer], homes[layer]) for layer in rank_job.cached_layers(rank_job.start)]
        if rank_job.adapter is not None:
            last = rank_job.plan.num_layers
            moving.append((last, rank, rank))  # the last hidden states of its own samples stay
            moving += [(last + 1, holder, receiver) for layer, holder, receiver in moving if layer == 0]  # the embedding's
        prefix.take_over(moving, rank, self.session.run, rank_job.cluster)
        self.result.spent_s["moving the cache"] = self.session.context.now_s() - start_s

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a round (see RankPhase)."""
        assert isinstance(planned, Round) and isinstance(self.optimizer, RingOptimizer)
        rank_job, shape = self.rank_job, self.shape(planned)
        if self._prefix is not None and rank_job.adapter is None:
            self._prefix.forget_above(shape.iterations[0].first_unfrozen)
        self.optimizer.num_steps = planned.number + 1  # counts only once the round is done; the state of a failed round is not saved
        return RingHandlers(
            rank=self.session.rank,
            number=planned.number,
            first_step=planned.number * rank_job.steps_per_round,
            by_loss=rank_job.policy.unfreezing == "plateau",
            costs=rank_job.costs(shape),
            batches=[collate(rank_job.split, samples) for samples in planned.samples],
            compute=self.compute,
            optimizer=self.optimizer,
            epoch=epoch,
            prefix=self._prefix,
            cached=shape.cached,
        ).table()

    def release(self) -> None:
        """Free memory and disk (see RankPhase)."""
        if self._prefix is not None:
            self.result.nbytes["activation cache"] = self._prefix.nbytes
            self._prefix.forget_above(-1)
        super().release()


def phases_on(session: RankSession[RingRankJob], result: RankResult) -> tuple[RingPhase, ...]:
    """Return the phase as a rank does it."""
    return (RingPhase(session, session.rank_job.phases()[0], result),)
