"""LoRA on the queries' and values' projections, by peft (Hu et al., ICLR 2022, section 4.2; PAC+, section II, Fig. 2).

GPT-2 keeps queries, keys and values in one matrix; there LoRA is on the whole of it, which is peft's own choice too.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.serial import write_text
from workbench.models.injection import projections
from workbench.models.published import Published
from workbench.models.quantization.stored import QuantizedLinear
from workbench.models.stack import BackboneStage, part_of
from workbench.models.tensor_files import save_tensors

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ROLES = ("query", "value", "cross_query", "cross_value", "query_key_value")


def require_peft() -> Any:
    """Return the module peft.  Raises ConfigError if it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # bitsandbytes, which peft looks for, complains of kernels that LoRA does not need
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "LoRA was asked for.", "The package 'peft' is not installed.", "Install it (pip install peft), or choose another technique."
        ) from None
    finally:
        logging.disable(before)
    return peft


def lora_targets(stage: BackboneStage) -> dict[str, str]:
    """Return the projections that LoRA adapts: their path in the stage -> their path in a layer.

    Raises ConfigError for a family whose table names none.
    """
    layers = projections(stage, ROLES, technique="LoRA", all_of_them=False)
    return {f"layers.{index}.{path}": path for index, paths in layers.items() for path in paths.values()}


def inject_lora(stage: BackboneStage, *, rank: int, alpha: float, dropout: float) -> None:
    """Put LoRA into the stage's projections; only its matrices are trainable afterwards.  They begin as peft draws them."""
    peft = require_peft()
    targets = lora_targets(stage)
    # GPT-2's Conv1D keeps its weight as (in, out).
    transposed = any(not isinstance(stage.get_submodule(path), (nn.Linear, QuantizedLinear)) for path in targets)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets), fan_in_fan_out=transposed)
    config._register_custom_module({QuantizedLinear: peft.tuners.lora.Linear})  # QLoRA (Dettmers et al., NeurIPS 2023, section 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wonders at a model that is not one of transformers'
        peft.inject_adapter_in_model(config, stage)


def peft_names(stage: BackboneStage, names: Iterable[str], prefix: str) -> dict[str, str]:
    """Return peft's names in its files of LoRA matrices: layers.I.PATH.lora_A.default.weight, ... in the whole stack's stage.

    prefix: of the base model's parameters in the class that peft is given (see Published).
    """
    found = {}
    for name in names:
        _, index, rest = name.split(".", 2)
        part = part_of(stage, int(index))
        # peft's own names leave the adapter's name, 'default', out; Hugging Face counts a decoder's layers from 0.
        number = int(index) if part is stage.family else int(index) - (stage.num_encoder_layers or 0)
        found[name] = f"base_model.model.{prefix}{part.layers}.{number}.{rest.replace('.default', '')}"
    return found


def save_lora(
    folder: Path,
    state: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    stage: BackboneStage,
    base: str,
    shape: Published,
    **settings: float,
) -> None:
    """Write what PeftModel.from_pretrained reads over the base model: adapter_config.json and adapter_model.safetensors.

    state: the LoRA matrices (see peft_names).  head: weight and bias of the matrix on the last hidden states, none of a model that
    predicts words.  base: where transformers finds the base model.  shape: its class.  settings: r, lora_alpha, lora_dropout.
    """
    names = peft_names(stage, state, shape.prefix)
    weights = {names[name]: tensor for name, tensor in state.items()}
    weights |= {f"base_model.model.{shape.head}.{name}": tensor for name, tensor in head.items()}
    save_tensors(folder / PEFT_WEIGHTS, weights, {"format": "pt"})
    described = {
        "peft_type": "LORA",
        "task_type": shape.task,
        "base_model_name_or_path": base,
        **settings,
        "target_modules": sorted(set(lora_targets(stage).values())),
        "modules_to_save": [shape.head] if head else None,
        "fan_in_fan_out": "query_key_value" in stage.family.weights,
        "bias": "none",
        "inference_mode": True,
    }
    write_text(folder / PEFT_CONFIG, json.dumps(described, indent=1) + "\n")
