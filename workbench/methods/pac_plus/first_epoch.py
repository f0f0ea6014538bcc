"""The first epoch: hybrid data and pipeline parallelism, every activation taped for later (sections V-A and IV-B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from workbench.core.errors import CacheError
from workbench.methods.common.folder import checkpoint_path
from workbench.methods.common.reporting import FIRST_EPOCH, LOADING, WAITING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.pac_plus.building import build_stage, rank_folder, stage_slots
from workbench.methods.pac_plus.handlers import PacPlusHandlers
from workbench.methods.pac_plus.layout import taped_samples
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.pac_plus.redistribution import share_adapter
from workbench.methods.pac_plus.taps import stage_taps
from workbench.methods.training.phases import Phase, StagePhase
from workbench.methods.training.steps import PlannedStep
from workbench.methods.training.worker import run_steps
from workbench.models.quantization import held_bytes
from workbench.models.tensor_files import save_tensors
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory


class FirstEpoch(StagePhase[PacPlusRankJob]):
    """A stage's backbone and adapters.  tensors: after the epoch, the whole adapter's parameters and moments by name, on every rank."""

    label = FIRST_EPOCH

    def __init__(self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        self.writes_journal = self.is_writer
        self.tensors: Mapping[str, torch.Tensor] | None = None
        self._folder = rank_folder(session) / "tape"
        self._tape: ActivationCache | None = None
        self._has_taped = False

    def load(self, epoch: int) -> None:
        """Load the stage; what an interrupted run has taped is taken up again (see RankPhase)."""
        self.session.progress.phase(LOADING)
        self._build()
        self.result.nbytes["private memory with the backbone"] = read_memory().anonymous_bytes
        if self.compute is not None:
            self.result.nbytes["backbone held"] = held_bytes(self.compute.backbone)
        manifest = self._manifest()
        if manifest is not None and self.rank_job.resumes:
            try:
                self._tape = ActivationCache.reopen(self._folder, manifest)
            except CacheError as error:
                self.result.notes.append(str(error))
        self.usable = self._tape is not None or manifest is None

    @contextmanager
    def epoch(self, epoch: int, begin: int) -> Iterator[None]:
        """Tape the activations (see RankPhase)."""
        manifest = self._manifest()
        if begin == 0 and manifest is not None:
            self._tape = ActivationCache.create(self._folder, manifest)
        yield
        if self._tape is not None:
            self._tape.finish()
        self._has_taped = True

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        return PacPlusHandlers(tape=self._tape, **self.own(planned, epoch)).table()

    def save(self, epoch: int) -> None:
        """Bring the whole adapter to every rank, and write it (see RankPhase)."""
        session, rank_job = self.session, self.rank_job
        session.progress.phase(WAITING)
        session.barrier()
        with self.timed("sharing the adapter"):
            slots = stage_slots(rank_job.adapter, rank_job.plan)
            self.tensors, spans = share_adapter(session, rank_job.programs(), self.optimizer, slots)
        self.result.redistribution += spans
        if session.rank == rank_job.plan.stages[0].ranks[0]:
            save_tensors(checkpoint_path(rank_job.folder, epoch), self.tensors)

    def tape(self) -> ActivationCache | None:
        """Return what this rank taped in the first epoch; where any rank's tape is lost, the backbone fills them all again."""
        if self._has_taped:
            return self._tape
        usable = True
        try:
            self._tape = None if self.index is None else ActivationCache.open(self._folder, fingerprint=self.rank_job.fingerprint)
        except CacheError as error:
            self.result.notes.append(str(error))
            usable = False
        if self.session.agree(usable):
            return self._tape
        with self.timed("filling the cache again"):
            self._build()
            manifest = self._manifest()
            self._tape = None if manifest is None else ActivationCache.create(self._folder, manifest)
            run_steps(self, self.phase.steps(0), program=partial(self.rank_job.programs().hybrid, backbone_only=True))
            if self._tape is not None:
                self._tape.finish()
            self.release()
        return self._tape

    def _build(self) -> None:
        if self.index is not None:
            self.compute, self.optimizer = build_stage(self.rank_job, self.index, self.steps_per_epoch)

    def _manifest(self) -> CacheManifest | None:
        """Return what this rank tapes of the activations; None for a rank without a stage, and where no epoch follows."""
        rank_job = self.rank_job
        if self.index is None or rank_job.job.epochs == 1:
            return None
        stage, config = rank_job.plan.stages[self.index], rank_job.adapter
        taps = stage_taps(stage.start, stage.stop, config.num_encoder_layers)
        samples = taped_samples(rank_job.plan, self.session.rank, self.phase.steps(0))
        return CacheManifest(
            fingerprint=rank_job.fingerprint,
            samples=samples,
            lengths=tuple(rank_job.split.lengths[sample] for sample in samples),
            num_taps=taps.num_taps,
            width=config.hidden_size,
            dtype=rank_job.cache_dtype,
            num_target_taps=taps.num_target_taps,
            target_length=config.target_length,
        )
