"""Trained LoRA-FA and LoRA matrices as an adapter that peft reads."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.lora import ROLES, save_lora
from workbench.models.zeroth_order.adapted import LoraFaLinear, LoraLinear
from workbench.models.zeroth_order.causal_model import CausalModel


def save_for_peft(folder: Path, model: CausalModel, *, name: str) -> None:
    """Write what PeftModel.from_pretrained reads beside the base model (AutoModel).  name: the base model's.

    LoRA-FA's A goes along: to peft it is LoRA.  Raises ConfigError for other techniques, other roles than LoRA's, and a stage of a model.
    """
    config, state = model.config, dict[str, Tensor]()
    for path, module in model.backbone.named_modules():
        if isinstance(module, LoraFaLinear | LoraLinear):
            a = module.a / (config.alpha / config.rank) if isinstance(module, LoraFaLinear) else module.A
            state[f"{path}.lora_A.default.weight"] = a.detach().float().T
            state[f"{path}.lora_B.default.weight"] = module.B.detach().T
    if not state or config.roles != ROLES or not (model.is_first and model.is_last):
        raise ConfigError(
            "An adapter for peft was asked for.",
            "Only a whole model with LoRA-FA or LoRA on queries and values makes one.",
            "Save trainables.state() instead.",
        )
    save_lora(folder, state, model.backbone, model=name, rank=config.rank, alpha=config.alpha, dropout=0.0)
