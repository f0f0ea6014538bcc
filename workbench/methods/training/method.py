"""Steps that all methods that train share: simulate, launch, evaluate, report, sweep."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.files import remove
from workbench.core.plan import Plan
from workbench.core.report import EpochRecord, SweepPoint
from workbench.core.run_files import ADAPTER, DEVICES
from workbench.core.timeline import Timeline
from workbench.methods.base import Event, Notify, Outcome, Planned, Prediction, ignore
from workbench.methods.common import records
from workbench.methods.common.folder import begin_folder
from workbench.methods.training.faults import VirtualPolicy, predict, under_policy
from workbench.methods.training.handlers import PlannedStep, typical_steps
from workbench.methods.training.heating import Stretch, gets_hot, heated_s
from workbench.methods.training.phases import Phase, PhasedJob, Plans
from workbench.methods.training.profiled import Layered, LayerMethod
from workbench.methods.training.recording_policy import OncePolicy
from workbench.methods.training.step_policy import StepPolicy
from workbench.methods.training.timetable import Timetable
from workbench.runtime.context import RankContext
from workbench.runtime.device_server import Worker, serve_device
from workbench.runtime.engine_service import Engines
from workbench.runtime.snapshot import passing
from workbench.tasks.metrics import quality


class Trainable(Layered, Protocol):
    """A job whose steps train a model."""

    @property
    def task(self) -> Any:
        """Return the task, with its splits and metrics."""

    @property
    def typical_length(self) -> int:
        """Return the tokens of a typical mini-batch, for planning and to compare plans."""


class Trained(Protocol):
    """The trained model after each epoch of a run."""

    def save(self, folder: Path, epoch: int) -> Path:
        """Save the model with its weights after an epoch, and return the path."""
        ...


SplitName = Literal["validation", "test"]
T = TypeVar("T", bound=Trainable)


class TrainingMethod(LayerMethod[T], Plans):
    """A method that trains; a subclass adds its specifics.  Together they form a methods.base.Method.

    plan, check, rank_job, check_plan: see phases.Plans, methods.base.require_plan.
    worker: makes what does a device's steps, from its time dilation.  serve_rank: the function that devices call, built
    from it.
    backbone(prepared): reads the model before training, to initialize and to score what the devices train.
    open_run(planned, folder, backbone, notify, resume=...): the policy of a run in a folder, a new one, or if `resume`
    says so the one that the folder holds.  backbone: reads the model, once.
    virtual_policy(method, planned, rank_job): the policy of a simulated run with faults.
    trained(prepared, model, rank_job): the trained model of a run.  rank_job: that of the last devices.
    scores(prepared, trained, epochs, split, notify): its metrics on a split after each of some epochs.
    completed(outcome, policy, trained): the outcome with its technique, its bytes, and what only this method reports.
    begin(prepared, backbone, rank_job, is_new, notify): writes the initial state of a new run, by default none.
    Without a backbone any state serves: its steps are only timed.
    """

    check_plan: Callable[[T, Cluster, Plan], None]
    worker: Callable[[float], Worker]
    serve_rank: Callable[[RankContext, None], None]
    backbone: Callable[[T], Any]
    open_run: Callable[..., StepPolicy]
    virtual_policy: Callable[[Any, Planned[T], Any], VirtualPolicy]
    trained: Callable[[T, Any, Any], Trained]
    scores: Callable[[T, Any, Sequence[int], SplitName, Notify], list[dict[str, float]]]
    completed: Callable[[Outcome, Any, Any], Outcome]
    begin: Callable[[T, Callable[[], Any] | None, Any, bool, Notify], object] = staticmethod(lambda *state: None)

    def __init_subclass__(cls) -> None:
        """Add the function that devices call to serve a coordinator."""
        super().__init_subclass__()

        def serve_rank(context: RankContext, payload: None) -> None:
            serve_device(context, cls.worker(context.dilation))

        if "rank_job" in vars(cls):
            cls.called_by_devices(serve_rank)

    def predict(self, planned: Planned[T]) -> Prediction:
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
        return under_policy(prediction, self.virtual_policy(self, planned, first)) if changes else prediction

    def execute(
        self,
        planned: Planned[T],
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Train on the engines, choose the epoch on the validation split, score the test split once (see Method)."""
        prepared, is_real = planned.prepared, engines.fidelity == "real"

        @cache
        def backbone() -> Any:
            model = prepared.job.model
            notify(Event("phase", message=f"Reading {model}, by which this machine scores what is trained"))
            return self.backbone(prepared)

        policy = self.open_run(planned, folder, backbone, notify, resume=resume)
        message = f"Training on {planned.cluster.in_words}, {engines.fidelity} links"
        notify(Event("phase", message=message, stage="train"))
        with engines.service(self.serve_rank) as devices:
            recoveries = policy.run(devices, engines.cluster, prepared.job)
        last, results = policy.last.job, policy.results
        if len(policy.generations) > 1:
            prediction = predict(last)
        steps = policy.measured_steps(prediction)
        # Reading the model takes seconds, in which the devices would wait if it came before their training.
        trained = cache(lambda: self.trained(prepared, backbone(), last))

        def scores(numbers: Sequence[int], split: SplitName) -> list[dict[str, float]]:
            return self.scores(prepared, trained(), numbers, split, notify)

        epochs, metrics, best = _chosen_epoch(records.epoch_records(steps), scores, prepared.task, notify)
        saved = trained().save(folder / ADAPTER, best)
        outcome = Outcome(
            fidelity=engines.fidelity,
            steps=steps,
            epochs=epochs,
            timelines=records.measured_timelines(
                policy.last_results(), last, prediction, engines.fidelity, _resident(last)
            ),
            metrics=metrics,
            chosen_epoch=best + 1,
            phases_s=records.phase_seconds(results) | policy.spent_s,
            overrun_share=records.overrun_share(results, is_real=is_real),
            notes=(*policy.notes, *(note for result in results for note in result.notes)),
            artifacts={"adapter": str(saved)},
            recoveries=recoveries,
        )
        outcome = self.completed(outcome, policy, trained())
        shutil.rmtree(folder / DEVICES, ignore_errors=True)
        # An end before the last epoch may be gone on from.
        for path in list(passing(folder, with_moments=not policy.has_converged)):
            remove(path)
        return outcome

    def sweep_point(
        self,
        planned: Planned[T],
        name: str,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
        notify: Notify = ignore,
    ) -> SweepPoint:
        """Simulate, and on engines measure, some steps of the first phase under a plan (see Method)."""
        prepared, _, cluster, plan = planned
        self.check_plan(prepared, cluster, plan)
        message, phase, typical = self._typical(planned, num_steps)
        message, steps = replace(message, folder=folder), tuple(typical.values())
        predicted = message.predictor(phase).records(0, steps)
        if gets_hot(cluster):
            members, each = tuple(range(cluster.world_size)), range(len(steps))
            taken_s = heated_s(cluster, [Stretch(Timetable(message, some=steps), members, each)])
            predicted = tuple(replace(step, predicted_s=taken_s[step.step]) for step in predicted)
        results = None
        if engines is not None:
            begin_folder(folder, "sweep", prepared.job)
            self.begin(prepared, None, message, True, ignore)
            message = replace(message, sweep=tuple(typical))
            policy = OncePolicy(message, message.plan, Timetable(message), notify)
            with engines.service(self.serve_rank) as devices:
                policy.run(devices, message.cluster, replace(prepared.job, faults=""))
            results = policy.results
        return records.sweep_point(name, plan, predicted, results)

    def typical_step(self, planned: Planned[T]) -> Timeline:
        """Simulate one step of the first phase, without its memory (see Method)."""
        run, phase, typical = self._typical(planned, 1)
        [step] = typical.values()
        return run.predictor(phase).timeline(step, memory=False)

    def _typical(self, planned: Planned[T], num_steps: int) -> tuple[Any, Phase, dict[int, PlannedStep]]:
        """Return a run's job under its first plan, its first phase, and steps of typical length, by their numbers."""
        prepared, profile, cluster, plan = planned
        run = self.rank_job(prepared, profile, cluster, plan.at(0))
        phase = run.phases()[0]
        return run, phase, typical_steps(phase.steps(0), prepared.job.batch_size, prepared.typical_length, num_steps)


def _resident(rank_job: PhasedJob) -> dict[bool, list[int]]:
    """Return the bytes that stay on every rank throughout, by whether epochs are cached."""
    resident = {}
    for phase in rank_job.phases():
        costs = phase.program(phase.steps(phase.epochs.start)[0].shape).costs
        resident[phase.cached] = [costs.resident_bytes(rank) for rank in range(rank_job.cluster.world_size)]
    return resident


def _chosen_epoch(
    epochs: Sequence[EpochRecord],
    scores: Callable[[Sequence[int], SplitName], list[dict[str, float]]],
    task: Any,
    notify: Notify,
) -> tuple[tuple[EpochRecord, ...], dict[str, float], int]:
    """Return the epochs with their metrics on the validation split, the metrics of the best one on the test split, and
    its number.

    scores: returns the model's scores after some epochs on a split.  Of equally good epochs the first is chosen.
    """
    notify(Event("phase", message="Scoring every epoch on the validation split", stage="evaluate"))
    metrics = scores(range(len(epochs)), "validation")
    for record, record_metrics in zip(epochs, metrics, strict=True):
        notify(Event("scores", epoch=record.epoch, metrics=record_metrics))
    best = max(range(len(epochs)), key=lambda epoch: quality(task, metrics[epoch]))
    notify(Event("phase", message="Scoring the chosen epoch on the test split"))
    scored = tuple(replace(epoch, metrics=epoch_metrics) for epoch, epoch_metrics in zip(epochs, metrics, strict=True))
    return scored, scores([best], "test")[0], best
