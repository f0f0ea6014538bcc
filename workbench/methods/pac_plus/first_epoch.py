"""The first epoch: hybrid data and pipeline parallelism, every activation taped for later (sections V-A and IV-B)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from workbench.core.errors import CacheError
from workbench.methods.common.reporting import FIRST_EPOCH, LOADING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.pac_plus.handlers import PacPlusHandlers
from workbench.methods.pac_plus.initial import build_stage
from workbench.methods.pac_plus.prepare import stage_taps
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.pac_plus.redistribution import taped_samples
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import Phase, StagePhase
from workbench.methods.training.worker import run_steps
from workbench.models.quantization import held_bytes
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory


class FirstEpoch(StagePhase[PacPlusRankJob]):
    """A stage's backbone and adapters.  tensors: of its adapters and their moments as the epoch left them; None before."""

    label = FIRST_EPOCH

    def __init__(self, session: RankSession[PacPlusRankJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        self.tensors: Mapping[str, torch.Tensor] | None = None
        self._folder = session.context.own_folder(self.rank_job.folder) / "tape"
        self._tape: ActivationCache | None = None
        self._has_taped = False

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        self._build()
        self.result.nbytes["private memory with the backbone"] = read_memory().anonymous_bytes
        if self.compute is not None:
            self.result.nbytes["backbone held"] = held_bytes(self.compute.backbone)

    @contextmanager
    def epoch(self, epoch: int, begin: int) -> Iterator[None]:
        """Tape the activations; where a tape lacks those of steps before `begin`, the backbone fills them afterwards (see RankPhase)."""
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
        # Last, so that a run whose devices have changed goes on at once.
        self._fill([steps[number] for number in lacking.nonzero().flatten().tolist()])
        if self._tape is not None:
            self._tape.finish()
        if self.optimizer is not None:
            self.tensors = self.optimizer.named_tensors()
        self._has_taped = True

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        return PacPlusHandlers(tape=self._tape, **self.own(planned, epoch)).table()

    def tape(self, lost: Sequence[int]) -> ActivationCache | None:
        """Return what this rank taped in the first epoch.

        lost: samples whose records no rank has, after an interruption: all of them are taped still, or the backbone fills these again.
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
                self.told_of(error)
            if self.session.agree(manifest is None or self._tape is not None):
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
                run_steps(self, steps, program=partial(self.rank_job.programs().hybrid, backbone_only=True))

    def _build(self) -> None:
        if self.index is not None:
            self.compute, self.optimizer = build_stage(self.rank_job, self.index, self.steps_per_epoch)

    def _manifest(self, steps: Sequence[PlannedStep]) -> CacheManifest | None:
        """Return what this rank tapes of some steps' activations; None for a rank without a stage, and where no epoch follows."""
        rank_job = self.rank_job
        if self.index is None or rank_job.job.epochs == 1:
            return None
        stage, config = rank_job.plan.stages[self.index], rank_job.adapter
        taps = stage_taps(stage.start, stage.stop, config.num_encoder_layers)
        samples = taped_samples(rank_job.plan, self.session.rank, steps)
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
