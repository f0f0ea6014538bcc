"""Score a model on a task of prompts, zero-shot, calibrated or trained (P-RGE, Table 2): accuracy, or SQuAD's F1 for
answers.

content_free: divide by the words' probabilities after a prompt without content (Zhao et al., Calibrate Before Use, ICML
2021, section 5: W = diag(p_cf)^-1, p_cf averaged over "N/A", "[MASK]" and the empty text).  In a multiple choice, where
each sample has different candidates, divide by their likelihood after the bare connective (domain-conditional pointwise
mutual information: Holtzman et al., Surface Form Competition, EMNLP 2021), summed over tokens, as in MeZO's own
evaluation.
mean_prior: divide by the words' mean probabilities over unlabelled prompts (Zhou et al., Batch Calibration, ICLR 2024);
we use training prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Literal, get_args

from workbench.core.errors import ConfigError, check_choice, require_numbers
from workbench.tasks.metrics import answer_f1
from workbench.tasks.prompts.encoding import EncodedPrompts, EncodedRow, PromptEncoder
from workbench.tasks.task import PromptSample, Task, fixed_order
from workbench.tasks.tokenize import by_length, padded_length

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """input_ids, attention_mask: (n, t) int64, padded on the right.

    targets: (n, k) int64, the tokens to predict.  positions: (n, k) int64, the positions whose last hidden states
    predict them.
    target_mask: (n, k) bool, False where a row has fewer targets (targets and positions are then 0).  A row's loss is
    the mean over its targets.  decoder_ids: (n, s) int64 for an encoder-decoder, whose positions refer to the decoder;
    None for others.
    labels: (n,) int64, classes or correct candidates; they are the targets of an encoder's separate head.  indices:
    positions of the rows in their split.
    choices: (c,) int64, the tokens over which the loss is computed; None: the whole vocabulary.
    """

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


def step_indices(num_samples: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the samples of training step `step` (from 0): batch_size of them, from concatenated seeded permutations.

    Lengths are ignored, as in the paper (section 3.1).  A batch at the end of an epoch continues with the next epoch's
    first samples.
    Raises ConfigError if there are no samples or batch_size is below 1.
    """
    if num_samples < 1:
        raise ConfigError("Mini-batches of an empty dataset were asked for.", "There are 0 samples.", "Give data.")
    if batch_size < 1:
        raise ConfigError(f"Mini-batches of {batch_size} samples were asked for.", "That is none.", "Raise batch_size.")
    return indices_from(num_samples, seed, step * batch_size, batch_size)


def indices_from(num_samples: int, seed: int, first: int, count: int) -> list[int]:
    """Return the samples at `count` positions, from `first` on, of the concatenated permutations of step_indices."""
    return [
        _permutation(num_samples, seed, position // num_samples)[position % num_samples]
        for position in range(first, first + count)
    ]


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(fixed_order(f"prompts {seed} {epoch}", num_samples))


def training_batch(encoded: EncodedPrompts, batch_size: int, seed: int, step: int) -> PromptBatch:
    """Return the batch of a training step: step_indices() as tensors."""
    return collate_prompts(encoded, step_indices(len(encoded), batch_size, seed, step))


def collate_prompts(encoded: EncodedPrompts, indices: Sequence[int], *, length: int | None = None) -> PromptBatch:
    """Return the rows at `indices` as one batch.

    length: None pads to the longest row, rounded up to a multiple of 8 (1 in the paper); a number pads to it.
    Raises ConfigError if `indices` is empty or a row is longer than `length`.
    """
    if not indices:
        raise ConfigError("A batch of 0 samples was asked for.", "There is nothing to pad to.", "Leave it out.")
    rows = [encoded.rows[index] for index in indices]
    if length is not None and (too_long := [index for index in indices if len(encoded.rows[index].ids) > length]):
        tokens = len(encoded.rows[too_long[0]].ids)
        raise ConfigError(
            f"Padding to {length} tokens was asked for.", f"Sample {too_long[0]} has {tokens}.", "Raise the length."
        )
    labels = [encoded.labels[index] for index in indices]
    return batch_of(rows, labels, encoded.pad_id, indices, length=length, choices=encoded.choices)


def batch_of(
    rows: Sequence[EncodedRow],
    labels: Sequence[int],
    pad_id: int,
    indices: Sequence[int],
    *,
    length: int | None = None,
    choices: Sequence[int] = (),
) -> PromptBatch:
    """Convert rows to tensors.  All rows must be for the same kind of model."""
    import torch

    def padded(values: Iterable[Sequence[int]], fill: int = 0, width: int = 0) -> Tensor:
        rows = list(values)
        longest = width or max(map(len, rows))
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

    width = padded_length([len(row.ids) for row in rows]) if length is None else length
    return PromptBatch(
        input_ids=padded((row.ids for row in rows), pad_id, width),
        attention_mask=padded(([1] * len(row.ids) for row in rows), 0, width),
        targets=padded(row.targets for row in rows),
        positions=padded(range(row.first_position, row.first_position + len(row.targets)) for row in rows),
        target_mask=padded(([True] * len(row.targets) for row in rows), False),
        labels=torch.tensor(labels),
        indices=tuple(indices),
        decoder_ids=padded((row.decoder_ids for row in rows), pad_id) if rows[0].decoder_ids else None,
        choices=torch.tensor(choices) if choices else None,
    )


LogitsAt = Callable[[PromptBatch], "Tensor"]
"""A model: returns logits (n, k, V) at the batch's positions; an encoder's head returns (n, 1, classes)."""


def label_log_likelihoods(logits_at: LogitsAt, encoded: EncodedPrompts) -> Tensor:
    """Return (n, classes) float32: log-probabilities of the label words' tokens over the whole vocabulary, rows in
    split order.
    """
    import torch

    all_scores: Tensor | None = None
    for indices in by_length(encoded.lengths, BATCH_SIZE):
        with torch.inference_mode():
            logits = logits_at(collate_prompts(encoded, indices))[:, 0].float()
            chosen = logits[:, list(encoded.label_ids)] if encoded.label_ids else logits
            scores = (chosen - logits.logsumexp(dim=1, keepdim=True)).cpu()
        if all_scores is None:
            all_scores = torch.empty(len(encoded), scores.shape[1])
        all_scores[indices] = scores
    assert all_scores is not None, "a split has samples"
    return all_scores


def target_log_likelihoods(logits_at: LogitsAt, rows: Sequence[EncodedRow], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (rows,) float32 sums of the targets' log-likelihoods, and (rows,) float32 numbers of targets."""
    import torch

    sums, counts = torch.empty(len(rows)), torch.empty(len(rows))
    for mine in by_length([len(row.ids) for row in rows], BATCH_SIZE):
        batch = batch_of([rows[index] for index in mine], [0] * len(mine), pad_id, mine)
        with torch.inference_mode():
            logits = logits_at(batch).float()
            chosen = logits.gather(2, batch.targets.to(logits.device)[:, :, None])[:, :, 0] - logits.logsumexp(dim=2)
            shown = batch.target_mask.to(logits.device)
            sums[mine] = torch.where(shown, chosen, 0.0).sum(dim=1).cpu()
            counts[mine] = shown.sum(dim=1).float().cpu()
    return sums, counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """The padding of random batches.

    share: expected share of padding among a batch's tokens.  padded_length: expected number of tokens per sample.
    """

    batch_size: int
    share: float
    padded_length: float


def padding_statistics(lengths: Sequence[int], batch_sizes: Iterable[int]) -> list[PaddingRow]:
    """Return one row for each batch size E, for batches of E random samples padded to their longest.

    The values are exact, without sampling: the m-th shortest of n samples is the longest in C(m - 1, E - 1) of C(n, E)
    batches.
    Raises ConfigError for E below 1 or above n.
    """
    ordered = sorted(lengths)
    return [_row(ordered, batch_size) for batch_size in batch_sizes]


def _row(ordered: Sequence[int], batch_size: int) -> PaddingRow:
    count = len(ordered)
    if not 1 <= batch_size <= count:
        raise ConfigError(
            f"The padding in batches of {batch_size} samples was asked for.",
            f"There are {count} samples.",
            "Choose from 1 to that.",
        )
    mean = sum(ordered) / count
    expected, share = 0.0, batch_size / count  # C(n - 1, E - 1) / C(n, E), for the longest sample
    for rank in range(count, batch_size - 1, -1):
        expected += share * ordered[rank - 1]
        share *= (rank - batch_size) / (rank - 1) if rank > 1 else 0.0
    return PaddingRow(batch_size=batch_size, share=max(0.0, 1 - mean / expected), padded_length=expected)


Calibration = Literal["none", "content_free", "mean_prior"]
CONTENT_FREE = ("N/A", "[MASK]", "")
PRIOR_SAMPLES = 200
"""Maximum number of prompts for the mean prior, chosen with a fixed seed because published files may be sorted by
class."""


def word_prior(
    logits_at: LogitsAt, encoder: PromptEncoder, calibration: Calibration, unlabelled: Sequence[PromptSample]
) -> Tensor:
    """Return (classes,) float32, the log of the label words' prior probability, up to a constant; zeros without
    calibration.

    unlabelled: prompts of the task; their labels are ignored.
    """
    import torch

    if calibration == "none":
        return torch.zeros(len(encoder.prompt.words))
    if calibration == "content_free":
        fields = encoder.prompt.without_content
        prompts = [
            PromptSample(sample_id=index, fields=fields(unlabelled[0].fields, text))
            for index, text in enumerate(CONTENT_FREE)
        ]
    else:
        prompts = [unlabelled[index] for index in fixed_order("prior", len(unlabelled))[:PRIOR_SAMPLES]]
    scores = label_log_likelihoods(logits_at, encoder.split(prompts)).log_softmax(dim=1)
    return scores.logsumexp(dim=0) - math.log(len(prompts))


MAX_NEW_TOKENS = 50
"""Maximum number of generated tokens, as in MeZO.  An answer ends at the end of its line."""


def generate_answers(logits_at: LogitsAt, encoder: PromptEncoder, samples: Sequence[PromptSample]) -> list[str]:
    """Return the line that the model generates after each prompt, greedily, up to MAX_NEW_TOKENS.

    Every token recomputes the whole text (`logits_at` has no cache).  The prompts leave room for MAX_NEW_TOKENS.
    """
    fields = encoder.fitted(samples, reserve=MAX_NEW_TOKENS if encoder.reader == "causal" else 0)
    prompts, answers = encoder.openings(fields), [""] * len(samples)
    for indices in by_length([len(row.ids) for row in prompts], BATCH_SIZE):
        for index, ids in _generated(logits_at, encoder, prompts, indices):
            answers[index] = encoder.encoder.decode(ids).strip().split("\n")[0].strip()
    return answers


def _generated(
    logits_at: LogitsAt, encoder: PromptEncoder, prompts: Sequence[EncodedRow], indices: Sequence[int]
) -> list[tuple[int, list[int]]]:
    import torch

    written: dict[int, list[int]] = {index: [] for index in indices}
    going = list(indices)
    tokenizer, pad_id = encoder.encoder, encoder.encoder.pad_id
    for _ in range(MAX_NEW_TOKENS):
        rows = [prompts[index].followed_by(written[index]) for index in going]
        with torch.inference_mode():
            logits = logits_at(batch_of(rows, [0] * len(rows), pad_id, going))[:, 0]
            following = require_numbers(logits, "Answers").argmax(dim=1).tolist()
        for index, token in zip(going, following, strict=True):
            if token != pad_id:  # the end of text for models without a separate padding token
                written[index].append(token)
        ended = {
            index for index, token in zip(going, following, strict=True) if token == pad_id or token in encoder.trail
        }
        going = [
            index for index in going if index not in ended and "\n" not in tokenizer.decode(written[index]).lstrip()
        ]
        if not going:
            break
    return list(written.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """metric: 'accuracy' or 'f1', with `value` in [0, 1].  predictions: classes, candidate numbers, or texts, in split
    order.

    correct: for each sample 0 or 1, or its F1; `value` is their mean.
    """

    metric: str
    value: float
    predictions: tuple[int, ...] | tuple[str, ...]
    correct: tuple[float, ...]
    calibration: Calibration = "none"


def evaluate(
    logits_at: LogitsAt,
    samples: Sequence[PromptSample],
    encoder: PromptEncoder,
    *,
    calibration: Calibration = "none",
    unlabelled: Sequence[PromptSample] = (),
) -> PromptScores:
    """Return a model's score on samples of the encoder's prompt.

    A classification chooses the most likely label word, a multiple choice the candidate with the highest mean
    log-likelihood of its tokens.
    A question is answered by greedy generation (up to MAX_NEW_TOKENS, to the end of the line) and scored by F1.
    calibration: see above; it may use prompts without labels, `unlabelled` (of the training split) or else the samples
    themselves.
    Questions have no calibration.
    Raises ConfigError for a calibration that the task does not support, and as PromptEncoder does; DivergedError for
    NaN or infinite scores.
    """
    if not samples:
        raise ConfigError("A score on no samples was asked for.", "The split has 0.", "Give data.")
    check_choice("calibration", calibration, get_args(Calibration))
    kind = encoder.prompt.kind
    if kind == "classification":
        scores = label_log_likelihoods(logits_at, encoder.split(samples))
        if calibration != "none":
            scores = scores - word_prior(logits_at, encoder, calibration, unlabelled or samples)
        chosen = require_numbers(scores, "The likeliest label words").argmax(dim=1).tolist()
    elif kind == "multiple_choice":
        chosen = choices(logits_at, encoder, samples, calibration=calibration)
    else:
        if calibration != "none":
            raise ConfigError(
                f"The calibration '{calibration}' was asked for.",
                "The answers to questions are free text, without a prior.",
                "Leave calibration out.",
            )
        texts = generate_answers(logits_at, encoder, samples)
        best = (
            max((answer_f1(text, answer) for answer in sample.answers), default=0.0)
            for text, sample in zip(texts, samples, strict=True)
        )
        right = tuple(best)
        return PromptScores(metric="f1", value=fmean(right), predictions=tuple(texts), correct=right)
    right = tuple(float(choice == sample.label) for choice, sample in zip(chosen, samples, strict=True))
    return PromptScores(
        metric="accuracy", value=fmean(right), predictions=tuple(chosen), correct=right, calibration=calibration
    )


def require_room(task: Task, encoder: PromptEncoder) -> None:
    """Raise ConfigError if a prompt of the validation or test split does not fit.  Called before a training whose
    `evaluate` would fail.
    """
    reserve = MAX_NEW_TOKENS if task.kind == "question_answering" and encoder.reader == "causal" else 0
    for split in (task.validation, task.test):
        encoder.fitted(split.prompts, reserve=reserve)


def choices(
    logits_at: LogitsAt, encoder: PromptEncoder, samples: Sequence[PromptSample], *, calibration: Calibration = "none"
) -> list[int]:
    """Return the number of the candidate that the model chooses for each sample."""
    if calibration == "mean_prior":
        raise ConfigError(
            "The calibration 'mean_prior' was asked for.",
            "Each sample has different candidates.",
            "Choose 'content_free'.",
        )
    fields = encoder.fitted(samples)
    num_candidates = len(encoder.prompt.candidates)
    owners = [index for index in range(len(samples)) for _ in range(num_candidates)]
    following = [
        continuation
        for sample, mine in zip(samples, fields, strict=True)
        for continuation in encoder.continuations(sample, mine)
    ]
    rows = encoder.rows([fields[owner] for owner in owners], following)
    sums, counts = target_log_likelihoods(logits_at, rows, encoder.encoder.pad_id)
    scores = sums / counts
    if calibration == "content_free":
        bare = [encoder.prompt.without_content(samples[owner].fields, "") for owner in owners]
        scores = sums - target_log_likelihoods(logits_at, encoder.rows(bare, following), encoder.encoder.pad_id)[0]
    return require_numbers(scores, "The likeliest candidates").view(len(samples), num_candidates).argmax(dim=1).tolist()
