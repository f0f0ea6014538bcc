"""From what the devices did to the measured side of a Report, and from the log of steps to scores and an adapter's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from workbench.core.report import EpochRecord
from workbench.methods.base import Event, Outcome, Prediction
from workbench.methods.common.folder import ADAPTER
from workbench.methods.common.records import epoch_records, measured_steps, measured_timelines, overrun_share
from workbench.methods.common.session import RankResult
from workbench.methods.p_rge.compute import load_model, stored_as
from workbench.methods.p_rge.policy import Done, Run
from workbench.methods.p_rge.predict import notes_of
from workbench.methods.p_rge.prepare import activation_type
from workbench.models.loading import load_tokenizer
from workbench.models.published import kept_name, save_tokenizer
from workbench.models.zeroth_order import CausalModel, replay
from workbench.models.zeroth_order.saving import TRAINED, TrainedDescription, save_for_peft, save_trained
from workbench.planners.adaptive import Precision
from workbench.tasks.prompts import evaluate
from workbench.tasks.prompts.samples import PromptSample


def results_of(done: Done) -> list[RankResult]:
    """Return what each device did in each generation, by its rank in the cluster; steps that not all members have finished are left out."""
    results: list[RankResult] = []
    for generation, parts in done.parts:
        all_busy = generation.plan.busy_ranks
        busy = [part for rank, part in parts.items() if generation.members.index(rank) in all_busy]
        whole = min((len(part.steps) for part in busy), default=0)
        for rank, part in sorted(parts.items()):
            # Whoever took part knows the whole loss; a lost device's record of it went with it.
            steps = [step._replace(loss=step.loss * len(all_busy) / len(busy)) for step in part.steps[:whole]]
            results.append(replace(part, rank=rank, steps=steps, resumed_at=(steps[0].epoch, steps[0].step) if steps else None))
    return results


def outcome_of(run: Run, done: Done, prediction: Prediction, fidelity: Any, *, resume: bool) -> Outcome:
    """Return what came of a run: its steps, the chosen epoch's score on the test split, what was trained."""
    prepared, cluster, history = run.prepared, run.cluster, run.history
    results = results_of(done)
    predicted = []
    for number, record in enumerate(prediction.steps):
        setting = next(change.setting for change in reversed(history.changes) if change.step <= number)
        predicted_s = done.predicted_s.get(number, record.predicted_s)
        predicted.append(replace(record, samples=setting.batch_size, predicted_s=predicted_s))
    steps = measured_steps(results, predicted)
    epochs, metrics, best, saved = _evaluated(run, epoch_records(steps) if steps else ())
    counted = sum(len(part.steps) for _, parts in done.parts for part in list(parts.values())[:1])
    sent = sum(result.nbytes.get("sent", 0) for result in results)
    nbytes: dict[str, int] = {}
    for result in results:
        for name, size in result.nbytes.items():
            key = f"{cluster.devices[result.rank].name}: {name}"
            nbytes[key] = nbytes.get(key, 0) + size if name == "sent" else max(nbytes.get(key, 0), size)
    if counted:
        nbytes["sent in a step, measured"] = round(sent / counted)
    nbytes["log on the disk"] = history.path.stat().st_size
    is_whole = any(not result.steps or len(result.steps) == len(steps) for result in results)
    by_rank = [
        RankResult(rank=rank, steps=[step for result in results if result.rank == rank for step in result.steps])
        for rank in range(cluster.world_size)
    ]
    resident = dict.fromkeys((False, True), [0] * cluster.world_size)
    return Outcome(
        fidelity=fidelity,
        steps=steps,
        epochs=epochs,
        timelines=measured_timelines(by_rank, cluster, prediction, fidelity, resident) if is_whole else {},
        metrics=metrics,
        chosen_epoch=best + 1,
        technique=run.prepared.options.technique,
        bytes=nbytes,
        overrun_share=overrun_share(results, is_real=fidelity == "real"),
        notes=(*run.notes, *notes_of(history, prepared, resume=resume), *done.notes),
        artifacts={"adapter": str(saved), "log": str(history.path)},
        recoveries=done.recoveries,
    )


def _evaluated(run: Run, epochs: tuple[EpochRecord, ...]) -> tuple[tuple[EpochRecord, ...], dict[str, float], int, Path]:
    """Make the log's steps once more, score every epoch on the validation split, and the best on the test split."""
    prepared, records = run.prepared, run.history.records
    precision = run.history.changes[-1].setting.precision
    model = run.model if precision == prepared.options.precision else load_model(prepared, precision)
    per_epoch = prepared.steps_per_epoch
    ends = [min(begin + per_epoch, len(records)) for begin in range(0, len(records), per_epoch)]
    run.notify(Event("phase", message="Scoring every epoch on the validation split", stage="evaluate"))
    best: tuple[float, int, dict[str, Tensor]] | None = None
    done, scores = 0, []
    for epoch, end in enumerate(ends):
        done += replay(model.trainables, records[done:end])
        scores.append(_score(run, model, prepared.task.validation))
        if best is None or scores[-1] > best[0]:
            best = (scores[-1], epoch, model.trainables.state())
    assert best is not None, "a run has at least one step"
    run.notify(Event("phase", message="Scoring the chosen epoch on the test split"))
    model.trainables.load_state(best[2])
    metric = prepared.task.metric
    metrics = {metric: _score(run, model, prepared.task.test)}
    scored = tuple(replace(record, metrics={metric: scores[record.epoch]}) for record in epochs)
    return scored, metrics, best[1], _save(run, model, precision)


def _score(run: Run, model: CausalModel, samples: Sequence[PromptSample]) -> float:
    prepared = run.prepared
    return evaluate(
        model.logits_at,
        prepared.task,
        samples,
        load_tokenizer(prepared.job.model),
        is_causal=prepared.facts.is_causal,
        max_length=prepared.max_length,
    ).value


def _save(run: Run, model: CausalModel, precision: Precision) -> Path:
    """Write what was trained, and how, into the run's folder; what peft can read, for peft too."""
    folder, prepared = run.folder / ADAPTER, run.prepared
    name, compute = prepared.job.model, activation_type(precision, prepared.options.compute_dtype)
    save_tokenizer(name, folder)
    save_for_peft(folder, model, name=name)
    quantization = stored_as(precision, compute)
    about = TrainedDescription(model=kept_name(name), trainable=model.config, quantization=quantization, dtype=compute)
    save_trained(folder / TRAINED, model.trainables.state(), about)
    return folder
