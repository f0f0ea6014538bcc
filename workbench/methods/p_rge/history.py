"""What a run leaves on disk while it goes on: its steps as seeds and scalars, and the changes of its settings; enough to go on from.

Devices keep nothing: one that comes late, comes back or takes over other layers repeats the steps of the log.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.digest import weights_digest
from workbench.methods.common.folder import STEPS, begin_folder, holds_run
from workbench.methods.p_rge.layout import Change
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.models.zeroth_order import CausalModel, LogFile, StepLog
from workbench.planners.adaptive import Setting

LOG, CHANGES = "log.jsonl", "changes.json"


class History:
    """The steps that are done, in memory and on disk.  resumed: how many of them an earlier call of the program has done."""

    def __init__(self, folder: Path, prepared: PreparedJob, model: CausalModel, *, resume: bool) -> None:
        """Begin a run in a folder, or open that of the very same one.  Raises CacheError for another's, ConfigError for files of none."""
        text = msgspec.json.encode(prepared.identity() | {"weights": weights_digest(model.backbone)})
        identity, digest = msgspec.json.decode(text), hashlib.sha256(text).hexdigest()
        self.found = resume and holds_run(folder, digest, prepared.job)
        if not self.found:
            begin_folder(folder, digest, prepared.job)
        self.path = folder / STEPS / LOG
        self._changes_path = folder / STEPS / CHANGES
        self._file = LogFile(self.path, identity)
        self.records: list[StepLog] = list(self._file.steps[: prepared.num_steps])
        self.resumed = len(self.records)
        self.changes = [Change(0, 0, prepared.setting)]
        if self._changes_path.is_file():
            changes = from_json(self._changes_path.read_bytes(), list[Change], source=f"'{self._changes_path}'")
            self.changes = [change for change in changes if change.step <= self.resumed]

    def add(self, record: StepLog) -> None:
        """Note a step unless it is known, because every device reports it.  It is on the disk when this returns."""
        assert record.step <= len(self.records), f"step {record.step} was told before step {len(self.records)}"
        if record.step == len(self.records):
            self.records.append(record)
            self._file.append(record)

    def changed(self, setting: Setting) -> Change:
        """Return from where on a setting would be in force, if it were the next steps'; the last change if it is already."""
        step, last = len(self.records), self.changes[-1]
        return last if setting == last.setting else Change(step, last.samples_before(step), setting)

    def change(self, change: Change) -> None:
        """Note that the next steps have another setting."""
        self.changes.append(change)
        write_text(self._changes_path, to_json(self.changes))

    def close(self) -> None:
        """Close the log."""
        self._file.close()


def notes_of(history: History, prepared: PreparedJob, *, resume: bool) -> tuple[str, ...]:
    """Return what a reader of the report should know of where the run began and how its settings changed."""
    notes = []
    if resume and not history.found:
        notes.append("Nothing to resume: the run starts over.")
    elif resume:
        notes.append(f"Resumed after {history.resumed} of {prepared.num_steps} steps, from their seeds and scalars.")
    notes += [f"From step {change.step + 1} on {words(change.setting)}." for change in history.changes[1:]]
    return tuple(notes)


def words(setting: Setting) -> str:
    """Return a setting in words."""
    return f"{setting.queries} queries of {setting.batch_size} samples, weights in {setting.precision}"
