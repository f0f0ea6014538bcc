"""The files that describe a training run's result, next to the weights: result.json and a model card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.files import files_digest
from workbench.core.report import Report
from workbench.core.run_files import ADAPTER
from workbench.core.serial import read_json, user_path, write_json, write_text
from workbench.methods.common.model_card import CARD, Result, model_card
from workbench.models.configuration import local_folder
from workbench.models.saving import kept_name
from workbench.tasks.tables import SPLITS
from workbench.tasks.task import samples_digest
from workbench.tasks.wording import Prompt

RESULT = "result.json"


def write_result(report: Report, prepared: Any, technique: str) -> None:
    """Write result.json and the model card next to the trained weights.  prepared: the method's job (see
    base.Prepared).
    """
    task, job, folder = prepared.task, report.job, Path(report.artifacts["adapter"])
    prompt = task.prompt
    if prompt is not None:
        names, words, texts = task.class_names or prompt.label_words, (), _fields_of(prompt)
    else:
        numbered = (
            ()
            if task.kind in ("regression", "question_answering", "text_generation")
            else tuple(map(str, range(task.num_outputs)))
        )
        names, words = task.words or task.class_names or numbered, task.words
        roles = {"question_answering": ("question", "context"), "text_generation": ("instruction", "input")}
        named = roles.get(task.kind, ("text", "pair"))
        has_pairs = task.train.pairs is not None or task.train.answers is not None
        texts = () if task.train.images is not None else named[: 1 + has_pairs]
    data = None if job.data is None else user_path(job.data, "The data")
    trained, chosen, tested = (len(split) for split in (task.train, task.validation, task.test))
    about = Result(
        job=replace(
            job,
            model=kept_name(job.model),
            data=str(data.resolve()) if data is not None and data.exists() else job.data,
        ),
        technique=technique,
        base_digest=base_digest(job.model),
        kind=task.kind,
        texts=texts,
        class_names=names,
        words=words,
        prompt=prompt,
        may_be_none=prompt is None and task.may_be_none,
        max_length=min(job.max_length, prepared.facts.max_length),
        metrics=report.metrics,
        obtained=f"on {tested} test samples, after epoch {report.chosen_epoch}, the best on {chosen} validation "
        "samples",
        plan=f"{report.plan.where()}; cluster '{report.cluster.name}', {report.label}",
        source=f"{task.source or job.task}; {trained} training samples",
        digests={name: samples_digest(task, name) for name in SPLITS},
    )
    write_description(folder, about)


def write_description(folder: Path, about: Result) -> None:
    """Write a result's model card and result.json."""
    write_text(folder / CARD, model_card(folder, about))
    write_json(folder / RESULT, about)


def _fields_of(prompt: Prompt) -> tuple[str, ...]:
    names = (
        name for template in (prompt.text, *prompt.candidates) for _, name, _, _ in Formatter().parse(template) if name
    )
    return tuple(dict.fromkeys(names))


def base_digest(name: str) -> str:
    """Return a digest of a base model's safetensors files; '' for a tiny model or one without such files here."""
    folder = local_folder(name)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return files_digest(files) if files else ""


def find_result(place: Path | str) -> Path | None:
    """Return the folder with result.json: the path itself or its adapter/; None if neither has one."""
    path = user_path(place, "The result")
    return next((folder for folder in (path, path / ADAPTER) if (folder / RESULT).is_file()), None)


def required_result(place: Path | str, request: str) -> tuple[Path, Result]:
    """Return the folder with a run's result.json, and what that says.  place: see find_result.  request: what needs it,
    for the error.

    Raises ConfigError if there is no result, or if it is damaged.
    """
    folder = find_result(place)
    if folder is None:
        raise ConfigError(
            request, f"There is no {RESULT}.", "Give the folder that `workbench run` names as its result."
        )
    return folder, read_result(folder)


def read_result(folder: Path) -> Result:
    """Return what a folder's result.json says.  Raises ConfigError if it is damaged."""
    return read_json(folder / RESULT, Result, "the result")
