"""One rank's whole PAC+ run: first epoch, redistribution, cached epochs. This is what an engine is asked to call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from workbench.core.errors import CacheError
from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.folder import steps_path
from workbench.methods.common.reporting import CACHED_EPOCH, DONE, FIRST_EPOCH, IDLE, LOADING, WAITING
from workbench.methods.common.session import RankResult, RankSession, StepTrace, on_rank_zeros_clock
from workbench.methods.common.steps import PlannedStep, plan_steps
from workbench.methods.common.stepwise import EpochLog
from workbench.methods.pac_plus.building import build_stage, make_adapter, make_optimizer, stage_slots
from workbench.methods.pac_plus.cached_epochs import cached_steps, shard_owners, train_cached_epoch
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.first_epoch import tape_manifest, train_first_epoch
from workbench.methods.pac_plus.folder import checkpoint_path
from workbench.methods.pac_plus.redistribution import chunks_of, share_adapter, share_cache
from workbench.methods.pac_plus.session import RankJob
from workbench.methods.pac_plus.taps import record_layout
from workbench.models.loading import import_family
from workbench.models.quantization import held_bytes
from workbench.models.tensor_files import save_tensors
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.context import RankContext
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.kept_caches import KeptCache, KeptCaches
from workbench.runtime.memory import MemoryBudget, read_memory, release_free_memory
from workbench.runtime.process_group import group
from workbench.runtime.work_folder import full_disk_told
from workbench.tasks.batching import epoch_batches


def run_rank(context: RankContext, rank_job: RankJob) -> RankResult:
    """Do this rank's part of the job.  Checkpoints go to rank_job.folder, epoch by epoch."""
    import_family(rank_job.job.model)
    with (
        full_disk_told(rank_job.folder),
        group(context, rank_job.timeout_s) as process_group,
        MemoryBudget(context.device.name, context.device.memory_bytes) as budget,
        RankSession(context, rank_job, process_group, budget) as session,
    ):
        result = _Run(session).all()
    return on_rank_zeros_clock(result, context.clock_offset_s) if context.clock_offset_s else result


class _Run:
    """The state of one rank between its phases."""

    def __init__(self, session: RankSession) -> None:
        self._session, self._rank_job = session, session.rank_job
        job = self._rank_job.job
        self._epochs = job.epochs
        self._lengths = session.split.lengths
        self._steps: tuple[PlannedStep, ...] = plan_steps(
            epoch_batches(self._lengths, job.batch_size, job.seed, 0), self._lengths, job.micro_batches
        )
        self._result = RankResult(rank=session.rank)
        self._folder = Path(session.context.local_folder or self._rank_job.folder) / f"rank-{session.rank}"
        self._taped: ActivationCache | None = None
        self._has_taped = False

    def all(self) -> RankResult:
        rank_job, session = self._rank_job, self._session
        cached_stage = rank_job.plan.cached
        start, tensors = self._begin()
        if start < self._epochs:
            assert cached_stage is not None, "a plan without shares for cached epochs"
            owners = shard_owners(cached_stage, self._lengths, session.context.world_size, rank_job.job.seed)
            cache = self._cache(owners) if rank_job.kept is None else self._kept(*rank_job.kept)
            self._result.nbytes["private memory after the backbone's release"] = read_memory().anonymous_bytes
            compute, optimizer = self._whole_adapter(tensors, start)
            session.progress.phase(WAITING)
            step, _ = cached_steps(cached_stage, owners, self._lengths, session.context.world_size, seed=rank_job.job.seed, epoch=start)[0]
            session.barrier(rank_job.programs().cached(step))
            for epoch in range(start, self._epochs):
                session.progress.phase(CACHED_EPOCH if session.rank in cached_stage.ranks else IDLE, epoch)
                is_writer = session.rank == cached_stage.ranks[0]
                log = self._log(epoch, optimizer if session.rank in cached_stage.ranks else None, stage=-1, writes_journal=is_writer)
                begin = self._resumed_step(log, epoch, usable=True)
                with self._phase(f"epoch {epoch + 1}"):
                    traces = train_cached_epoch(
                        session, cached_stage, owners, compute, optimizer, cache, epoch=epoch, begin=begin, note=log
                    )
                self._finish_epoch(log, epoch, traces, optimizer.named_tensors() if is_writer else None)
        session.progress.phase(DONE)
        self._result.overrun_share = session.pacer.overrun_share
        self._result.late_s, self._result.paced_s = session.pacer.late_s, session.pacer.paced_s
        self._result.nbytes["peak resident"] = read_memory().peak_rss_bytes
        return self._result

    def _begin(self) -> tuple[int, dict[str, torch.Tensor] | None]:
        """Return the first epoch that runs from the cache, and parameters and moments to begin it with; None: the initial ones."""
        start = self._rank_job.start_epoch
        for epoch in range(start):
            self._result.steps += self._kept_steps(epoch)
        if start > 0:
            return start, load_file(checkpoint_path(self._rank_job.folder, start - 1))
        if self._rank_job.kept is not None:
            return 0, None
        with self._phase("first epoch"):
            return 1, self._first_epoch()

    def _kept(self, root: Path, key: str) -> KeptCache:
        """Return the activations that an earlier run kept."""
        kept = KeptCaches(root).find(key)
        if kept is None:
            raise CacheError("A kept activation cache was to be used.", "It was removed since the run began.", "Start the run again.")
        return kept

    def _first_epoch(self) -> dict[str, torch.Tensor]:
        session, rank_job = self._session, self._rank_job
        config, plan = rank_job.adapter, rank_job.plan
        index = plan.stage_of(session.rank)
        session.progress.phase(LOADING)
        compute, optimizer = build_stage(rank_job, index, len(self._steps))
        self._result.nbytes["private memory with the backbone"] = read_memory().anonymous_bytes
        if compute is not None and compute.backbone is not None:
            self._result.nbytes["backbone held"] = held_bytes(compute.backbone)
        is_writer = index is not None and session.rank == plan.stages[index].ranks[0]
        log = self._log(0, optimizer, stage=-1 if index is None else index, writes_journal=is_writer)
        tape, begin = self._first_tape(log)
        session.progress.phase(WAITING)
        session.barrier(rank_job.programs().hybrid(self._steps[0].shape))
        session.progress.phase(IDLE if index is None else FIRST_EPOCH, 0)
        traces = train_first_epoch(
            session,
            self._steps,
            compute,
            optimizer,
            tape,
            begin=begin,
            note=log,
        )
        if tape is not None:
            tape.finish()
        self._taped, self._has_taped = tape, True
        session.progress.phase(WAITING)
        session.barrier()
        session.progress.phase("sharing the adapter")
        with self._phase("sharing the adapter"):
            tensors, spans = share_adapter(session, rank_job.programs(), optimizer, stage_slots(config, plan))
        self._result.redistribution += spans
        self._finish_epoch(log, 0, traces, tensors if session.rank == plan.stages[0].ranks[0] else None)
        self._release(compute)
        return tensors

    def _first_tape(self, log: EpochLog) -> tuple[ActivationCache | None, int]:
        """Return the tape of the first epoch, and the step with which the epoch goes on: an interrupted run's are continued."""
        if self._epochs == 1:
            return None, self._resumed_step(log, 0, usable=True)
        manifest = tape_manifest(self._session, self._steps)
        folder = self._folder / "tape"
        tape: ActivationCache | None = None
        if manifest is not None and self._rank_job.resumes:
            try:
                tape = ActivationCache.reopen(folder, manifest)
            except CacheError as error:
                self._result.notes.append(str(error))
        begin = self._resumed_step(log, 0, usable=tape is not None or manifest is None)
        if begin == 0 and manifest is not None:
            tape = ActivationCache.create(folder, manifest)
        return tape, begin

    def _log(self, epoch: int, optimizer: FlatAdamW | None, *, stage: int, writes_journal: bool) -> EpochLog:
        return EpochLog(self._session, epoch, optimizer, stage=stage, writes_journal=writes_journal, num_steps=len(self._steps))

    def _resumed_step(self, log: EpochLog, epoch: int, *, usable: bool) -> int:
        """Return the step with which an epoch begins: after those that an interrupted run completed, if this run resumes it."""
        begin = 0
        if self._rank_job.resumes and epoch == self._rank_job.start_epoch:
            begin = log.agree(usable=usable)
            self._result.resumed_at = (epoch, begin)
        log.begin()
        return begin

    def _finish_epoch(self, log: EpochLog, epoch: int, traces: list[StepTrace], tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Keep an epoch whole, then drop what its steps had left.  tensors: of the rank that writes the checkpoint."""
        self._keep_steps(epoch, log.done + traces)
        if tensors is not None:
            self._save(epoch, tensors)
        if log.takes_part:
            self._session.progress.phase(WAITING)
        self._session.barrier()
        log.end()

    def _cache(self, owners: Sequence[int]) -> ActivationCache:
        """Return this rank's own shard, filled: kept from before if all ranks can use theirs, else from the tapes."""
        session, rank_job = self._session, self._rank_job
        folder = self._folder / "cache"
        kept: ActivationCache | None = None
        try:
            kept = ActivationCache.open(folder, fingerprint=f"{rank_job.fingerprint}/{session.rank}")
        except CacheError as error:
            if rank_job.start_epoch > 0:
                self._result.notes.append(str(error))
        if rank_job.start_epoch > 0 and self._agree(kept is not None):
            assert kept is not None
            return kept
        tape = self._tape()
        layout = record_layout(rank_job.adapter, rank_job.cache_dtype)
        samples = tuple(sample for sample, owner in enumerate(owners) if owner == session.rank)
        cache = ActivationCache.create(
            folder,
            CacheManifest(
                fingerprint=f"{rank_job.fingerprint}/{session.rank}",
                samples=samples,
                lengths=tuple(self._lengths[sample] for sample in samples),
                num_taps=layout.num_taps,
                width=layout.width,
                dtype=layout.dtype,
                num_target_taps=layout.num_target_taps,
                target_length=layout.target_length,
            ),
        )
        chunks = chunks_of(
            rank_job.plan,
            self._steps,
            owners,
            self._lengths,
            world_size=session.context.world_size,
            layout=layout,
            num_encoder_layers=rank_job.adapter.num_encoder_layers,
        )
        session.progress.phase(WAITING)
        session.barrier()
        session.progress.phase("sharing the activations")
        with self._phase("sharing the activations"):
            self._result.redistribution += share_cache(
                session, rank_job.programs(), chunks, tape, cache, num_encoder_layers=rank_job.adapter.num_encoder_layers
            )
            session.barrier()
        cache.finish()
        self._result.nbytes["activation cache"] = cache.manifest.nbytes
        if tape is not None:
            tape.remove()
        return cache

    def _tape(self) -> ActivationCache | None:
        """Return what this rank taped in the first epoch; where any rank's tape is lost, the backbone fills them all again."""
        if self._has_taped:
            return self._taped
        session, rank_job = self._session, self._rank_job
        index = rank_job.plan.stage_of(session.rank)
        tape: ActivationCache | None = None
        try:
            tape = ActivationCache.open(self._folder / "tape", fingerprint=rank_job.fingerprint) if index is not None else None
            usable = True
        except CacheError as error:
            self._result.notes.append(str(error))
            usable = False
        if self._agree(usable):
            return tape
        session.progress.phase("filling the cache again")
        with self._phase("filling the cache again"):
            compute, optimizer = build_stage(rank_job, index, len(self._steps))
            manifest = tape_manifest(session, self._steps)
            tape = ActivationCache.create(self._folder / "tape", manifest) if manifest is not None else None
            train_first_epoch(
                session,
                self._steps,
                compute,
                optimizer,
                tape,
                backbone_only=True,
            )
            if tape is not None:
                tape.finish()
            self._release(compute)
        return tape

    def _agree(self, mine: bool) -> bool:
        """Return whether every rank says yes."""
        count = torch.tensor([0.0 if mine else 1.0])
        self._session.sum(count)
        return count.item() == 0

    def _whole_adapter(self, tensors: Mapping[str, torch.Tensor] | None, start: int) -> tuple[StageCompute, FlatAdamW]:
        rank_job = self._rank_job
        adapter = make_adapter(rank_job, 0, rank_job.adapter.num_layers)
        optimizer = make_optimizer(rank_job, adapter, len(self._steps))
        if tensors is not None:
            optimizer.load_named_tensors(tensors, num_steps=start * len(self._steps))
        return StageCompute(adapter, None, tap_dtype=cache_dtype(rank_job.cache_dtype)), optimizer

    def _save(self, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a checkpoint whole or not at all."""
        save_tensors(checkpoint_path(self._rank_job.folder, epoch), tensors)

    def _keep_steps(self, epoch: int, traces: list[StepTrace]) -> None:
        """Add an epoch's steps to the result, and note them on the disk for a run that is resumed."""
        self._result.steps += traces
        write_text(steps_path(self._rank_job.folder, epoch, self._session.rank), to_json(traces))

    def _kept_steps(self, epoch: int) -> list[StepTrace]:
        path = steps_path(self._rank_job.folder, epoch, self._session.rank)
        return from_json(path.read_bytes(), list[StepTrace], source=f"'{path}'") if path.is_file() else []

    def _release(self, compute: StageCompute | None) -> None:
        if compute is not None:
            compute.backbone = None
        release_free_memory()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self._session.context.now_s()
        yield
        self._result.phases_s[name] = (start, self._session.context.now_s())
