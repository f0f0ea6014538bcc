"""Some steps of the first epoch under any plan: to lay predicted and measured step times beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.records import WARM_UP_STEPS
from workbench.methods.common.session import RankResult, RankSession, StepTrace
from workbench.methods.common.steps import PlannedStep, plan_steps
from workbench.methods.pac_plus.building import build_stage
from workbench.methods.pac_plus.first_epoch import train_first_epoch
from workbench.methods.pac_plus.prepare import PreparedJob
from workbench.methods.pac_plus.session import RankJob
from workbench.models.loading import import_family
from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget
from workbench.runtime.process_group import group
from workbench.tasks.batching import epoch_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSweep:
    """A plan and the steps to run under it."""

    rank_job: RankJob
    steps: tuple[PlannedStep, ...]


def sweep_steps(prepared: PreparedJob, num_steps: int) -> tuple[PlannedStep, ...]:
    """Return `num_steps` mini-batches of the first epoch whose length is closest to the mean, the same for every plan."""
    job, lengths = prepared.job, prepared.train.lengths
    steps = plan_steps(epoch_batches(lengths, job.batch_size, job.seed, 0), lengths, job.micro_batches)
    whole = [step for step in steps if step.shape.samples == job.batch_size] or list(steps)
    typical = prepared.typical_length
    return tuple(sorted(whole, key=lambda step: abs(max(step.shape.lengths) - typical))[:num_steps])


def run_sweep(context: RankContext, sweep: RankSweep) -> RankResult:
    """Run the steps on this rank, some of them twice at the beginning as a warm-up."""
    rank_job = sweep.rank_job
    import_family(rank_job.job.model)
    with (
        group(context, rank_job.timeout_s) as process_group,
        MemoryBudget(context.device.name, context.device.memory_bytes),
        RankSession(context, rank_job, process_group) as session,
    ):
        result = RankResult(rank=context.rank)
        warm_up = sweep.steps[:WARM_UP_STEPS]
        compute, optimizer = build_stage(rank_job, rank_job.plan.stage_of(context.rank), len(warm_up) + len(sweep.steps))

        def train(steps: tuple[PlannedStep, ...]) -> list[StepTrace]:
            return train_first_epoch(session, steps, compute, optimizer, None)

        session.barrier()
        train(warm_up)
        session.pacer.reset()
        result.steps = train(sweep.steps)
        result.overrun_share, result.late_s, result.paced_s = session.pacer.overrun_share, session.pacer.late_s, session.pacer.paced_s
        return result
