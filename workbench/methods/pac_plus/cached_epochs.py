"""The later epochs: data parallel over the activation cache, the backbone neither run nor held (sections IV-B and V-B)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors.torch import load_file

from workbench.core.errors import CacheError
from workbench.methods.common.folder import checkpoint_path
from workbench.methods.common.reporting import CACHED_EPOCH, WAITING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.pac_plus.building import make_adapter, rank_folder
from workbench.methods.pac_plus.cached_batches import READ_AHEAD, CachedBatches, TapSource
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.first_epoch import FirstEpoch
from workbench.methods.pac_plus.handlers import PacPlusHandlers
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.pac_plus.redistribution import share_cache
from workbench.methods.training.phases import Phase, RankPhase, make_optimizer
from workbench.methods.training.steps import PAD_TO_MULTIPLE, PlannedStep
from workbench.models.tensor_files import save_tensors
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.executor import Handler
from workbench.runtime.kept_caches import KeptCaches
from workbench.runtime.memory import read_memory
from workbench.tasks.tokenize import collate


class CachedEpochs(RankPhase[PacPlusRankJob]):
    """The whole adapter and this rank's shard of the activations, which the first epoch has taped or an earlier run has kept."""

    label = CACHED_EPOCH

    def __init__(self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult, first: FirstEpoch) -> None:
        super().__init__(session, phase, result)
        assert self.rank_job.plan.cached is not None
        self._first, self._ranks = first, self.rank_job.plan.cached.ranks
        self.writes_journal = session.rank == self._ranks[0]
        self._cache: TapSource | None = None
        self._batches: CachedBatches | None = None

    def load(self, epoch: int) -> None:
        """Get the shard, and make the adapter as it is before an epoch (see RankPhase)."""
        rank_job = self.rank_job
        self._cache = self._kept() or self._shard()
        self.result.nbytes["private memory after the backbone's release"] = read_memory().anonymous_bytes
        if self.session.rank not in self._ranks:
            return
        steps_per_epoch = len(self.phase.steps(epoch))
        adapter = make_adapter(rank_job, 0, rank_job.adapter.num_layers)
        self.optimizer = make_optimizer(rank_job, adapter, steps_per_epoch)
        if epoch:
            tensors = self._first.tensors or load_file(checkpoint_path(rank_job.folder, epoch - 1))
            self.optimizer.load_named_tensors(tensors, num_steps=epoch * steps_per_epoch)
        self.compute = StageCompute(adapter, None, tap_dtype=cache_dtype(rank_job.cache_dtype))

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
        assert self.optimizer is not None
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

    def save(self, epoch: int) -> None:
        """Write the whole adapter (see RankPhase)."""
        if self.writes_journal and self.optimizer is not None:
            save_tensors(checkpoint_path(self.rank_job.folder, epoch), self.optimizer.named_tensors())

    def _kept(self) -> TapSource | None:
        """Return the activations that an earlier run kept."""
        if self.rank_job.kept is None:
            return None
        root, key = self.rank_job.kept
        kept = KeptCaches(root).find(key)
        if kept is None:
            raise CacheError("A kept activation cache was to be used.", "It was removed since the run began.", "Start the run again.")
        return kept

    def _shard(self) -> ActivationCache:
        """Return this rank's own shard, filled: kept from before if all ranks can use theirs, else from the tapes."""
        session, rank_job = self.session, self.rank_job
        folder, fingerprint = rank_folder(session) / "cache", f"{rank_job.fingerprint}/{session.rank}"
        if rank_job.start_epoch > 0:
            cache: ActivationCache | None = None
            try:
                cache = ActivationCache.open(folder, fingerprint=fingerprint)
            except CacheError as error:
                self.result.notes.append(str(error))
            if session.agree(cache is not None):
                assert cache is not None
                return cache
        tape = self._first.tape()
        layout, lengths = rank_job.record_layout, rank_job.split.lengths
        samples = tuple(sample for sample, owner in enumerate(rank_job.owners) if owner == session.rank)
        manifest = CacheManifest(
            fingerprint=fingerprint,
            samples=samples,
            lengths=tuple(lengths[sample] for sample in samples),
            num_taps=layout.num_taps,
            width=layout.width,
            dtype=layout.dtype,
            num_target_taps=layout.num_target_taps,
            target_length=layout.target_length,
        )
        shard = ActivationCache.create(folder, manifest)
        chunks, borders = rank_job.chunks(), rank_job.adapter.num_encoder_layers
        session.progress.phase(WAITING)
        session.barrier()
        with self.timed("sharing the activations"):
            self.result.redistribution += share_cache(session, rank_job.programs(), chunks, tape, shard, num_encoder_layers=borders)
            session.barrier()
        shard.finish()
        self.result.nbytes["activation cache"] = manifest.nbytes
        if tape is not None:
            tape.remove()
        return shard


def phases_on(session: RankSession[PacPlusRankJob], result: RankResult) -> tuple[RankPhase[PacPlusRankJob], ...]:
    """Return the phases as a rank does them."""
    first, *cached = session.rank_job.phases()
    own = FirstEpoch(session, first, result)
    return (own, *(CachedEpochs(session, phase, result, own) for phase in cached))
