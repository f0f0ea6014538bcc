"""The history and the prediction of a P-RGE run: its log on disk, from which it can resume, and the time of its next steps.

Devices store nothing: one that joins late, comes back or gets other layers replays the steps of the log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import msgspec

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.serial import from_json, to_json, write_text
from workbench.core.timeline import Timeline
from workbench.methods.base import Prediction
from workbench.methods.common.folder import STEPS, begin_folder, holds_run, weights_digest
from workbench.methods.common.records import traced_step
from workbench.methods.p_rge.layout import Change, QueryStep, Shape
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.models.zeroth_order import CausalModel, LogFile, StepLog
from workbench.planners.adaptive import Setting
from workbench.planners.queries import chosen_passings
from workbench.simulator import simulate

LOG, CHANGES = "log.jsonl", "changes.json"


class History:
    """The finished steps, in memory and on disk.  resumed: number of steps done by an earlier program call."""

    def __init__(self, folder: Path, prepared: PreparedJob, model: CausalModel, *, resume: bool) -> None:
        """Begin a run in a folder, or reopen exactly the same run.  Raises CacheError for another run's, ConfigError for foreign files."""
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
        """Record a step unless it is known, because every device reports it.  It is on the disk on return."""
        assert record.step <= len(self.records), f"step {record.step} was told before step {len(self.records)}"
        if record.step == len(self.records):
            self.records.append(record)
            self._file.append(record)

    def changed(self, setting: Setting) -> Change:
        """Return the change from which a setting would apply, if the next steps had it; the last change if it already applies."""
        step, last = len(self.records), self.changes[-1]
        return last if setting == last.setting else Change(step, last.samples_before(step), setting)

    def change(self, change: Change) -> None:
        """Record that the next steps have another setting."""
        self.changes.append(change)
        write_text(self._changes_path, to_json(self.changes))

    def close(self) -> None:
        """Close the log."""
        self._file.close()


def notes_of(history: History, prepared: PreparedJob, *, resume: bool) -> tuple[str, ...]:
    """Return notes for the report: where the run began and how its settings changed."""
    notes = []
    if resume and not history.found:
        notes.append("Nothing to resume: the run starts over.")
    elif resume:
        notes.append(f"Resumed after {history.resumed} of {prepared.num_steps} steps, from their seeds and scalars.")
    notes += [f"From step {change.step + 1} on {words(change.setting)}." for change in history.changes[1:]]
    return tuple(notes)


def words(setting: Setting) -> str:
    """Describe a setting in words."""
    return f"{setting.queries} queries of {setting.batch_size} samples, weights in {setting.precision}"


class Predictor:
    """Simulates the steps of one plan and setting on one cluster: a runtime.coordinator.Predictor.  Equal shapes are simulated once."""

    def __init__(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting, shape: Callable[[int], Shape]
    ) -> None:
        """shape: of each step's batch.  Raises PlanError if a device has too little memory for its share."""
        self._profile, self.cluster, self._crossing = profile, cluster, prepared.crossing(setting)
        self.passings = chosen_passings(profile, cluster, plan, prepared.size(setting))
        self._step = QueryStep.build(plan, self.passings, cluster.world_size)
        self.shape = shape
        self.timeline = lru_cache(maxsize=None)(self._simulated)

    def program(self, shape: Shape) -> Program:
        """Return the program of a step, the one that the ranks execute."""
        return self._step.program(self._profile, self.cluster, shape, self._crossing)

    def _simulated(self, shape: Shape, title: str = "") -> Timeline:
        """Return the timeline of a step; its memory too if it has a title."""
        return simulate(self.program(shape), title=title, memory=bool(title))

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        return self.timeline(self.shape(step)).makespan_s

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step in which a device computes."""
        return self.timeline(self.shape(step)).busy_s(place)


def predict(prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, setting: Setting) -> Prediction:
    """Return every step's simulated seconds, as if nothing changed, and the timeline of a middle step of the first epoch.

    bytes: sent by all devices in a step, and for comparison by first-order data parallelism on the same devices.
    """
    predictor = Predictor(prepared, profile, cluster, plan, setting, partial(prepared.shape, Change(0, 0, setting)))
    per_epoch = prepared.steps_per_epoch
    middle = traced_step(min(per_epoch, prepared.num_steps))
    timeline = predictor.timeline(predictor.shape(middle), f"Step {middle + 1} of the first epoch")
    steps = tuple(
        StepRecord(
            epoch=step // per_epoch,
            step=step % per_epoch,
            samples=setting.batch_size,
            cached=False,
            predicted_s=predictor.seconds(step),
        )
        for step in range(prepared.num_steps)
    )
    epochs = tuple(
        EpochRecord(epoch=epoch, cached=False, seconds=sum(step.predicted_s or 0.0 for step in steps if step.epoch == epoch))
        for epoch in range(steps[-1].epoch + 1)
    )
    trained = sum(layer.trainable_bytes for layer in profile.layers[0])
    devices = sum(len(stage.shares) for stage in plan.stages)
    return Prediction(
        steps=steps,
        epochs=epochs,
        timelines={"first epoch, predicted": timeline},
        bytes={
            "sent in a step": sum(timeline.bytes_sent(rank) for rank in range(cluster.world_size)),
            # A ring all-reduce of a gradient sends 2 (n - 1) times the bytes of all trained values.
            "sent in a step of first-order data parallelism": 2 * (devices - 1) * trained,
            "kept of a step in the log": 8 * setting.queries,
        },
    )
