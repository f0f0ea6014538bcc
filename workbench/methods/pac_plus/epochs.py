"""The later epochs: data parallel over the activation cache, the backbone neither run nor held (sections IV-B and V-B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.errors import CacheError
from workbench.methods.common.reporting import CACHED_EPOCH, WAITING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.pac_plus.first_epoch import FirstEpoch
from workbench.methods.pac_plus.handlers import READ_AHEAD, CachedBatches, PacPlusHandlers, StageCompute
from workbench.methods.pac_plus.initial import make_adapter
from workbench.methods.pac_plus.prepare import rank_taps, whole_taps
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.pac_plus.redistribution import parts_of, taped
from workbench.methods.training.handlers import PAD_TO_MULTIPLE, PlannedStep
from workbench.methods.training.phases import Phase, RankPhase, make_optimizer
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.memory import read_memory
from workbench.runtime.state import carry_out
from workbench.schedules.moves import Move
from workbench.tasks.tokenize import collate


class CachedEpochs(RankPhase[PacPlusRankJob]):
    """The whole adapter and this rank's shard of the activations, which the first epoch has taped."""

    label = CACHED_EPOCH

    def __init__(self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult, first: FirstEpoch) -> None:
        super().__init__(session, phase, result)
        assert self.rank_job.plan.cached is not None
        self._first, self._ranks = first, self.rank_job.plan.cached.ranks
        self.is_writer = session.rank == self._ranks[0]
        self._cache: ActivationCache | None = None
        self._batches: CachedBatches | None = None

    def load(self, epoch: int) -> None:
        """Get the shard, and make the adapter as it is before an epoch (see RankPhase)."""
        rank_job = self.rank_job
        self._cache = self._shard()
        self.result.nbytes["private memory after the backbone's release"] = read_memory().anonymous_bytes
        has_share = self.session.rank in self._ranks
        if has_share:
            steps_per_epoch = len(self.phase.steps(epoch))
            adapter = make_adapter(rank_job, 0, rank_job.adapter.num_layers)
            self.optimizer = make_optimizer(rank_job, adapter, steps_per_epoch)
            self.optimizer.set_num_steps(epoch * steps_per_epoch)
            self.compute = StageCompute(adapter, None, tap_dtype=cache_dtype(rank_job.cache_dtype))
        if rank_job.start_epoch < epoch:
            into = self.optimizer.named_tensors() if self.optimizer is not None else {}
            self._carry_out("sharing the adapter", rank_job.adapter_moves(), self._first.tensors or {}, into)
            self._first.tensors = None

    @contextmanager
    def epoch(self, epoch: int, begin: int) -> Iterator[None]:
        """Read this rank's activations ahead (see RankPhase)."""
        if self.compute is None or self._cache is None:
            yield
            return
        rank = self.session.rank
        own = [(step.samples[rank], step.shape.lengths[rank]) for step in self.phase.steps(epoch)[begin:] if step.samples[rank]]
        # An emulated device has one slowed core: nothing of it is free to read ahead, and its LOAD has its own price.
        depth = 0 if self.session.slows_down else READ_AHEAD
        with CachedBatches(self._cache, own, depth=depth, packs=self.compute.packs) as self._batches:
            yield

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        assert isinstance(self.optimizer, FlatAdamW)
        samples = planned.samples[self.session.rank]
        return PacPlusHandlers(
            rank=self.session.rank,
            batches=[collate(self.rank_job.split, samples, PAD_TO_MULTIPLE)] if samples else [],
            total=planned.shape.samples,
            compute=self.compute,
            optimizer=self.optimizer,
            cache=self._batches,
            epoch=epoch,
            layers=self.rank_job.layers,
        ).table()

    def _shard(self) -> ActivationCache:
        """Return this rank's own shard: an interrupted run's if it is the same, else filled from all ranks' shards and tapes."""
        session, rank_job = self.session, self.rank_job
        owners, layout, lengths = rank_job.owners, rank_job.record_layout, rank_job.split.lengths
        folder = session.context.own_folder(rank_job.folder) / "cache"
        samples = tuple(sample for sample, owner in enumerate(owners) if owner == session.rank)
        former, holders, is_same = self._former(folder, samples)
        if former is not None and is_same:
            return former
        manifest = CacheManifest(
            fingerprint=rank_job.fingerprint,
            samples=samples,
            lengths=tuple(lengths[sample] for sample in samples),
            num_taps=layout.num_taps,
            width=layout.width,
            dtype=layout.dtype,
            num_target_taps=layout.num_target_taps,
            target_length=layout.target_length,
        )
        whole, taps = whole_taps(rank_job.adapter), rank_taps(rank_job.plan, rank_job.adapter.num_encoder_layers)
        rounds = rank_job.shard_moves(holders)
        held, tape = taped(former, whole), None
        lost = [sample for sample in range(len(owners)) if sample not in holders]
        if lost:
            tape = self._first.tape(lost)
            rounds += rank_job.tape_moves(rank_job.filling_steps(lost))
            held |= taped(tape, taps.get(session.rank))
        shard = ActivationCache.create(folder.with_name("cache.part"), manifest)
        session.progress.phase(WAITING)
        session.barrier()
        self._carry_out("sharing the activations", rounds, held, parts_of(shard, (whole, *taps.values())))
        session.barrier()
        shard.finish()
        self.result.nbytes["activation cache"] = manifest.nbytes
        for source in (former, tape):
            if source is not None:
                source.remove()
        return shard.moved(folder)

    def _former(self, folder: Path, samples: Sequence[int]) -> tuple[ActivationCache | None, Mapping[int, Sequence[int]], bool]:
        """Return this rank's shard of an interrupted run, which ranks have each sample in theirs, and whether all have what they need."""
        shard: ActivationCache | None = None
        if self.rank_job.start_epoch == 0:
            return None, {}, False
        held = torch.zeros(self.session.context.world_size, len(self.rank_job.split))
        try:
            shard = ActivationCache.open(folder, fingerprint=self.rank_job.fingerprint)
            held[self.session.rank, list(shard.samples)] = 1
        except CacheError as error:
            self.told_of(error)
        self.session.sum(held)
        ranks_of = {sample: held[:, sample].nonzero().flatten().tolist() for sample in range(held.shape[1])}
        is_same = self.session.agree(shard is not None and set(shard.samples) == set(samples))
        return shard, {sample: ranks for sample, ranks in ranks_of.items() if ranks}, is_same

    def _carry_out(self, name: str, rounds: Sequence[Move], held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        with self.timed(name):
            self.result.redistribution += carry_out(rounds, self.session.rank, self.session.run, held, into)


def phases_on(session: RankSession[PacPlusRankJob], result: RankResult) -> tuple[RankPhase[PacPlusRankJob], ...]:
    """Return the phases as a rank does them."""
    first, *cached = session.rank_job.phases()
    own = FirstEpoch(session, first, result)
    return (own, *(CachedEpochs(session, phase, result, own) for phase in cached))
