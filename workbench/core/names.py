"""Names that options, models, tasks and profiles share: the number types of stored weights, the kinds of tasks, and the
techniques of fine-tuning.
"""

from __future__ import annotations

from typing import Literal, get_args

FloatType = Literal["float32", "float16", "bfloat16"]
StorageType = Literal["float32", "float16", "bfloat16", "int8", "int4", "nf4"]
EmbeddingStorage = Literal["float32", "float16", "bfloat16", "int8"]

FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)
FP32_BYTES = 4
"""Bytes of a value in float32."""

ActivationsChoice = Literal["auto", "memory", "recompute", "disk"]
"""How activations reach the backward pass; auto: the planner chooses for each stage, and never the disk.
"""

TrainedKind = Literal[
    "classification",
    "regression",
    "sequence_to_sequence",
    "question_answering",
    "token_classification",
    "text_generation",
]
"""Kinds of tasks for which an adapter is trained."""
Kind = Literal[TrainedKind, "multiple_choice"]
"""Kinds of tasks."""

Technique = Literal["full", "lora", "adapters", "serial", "parallel"]
"""The trained weights: all, or a few that are added to the frozen model (see models.techniques.TechniqueConfig)."""
