"""A rank's part of a run that stops in its middle, for the engines to import."""

from __future__ import annotations

from workbench.methods.common.session import StepTrace
from workbench.methods.fine_tuning.method import run_rank
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.training.epoch_log import EpochLog
from workbench.runtime.context import RankContext


def stop_in_the_second_epoch(context: RankContext, job: FineTuningRankJob) -> None:
    """Do a rank's part until it has completed the second step of the second epoch; all ranks stop there."""
    note = EpochLog.__call__

    def note_and_stop(log: EpochLog, trace: StepTrace) -> None:
        note(log, trace)
        if (trace.epoch, trace.step) == (1, 1):
            raise InterruptedError

    EpochLog.__call__ = note_and_stop
    try:
        run_rank(context, job)
    except InterruptedError:
        return
    finally:
        EpochLog.__call__ = note
