"""What a run leaves on disk while it goes on: its steps as seeds and scalars, and the changes of its settings; enough to go on from.

Devices keep nothing: one that comes late, comes back or takes other layers over makes the steps of the log anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from workbench.core.serial import to_json
from workbench.methods.common.digest import weights_digest
from workbench.methods.common.folder import STEPS, begin_folder, holds_run
from workbench.methods.p_rge.layout import Change
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.models.zeroth_order import CausalModel, LogFile, StepLog
from workbench.planners.adaptive import Setting

LOG, CHANGES = "log.jsonl", "changes.jsonl"


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
        self.changes = self._read_changes()
        if not self.changes or self.changes[0].step:
            self.changes.insert(0, Change(0, 0, prepared.setting))

    def add(self, record: StepLog) -> bool:
        """Note a step; return False if it is known already, as every device tells of it.  On the disk when this returns."""
        if record.step != len(self.records):
            assert record.step < len(self.records), f"step {record.step} was told before step {len(self.records)}"
            return False
        self.records.append(record)
        self._file.append(record)
        return True

    def changed(self, setting: Setting) -> Change:
        """Return from where on a setting would be in force, if it were the next steps'; the last change if it is already."""
        step, last = len(self.records), self.changes[-1]
        return last if setting == last.setting else Change(step, last.samples_before(step), setting)

    def change(self, change: Change) -> None:
        """Note that the next steps have another setting."""
        self.changes.append(change)
        with open(self._changes_path, "ab") as file:
            file.write(to_json(change, indent=-1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the log."""
        self._file.close()

    def _read_changes(self) -> list[Change]:
        """Return what the file holds of these steps; a last line that was torn by a crash is cut off."""
        if not self._changes_path.is_file():
            return []
        found: list[Change] = []
        whole = 0
        for line in self._changes_path.read_bytes().splitlines(keepends=True):
            try:
                change = msgspec.json.decode(line, type=Change)
            except (msgspec.DecodeError, msgspec.ValidationError):
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if change.step <= len(self.records):
                found.append(change)
        os.truncate(self._changes_path, whole)
        return found


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
