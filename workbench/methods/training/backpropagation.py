"""The common part of methods with backpropagation: costs by technique, runs that continue from snapshots, scores."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.names import FP32_BYTES
from workbench.core.profile import Profile
from workbench.core.report import TRAINED_WEIGHTS
from workbench.core.sealed import owner_of
from workbench.core.serial import to_json
from workbench.methods.base import Event, Notify, Outcome, Planned, ignore
from workbench.methods.common.folder import begin_folder, holds_run, model_digest
from workbench.methods.common.measured_stack import measured_stack
from workbench.methods.common.records import device_bytes
from workbench.methods.common.room import require_places
from workbench.methods.common.scaling import describe_facts
from workbench.methods.training.faults import VirtualTraining
from workbench.methods.training.interrupted import Interrupted, begin, take_up
from workbench.methods.training.method import SplitName, Trained, TrainingMethod
from workbench.methods.training.phases import RankJob
from workbench.methods.training.policy import TrainingPolicy
from workbench.methods.training.prepare import PreparedTraining
from workbench.methods.training.worker import PhasesOn, TrainingWorker
from workbench.models.evaluation import Predictions
from workbench.models.layers_on_disk import load_frozen
from workbench.models.loading import load_stack
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.sealed_tensors import damage_of
from workbench.models.stack import LayerStack
from workbench.profiler.analytic import (
    LayerCost,
    NumberFormat,
    Technique,
    TechniqueSizes,
    analytic_profile,
    layer_costs,
)
from workbench.tasks.metrics import score
from workbench.tasks.tokenize import TokenizedSplit


class AnalyticTechnique(NamedTuple):
    """How a method trains, for the analytic costs.  numbers: number format of the frozen backbone."""

    name: Technique
    sizes: TechniqueSizes
    numbers: NumberFormat = NumberFormat()


class Predicting(Trained, Protocol):
    """The trained model after each epoch of a run, which predicts a tokenized split."""

    def predict(self, epochs: Sequence[int], split: TokenizedSplit, notify: Notify = ignore) -> list[Predictions]:
        """Return the predictions on a split after each of some epochs."""
        ...


P = TypeVar("P", bound=PreparedTraining)


class BackpropagationMethod(TrainingMethod[P]):
    """A TrainingMethod that backpropagates, and stores what it trains in snapshots.

    phases_on: builds the phases of a RankJob on a rank (see worker.TrainingWorker).
    """

    phases_on: PhasesOn[Any]
    virtual_policy = VirtualTraining
    trained: Callable[[P, LayerStack, Any], Predicting]

    @classmethod
    def worker(cls, dilation: float) -> TrainingWorker[Any]:
        """Return what does a device's steps (see TrainingMethod)."""
        return TrainingWorker(cls.phases_on, dilation)

    @abstractmethod
    def num_trained(self, prepared: P) -> int:
        """Return the number of weights that are trained once all layers are (see Method)."""

    @abstractmethod
    def technique(self, prepared: P) -> AnalyticTechnique:
        """Return how the method trains, for the analytic costs."""

    def scaled(self, prepared: P, cluster: Cluster, notify: Notify, *, refresh: bool) -> Profile:
        """Return every layer's cost on every device (see ProfiledMethod).  Raises PlanError if the model fits on no
        plan's devices, before it is measured.
        """
        require_places(prepared.job, self.layer_costs(prepared, batch=1, sequence_length=1), cluster)
        return super().scaled(prepared, cluster, notify, refresh=refresh)

    def measured_stack(self, prepared: P, quantization: QuantizationConfig | None = None) -> LayerStack:
        """Return the layers whose costs are measured (see common.measured_stack)."""
        costs = self.layer_costs(prepared, batch=1, sequence_length=1)
        return measured_stack(
            prepared.job.model, prepared.facts, costs, quantization, with_head=prepared.predicts_words
        )

    def catalogue(self, prepared: P, cluster: Cluster) -> Profile:
        """Return every layer's cost from the catalogue's figures (see ProfiledMethod)."""
        technique, typical = self.technique(prepared), prepared.typical_length
        return analytic_profile(
            describe_facts(prepared.facts),
            cluster,
            technique=technique.name,
            sizes=technique.sizes,
            numbers=technique.numbers,
            num_labels=prepared.task.num_outputs,
            sequence_lengths=tuple(sorted({8, typical, 2 * typical, prepared.longest})),
        )

    def layer_costs(self, prepared: P, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's analytic FLOPs and bytes (see Method)."""
        technique = self.technique(prepared)
        return layer_costs(
            describe_facts(prepared.facts),
            technique.name,
            batch=batch,
            sequence_length=sequence_length,
            sizes=technique.sizes,
            numbers=technique.numbers,
            num_labels=prepared.task.num_outputs,
        )

    def backbone(self, prepared: P) -> LayerStack:
        """Return the model as the run's devices store it (see TrainingMethod).

        The process holds some of its layers at a time, unless training changes them.
        """
        model, with_head = prepared.job.model, prepared.predicts_words
        if self.technique(prepared).name == "full":
            return quantize(load_stack(model, with_head=with_head), prepared.quantization)
        return load_frozen(model, prepared.quantization, with_head=with_head)

    def open_run(
        self, planned: Planned[P], folder: Path, backbone: Callable[[], LayerStack], notify: Notify, *, resume: bool
    ) -> TrainingPolicy:
        """Return the policy of a run, which continues from the folder's newest snapshot (see TrainingMethod)."""
        prepared, job = planned.prepared, planned.prepared.job
        message = replace(self.rank_job(*planned), folder=folder)
        identity = _fingerprint(prepared, message)
        message = replace(message, fingerprint=identity)
        spoilt = ""
        if resumes := resume and holds_run(folder, identity, job):
            spoilt = next(
                filter(None, (damage_of(path, owner_of(identity, path)) for path in message.begins_with())), ""
            )
            resumes = not spoilt
        if not resumes:
            begin_folder(folder, identity, job)
        former = take_up(message) if resumes else replace(begin(message), damage=(spoilt,) if spoilt else ())
        notes = (_resumed(former, job.epochs, has_run=resumes), *former.notes, *former.damage) if resume else ()
        if resumes:
            notify(Event("phase", message=notes[0]))
        self.begin(prepared, backbone, message, not resumes, notify)
        policy = TrainingPolicy(self, planned, message, former, notify)
        policy.notes[:0] = notes
        return policy

    def scores(
        self, prepared: P, trained: Predicting, epochs: Sequence[int], split: SplitName, notify: Notify
    ) -> list[dict[str, float]]:
        """Return the metrics on a split after each of some epochs (see TrainingMethod)."""
        tokenized = getattr(prepared, split)
        return [
            score(prepared.task, getattr(prepared.task, split), tokenized, predictions)
            for predictions in trained.predict(epochs, tokenized, notify)
        ]

    def completed(self, outcome: Outcome, policy: TrainingPolicy, trained: Predicting) -> Outcome:
        """Return the outcome with the technique, and the bytes of each device and of the trained weights (see
        TrainingMethod).
        """
        last = policy.last.job
        num_trained = sum(tensor.numel() for tensor in last.trained(outcome.chosen_epoch - 1).values())
        nbytes = device_bytes(policy.results, last.cluster) | {TRAINED_WEIGHTS: FP32_BYTES * num_trained}
        return replace(outcome, technique=self.technique(policy.prepared).name, bytes=nbytes)


def _fingerprint(prepared: PreparedTraining, rank_job: RankJob) -> str:
    """Return the identity of a run on any devices: the backbone's weights, the tokens, and every setting of the job."""
    digest = hashlib.sha256(model_digest(prepared.job.model).encode())
    digest.update(prepared.data_digest().encode())
    digest.update(b"" if rank_job.phases()[0].epochs else b"from a kept cache")
    digest.update(to_json(prepared.job.identity).encode())
    return digest.hexdigest()


def _resumed(former: Interrupted, epochs: int, *, has_run: bool) -> str:
    """Describe in words how a resumed run begins.  has_run: whether the folder holds an earlier run."""
    if not has_run:
        return "The run starts over." if former.damage else "Nothing to resume: the run starts over."
    if not former.epochs and not former.step:
        return "Resumed in epoch 1: none of its steps can be used."
    if former.epochs == epochs:
        return f"Resumed: all {epochs} epochs were finished, so none is trained again."
    place = f"step {former.step} of epoch {former.epochs + 1}" if former.step else f"epoch {former.epochs}"
    others = "" if former.is_same else ", on other devices or under another plan"
    return f"Resumed after {place} of {epochs}{others}; the times of what was finished are the interrupted run's."
