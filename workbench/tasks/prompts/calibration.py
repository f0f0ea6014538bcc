"""Zero-shot scores freed of what a model prefers whatever it is asked.

content_free: the words' probabilities behind a prompt without content are divided out (Zhao et al., Calibrate Before Use, ICML 2021,
section 5: W = diag(p_cf)^-1, p_cf averaged over "N/A", "[MASK]" and the empty text).  In a multiple choice, where each sample has its own
candidates, their likelihood behind the bare connective is (domain-conditional pointwise mutual information: Holtzman et al., Surface Form
Competition, EMNLP 2021), summed over tokens, as MeZO's own evaluation does.
mean_prior: the words' mean probabilities over unlabelled prompts are (Zhou et al., Batch Calibration, ICLR 2024); we take training prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from workbench.core.errors import ConfigError
from workbench.tasks.prompts.encoding import PromptEncoder
from workbench.tasks.prompts.likelihoods import LogitsAt, label_log_likelihoods, target_log_likelihoods
from workbench.tasks.prompts.samples import PromptSample, fixed_order

if TYPE_CHECKING:
    from torch import Tensor

Calibration = Literal["none", "content_free", "mean_prior"]
CONTENT_FREE = ("N/A", "[MASK]", "")
PRIOR_SAMPLES = 200
"""Prompts from which the mean prior is taken, at most; drawn by a fixed seed, as published files may be ordered by class."""


def word_prior(logits_at: LogitsAt, encoder: PromptEncoder, calibration: Calibration, unlabelled: Sequence[PromptSample]) -> Tensor:
    """Return (classes,) float32, the log of the label words' prior probability, up to a constant; zeros without calibration.

    unlabelled: prompts of the task; their labels are not looked at.  Raises ConfigError for an unknown calibration.
    """
    import torch

    if calibration == "none":
        return torch.zeros(len(encoder.prompt.words))
    if calibration == "content_free":
        fields = encoder.prompt.without_content
        prompts = [PromptSample(sample_id=at, fields=fields(unlabelled[0].fields, one)) for at, one in enumerate(CONTENT_FREE)]
    elif calibration == "mean_prior":
        prompts = [unlabelled[index] for index in fixed_order("prior", len(unlabelled))[:PRIOR_SAMPLES]]
    else:
        raise unknown_calibration(calibration)
    scores = label_log_likelihoods(logits_at, encoder.split(prompts)).log_softmax(dim=1)
    return scores.logsumexp(dim=0) - math.log(len(prompts))


def candidate_prior(
    logits_at: LogitsAt, encoder: PromptEncoder, samples: Sequence[PromptSample], continuations: Sequence[str], owners: Sequence[int]
) -> Tensor:
    """Return (candidates,) float32, the summed log-likelihood of each candidate behind its sample's prompt without content."""
    fields = [encoder.prompt.without_content(samples[owner].fields, "") for owner in owners]
    sums, _ = target_log_likelihoods(logits_at, encoder.rows(fields, continuations), encoder.encoder.pad_id)
    return sums


def unknown_calibration(name: str) -> ConfigError:
    """Return the error of a name that is no calibration."""
    return ConfigError(f"The calibration '{name}' was asked for.", "Known are none, content_free, mean_prior.", "Choose one of them.")
