"""How good a model is on a task of prompts, zero-shot or trained (P-RGE, Table 2): accuracy, or F1 of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from workbench.core.errors import ConfigError, require_numbers
from workbench.tasks.prompts.answers import MAX_NEW_TOKENS, answer_f1, generate_answers
from workbench.tasks.prompts.calibration import Calibration, candidate_prior, unknown_calibration, word_prior
from workbench.tasks.prompts.encoding import PromptEncoder
from workbench.tasks.prompts.likelihoods import BATCH_SIZE, LogitsAt, label_log_likelihoods, target_log_likelihoods
from workbench.tasks.prompts.samples import PromptSample, PromptTask


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """metric: 'accuracy' or 'f1', in [0, 1] as `value`.  predictions: classes, numbers of candidates, or texts, in the split's order.

    correct: of each sample 0 or 1, or its F1; `value` is their mean.
    """

    metric: str
    value: float
    predictions: tuple[int, ...] | tuple[str, ...]
    correct: tuple[float, ...]
    calibration: Calibration = "none"


def evaluate(
    logits_at: LogitsAt,
    task: PromptTask,
    samples: Sequence[PromptSample],
    tokenizer: Any,
    *,
    is_causal: bool,
    max_length: int,
    calibration: Calibration = "none",
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> PromptScores:
    """Return the score of a model on samples of a task, as a rule task.test.

    A classification takes the likeliest label word, a multiple choice the candidate of the highest mean log-likelihood of its tokens, a
    question is answered by greedy generation (up to max_new_tokens, to the line's end) and counts by F1.
    calibration: see calibration.py; what it needs besides comes from task.train, without labels.  A question has none.
    Raises ConfigError for a calibration that the task cannot have, and as encode_prompts does; DivergedError for scores that are none.
    """
    if not samples:
        raise ConfigError("A score on no samples was asked for.", "The split has 0.", "Give data.")
    encoder = PromptEncoder(task.prompt, tokenizer, is_causal=is_causal, max_length=max_length)
    if calibration not in ("none", "content_free", "mean_prior"):
        raise unknown_calibration(calibration)
    if task.kind == "classification":
        scores = label_log_likelihoods(logits_at, encoder.split(samples), batch_size)
        if calibration != "none":
            scores = scores - word_prior(logits_at, encoder, calibration, task.train)
        chosen = require_numbers(scores, "The likeliest label words").argmax(dim=1).tolist()
    elif task.kind == "multiple_choice":
        chosen = choices(logits_at, encoder, samples, calibration=calibration, batch_size=batch_size)
    else:
        if calibration != "none":
            raise _no_calibration(task, calibration)
        texts = generate_answers(logits_at, encoder, tokenizer, samples, max_new_tokens=max_new_tokens, batch_size=batch_size)
        right = tuple(answer_f1(text, sample.answers) for text, sample in zip(texts, samples, strict=True))
        return PromptScores(metric="f1", value=fmean(right), predictions=tuple(texts), correct=right)
    right = tuple(float(one == sample.label) for one, sample in zip(chosen, samples, strict=True))
    return PromptScores(metric="accuracy", value=fmean(right), predictions=tuple(chosen), correct=right, calibration=calibration)


def require_room(task: PromptTask, tokenizer: Any, *, is_causal: bool, max_length: int, max_new_tokens: int = MAX_NEW_TOKENS) -> None:
    """Raise ConfigError, as `evaluate` would only after a training, if a prompt of the validation or test split does not fit."""
    encoder = PromptEncoder(task.prompt, tokenizer, is_causal=is_causal, max_length=max_length)
    reserve = max_new_tokens if task.kind == "question_answering" and encoder.reader == "causal" else 0
    for samples in (task.validation, task.test):
        encoder.fitted(samples, reserve=reserve)


def choices(
    logits_at: LogitsAt,
    encoder: PromptEncoder,
    samples: Sequence[PromptSample],
    *,
    calibration: Calibration = "none",
    batch_size: int = BATCH_SIZE,
) -> list[int]:
    """Return the number of the candidate that each sample's model takes."""
    if calibration == "mean_prior":
        raise ConfigError("The calibration 'mean_prior' was asked for.", "Each sample has candidates of its own.", "Choose 'content_free'.")
    fields, _ = encoder.fitted(samples)
    each = len(encoder.prompt.candidates)
    owners = [index for index in range(len(samples)) for _ in range(each)]
    following = [one for sample, mine in zip(samples, fields, strict=True) for one in encoder.continuations(sample, mine)]
    rows = encoder.rows([fields[owner] for owner in owners], following)
    sums, counts = target_log_likelihoods(logits_at, rows, encoder.encoder.pad_id, batch_size)
    is_free = calibration == "content_free"
    scores = sums - candidate_prior(logits_at, encoder, samples, following, owners) if is_free else sums / counts
    return require_numbers(scores, "The likeliest candidates").view(len(samples), each).argmax(dim=1).tolist()


def _no_calibration(task: PromptTask, calibration: str) -> ConfigError:
    return ConfigError(
        f"The calibration '{calibration}' was asked for on '{task.name}'.",
        "Its answers are free text, which has no prior to take out.",
        "Leave calibration out.",
    )
