"""A rank's part of a run, whole or up to its middle, without a coordinator; for the engines to import."""

from __future__ import annotations

from typing import Any

from workbench.methods.common.rank_results import RankResult, StepTrace
from workbench.methods.fine_tuning.method import FineTuning
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.pac_plus.method import PacPlus
from workbench.methods.pac_plus.rank_job import PacPlusRankJob
from workbench.methods.ringada.method import RingAda
from workbench.methods.ringada.rank_job import RingRankJob
from workbench.methods.training import worker
from workbench.methods.training.worker import TrainingWorker
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Controls
from workbench.runtime.process_group import group

METHODS = {FineTuningRankJob: FineTuning, PacPlusRankJob: PacPlus, RingRankJob: RingAda}


def train_rank(context: RankContext, job: Any) -> RankResult:
    """Do a rank's part as one of all ranks."""
    with (
        group(context, job.timeout_s) as process_group,
        TrainingWorker(METHODS[type(job)].phases_on, context.dilation) as worker,
    ):
        return worker.train(context, process_group, job, Controls())[1]


def stop_in_the_first_epoch(context: RankContext, job: Any) -> None:
    """Do a rank's part until it has completed the second step of the first epoch; all ranks stop there."""
    _stop(context, job, (0, 1))


def stop_in_the_second_epoch(context: RankContext, job: Any) -> None:
    """Do a rank's part until it has completed the second step of the second epoch; all ranks stop there."""
    _stop(context, job, (1, 1))


def _stop(context: RankContext, job: Any, at: tuple[int, int]) -> None:
    note = worker._note

    def note_and_stop(*about: Any) -> None:
        note(*about)
        trace: StepTrace = about[-1]
        if (trace.epoch, trace.step) == at:
            raise InterruptedError

    worker._note = note_and_stop
    try:
        train_rank(context, job)
    except InterruptedError:
        return
    finally:
        worker._note = note
