"""Load the result of a training run, to predict and to evaluate with it.

All methods share one format: the files in the folder determine how the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from workbench.core.errors import ConfigError, require_numbers
from workbench.core.methods import attribute, declaration_of
from workbench.core.serial import shown, user_path
from workbench.methods.common.model_card import Result
from workbench.methods.common.result_file import RESULT, base_digest, required_result
from workbench.methods.common.result_models import WritingModel, load_head_model, writing_model
from workbench.methods.common.result_samples import Rows, read_samples, split_of, table_samples
from workbench.models import evaluation, saving
from workbench.models.configuration import model_facts
from workbench.models.loading import load_tokenizer
from workbench.models.saving import TrainedDescription, kept_name
from workbench.models.sharding.whole import WholeModel
from workbench.models.speculation import DraftChoice, local_draft
from workbench.models.text import LocalWriter
from workbench.tasks import load_task
from workbench.tasks.metrics import answers, score, tags
from workbench.tasks.own import FROM_FILES, OWN_TASKS
from workbench.tasks.prompts import evaluate, label_log_likelihoods
from workbench.tasks.prompts.encoding import PromptEncoder
from workbench.tasks.prompts.scoring import (
    MAX_NEW_TOKENS,
    Calibration,
    choices,
    generate_answers,
)
from workbench.tasks.question_answering import words_of
from workbench.tasks.task import Split, Task, as_text_to_text, samples_digest
from workbench.tasks.tokenize import TokenizedSplit, evaluation_batches, tokenize
from workbench.tasks.wording import Prompt


class Answer(NamedTuple):
    """A model's answer to a sample.

    answer: a class name, a number, or a text; for tagged words 'word/TAG word/TAG'.  probabilities: every class's
    probability by name; empty if there are no classes.
    """

    answer: str | float
    probabilities: dict[str, float]


class Evaluation(NamedTuple):
    """The metrics on some samples.

    metrics: metrics by name.  source: a description of the samples.
    """

    metrics: dict[str, float]
    samples: int
    source: str


def model_encoder(prompt: Prompt, model: str, max_length: int) -> PromptEncoder:
    """Return the encoder of a prompt for the model with this name.

    max_length: at most the model's maximum.  Raises as PromptEncoder.
    """
    facts = model_facts(model)
    return PromptEncoder(
        prompt, load_tokenizer(model), is_causal=facts.is_causal, max_length=min(max_length, facts.max_length)
    )


def load_result(place: Path | str) -> LoadedResult:
    """Load the result of a run, ready to predict.  place: the run's folder, or adapter/ in it.

    Raises ConfigError if the folder has no result, is damaged, or its base model's weights have changed;
    MissingDataError if that model is missing.
    """
    request = f"The result '{shown(str(place), 200)}' was asked for."
    folder, about = required_result(place, request)
    if not (folder / saving.WHOLE_MODEL).is_file() and base_digest(about.job.model) != about.base_digest:
        problem = f"The weights of its base model '{about.job.model}' have changed since."
        raise ConfigError(request, problem, "Give back the model's files, or train again.")
    return LoadedResult(folder, about)


class LoadedResult:
    """A trained model that can predict.

    about: its result.json.

    Raises ConfigError if the trained weights belong to another model, task or number of classes than result.json
    states.
    """

    def __init__(self, folder: Path, about: Result) -> None:
        self.about = about
        name = str(folder) if (folder / saving.WHOLE_MODEL).is_file() else about.job.model
        self._tokenizer: Any = load_tokenizer(name)
        described: TrainedDescription[Any]
        if about.prompt is not None:
            load = declaration_of(about.job.method).load_prompted
            if not load:
                request = f"The result '{shown(str(folder), 200)}' was asked for."
                raise ConfigError(
                    request,
                    f"Its {RESULT} has a prompt; {about.job.method} trains a head.",
                    "Take both files of one run.",
                )
            model, described = attribute(load)(folder)
            self._logits_of: Any = model.logits_at
            self._writing: Callable[[], WritingModel] = partial(writing_model, folder, about, described, model)
        else:
            described, self._logits_of, writing = load_head_model(folder)
            self._writing = lambda: writing
        _require_agreement(folder, about, described)

    def predict(self, samples: Sequence[str | Sequence[str]]) -> list[Answer]:
        """Return the answer to each sample: a text, or as many texts as about.texts names.

        Raises ConfigError for a wrong number of texts, and for a model of pictures.
        """
        names, about = self.about.texts, self.about
        rows = [(sample,) if isinstance(sample, str) else tuple(sample) for sample in samples]
        if about.kind == "text_generation":
            rows = [(*row, "") if len(row) == 1 else row for row in rows]  # an instruction may have no input
        wrong = next((len(row) for row in rows if len(row) != len(names)), None)
        if wrong is not None:
            problem = f"A sample of '{about.job.task}' is {' and '.join(names) or 'a picture'}."
            raise ConfigError(
                f"A prediction for a sample of {wrong} texts was asked for.",
                problem,
                f"Give {len(names)} for each sample.",
            )
        if not rows:
            return []
        if about.kind == "text_generation":
            return [Answer(text, {}) for text in self._generated(rows)]
        chosen = split_of(about, rows, [0] * len(rows))
        if about.prompt is None:
            tokenized, predictions = self._predictions(chosen)
            if about.kind == "question_answering":
                return [
                    Answer(text, {}) for text in answers(chosen, tokenized, predictions, may_be_none=about.may_be_none)
                ]
            if about.kind == "token_classification":
                named = [
                    [about.class_names[label] for label in word_labels]
                    for word_labels in tags(chosen, tokenized, predictions, about.class_names)
                ]
                pairs = (
                    zip(words_of(text), word_labels, strict=True)
                    for text, word_labels in zip(chosen.texts, named, strict=True)
                )
                return [Answer(" ".join(map("/".join, pairs_of_words)), {}) for pairs_of_words in pairs]
            scores = require_numbers(predictions.logits, "Predictions")
        else:
            encoder = model_encoder(about.prompt, about.job.model, about.max_length)
            if about.kind == "question_answering":
                return [Answer(text, {}) for text in generate_answers(self._logits_of, encoder, chosen.prompts)]
            if about.kind == "multiple_choice":
                chosen_numbers = zip(chosen.prompts, choices(self._logits_of, encoder, chosen.prompts), strict=True)
                return [
                    Answer(encoder.continuations(sample, sample.fields)[number].strip(), {})
                    for sample, number in chosen_numbers
                ]
            scores = require_numbers(
                label_log_likelihoods(self._logits_of, encoder.split(chosen.prompts)), "Predictions"
            )
        return _answers(scores, about)

    def _generated(self, rows: Rows) -> Iterator[str]:
        writer = self.writer()
        for row in rows:
            ids = self._tokenizer.instruct(*row)
            written = list(writer.write(ids, MAX_NEW_TOKENS))
            yield self._tokenizer.decode(written).strip()

    def writer(self, draft: DraftChoice | None = None) -> LocalWriter:
        """Return the writer of texts.  draft: which model guesses tokens, None for none.

        Raises ConfigError if the model answers with classes, numbers or spans.
        """
        about = self.about
        model = self._writing()
        if model is None:
            request, problem = (
                f"A text of a run on '{about.job.task}' was asked for.",
                "Its head gives classes or numbers.",
            )
            raise ConfigError(request, problem, "Use `workbench predict`, or train for texts (--task instructions).")
        whole_model = model if isinstance(model, WholeModel) else None
        guessing = None if draft is None else local_draft(draft, about.job.model, whole_model)
        return LocalWriter(about.job.model, model, {self._tokenizer.end_id}.difference((None,)), guessing)

    def read(self, path: str, columns: str | None = None) -> Rows:
        """Return the samples of a file (see read_samples)."""
        return read_samples(self.about, path, columns)

    def evaluate(
        self,
        data: str | None = None,
        columns: str | None = None,
        *,
        split: str = "test",
        samples: int | None = None,
        calibration: Calibration = "none",
    ) -> Evaluation:
        """Return the run's metrics on a split of the run's data, or on other labelled data: all rows of a file, or a
        folder's split.

        data: as in a job; None uses the run's data.  samples: maximum number of samples.  calibration: calibration of a
        prompt's answers (tasks.prompts.scoring.Calibration).
        Raises ConfigError if the run's data have changed since, because rows that it was trained on could then be
        scored.
        """
        about, job = self.about, self.about.job
        task: Any = None
        named: dict[str, Any] = {"columns": job.columns if columns is None else columns}
        if job.task in FROM_FILES:
            named["class_names"] = about.class_names  # labels and tags are matched by name
        if data is None or (job.task not in OWN_TASKS and user_path(data, "The data").is_dir()):
            limits = (
                {name: getattr(job, name) for name in ("train_samples", "validation_samples", "test_samples")}
                if data is None
                else {}
            )
            task = load_task(job.task, data=data or job.data, prompted=about.prompt is not None, **named, **limits)
            chosen, source = getattr(task, split), f"the {split} split of {task.source or job.task}"
            if data is None:
                self._require_same(split, task)
        elif about.kind == "text_generation" or (job.task in FROM_FILES and job.task not in OWN_TASKS):
            name = "instruction_tuning" if about.kind == "text_generation" else job.task
            chosen, source = load_task(name, data=data, whole=True, **named).test, Path(data).name
        else:
            rows, labels = table_samples(about, data, columns, split, has_labels=True)
            chosen, source = split_of(about, rows, labels), Path(data).name
        if samples is not None:
            chosen = chosen.take(range(min(samples, len(chosen))))
        if about.prompt is None:
            if calibration != "none":
                raise ConfigError(
                    f"The calibration '{calibration}' was asked for.",
                    "A head answers here, no prompt.",
                    "Leave it out.",
                )
            return Evaluation(score(about, chosen, *self._predictions(chosen)), len(chosen), source)
        encoder = model_encoder(about.prompt, job.model, about.max_length)
        unlabelled = () if task is None else task.train.prompts
        scored = evaluate(self._logits_of, chosen.prompts, encoder, calibration=calibration, unlabelled=unlabelled)
        return Evaluation({scored.metric: scored.value}, len(chosen), source)

    def _require_same(self, split: str, task: Any) -> None:
        """Raise ConfigError if a split of the run's own data has changed since the training."""
        about = self.about
        if about.digests.get(split) != samples_digest(as_text_to_text(task) if about.words else task, split):
            problem = (
                f"The data{f' {about.job.data!r}' if about.job.data else ''} have changed since, so rows of it may "
                "have been trained on."
            )
            request = f"The {split} split of the run's own data was asked for."
            raise ConfigError(request, problem, "Give back the data, or name others by --data.")

    def _predictions(self, split: Split) -> tuple[TokenizedSplit, evaluation.Predictions]:
        about = self.about
        if about.words:
            splits: Any = dict.fromkeys(("train", "validation", "test"), split)
            split = as_text_to_text(
                Task(name=about.job.task, kind="classification", num_outputs=1, metrics=(), **splits)
            ).test
        tokenized = tokenize(split, self._tokenizer, max_length=about.max_length, words=about.words)
        return tokenized, self._logits_of(evaluation_batches(tokenized))


def _require_agreement(folder: Path, about: Result, described: TrainedDescription[Any]) -> None:
    """Raise ConfigError if the description of trained weights contradicts result.json, which the tokenizer and the
    answers follow.
    """
    pairs: dict[str, tuple[object, object]] = {"base model": (kept_name(described.model), about.job.model)}
    if about.prompt is None:
        pairs["kind"] = (described.config.kind, about.kind)
        if about.class_names and not about.words:
            pairs["number of classes"] = (described.config.num_outputs, len(about.class_names))
    for setting, (trained, stated) in pairs.items():
        if trained != stated:
            problem = (
                f"Its weights were trained for the {setting} {shown(trained)}. Its {RESULT} names {shown(stated)}."
            )
            raise ConfigError(
                f"The result '{shown(str(folder), 200)}' was asked for.", problem, "Take both files of one run."
            )


def _answers(scores: Tensor, about: Result) -> list[Answer]:
    """Return the answers for (n, outputs) scores; class probabilities are their softmax."""
    if about.kind == "regression":
        return [Answer(value, {}) for value in scores.squeeze(1).tolist()]
    shares = scores.softmax(dim=1)
    best = shares.argmax(dim=1).tolist()
    return [
        Answer(about.class_names[number], dict(zip(about.class_names, row, strict=True)))
        for number, row in zip(best, shares.tolist(), strict=True)
    ]
