"""Score a model on a task of prompts, zero-shot, calibrated or trained (P-RGE, Table 2): accuracy, or SQuAD's F1 for answers.

content_free: divide by the words' probabilities after a prompt without content (Zhao et al., Calibrate Before Use, ICML 2021,
section 5: W = diag(p_cf)^-1, p_cf averaged over "N/A", "[MASK]" and the empty text).  In a multiple choice, where each sample has
different candidates, divide by their likelihood after the bare connective (domain-conditional pointwise mutual information: Holtzman
et al., Surface Form Competition, EMNLP 2021), summed over tokens, as in MeZO's own evaluation.
mean_prior: divide by the words' mean probabilities over unlabelled prompts (Zhou et al., Batch Calibration, ICLR 2024); we use training
prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

from workbench.core.errors import ConfigError, check_choice, require_numbers
from workbench.tasks.prompts.batches import BATCH_SIZE, LogitsAt, batch_of, label_log_likelihoods, target_log_likelihoods
from workbench.tasks.prompts.encoding import EncodedRow, PromptEncoder
from workbench.tasks.prompts.templates import PromptSample, PromptTask
from workbench.tasks.spans import answer_f1
from workbench.tasks.task import fixed_order
from workbench.tasks.tokenize import by_length

if TYPE_CHECKING:
    from torch import Tensor


Calibration = Literal["none", "content_free", "mean_prior"]
CONTENT_FREE = ("N/A", "[MASK]", "")
PRIOR_SAMPLES = 200
"""Maximum number of prompts for the mean prior, chosen with a fixed seed because published files may be sorted by class."""


def word_prior(logits_at: LogitsAt, encoder: PromptEncoder, calibration: Calibration, unlabelled: Sequence[PromptSample]) -> Tensor:
    """Return (classes,) float32, the log of the label words' prior probability, up to a constant; zeros without calibration.

    unlabelled: prompts of the task; their labels are ignored.  Raises ConfigError for an unknown calibration.
    """
    import torch

    check_choice("calibration", calibration, get_args(Calibration))
    if calibration == "none":
        return torch.zeros(len(encoder.prompt.words))
    if calibration == "content_free":
        fields = encoder.prompt.without_content
        prompts = [PromptSample(sample_id=at, fields=fields(unlabelled[0].fields, one)) for at, one in enumerate(CONTENT_FREE)]
    else:
        prompts = [unlabelled[index] for index in fixed_order("prior", len(unlabelled))[:PRIOR_SAMPLES]]
    scores = label_log_likelihoods(logits_at, encoder.split(prompts)).log_softmax(dim=1)
    return scores.logsumexp(dim=0) - math.log(len(prompts))


def candidate_prior(
    logits_at: LogitsAt, encoder: PromptEncoder, samples: Sequence[PromptSample], continuations: Sequence[str], owners: Sequence[int]
) -> Tensor:
    """Return (candidates,) float32, the summed log-likelihood of each candidate after its sample's prompt without content."""
    fields = [encoder.prompt.without_content(samples[owner].fields, "") for owner in owners]
    sums, _ = target_log_likelihoods(logits_at, encoder.rows(fields, continuations), encoder.encoder.pad_id)
    return sums


MAX_NEW_TOKENS = 50
"""Maximum number of generated tokens, as in MeZO.  An answer ends at the end of its line."""


def generate_answers(logits_at: LogitsAt, encoder: PromptEncoder, decoder: Any, samples: Sequence[PromptSample]) -> list[str]:
    """Return the line that the model generates after each prompt, greedily.

    Every token recomputes the whole text (`logits_at` has no cache).  The prompts leave room for MAX_NEW_TOKENS.  decoder: the tokenizer.
    """
    fields = encoder.fitted(samples, reserve=MAX_NEW_TOKENS if encoder.reader == "causal" else 0)
    prompts = encoder.openings(fields)
    answers = [""] * len(samples)
    for indices in by_length([len(row.ids) for row in prompts], BATCH_SIZE):
        for index, ids in _generated(logits_at, encoder, decoder, prompts, indices):
            answers[index] = decoder.decode(ids).strip().split("\n")[0].strip()
    return answers


def _generated(
    logits_at: LogitsAt, encoder: PromptEncoder, decoder: Any, prompts: Sequence[EncodedRow], indices: Sequence[int]
) -> list[tuple[int, list[int]]]:
    import torch

    written: dict[int, list[int]] = {index: [] for index in indices}
    going = list(indices)
    pad_id = encoder.encoder.pad_id
    for _ in range(MAX_NEW_TOKENS):
        rows = [prompts[index].followed_by(written[index]) for index in going]
        with torch.inference_mode():
            logits = logits_at(batch_of(rows, [0] * len(rows), pad_id, going))[:, 0]
            following = require_numbers(logits, "Answers").argmax(dim=1).tolist()
        for index, token in zip(going, following, strict=True):
            if token != pad_id:  # the end of text for models without a separate padding token
                written[index].append(token)
        ended = {index for index, token in zip(going, following, strict=True) if token in (pad_id, *encoder.trail)}
        going = [index for index in going if index not in ended and "\n" not in decoder.decode(written[index]).lstrip()]
        if not going:
            break
    return list(written.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """metric: 'accuracy' or 'f1', with `value` in [0, 1].  predictions: classes, candidate numbers, or texts, in split order.

    correct: for each sample 0 or 1, or its F1; `value` is their mean.
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
) -> PromptScores:
    """Return a model's score on samples of a task, usually task.test.

    A classification chooses the most likely label word, a multiple choice the candidate with the highest mean log-likelihood of its tokens.
    A question is answered by greedy generation (up to MAX_NEW_TOKENS, to the end of the line) and scored by F1.
    calibration: see above; it may use prompts from task.train, without labels.  Questions have no calibration.
    Raises ConfigError for a calibration that the task cannot have, and as encode_prompts does; DivergedError for NaN or infinite scores.
    """
    if not samples:
        raise ConfigError("A score on no samples was asked for.", "The split has 0.", "Give data.")
    encoder = PromptEncoder(task.prompt, tokenizer, is_causal=is_causal, max_length=max_length)
    check_choice("calibration", calibration, get_args(Calibration))
    if task.kind == "classification":
        scores = label_log_likelihoods(logits_at, encoder.split(samples))
        if calibration != "none":
            scores = scores - word_prior(logits_at, encoder, calibration, task.train)
        chosen = require_numbers(scores, "The likeliest label words").argmax(dim=1).tolist()
    elif task.kind == "multiple_choice":
        chosen = choices(logits_at, encoder, samples, calibration=calibration)
    else:
        if calibration != "none":
            asked, found = f"The calibration '{calibration}' was asked for on '{task.name}'.", "Its answers are free text, without a prior."
            raise ConfigError(asked, found, "Leave calibration out.")
        texts = generate_answers(logits_at, encoder, tokenizer, samples)
        best = (max((answer_f1(text, one) for one in sample.answers), default=0.0) for text, sample in zip(texts, samples, strict=True))
        right = tuple(best)
        return PromptScores(metric="f1", value=fmean(right), predictions=tuple(texts), correct=right)
    right = tuple(float(one == sample.label) for one, sample in zip(chosen, samples, strict=True))
    return PromptScores(metric="accuracy", value=fmean(right), predictions=tuple(chosen), correct=right, calibration=calibration)


def require_room(task: PromptTask, tokenizer: Any, *, is_causal: bool, max_length: int) -> None:
    """Raise ConfigError if a prompt of the validation or test split does not fit, before a training whose `evaluate` would fail."""
    encoder = PromptEncoder(task.prompt, tokenizer, is_causal=is_causal, max_length=max_length)
    reserve = MAX_NEW_TOKENS if task.kind == "question_answering" and encoder.reader == "causal" else 0
    for samples in (task.validation, task.test):
        encoder.fitted(samples, reserve=reserve)


def choices(
    logits_at: LogitsAt, encoder: PromptEncoder, samples: Sequence[PromptSample], *, calibration: Calibration = "none"
) -> list[int]:
    """Return the number of the candidate that the model chooses for each sample."""
    if calibration == "mean_prior":
        raise ConfigError("The calibration 'mean_prior' was asked for.", "Each sample has candidates of its own.", "Choose 'content_free'.")
    fields = encoder.fitted(samples)
    each = len(encoder.prompt.candidates)
    owners = [index for index in range(len(samples)) for _ in range(each)]
    following = [one for sample, mine in zip(samples, fields, strict=True) for one in encoder.continuations(sample, mine)]
    rows = encoder.rows([fields[owner] for owner in owners], following)
    sums, counts = target_log_likelihoods(logits_at, rows, encoder.encoder.pad_id)
    is_free = calibration == "content_free"
    scores = sums - candidate_prior(logits_at, encoder, samples, following, owners) if is_free else sums / counts
    return require_numbers(scores, "The likeliest candidates").view(len(samples), each).argmax(dim=1).tolist()
