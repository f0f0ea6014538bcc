"""A rank's part of a run that stops in its middle, for the engines to import."""

from __future__ import annotations

from typing import Any

from workbench.methods.common.session import StepTrace
from workbench.methods.fine_tuning.method import FineTuning
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.pac_plus.method import PacPlus
from workbench.methods.training.interrupted import EpochLog
from workbench.runtime.context import RankContext


def stop_in_the_first_epoch(context: RankContext, job: Any) -> None:
    """Do a rank's part until it has completed the second step of the first epoch; all ranks stop there."""
    _stop(context, job, (0, 1))


def stop_in_the_second_epoch(context: RankContext, job: Any) -> None:
    """Do a rank's part until it has completed the second step of the second epoch; all ranks stop there."""
    _stop(context, job, (1, 1))


def _stop(context: RankContext, job: Any, at: tuple[int, int]) -> None:
    note = EpochLog.__call__

    def note_and_stop(log: EpochLog, trace: StepTrace) -> None:
        note(log, trace)
        if (trace.epoch, trace.step) == at:
            raise InterruptedError

    EpochLog.__call__ = note_and_stop
    try:
        (FineTuning if isinstance(job, FineTuningRankJob) else PacPlus).run_rank(context, job)
    except InterruptedError:
        return
    finally:
        EpochLog.__call__ = note
