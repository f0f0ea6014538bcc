"""P-RGE as a Method: the functions that experiment.run calls, in call order, and the measured side of a Report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.errors import DeviceLostError
from workbench.core.plan import Plan
from workbench.core.profile import Profile, trainable_bytes
from workbench.core.report import Recovery, StepRecord, SweepPoint
from workbench.core.run_files import ADAPTER
from workbench.core.timeline import Timeline
from workbench.methods.base import SCORED, Event, Notify, Outcome, Planned, Prediction, Told, counting, ignore
from workbench.methods.common.folder import model_digest
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.records import (
    WARM_UP_STEPS,
    epoch_records,
    measured_steps,
    measured_timelines,
    overrun_share,
    sweep_point,
)
from workbench.methods.common.result import model_encoder
from workbench.methods.common.scaling import describe_facts
from workbench.methods.p_rge.adaptive import Setting
from workbench.methods.p_rge.measure import catalogue_profile, measure_layers, numbers_of
from workbench.methods.p_rge.options import METHOD
from workbench.methods.p_rge.policy import History, QueryPolicy, changed_notes, fitted_setting, notes_of
from workbench.methods.p_rge.prepare import PreparedJob, check_plan, prepare, require_known
from workbench.methods.p_rge.queries import chosen_passings, plan_queries
from workbench.methods.p_rge.rank_job import Change, PRGERankJob, change_at, rank_job
from workbench.methods.p_rge.virtual import VirtualQueryPolicy
from workbench.methods.p_rge.worker import load_model, serve_rank
from workbench.methods.p_rge.zeroth_order import CausalModel, StepLog, replay, warn_of_rounding
from workbench.methods.p_rge.zeroth_order.loading import TRAINED, save_for_peft, save_trained
from workbench.methods.training.faults import predict, under_policy
from workbench.methods.training.method import SplitName, chosen_epoch
from workbench.methods.training.phases import Plans
from workbench.methods.training.profiled import LayerMethod, Measurement
from workbench.models.saving import TrainedDescription, kept_name, save_tokenizer
from workbench.profiler.analytic import LayerCost, layer_costs
from workbench.runtime.engine_service import Engines
from workbench.tasks.prompts import evaluate
from workbench.tasks.prompts.scoring import PromptBatch


class PRGE(LayerMethod[PreparedJob], Plans):
    """Fine-tuning with forward passes; the queries of a step are divided among the devices."""

    name = METHOD
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)

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
        return (
            *super().notes(planned),
            *changed_notes(prepared, [Change(0, 0, prepared.setting), Change(0, 0, setting)]),
        )

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        setting = setting_of(prepared, plan)
        check_plan(prepared, cluster, plan, setting)
        chosen_passings(prepared.problem(profile, cluster, setting), plan)

    def predict(self, planned: Planned[PreparedJob]) -> Prediction:
        """Simulate every step and the faults to inject.  bytes: bytes that all devices send in a step (see Method)."""
        job = self.rank_job(*planned)
        prediction = predict(job)
        (timeline,), num_devices = prediction.timelines.values(), len(planned.plan.busy_ranks)
        nbytes = {
            "sent in a step": timeline.all_sent_bytes,
            # A ring all-reduce of a gradient sends 2 (n - 1) times the bytes of all trained values.
            "sent in a step of first-order data parallelism": 2 * (num_devices - 1) * trainable_bytes(job.layers),
            "kept of a step in the log": 8 * job.change.setting.queries
            + 4 * (planned.prepared.rule.direction == "low_rank"),
        }
        prediction = replace(prediction, bytes=nbytes)
        if job.job.faults:
            policy = VirtualQueryPolicy(self, planned, job.change)
            return under_policy(prediction, policy)
        if not planned.prepared.options.adapt:
            return prediction
        return replace(prediction, notes=("A simulation adapts nothing to a change of the devices' speed.",))

    def rank_job(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan) -> PRGERankJob:
        """Return the job of a run from its first step on."""
        return rank_job(prepared, profile, cluster, plan, [Change(0, 0, setting_of(prepared, plan))])

    def execute(
        self,
        planned: Planned[PreparedJob],
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Train on the engines, choose the epoch on the validation split, score the test split once (see Method)."""
        prepared = planned.prepared
        history = History(folder, prepared, model_digest(prepared.job.model), resume=resume)
        policy = QueryPolicy(self, planned, history, notify)
        notify(
            Event(
                "phase",
                message=f"Training on {planned.cluster.in_words}, {engines.fidelity} links",
                stage="train",
            )
        )
        recoveries = _train(policy, engines)
        # Reading the model takes seconds, in which the devices would wait if it came before their training.
        message = f"Reading {prepared.job.model}, by which this machine scores what is trained"
        notify(Event("phase", message=message, stage="evaluate"))
        model = load_model(prepared)
        with warnings.catch_warnings(record=True) as rounding:
            warnings.simplefilter("always")
            if not prepared.rule.tangent:
                warn_of_rounding(model, prepared.options.epsilon)
        outcome = outcome_of(policy, model, prediction, engines.fidelity)
        log_notes = notes_of(policy.history, prepared, resume=resume)
        notes = (*(str(warning.message) for warning in rounding), *log_notes, *policy.notes)
        return replace(outcome, notes=notes, recoveries=recoveries)

    def sweep_point(
        self,
        planned: Planned[PreparedJob],
        name: str,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
        notify: Notify = ignore,
    ) -> SweepPoint:
        """Simulate the first steps under a plan, and measure them if engines are given (see Method)."""
        planned = _of_steps(planned, num_steps + WARM_UP_STEPS)
        short, _, cluster, plan = planned
        check_plan(short, cluster, plan, setting_of(short, plan))
        steps = self.predict(planned).steps
        results = None
        if engines is not None:
            policy = QueryPolicy(self, planned, History(folder, short, "", resume=False), notify)
            _train(policy, engines)
            if len(policy.generations) > 1:  # the others continued under another plan, whose steps are not measured
                raise DeviceLostError(
                    f"The steps of the plan '{name}' were to be timed.", " ".join(policy.notes), "Run the sweep again."
                )
            results = results_of(policy)
        return sweep_point(name, plan, steps, results, warm_up=WARM_UP_STEPS)

    def typical_step(self, planned: Planned[PreparedJob]) -> Timeline:
        """Simulate one step (see Method)."""
        [timeline] = self.predict(_of_steps(planned, 1)).timelines.values()
        return timeline


def _of_steps(planned: Planned[PreparedJob], num_steps: int) -> Planned[PreparedJob]:
    """Return a run of a few steps with the plan's settings, which nothing changes."""
    prepared, setting = planned.prepared, setting_of(planned.prepared, planned.plan)
    options = replace(prepared.options, steps=num_steps, queries=setting.queries, adapt=False)
    job = replace(prepared.job, faults="", batch_size=setting.batch_size)
    return planned._replace(prepared=replace(prepared, job=job, options=options))


def setting_of(prepared: PreparedJob, plan: Plan) -> Setting:
    """Return the setting of a plan's steps: the requested one, unless the job adapts."""
    if not prepared.options.adapt:
        return prepared.setting
    queries = sum(share.queries for share in plan.stages[0].shares)
    return Setting(queries - prepared.rule.has_base, plan.micro_batch_size)


def _train(policy: QueryPolicy, engines: Engines) -> tuple[Recovery, ...]:
    """Do a run's remaining steps on engines that a coordinator commands."""
    with engines.service(serve_rank) as devices:
        return policy.run(devices, policy.cluster, policy.prepared.job, adapts=policy.prepared.options.adapt)


def results_of(policy: QueryPolicy) -> list[RankResult]:
    """Return each device's results in each generation, by its rank in the cluster."""
    return [
        replace(part, rank=rank, resumed_at=(part.steps[0].epoch, part.steps[0].step) if part.steps else None)
        for _, parts in policy.parts
        for rank, part in sorted(parts.items())
    ]


def reported_steps(policy: QueryPolicy, prediction: Prediction) -> tuple[StepRecord, ...]:
    """Return all steps with their losses.

    The log has every step, also those of an earlier call, and the one in which a device was lost; their seconds are the
    log's.
    """
    history, predicted = policy.history, []
    for number, record in enumerate(prediction.steps):
        expected_s = policy.expected(replace(record, predicted_s=None)).predicted_s
        samples = change_at(history.changes, number).setting.batch_size
        predicted.append(
            replace(record, samples=samples, predicted_s=record.predicted_s if expected_s is None else expected_s)
        )
    measured = {(step.epoch, step.step): step for step in measured_steps(results_of(policy), predicted)}
    return tuple(
        replace(measured.get((step.epoch, step.step), replace(step, measured_s=record.seconds)), loss=record.loss)
        for step, record in zip(predicted, history.records, strict=False)
    )


def outcome_of(policy: QueryPolicy, model: CausalModel, prediction: Prediction, fidelity: Any) -> Outcome:
    """Return the outcome of a run: its steps, the chosen epoch's score on the test split, the trained values."""
    cluster, history, results = policy.cluster, policy.history, results_of(policy)
    steps, prepared = reported_steps(policy, prediction), policy.prepared
    trained = TrainedByLog(prepared, model, history.records)
    epochs, metrics, best = chosen_epoch(
        epoch_records(steps),
        partial(trained.scores, notify=policy.notify),
        lambda metrics: metrics[prepared.task.metric],
        policy.notify,
    )
    saved = _save(prepared, model, history.folder / ADAPTER)
    counted = sum(max((len(part.steps) for part in parts.values()), default=0) for _, parts in policy.parts)
    sent_bytes = sum(result.nbytes.get("sent", 0) for result in results)
    nbytes: dict[str, int] = {}
    for result in results:
        for name, size in result.nbytes.items():
            key = f"{cluster.devices[result.rank].name}: {name}"
            nbytes[key] = nbytes.get(key, 0) + size if name == "sent" else max(nbytes.get(key, 0), size)
    if counted:
        nbytes["sent in a step, measured"] = round(sent_bytes / counted)
    nbytes["log on the disk"] = history.path.stat().st_size
    measured = {(step.epoch, step.step) for result in results for step in result.steps}
    is_whole = any(not result.steps or len(result.steps) == len(measured) for result in results)
    by_rank = [
        RankResult(rank=rank, steps=[step for result in results if result.rank == rank for step in result.steps])
        for rank in range(cluster.world_size)
    ]
    resident = dict.fromkeys((False, True), [0] * cluster.world_size)
    return Outcome(
        fidelity=fidelity,
        steps=steps,
        epochs=epochs,
        timelines=measured_timelines(by_rank, policy.first, prediction, fidelity, resident) if is_whole else {},
        metrics=metrics,
        chosen_epoch=best + 1,
        technique=prepared.options.technique,
        bytes=nbytes,
        overrun_share=overrun_share(results, is_real=fidelity == "real"),
        artifacts={"adapter": str(saved), "log": str(history.path)},
    )


class TrainedByLog:
    """The model after each epoch of a run, rebuilt from its log.  model: the model before the first step."""

    def __init__(self, prepared: PreparedJob, model: CausalModel, records: Sequence[StepLog]) -> None:
        self._prepared, self.model, self._records, self._num_steps = prepared, model, records, 0
        self._encoder = model_encoder(prepared.task.template, prepared.job.model, prepared.job.max_length)
        self._best: tuple[float, int, dict[str, Tensor]] | None = None

    def scores(self, epochs: Sequence[int], split: SplitName, notify: Notify = ignore) -> list[dict[str, float]]:
        """Return the metric on a split after each of some epochs, in their order.  After the other epochs, the best one
        can be requested.
        """
        task, scores = self._prepared.task, []
        samples = getattr(task, split).prompts
        for number, epoch in enumerate(epochs):
            self._go_to(epoch)
            report = counting(notify, SCORED, before=number, rounds=len(epochs))
            value = evaluate(self._counted(len(samples), report), samples, self._encoder).value
            if self._best is None or value > self._best[0]:
                self._best = value, epoch, self.model.trainables.state()
            scores.append({task.metric: value})
        return scores

    def _counted(self, num_samples: int, report: Told) -> Callable[[PromptBatch], Tensor]:
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


def _save(prepared: PreparedJob, model: CausalModel, folder: Path) -> Path:
    """Write the trained values and their settings into a folder; also in peft's format, if peft can read them."""
    name = prepared.job.model
    save_tokenizer(name, folder)
    save_for_peft(folder, model, name=name)
    about = TrainedDescription(
        model=kept_name(name),
        config=model.config,
        quantization=prepared.quantization,
        dtype=prepared.activation_type,
    )
    save_trained(folder / TRAINED, model.trainables.state(), about)
    return folder
