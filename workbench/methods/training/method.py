"""Steps that all methods with backpropagation share: simulate, launch, resume, evaluate, sweep."""

from __future__ import annotations

import hashlib
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.files import remove
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import TRAINED_WEIGHTS, EpochRecord, SweepPoint
from workbench.core.run_files import ADAPTER, DEVICES
from workbench.core.sealed import owner_of
from workbench.core.serial import to_json
from workbench.core.timeline import Timeline
from workbench.methods.base import Event, Notify, Outcome, Planned, Prediction, ignore
from workbench.methods.common import records
from workbench.methods.common.folder import begin_folder, holds_run, model_digest
from workbench.methods.common.measured_stack import measured_stack
from workbench.methods.common.room import require_places
from workbench.methods.common.scaling import describe_facts
from workbench.methods.training.faults import VirtualTraining, predict, under_policy
from workbench.methods.training.handlers import typical_steps
from workbench.methods.training.heating import Stretch, gets_hot, heated_s
from workbench.methods.training.interrupted import Interrupted, begin, take_up
from workbench.methods.training.phases import Plans, RankJob
from workbench.methods.training.policy import TrainingPolicy
from workbench.methods.training.prepare import PreparedTraining
from workbench.methods.training.profiled import LayerMethod
from workbench.methods.training.recording_policy import OncePolicy
from workbench.methods.training.timetable import Timetable
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
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import serve_device
from workbench.runtime.engine_service import Engines
from workbench.runtime.snapshot import passing
from workbench.tasks.metrics import quality, score
from workbench.tasks.tokenize import TokenizedSplit


class AnalyticTechnique(NamedTuple):
    """How a method trains, for the analytic costs.  numbers: number format of the frozen backbone."""

    name: Technique
    sizes: TechniqueSizes
    numbers: NumberFormat = NumberFormat()


class Trained(Protocol):
    """The trained model after each epoch of a run."""

    def predict(self, epochs: Sequence[int], split: TokenizedSplit, notify: Notify = ignore) -> list[Predictions]:
        """Return the predictions on a split after each of some epochs."""
        ...

    def save(self, folder: Path, epoch: int) -> Path:
        """Save the model with its weights after an epoch, and return the path."""
        ...


P = TypeVar("P", bound=PreparedTraining)


class TrainingMethod(LayerMethod[P], Plans):
    """A method that trains by backpropagation; a subclass adds its specifics.  Together they form a
    methods.base.Method.

    plan, check, rank_job, check_plan: see phases.Plans, methods.base.require_plan.
    phases_on: builds the phases of a RankJob on a rank (see worker.TrainingWorker).  serve_rank: the function that
    devices call, built from it.
    trained: the trained model of a run, for a backbone.
    begin(prepared, backbone, rank_job, is_new, notify): writes the initial state of a new run, by default none.
    backbone: reads the model, once.  Without it any state serves: its steps are only timed.
    """

    check_plan: Callable[[P, Cluster, Plan], None]
    phases_on: PhasesOn[Any]
    serve_rank: Callable[[RankContext, None], None]
    trained: Callable[[P, LayerStack, Any], Trained]
    begin: Callable[[P, Callable[[], LayerStack] | None, Any, bool, Notify], object] = staticmethod(lambda *state: None)

    def __init_subclass__(cls) -> None:
        """Add the function that devices call to serve a coordinator."""
        super().__init_subclass__()

        def serve_rank(context: RankContext, payload: None) -> None:
            serve_device(context, TrainingWorker(cls.phases_on, context.dilation))

        if "rank_job" in vars(cls):
            cls.called_by_devices(serve_rank)

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

    def predict(self, planned: Planned[P]) -> Prediction:
        """Simulate every step and the faults to inject (see Method)."""
        first = self.rank_job(*planned)
        prediction = predict(first)
        if first.job.converged_after:
            prediction = replace(
                prediction, notes=(f"A simulation knows no losses: it does all {first.job.epochs} epochs.",)
            )
        changes = planned.prepared.job.faults or any(
            device.leave_below or device.leave_if_throttled or device.sustained for device in planned.cluster.devices
        )
        return under_policy(prediction, VirtualTraining(self, planned, first)) if changes else prediction

    def execute(
        self,
        planned: Planned[P],
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Train on the engines, choose the epoch on the validation split, score the test split once (see Method)."""
        prepared, cluster = planned.prepared, planned.cluster
        job, is_real = prepared.job, engines.fidelity == "real"
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

        @cache
        def backbone() -> LayerStack:
            notify(Event("phase", message=f"Reading {job.model}, by which this machine scores what is trained"))
            return self.backbone(prepared, message.quantization)

        self.begin(prepared, backbone, message, not resumes, notify)
        notify(Event("phase", message=f"Training on {cluster.in_words}, {engines.fidelity} links", stage="train"))
        policy = TrainingPolicy(self, planned, message, former, notify)
        with engines.service(self.serve_rank) as devices:
            recoveries = policy.run(devices, engines.cluster, job)
        notes += tuple(policy.notes)
        message, former, results = policy.last.job, policy.last.former, policy.results
        if len(policy.generations) > 1:
            cluster, prediction = message.cluster, predict(message)
        expected = [policy.expected(step) for step in former.steps(prediction.steps)]
        for result in results:
            result.resumed_at = (former.epochs, former.step)
        steps = records.measured_steps([*former.results, *results], expected)
        epochs = records.epoch_records(steps)[: policy.epochs]
        # Reading the model takes seconds, in which the devices would wait if it came before their training.
        trained = cache(lambda: self.trained(prepared, backbone(), message))

        def scores(numbers: Sequence[int], split: SplitName) -> list[dict[str, float]]:
            tokenized = getattr(prepared, split)
            predictions = trained().predict(numbers, tokenized, notify)
            return [
                score(prepared.task, getattr(prepared.task, split), tokenized, split_predictions)
                for split_predictions in predictions
            ]

        epochs, metrics, best = chosen_epoch(epochs, scores, partial(quality, prepared.task), notify)
        saved = trained().save(folder / ADAPTER, best)
        num_trained = sum(tensor.numel() for tensor in message.trained(best).values())

        shutil.rmtree(folder / DEVICES, ignore_errors=True)
        for path in list(
            passing(folder, with_moments=policy.epochs == job.epochs)
        ):  # an end before the last epoch may be gone on from
            remove(path)
        return Outcome(
            fidelity=engines.fidelity,
            steps=steps,
            epochs=epochs,
            timelines=records.measured_timelines(
                former.joined(results), message, prediction, engines.fidelity, _resident(message)
            ),
            metrics=metrics,
            chosen_epoch=best + 1,
            technique=self.technique(prepared).name,
            phases_s=records.phase_seconds(results) | policy.spent_s,
            bytes=records.device_bytes(results, cluster) | {TRAINED_WEIGHTS: FP32_BYTES * num_trained},
            overrun_share=records.overrun_share(results, is_real=is_real),
            notes=(*notes, *(note for result in results for note in result.notes)),
            artifacts={"adapter": str(saved)},
            recoveries=recoveries,
        )

    def backbone(self, prepared: P, quantization: QuantizationConfig) -> LayerStack:
        """Return the model as the run's devices store it, to initialize and to score what they train.

        The process holds some of its layers at a time, unless training changes them.
        """
        model, with_head = prepared.job.model, prepared.predicts_words
        if self.technique(prepared).name == "full":
            return quantize(load_stack(model, with_head=with_head), quantization)
        return load_frozen(model, quantization, with_head=with_head)

    def sweep_point(
        self,
        planned: Planned[P],
        name: str,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
        notify: Notify = ignore,
    ) -> SweepPoint:
        """Simulate, and on engines measure, some steps of the first phase under a plan (see Method)."""
        prepared, profile, cluster, plan = planned
        self.check_plan(prepared, cluster, plan)
        message = replace(self.rank_job(prepared, profile, cluster, plan.at(0)), folder=folder)
        phase = message.phases()[0]
        steps = typical_steps(phase.steps(0), prepared.job.batch_size, prepared.typical_length, num_steps)
        predicted = message.predictor(phase).records(0, steps)
        if gets_hot(cluster):
            members, each = tuple(range(cluster.world_size)), range(len(steps))
            taken_s = heated_s(cluster, [Stretch(Timetable(message, some=steps), members, each)])
            predicted = tuple(replace(step, predicted_s=taken_s[step.step]) for step in predicted)
        results = None
        if engines is not None:
            begin_folder(folder, "sweep", prepared.job)
            self.begin(prepared, None, message, True, ignore)
            message = replace(message, sweep=steps)
            policy = OncePolicy(message, message.plan, Timetable(message), notify)
            with engines.service(self.serve_rank) as devices:
                policy.run(devices, message.cluster, replace(prepared.job, faults=""), adapts=False)
            results = policy.results
        return records.sweep_point(name, plan, predicted, results)

    def typical_step(self, planned: Planned[P]) -> Timeline:
        """Simulate one step of the first phase, without its memory (see Method)."""
        prepared, profile, cluster, plan = planned
        run = self.rank_job(prepared, profile, cluster, plan.at(0))
        phase = run.phases()[0]
        [step] = typical_steps(phase.steps(0), prepared.job.batch_size, prepared.typical_length, 1)
        return run.predictor(phase).timeline(step, memory=False)


def _fingerprint(prepared: PreparedTraining, rank_job: RankJob) -> str:
    """Return the identity of a run on any devices: the backbone's weights, the tokens, and every setting of the job."""
    digest = hashlib.sha256(model_digest(prepared.job.model).encode())
    digest.update(prepared.data_digest().encode())
    digest.update(b"" if rank_job.phases()[0].epochs else b"from a kept cache")
    digest.update(to_json(prepared.job.identity).encode())
    return digest.hexdigest()


def _resident(rank_job: RankJob) -> dict[bool, list[int]]:
    """Return the bytes that stay on every rank throughout, by whether epochs are cached."""
    resident = {}
    for phase in rank_job.phases():
        costs = phase.program(phase.steps(phase.epochs.start)[0].shape).costs
        resident[phase.cached] = [costs.resident_bytes(rank) for rank in range(rank_job.cluster.world_size)]
    return resident


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


SplitName = Literal["validation", "test"]


def chosen_epoch(
    epochs: Sequence[EpochRecord],
    scores: Callable[[Sequence[int], SplitName], list[dict[str, float]]],
    quality: Callable[[Mapping[str, float]], float],
    notify: Notify,
) -> tuple[tuple[EpochRecord, ...], dict[str, float], int]:
    """Return the epochs with their metrics on the validation split, the metrics of the best one on the test split, and
    its number.

    scores: returns the model's scores after some epochs on a split.  quality: the higher, the better; of equally good
    epochs the first is chosen.
    """
    notify(Event("phase", message="Scoring every epoch on the validation split", stage="evaluate"))
    metrics = scores(range(len(epochs)), "validation")
    for record, record_metrics in zip(epochs, metrics, strict=True):
        notify(Event("scores", epoch=record.epoch, metrics=record_metrics))
    best = max(range(len(epochs)), key=lambda epoch: quality(metrics[epoch]))
    notify(Event("phase", message="Scoring the chosen epoch on the test split"))
    scored = tuple(replace(epoch, metrics=epoch_metrics) for epoch, epoch_metrics in zip(epochs, metrics, strict=True))
    return scored, scores([best], "test")[0], best
