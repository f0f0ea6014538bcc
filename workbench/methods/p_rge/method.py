"""P-RGE as a Method: the functions that experiment.run calls, in call order, and the measured side of a Report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile, trainable_bytes
from workbench.methods.base import SCORED, CountProgress, Notify, Outcome, Planned, Prediction, counting
from workbench.methods.common.folder import model_digest
from workbench.methods.common.records import device_bytes
from workbench.methods.common.result import model_encoder
from workbench.methods.common.scaling import describe_facts
from workbench.methods.p_rge.measure import catalogue_profile, measure_layers, numbers_of
from workbench.methods.p_rge.options import METHOD
from workbench.methods.p_rge.policy import (
    History,
    QueryPolicy,
    changed_notes,
    fewer_samples,
    fitted_setting,
    notes_of,
)
from workbench.methods.p_rge.prepare import PreparedJob, check_plan, prepare, require_known, setting_of
from workbench.methods.p_rge.queries import chosen_passings, plan_queries
from workbench.methods.p_rge.rank_job import LOG, Change, PRGERankJob, rank_job
from workbench.methods.p_rge.virtual import VirtualQueryPolicy
from workbench.methods.p_rge.worker import QueryWorker, load_model
from workbench.methods.p_rge.zeroth_order import CausalModel, read_log, replay, warn_of_rounding
from workbench.methods.p_rge.zeroth_order.loading import TRAINED, save_for_peft, save_trained
from workbench.methods.training.faults import CHANGES
from workbench.methods.training.method import SplitName, TrainingMethod
from workbench.methods.training.profiled import Measurement
from workbench.models.saving import TrainedDescription, kept_name, save_tokenizer
from workbench.profiler.analytic import LayerCost, layer_costs
from workbench.tasks.prompts import evaluate
from workbench.tasks.prompts.scoring import PromptBatch
from workbench.tasks.task import PromptSample


class TrainedByLog:
    """The model after each epoch of a run, rebuilt from its log.

    model: the model before the first step.  job: that of the run's last devices.  notes: warnings of rounding.
    """

    def __init__(self, prepared: PreparedJob, model: CausalModel, job: PRGERankJob) -> None:
        self._prepared, self.model, self._num_steps = prepared, model, 0
        self._records = read_log(job.folder / LOG)[1][: prepared.num_steps]
        self._encoder = model_encoder(prepared.task.template, prepared.job.model, prepared.job.max_length)
        self._best: tuple[float, int, dict[str, Tensor]] | None = None
        with warnings.catch_warnings(record=True) as rounding:
            warnings.simplefilter("always")
            if not prepared.rule.tangent:
                warn_of_rounding(model, prepared.options.epsilon)
        self.notes = tuple(str(warning.message) for warning in rounding)

    def score(self, epoch: int, samples: Sequence[PromptSample], report: CountProgress) -> float:
        """Return the metric on some samples after an epoch.  The epochs are requested in their order; then the best one
        can be requested again.
        """
        self._go_to(epoch)
        value = evaluate(self._counted(len(samples), report), samples, self._encoder).value
        if self._best is None or value > self._best[0]:
            self._best = value, epoch, self.model.trainables.state()
        return value

    def save(self, folder: Path, epoch: int) -> Path:
        """Write the values trained after an epoch and their settings; also in peft's format, if peft can read them."""
        self._go_to(epoch)
        name = self._prepared.job.model
        save_tokenizer(name, folder)
        save_for_peft(folder, self.model, name=name)
        about = TrainedDescription(
            model=kept_name(name),
            config=self.model.config,
            quantization=self._prepared.quantization,
            dtype=self._prepared.activation_type,
        )
        save_trained(folder / TRAINED, self.model.trainables.state(), about)
        return folder

    def _counted(self, num_samples: int, report: CountProgress) -> Callable[[PromptBatch], Tensor]:
        """Return the model's logits, and report after each batch how many samples are finished."""
        rows = max(1, len(self._encoder.prompt.candidates))  # of a sample
        finished: set[int] = set()

        def logits_at(batch: PromptBatch) -> Tensor:
            logits = self.model.logits_at(batch)
            finished.update(batch.indices)
            report(len(finished) // rows, num_samples)
            return logits

        return logits_at

    def _go_to(self, epoch: int) -> None:
        if self._best is not None and self._best[1] == epoch:
            self.model.trainables.load_state(self._best[2])
            return
        end = min((epoch + 1) * self._prepared.steps_per_epoch, len(self._records))
        self._num_steps += replay(self.model.trainables, self._records[self._num_steps : end])


class PRGE(TrainingMethod[PreparedJob]):
    """Fine-tuning with forward passes; the queries of a step are divided among the devices."""

    name = METHOD
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    check_plan = staticmethod(check_plan)
    worker = QueryWorker
    virtual_policy = VirtualQueryPolicy
    trained = TrainedByLog

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return every layer's cost from the catalogue's figures (see ProfiledMethod)."""
        return catalogue_profile(prepared, cluster)

    def layer_costs(self, prepared: PreparedJob, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's analytic FLOPs and bytes (see Method)."""
        return layer_costs(
            describe_facts(prepared.facts),
            "frozen",
            batch=batch,
            sequence_length=sequence_length,
            numbers=numbers_of(prepared),
        )

    def holds_whole_model(self, prepared: PreparedJob) -> bool:
        """Return whether the model is scored without quantization, and so loaded at once (see Method)."""
        return prepared.quantization is None

    def measured(self, prepared: PreparedJob) -> Measurement:
        """Return the settings that affect layer costs, and a function that measures them (see LayerMethod)."""
        options = prepared.options
        key = {
            "method": METHOD,
            "version": 5,
            "trainable": replace(prepared.trainable, seed=0).identity,
            "precision": options.precision,
            "compute_dtype": options.compute_dtype,
        }
        return key, lambda max_length: measure_layers(prepared, max_length=max_length)

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Divide the queries, or the layers, among the devices; with other settings if the job allows that (see
        Method).
        """
        setting = fitted_setting(prepared, cluster, profile)
        return plan_queries(prepared.problem(profile, cluster, setting))

    def notes(self, planned: Planned[PreparedJob]) -> tuple[str, ...]:
        """Add how the settings that fit differ from the requested ones (see Method)."""
        prepared, setting = planned.prepared, setting_of(planned.prepared, planned.plan)
        changes = [Change(0, 0, prepared.setting), Change(0, 0, setting)]
        return (*super().notes(planned), *changed_notes(changes), *fewer_samples(prepared, changes))

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_plan(prepared, cluster, plan)
        chosen_passings(prepared.problem(profile, cluster, setting_of(prepared, plan)), plan)

    def predict(self, planned: Planned[PreparedJob]) -> Prediction:
        """Simulate every step and the faults to inject.  bytes: bytes that all devices send in a step (see Method)."""
        prediction, job = super().predict(planned), self.rank_job(*planned)
        (timeline,), num_devices = prediction.timelines.values(), len(planned.plan.busy_ranks)
        nbytes = {
            "sent in a step": timeline.all_sent_bytes,
            # A ring all-reduce of a gradient sends 2 (n - 1) times the bytes of all trained values.
            "sent in a step of first-order data parallelism": 2 * (num_devices - 1) * trainable_bytes(job.layers),
            "kept of a step in the log": 8 * job.change.setting.queries
            + 4 * (planned.prepared.rule.direction == "low_rank"),
        }
        prediction = replace(prediction, bytes=nbytes)
        if CHANGES in prediction.phases_s or not planned.prepared.options.adapt:
            return prediction
        return replace(prediction, notes=("A simulation adapts nothing to a change of the devices' speed.",))

    def rank_job(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> PRGERankJob:
        """Return the job of a run from its first step on."""
        return rank_job(prepared, profile, cluster, plan, [Change(0, 0, setting_of(prepared, plan))])

    def backbone(self, prepared: PreparedJob) -> CausalModel:
        """Return the model before the first step (see TrainingMethod)."""
        return load_model(prepared)

    def open_run(
        self, planned: Planned[PreparedJob], folder: Path, backbone: Callable[[], Any], notify: Notify, *, resume: bool
    ) -> QueryPolicy:
        """Return the policy of a run, which continues from the log in the folder (see TrainingMethod)."""
        prepared = planned.prepared
        history = History(folder, prepared, model_digest(prepared.job.model), resume=resume)
        policy = QueryPolicy(self, planned, history, notify)
        policy.notes += notes_of(history, prepared, resume=resume)
        return policy

    def scores(
        self,
        prepared: PreparedJob,
        trained: TrainedByLog,
        epochs: Sequence[int],
        split: SplitName,
        notify: Notify,
    ) -> list[dict[str, float]]:
        """Return the metric on a split after each of some epochs (see TrainingMethod)."""
        task, scores = prepared.task, []
        for number, epoch in enumerate(epochs):
            report = counting(notify, SCORED, before=number, rounds=len(epochs))
            scores.append({task.metric: trained.score(epoch, getattr(task, split).prompts, report)})
        return scores

    def completed(self, outcome: Outcome, policy: QueryPolicy, trained: TrainedByLog) -> Outcome:
        """Return the outcome with the technique, the bytes sent, the log, and a warning of rounding (see
        TrainingMethod).
        """
        results, log = policy.results, policy.history.path
        nbytes = device_bytes(results, policy.cluster)
        if counted := len({(step.epoch, step.step) for result in results for step in result.steps}):
            sent_bytes = sum(result.nbytes.get("sent", 0) for result in results)
            nbytes["sent in a step, measured"] = round(sent_bytes / counted)
        nbytes["log on the disk"] = log.stat().st_size
        return replace(
            outcome,
            technique=policy.prepared.options.technique,
            bytes=nbytes,
            notes=(*trained.notes, *outcome.notes, *fewer_samples(policy.prepared, policy.history.changes_in_run)),
            artifacts=outcome.artifacts | {"log": str(log)},
        )
