"""Save what a technique has trained, and load it in a fresh process to predict the same; LoRA's matrices for peft besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.serial import to_json, write_text
from workbench.models.loading import load_stack
from workbench.models.lora import save_lora
from workbench.models.saving import load_saved
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.models.tensor_files import save_tensors

TRAINED, DESCRIPTION = "trained.safetensors", "fine_tuning.json"
_BACKBONE = "backbone."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """What was trained.  model: the backbone's name.  notes: anything worth keeping (metrics, epoch)."""

    config: TechniqueConfig
    model: str
    task: str
    max_length: int
    notes: dict[str, float | int | str] = field(default_factory=dict)
    schema_version: int = 1


def set_trained(model: TechniqueStage, weights: Mapping[str, Tensor]) -> None:
    """Set a model's trained parameters by name.  Raises ConfigError for a name or a shape that does not fit."""
    with torch.no_grad():
        for name, parameter in model.trained().items():
            if name not in weights or weights[name].shape != parameter.shape:
                found = f"It has the shape {tuple(weights[name].shape)}." if name in weights else "It is missing."
                raise ConfigError(f"The trained parameter '{name}' was asked for.", found, "Check which model and technique it is for.")
            parameter.copy_(weights[name])


def save_trained(folder: Path, model: TechniqueStage, description: TrainedDescription) -> Path:
    """Write a whole model's trained parameters and what they are, the description last; return the folder."""
    state = {name: parameter.detach() for name, parameter in model.trained().items()}
    save_tensors(folder / TRAINED, state)
    config = description.config
    if config.technique == "lora":
        save_lora(
            folder,
            {name.removeprefix(_BACKBONE): tensor for name, tensor in state.items() if ".lora_" in name},
            model.backbone,
            model=description.model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
        )
    write_text(folder / DESCRIPTION, to_json(description) + "\n")
    return folder


def load_trained(folder: Path | str) -> tuple[TechniqueStage, TrainedDescription]:
    """Return the whole model with what was trained, in evaluation mode.  Raises ConfigError if the folder holds none or it is damaged."""
    asked = f"The fine-tuned model '{folder}' was asked for."
    description, weights = load_saved(Path(folder), asked, TrainedDescription, DESCRIPTION, TRAINED)
    stack = load_stack(description.model)
    model = TechniqueStage(stack.stage(0, stack.num_layers), description.config)
    set_trained(model, weights)
    model.eval()
    return model, description
