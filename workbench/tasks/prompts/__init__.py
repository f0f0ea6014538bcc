"""Tasks as next-word prediction (P-RGE, appendix D.2): the 13 prompts of Table 8, their tokens, batches and scores."""

from workbench.tasks.prompts.encoding import EncodedPrompts
from workbench.tasks.prompts.scoring import (
    PaddingRow,
    PromptBatch,
    collate_prompts,
    evaluate,
    indices_from,
    label_log_likelihoods,
    padding_statistics,
    require_room,
    step_indices,
    training_batch,
)
from workbench.tasks.task import OWN_PROMPT, PromptSample
from workbench.tasks.wording import PAPER_SAMPLES, PROMPTS, Prompt
