"""Some steps under any plan: to lay predicted and measured step times beside each other."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.records import WARM_UP_STEPS
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.common.steps import PlannedStep
from workbench.methods.fine_tuning.session import RankJob
from workbench.methods.fine_tuning.worker import build_stage, prepare_imports, train_epoch
from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget
from workbench.runtime.process_group import group


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSweep:
    """A plan and the steps to run under it."""

    rank_job: RankJob
    steps: tuple[PlannedStep, ...]


def run_sweep(context: RankContext, sweep: RankSweep) -> RankResult:
    """Run the steps on this rank, some of them twice at the beginning as a warm-up."""
    rank_job = sweep.rank_job
    prepare_imports(rank_job)
    with (
        group(context, rank_job.timeout_s) as process_group,
        MemoryBudget(context.device.name, context.device.memory_bytes),
        RankSession(context, rank_job, process_group) as session,
    ):
        result = RankResult(rank=context.rank)
        compute, optimizer = build_stage(rank_job, rank_job.plan.stage_of(context.rank), WARM_UP_STEPS + len(sweep.steps))
        session.barrier()
        train_epoch(session, rank_job, sweep.steps[:WARM_UP_STEPS], compute, optimizer)
        session.pacer.reset()
        result.steps = train_epoch(session, rank_job, sweep.steps, compute, optimizer)
        result.overrun_share, result.late_s, result.paced_s = session.pacer.overrun_share, session.pacer.late_s, session.pacer.paced_s
        return result
