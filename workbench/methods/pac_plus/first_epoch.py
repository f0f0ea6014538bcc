"""The first epoch: hybrid data and pipeline parallelism, every activation taped for later (sections V-A and IV-B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.plan import Plan
from workbench.methods.common.session import RankSession, StepTrace, trace_of
from workbench.methods.common.steps import PAD_TO_MULTIPLE, PlannedStep
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.handlers import HybridHandlers
from workbench.methods.pac_plus.taps import stage_taps
from workbench.runtime.activation_cache import ActivationCache, CacheManifest
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.schedules.pieces import StepLayout
from workbench.tasks.tokenize import collate


def taped_samples(plan: Plan, rank: int, steps: Sequence[PlannedStep]) -> tuple[int, ...]:
    """Return the samples whose activations the rank sees in the first epoch, in that order."""
    index = plan.stage_of(rank)
    if index is None:
        return ()
    stage = plan.stages[index]
    position = stage.ranks.index(rank)
    return tuple(sample for step in steps for micro in step.samples for sample in micro[slice(*stage.split(len(micro))[position])])


def tape_manifest(session: RankSession, steps: Sequence[PlannedStep]) -> CacheManifest | None:
    """Return what this rank tapes of the activations; None for a rank without a stage."""
    plan = session.rank_job.plan
    index = plan.stage_of(session.rank)
    if index is None:
        return None
    stage = plan.stages[index]
    samples, config = taped_samples(plan, session.rank, steps), session.rank_job.adapter
    taps = stage_taps(stage.start, stage.stop, config.num_encoder_layers)
    return CacheManifest(
        fingerprint=session.rank_job.fingerprint,
        samples=samples,
        lengths=tuple(session.split.lengths[sample] for sample in samples),
        num_taps=taps.num_taps,
        width=config.hidden_size,
        dtype=session.rank_job.cache_dtype,
        num_target_taps=taps.num_target_taps,
        target_length=config.target_length,
    )


def train_first_epoch(
    session: RankSession,
    steps: Sequence[PlannedStep],
    compute: StageCompute | None,
    optimizer: FlatAdamW | None,
    tape: ActivationCache | None,
    *,
    epoch: int = 0,
    backbone_only: bool = False,
    begin: int = 0,
    note: Callable[[StepTrace], None] | None = None,
) -> list[StepTrace]:
    """Train one epoch on this rank and return its steps; a rank that the plan leaves idle returns at once.

    backbone_only: train nothing, only run the backbone and fill the tape.  begin: the first step to do.
    note: is called after every step that this rank has completed.
    """
    rank_job = session.rank_job
    index = rank_job.plan.stage_of(session.rank)
    if index is None or compute is None or optimizer is None:
        return []
    stage, programs = rank_job.plan.stages[index], rank_job.programs()
    traces = []
    for number, planned in list(enumerate(steps))[begin:]:
        handlers = HybridHandlers(
            rank=session.rank,
            layout=StepLayout(plan=rank_job.plan, sizes=planned.shape.sizes, lengths=planned.shape.lengths),
            batches=[collate(session.split, micro, PAD_TO_MULTIPLE) for micro in planned.samples],
            samples=planned.samples,
            compute=compute,
            optimizer=optimizer,
            tape=tape,
            epoch=epoch,
            layers=rank_job.layers[stage.start : stage.stop],
        )
        done = session.run(programs.hybrid(planned.shape, backbone_only=backbone_only), handlers.table())
        trace = trace_of(session, done, epoch, number, len(steps), planned.shape.samples)
        session.progress.step(trace, len(steps), cached=False, trains=not backbone_only)
        traces.append(trace)
        if note is not None:
            note(trace)
    return traces
