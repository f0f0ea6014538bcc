"""What an epoch leaves on the disk after every step: who did it in what time, and what was trained."""

from __future__ import annotations

from collections.abc import Callable

from workbench.core.serial import to_json
from workbench.methods.common.folder import journal_path, steps_log_path
from workbench.methods.common.session import StepTrace, on_clock
from workbench.methods.training.phases import RankPhase
from workbench.runtime.step_journal import StepJournal


class EpochLog:
    """One rank's record of one epoch from a step on: a line for each step, and (one rank for each group) the state after every step."""

    def __init__(self, phase: RankPhase, epoch: int, begin: int, told: Callable[[StepTrace], None] | None = None) -> None:
        """told: is called with every step once it is kept."""
        session, folder = phase.session, phase.rank_job.folder
        self._journal: StepJournal | None = None
        self._told = told
        self._offset_s = session.context.clock_offset_s
        self._path = steps_log_path(folder, epoch, begin, session.rank)
        self._journal_path = journal_path(folder, epoch, phase.layers)
        if phase.optimizer is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        if phase.keeps_steps:
            self._journal = StepJournal(self._journal_path, phase.optimizer)

    def __call__(self, trace: StepTrace) -> None:
        """Note a step that this rank has completed; the journal last, for it is what makes the step count."""
        with open(self._path, "a", encoding="utf-8") as lines:
            lines.write(to_json(on_clock(trace, self._offset_s), indent=-1) + "\n")
        if self._journal is not None:
            self._journal.write()
        if self._told is not None:
            self._told(trace)

    def end(self) -> None:
        """Remove the journal of an epoch that is kept whole by now."""
        if self._journal is not None:
            self._journal_path.unlink(missing_ok=True)
