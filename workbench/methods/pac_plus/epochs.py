"""The epochs of PAC+ on a rank (sections IV-B, V-A and V-B).

The first epoch uses hybrid data and pipeline parallelism, and tapes every activation.  The later epochs use data
parallelism over the activation cache; the backbone is neither run nor in memory.
A rank's initial state is a stage of the adapter, initialized and then calibrated on training samples (section IV-C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workbench.assets.fetch import cache_folder
from workbench.core.errors import CacheError
from workbench.core.run_files import INITIAL
from workbench.core.sealed import owner_of
from workbench.methods.base import Event, Notify, ignore
from workbench.methods.common.folder import weights_digest
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import CACHED_EPOCH, FIRST_EPOCH, WAITING, RankSession
from workbench.methods.pac_plus.handlers import READ_AHEAD, CachedBatches, PacPlusHandlers, StageCompute
from workbench.methods.pac_plus.prepare import PreparedJob, rank_taps, whole_taps
from workbench.methods.pac_plus.rank_job import PacPlusRankJob, Programs, parts_of, taped, taped_samples
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import Phase
from workbench.methods.training.rank_phases import RankPhase, StagePhase, make_optimizer
from workbench.methods.training.worker import run_steps
from workbench.models.distillation import distill, distillation_fingerprint, distilled, load_distilled
from workbench.models.evaluation import calibrate, set_statistics
from workbench.models.initialization import initialize
from workbench.models.loading import load_language_model_head, load_stack, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter, ParallelAdapterStage
from workbench.models.quantization import held_bytes
from workbench.models.sealed_tensors import save_sealed
from workbench.models.side_layers import WORD_KINDS
from workbench.models.stack import LayerStack
from workbench.runtime.activation_cache import ActivationCache, CacheManifest, cache_dtype
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.memory import read_memory
from workbench.runtime.state import carry_out, load_state
from workbench.schedules.moves import Move
from workbench.tasks.embedded import load_unlabelled
from workbench.tasks.tokenize import collate, text_batches


class CachedEpochs(RankPhase[PacPlusRankJob]):
    """The whole adapter and this rank's shard of the activations taped in the first epoch."""

    label = CACHED_EPOCH

    def __init__(
        self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult, first: FirstEpoch
    ) -> None:
        super().__init__(session, phase, result)
        assert self.rank_job.plan.cached is not None
        self._first, self._ranks = first, self.rank_job.plan.cached.ranks
        self.is_writer = session.rank == self._ranks[0]
        self._cache: ActivationCache | None = None
        self._batches: CachedBatches | None = None

    def load(self, epoch: int) -> None:
        """Get the shard, and create the adapter as it is before an epoch (see RankPhase)."""
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
        """Prefetch this rank's activations (see RankPhase)."""
        if self.compute is None or self._cache is None:
            yield
            return
        rank = self.session.rank
        samples = [
            (step.samples[rank], step.shape.lengths[rank])
            for step in self.phase.steps(epoch)[begin:]
            if step.samples[rank]
        ]
        # An emulated device has one slowed core, with no time to prefetch; its LOAD has a separate cost.
        depth = 0 if self.session.slows_down else READ_AHEAD
        with CachedBatches(self._cache, samples, depth=depth, packs=self.compute.packs) as self._batches:
            yield

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        assert isinstance(self.optimizer, FlatAdamW)
        samples = planned.samples[self.session.rank]
        return PacPlusHandlers(
            rank=self.session.rank,
            batches=[collate(self.rank_job.split, samples)] if samples else [],
            total=planned.shape.samples,
            compute=self.compute,
            optimizer=self.optimizer,
            cache=self._batches,
            epoch=epoch,
            layers=self.rank_job.layers,
        ).table()

    def _shard(self) -> ActivationCache:
        """Return this rank's shard: an interrupted run's if it is the same, else filled from all ranks' shards and
        tapes.
        """
        session, rank_job = self.session, self.rank_job
        owners = rank_job.owners
        folder = session.context.own_folder(rank_job.folder) / "cache"
        samples = tuple(sample for sample, owner in enumerate(owners) if owner == session.rank)
        former, holders, is_same = self._former(folder, samples)
        if former is not None and is_same:
            return former
        all_taps, taps = whole_taps(rank_job.adapter), rank_taps(rank_job.plan, rank_job.adapter.num_encoder_layers)
        manifest = rank_job.manifest(session.rank, samples, all_taps)
        rounds = rank_job.shard_moves(holders)
        contents, tape = taped(former, all_taps), None
        lost = [sample for sample in range(len(owners)) if sample not in holders]
        if lost:
            tape = self._first.tape(lost)
            rounds += rank_job.tape_moves(rank_job.filling_steps(lost))
            contents |= taped(tape, taps.get(session.rank))
        shard = ActivationCache.create(folder.with_name("cache.part"), manifest)
        session.progress.phase(WAITING)
        session.barrier()
        self._carry_out("sharing the activations", rounds, contents, parts_of(shard, (all_taps, *taps.values())))
        session.barrier()
        shard.finish()
        self.result.nbytes["activation cache"] = manifest.nbytes
        for source in (former, tape):
            if source is not None:
                source.remove()
        return shard.moved(folder)

    def _former(
        self, folder: Path, samples: Sequence[int]
    ) -> tuple[ActivationCache | None, Mapping[int, Sequence[int]], bool]:
        """Return this rank's shard of an interrupted run, the ranks that have each sample, and whether all have what
        they need.
        """
        shard: ActivationCache | None = None
        if self.rank_job.start_epoch == 0:
            return None, {}, False
        holds = torch.zeros(self.session.context.world_size, len(self.rank_job.split))
        try:
            owner = self.session.context.device.name
            shard = ActivationCache.open(folder, fingerprint=self.rank_job.fingerprint, owner=owner)
            holds[self.session.rank, list(shard.samples)] = 1
        except CacheError as error:
            self.told_of(error)
        self.session.sum(holds)
        ranks_of = {sample: holds[:, sample].nonzero().flatten().tolist() for sample in range(holds.shape[1])}
        is_same = self.session.every_rank(shard is not None and set(shard.samples) == set(samples))
        return shard, {sample: ranks for sample, ranks in ranks_of.items() if ranks}, is_same

    def _carry_out(
        self, name: str, rounds: Sequence[Move], held_tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]
    ) -> None:
        with self.timed(name):
            self.result.redistribution += carry_out(rounds, self.session.rank, self.session.run, held_tensors, into)


def phases_on(session: RankSession[PacPlusRankJob], result: RankResult) -> tuple[RankPhase[PacPlusRankJob], ...]:
    """Return the phases as a rank does them."""
    first, *cached = session.rank_job.phases()
    first_epoch = FirstEpoch(session, first, result)
    return (first_epoch, *(CachedEpochs(session, phase, result, first_epoch) for phase in cached))


class FirstEpoch(StagePhase[PacPlusRankJob]):
    """A stage's backbone and adapters.  tensors: its adapters and moments at the end of the epoch; None before."""

    label = FIRST_EPOCH

    def __init__(self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        self.tensors: Mapping[str, torch.Tensor] | None = None
        self._folder = session.context.own_folder(self.rank_job.folder) / "tape"
        self._tape: ActivationCache | None = None
        self._has_taped = False

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self._build()
        self.result.nbytes["private memory with the backbone"] = read_memory().anonymous_bytes
        if self.compute is not None:
            self.result.nbytes["backbone held"] = held_bytes(self.compute.backbone)

    @contextmanager
    def epoch(self, epoch: int, begin: int) -> Iterator[None]:
        """Tape the activations; the backbone later fills those of steps before `begin` that are missing (see
        RankPhase).
        """
        manifest, steps = self._manifest(self.phase.steps(epoch)), self.phase.steps(epoch)[:begin]
        if manifest is not None and begin:
            try:
                self._tape = ActivationCache.reopen(self._folder, manifest)
            except CacheError as error:
                self.told_of(error)
        if manifest is not None and self._tape is None:
            self._tape = ActivationCache.create(self._folder, manifest)
        lacking = torch.zeros(begin)
        if self._tape is not None:
            written = self._tape.written
            for number, step in enumerate(steps):
                lacking[number] = not written.issuperset(taped_samples(self.rank_job.plan, self.session.rank, [step]))
        if begin:
            self.session.sum(lacking)
        yield
        # Last, so that a run whose devices have changed continues at once.
        self._fill([steps[number] for number in lacking.nonzero().flatten().tolist()])
        if self._tape is not None:
            self._tape.finish()
        if self.optimizer is not None:
            self.tensors = self.optimizer.named_tensors()
        self._has_taped = True

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        return PacPlusHandlers(tape=self._tape, **self.handler_fields(planned, epoch)).table()

    def tape(self, lost: Sequence[int]) -> ActivationCache | None:
        """Return this rank's tape of the first epoch.

        lost: samples whose records no rank has, after an interruption: either all of them are still taped, or the
        backbone refills these.
        """
        if self._has_taped:
            return self._tape
        steps = self.rank_job.filling_steps(lost)
        manifest = self._manifest(steps)
        self._tape = None
        if len(lost) == len(self.rank_job.split):
            try:
                self._tape = None if manifest is None else ActivationCache.open_as(self._folder, manifest)
            except CacheError as error:
                if self._folder.exists():  # a device removes its tape once its shard is complete
                    self.told_of(error)
            if self.session.every_rank(manifest is None or self._tape is not None):
                return self._tape
        self._build()
        self._tape = None if manifest is None else ActivationCache.create(self._folder, manifest)
        self._fill(steps)
        if self._tape is not None:
            self._tape.finish()
        self.release()
        return self._tape

    def _fill(self, steps: Sequence[PlannedStep]) -> None:
        """Tape the activations of some steps without training."""
        if steps:
            with self.timed("filling the cache again"):
                run_steps(self, steps, program=partial(Programs(self.rank_job).hybrid, backbone_only=True))

    def _build(self) -> None:
        if self.index is not None:
            self.compute, self.optimizer = build_stage(self.rank_job, self.index, self.steps_per_epoch)

    def _manifest(self, steps: Sequence[PlannedStep]) -> CacheManifest | None:
        """Return what this rank tapes in some steps; None for a rank without a stage, or if no epoch follows."""
        rank_job = self.rank_job
        if self.index is None or rank_job.job.epochs == 1:
            return None
        taps = rank_taps(rank_job.plan, rank_job.adapter.num_encoder_layers)[self.session.rank]
        return rank_job.manifest(self.session.rank, taped_samples(rank_job.plan, self.session.rank, steps), taps)


def build_stage(
    rank_job: PacPlusRankJob, index: int, steps_per_epoch: int, *, is_fast: bool = True
) -> tuple[StageCompute, FlatAdamW]:
    """Return a stage's layers and their optimizer.  is_fast: see StageCompute."""
    stage = rank_job.plan.stages[index]
    adapter = make_adapter(rank_job, stage.start, stage.stop)
    backbone = rank_job.load_backbone(stage.start, stage.stop)
    optimizer = make_optimizer(rank_job, adapter, steps_per_epoch)
    return StageCompute(adapter, backbone, tap_dtype=cache_dtype(rank_job.cache_dtype), is_fast=is_fast), optimizer


def make_adapter(rank_job: PacPlusRankJob, start: int, stop: int) -> ParallelAdapterStage:
    """Return the initial adapters of layers [start, stop), ready to train."""
    adapter = ParallelAdapterStage(rank_job.adapter, start, stop)
    load_state([rank_job.folder / INITIAL], rank_job.fingerprint, adapter.state_dict())
    if rank_job.adapter.kind in WORD_KINDS and stop == rank_job.adapter.num_layers:
        adapter.attach(load_language_model_head(rank_job.job.model))
    return adapter.train()


def save_initial(adapter: ParallelAdapter, folder: Path, run: str) -> None:
    """Write the initial adapter of every rank.  run: its fingerprint."""
    save_sealed(folder / INITIAL, owner_of(run, folder / INITIAL), adapter.state_dict())


CALIBRATION_SAMPLES = 256
DISTILLATION_BATCH = 32


def begin(
    prepared: PreparedJob,
    backbone: Callable[[], LayerStack] | None,
    rank_job: PacPlusRankJob,
    is_new: bool,
    notify: Notify,
) -> None:
    """Write the initial adapter of a new run into its folder (see TrainingMethod)."""
    if backbone is None:
        adapter = ParallelAdapter(prepared.adapter)
        initialize(adapter, "fan_in")
        save_initial(adapter, rank_job.folder, rank_job.fingerprint)
    elif is_new:
        save_initial(initial_adapter(prepared, backbone(), notify), rank_job.folder, rank_job.fingerprint)


def initial_adapter(prepared: PreparedJob, stack: LayerStack, notify: Notify = ignore) -> ParallelAdapter:
    """Return the initial adapter, calibrated on the backbone as the devices store it.

    An initialization that is made from the original weights loads the whole model for its time.
    Raises ConfigError if this backbone does not support the initialization.
    """
    adapter = ParallelAdapter(prepared.adapter)
    how = prepared.options.initialization
    original = partial(load_stack, prepared.job.model, with_head=prepared.predicts_words)
    if how == "distilled":
        load_distilled(adapter, _distilled_state(prepared, original(), notify))
    elif how == "torch_pruned":
        from workbench.models.initialization import copy_torch_pruned  # imported only on use: the package is optional

        copy_torch_pruned(adapter, original())
    else:
        initialize(adapter, how, stack=original() if how == "pruned" else None)
    train = prepared.train
    chosen = list(range(min(CALIBRATION_SAMPLES, len(train))))
    batches = [collate(train, chosen[start : start + 32]) for start in range(0, len(chosen), 32)]
    set_statistics(adapter, calibrate(stack, batches))
    return adapter


def _distilled_state(prepared: PreparedJob, stack: LayerStack, notify: Notify) -> dict:
    """Return the distilled weights, stored by an earlier run or trained now, which takes minutes."""
    texts = load_unlabelled()
    fingerprint = distillation_fingerprint(prepared.job.model, weights_digest(stack), prepared.adapter, texts)
    max_length = min(prepared.job.max_length, prepared.facts.max_length)

    def make() -> dict:
        notify(Event("phase", message=f"Distilling the initial weights on {len(texts)} texts (once)"))
        epochs = text_batches(
            texts, load_tokenizer(prepared.job.model), max_length, DISTILLATION_BATCH, prepared.adapter.seed
        )
        return distill(stack, prepared.adapter, epochs, lambda line: notify(Event("note", message=line)))

    return distilled(cache_folder() / "distilled", fingerprint, make)
