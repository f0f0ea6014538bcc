"""Trained values as a file that says which model they are of, and LoRA-FA's and LoRA's matrices as an adapter that peft reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.serial import to_json
from workbench.models.lora import ROLES, save_lora
from workbench.models.published import PeftTask, Published, base_of, published
from workbench.models.quantization.config import FloatType, QuantizationConfig
from workbench.models.tensor_files import save_tensors
from workbench.models.zeroth_order.adapted import LoraFaLinear, LoraLinear
from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import TrainableConfig
from workbench.models.zeroth_order.loading import load_causal_model

TRAINED = "trained.safetensors"
"""The file's name in a run's folder."""
_METADATA = "workbench"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """What trained values are of: the model's name, and how they were put in.  A frozen A is drawn again from its seed.

    quantization: of the frozen weights.  dtype: of weights and activations without it.
    """

    model: str
    trainable: TrainableConfig
    quantization: QuantizationConfig | None = None
    dtype: FloatType = "float32"

    @property
    def metadata(self) -> dict[str, str]:
        """Return it as the metadata of a safetensors file."""
        return {_METADATA: to_json(self, indent=-1)}


def save_trained(path: Path, state: Mapping[str, Tensor], description: TrainedDescription) -> None:
    """Write trained values, trainables.state(), with what they are of."""
    save_tensors(path, state, description.metadata)


def find_trained(path: Path | str) -> Path | None:
    """Return the file of trained values that a path means: itself, or TRAINED in a folder, or in the folder's adapter/; None if none is."""
    folder = Path(path)
    for found in (folder, folder / TRAINED, folder / "adapter" / TRAINED):
        if found.is_file():
            return found
    return None


def load_trained(path: Path | str) -> tuple[CausalModel, TrainedDescription]:
    """Return the model with the values that a run, or a program in an inference engine, has trained.

    path: as in find_trained.  Raises ConfigError for a file that is missing, damaged or of something else, and as load_causal_model does.
    """
    asked, found = f"The trained values '{path}' were asked for.", find_trained(path)
    if found is None:
        raise ConfigError(asked, f"There is no such file, and no {TRAINED} in such a folder.", "Check the path.")
    try:
        with safe_open(found, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA, "")
            state: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        description = msgspec.json.decode(text, type=TrainedDescription)
    except SafetensorError as error:
        raise ConfigError(asked, f"The file is damaged: {error}.", "Train again, or take a copy.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(asked, "The file does not say which model its values are of.", "Give one that P-RGE wrote.") from error
    dtype = getattr(torch, description.dtype)
    model = load_causal_model(description.model, description.trainable, quantization=description.quantization, dtype=dtype)
    model.trainables.load_state(state)
    return model, description


def save_for_peft(folder: Path, model: CausalModel, *, name: str) -> Published | None:
    """Write what peft reads over the base model, with the head if it was trained; return transformers' class of it.  name: the model's.

    LoRA-FA's A goes along: to peft it is LoRA.  Nothing is written, and None returned, for other techniques and roles than LoRA's, and
    for a model that no class of transformers holds.
    """
    config, state = model.config, dict[str, Tensor]()
    assert model.is_first and model.is_last, "a stage of a model is no adapter of it"
    words: PeftTask = "CAUSAL_LM" if model.backbone.num_encoder_layers is None else "SEQ_2_SEQ_LM"
    shape = published(name, words if model.pooled is None else "TOKEN_CLS")
    if config.technique not in ("lora_fa", "lora") or config.roles != ROLES or shape is None:
        return None
    for path, module in model.backbone.named_modules():
        if isinstance(module, LoraFaLinear | LoraLinear):
            a = module.a / (config.alpha / config.rank) if isinstance(module, LoraFaLinear) else module.A
            state[f"{path}.lora_A.default.weight"] = a.detach().float().T
            state[f"{path}.lora_B.default.weight"] = module.B.detach().T
    head = {} if model.pooled is None else {"weight": model.pooled.weight.detach().T, "bias": model.pooled.bias.detach()}
    settings = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0}
    save_lora(folder, state, head, model.backbone, base_of(name), shape, **settings)
    return shape
