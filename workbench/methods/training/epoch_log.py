"""What an unfinished epoch leaves on the disk after every step, and how a resumed run finds the last step that all devices completed."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.core.errors import WorkbenchError
from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.folder import journal_path, steps_log_path
from workbench.methods.common.session import RankSession, StepTrace
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.step_journal import StepJournal


class EpochLog:
    """One rank's record of one epoch: its steps, one line each, and (one rank for each stage) the optimizer after every step.

    stage: the pipeline stage whose adapters the optimizer holds, -1 in a cached epoch, where it holds them all.
    writes_journal: every rank of a group has the same adapters after a step, so one writes for all.
    """

    def __init__(
        self, session: RankSession, epoch: int, optimizer: FlatAdamW | None, *, stage: int, writes_journal: bool, num_steps: int
    ) -> None:
        self._session, self._epoch, self._optimizer, self._num_steps = session, epoch, optimizer, num_steps
        self._journal_path = journal_path(session.rank_job.folder, epoch, stage)
        self._lines_path = steps_log_path(session.rank_job.folder, epoch, session.rank)
        self._writes_journal = writes_journal
        self._journal: StepJournal | None = None
        self.done: list[StepTrace] = []
        """The steps that were completed before this call of the program."""

    @property
    def takes_part(self) -> bool:
        """Return whether this rank has a share in the epoch."""
        return self._optimizer is not None

    def agree(self, *, usable: bool) -> int:
        """Return how many steps of this epoch all ranks have completed, with the optimizer set to what it was then.

        usable: whether this rank's tape or cache can be used; if any rank's cannot, the epoch begins anew.
        Every rank must call this, also one without a share.
        """
        votes = torch.zeros(self._num_steps + 2)  # by completed steps; the last word counts the voters
        journal = kept = None
        if self._optimizer is not None:
            votes[-1] = 1
            kept = read_log(self._lines_path)
            journal = StepJournal(self._journal_path, self._optimizer, writable=False)
            before = self._epoch * self._num_steps
            for steps in journal.kept_steps() if usable else ():
                if 0 < steps - before <= len(kept):
                    votes[steps - before] = 1
        self._session.sum(votes)
        agreed = torch.nonzero(votes[:-1] == votes[-1]).flatten().tolist() if votes[-1] else []
        count = max(agreed, default=0)
        if journal is not None and kept is not None and count:
            journal.restore(self._epoch * self._num_steps + count)
            self.done = kept[:count]
        return count

    def begin(self) -> None:
        """Open the files for the steps to come; what was not agreed on is dropped."""
        if self._optimizer is None:
            return
        # Whole or not at all: a kill in this moment must not lose what is already done.
        write_text(self._lines_path, "".join(_line(trace) for trace in self.done))
        if self._writes_journal:
            if not self.done:
                self._journal_path.unlink(missing_ok=True)
            self._journal = StepJournal(self._journal_path, self._optimizer, writable=True)

    def __call__(self, trace: StepTrace) -> None:
        """Note a step that this rank has completed; the journal last, for it is what makes the step count."""
        with open(self._lines_path, "a", encoding="utf-8") as lines:
            lines.write(_line(trace))
        if self._journal is not None:
            self._journal.write()

    def end(self) -> None:
        """Remove the files of an epoch that is kept whole by now."""
        self._lines_path.unlink(missing_ok=True)
        if self._writes_journal:
            self._journal_path.unlink(missing_ok=True)


def _line(trace: StepTrace) -> str:
    return to_json(trace, indent=-1) + "\n"


def read_log(path: Path) -> list[StepTrace]:
    """Return the steps 0, 1, ... of a log whose lines are whole; the last may have been cut off."""
    traces: list[StepTrace] = []
    if not path.is_file():
        return traces
    for line in path.read_bytes().splitlines():
        try:
            trace = from_json(line, StepTrace, source=str(path))
        except WorkbenchError:
            break
        if trace.step != len(traces):
            break
        traces.append(trace)
    return traces
