"""Tasks as next-word prediction (P-RGE, appendix D.2): the 13 prompts of Table 8, their data, batches and scores."""

from workbench.tasks.prompts.answers import answer_f1, exact_match, generate_answers
from workbench.tasks.prompts.batches import PromptBatch, collate_prompts, prompt_batches, step_indices, training_batch
from workbench.tasks.prompts.calibration import Calibration
from workbench.tasks.prompts.encoding import EncodedPrompts, PromptEncoder, encode_prompts
from workbench.tasks.prompts.likelihoods import LogitsAt, label_log_likelihoods
from workbench.tasks.prompts.loading import OWN_PROMPT, PROMPT_TASKS, load_prompt_task, unknown_prompt_task
from workbench.tasks.prompts.padding import PaddingRow, padding_statistics
from workbench.tasks.prompts.samples import PAPER_SAMPLES, PromptSample, PromptSplit, PromptTask
from workbench.tasks.prompts.scoring import PromptScores, evaluate, require_room
from workbench.tasks.prompts.templates import PROMPTS, Prompt

__all__ = [
    "answer_f1",
    "exact_match",
    "generate_answers",
    "PromptBatch",
    "collate_prompts",
    "prompt_batches",
    "step_indices",
    "training_batch",
    "Calibration",
    "EncodedPrompts",
    "PromptEncoder",
    "encode_prompts",
    "OWN_PROMPT",
    "PROMPT_TASKS",
    "load_prompt_task",
    "unknown_prompt_task",
    "LogitsAt",
    "label_log_likelihoods",
    "PaddingRow",
    "padding_statistics",
    "PAPER_SAMPLES",
    "PromptSample",
    "PromptSplit",
    "PromptTask",
    "PromptScores",
    "evaluate",
    "require_room",
    "PROMPTS",
    "Prompt",
]
