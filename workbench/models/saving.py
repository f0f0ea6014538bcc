"""Save what was trained as safetensors and JSON, whole or not at all, and load it in a fresh process to predict the same.

LoRA is what peft reads, full fine-tuning what transformers reads, where one of their classes holds the model (see published.py); Adapters
and all others are in our own format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json, write_text
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import load_stack, model_config, stored_weights
from workbench.models.lora import PEFT_CONFIG, PEFT_WEIGHTS, peft_names, save_lora
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.published import Published, base_of, head_task, kept_name, published, published_model, save_tokenizer
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.models.tensor_files import save_tensors

T = TypeVar("T")

WEIGHTS, DESCRIPTION = "adapter.safetensors", "adapter.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """What a saved adapter is for.  model: the backbone's name.  quantization: of the backbone."""

    config: ParallelAdapterConfig
    model: str
    task: str
    max_length: int
    quantization: QuantizationConfig | None = None
    schema_version: int = 1


def save_adapter(folder: Path | str, state: Mapping[str, Tensor], description: AdapterDescription) -> Path:
    """Write a whole adapter's state_dict (or the union of its stages') and return the folder.

    Raises ConfigError if the state is not whole.  Weights go first: a folder with a description is complete.
    """
    folder = Path(folder)
    # Loading checks names and shapes, so that nobody finds out later.
    _build(description.config, state, f"The adapter for '{folder}'")
    save_tensors(folder / WEIGHTS, state)
    write_text(folder / DESCRIPTION, to_json(description) + "\n")
    return folder


def load_adapter(folder: Path | str) -> tuple[ParallelAdapter, AdapterDescription]:
    """Return a saved adapter, in evaluation mode.  Raises ConfigError if the folder holds none or it is damaged."""
    description, state = load_saved(Path(folder), f"The adapter '{folder}' was asked for.", AdapterDescription, DESCRIPTION, WEIGHTS)
    return _build(description.config, state, f"The adapter '{folder}'").eval(), description


def load_saved(folder: Path, asked: str, kind: type[T], description: str, weights: str | None) -> tuple[T, dict[str, Tensor]]:
    """Return the description and the tensors of what was trained, from files of these names; weights: None reads none.

    asked: sentence for the error.  Raises ConfigError if one of them is missing or damaged.
    """
    try:
        found = from_json((folder / description).read_bytes(), kind, source=f"'{folder / description}'")
        return found, {} if weights is None else load_file(folder / weights)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror or error}: '{error.filename or weights}'.", "Check the folder.") from error
    except SafetensorError as error:
        raise ConfigError(asked, f"Its {weights} is damaged: {error}.", "Train it again, or take a copy.") from error


def _build(config: ParallelAdapterConfig, state: Mapping[str, Tensor], what: str) -> ParallelAdapter:
    adapter = ParallelAdapter(config)
    try:
        adapter.load_state_dict(dict(state))
    except RuntimeError as error:
        first = " ".join(str(error).split("\n")[1:2]).strip() or str(error)
        raise ConfigError(f"{what} was asked for.", f"Its weights do not fit its description: {first}", "Check the folder.") from error
    return adapter


TRAINED, TRAINED_DESCRIPTION = "trained.safetensors", "fine_tuning.json"
WHOLE_MODEL = "config.json"
"""The file that transformers writes beside the weights of a whole model."""
_BACKBONE, _HEAD = "backbone.", "head.output."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedDescription:
    """What was trained.  model: the backbone's name.  class_names: in the order of the classes.  quantization: of the backbone."""

    config: TechniqueConfig
    model: str
    task: str
    max_length: int
    class_names: tuple[str, ...] = ()
    quantization: QuantizationConfig | None = None
    schema_version: int = 2


def set_trained(model: TechniqueStage, weights: Mapping[str, Tensor]) -> None:
    """Set a model's trained parameters by name.  Raises ConfigError for a name or a shape that does not fit."""
    with torch.no_grad():
        for name, parameter in model.trained().items():
            if name not in weights or weights[name].shape != parameter.shape:
                found = f"It has the shape {tuple(weights[name].shape)}." if name in weights else "It is missing."
                raise ConfigError(f"The trained parameter '{name}' was asked for.", found, "Check which model and technique it is for.")
            parameter.copy_(weights[name])


def save_trained(folder: Path, model: TechniqueStage, description: TrainedDescription) -> Path:
    """Write a whole model's trained parameters and what they are, the description last; return the folder.

    A regression's head is written so that it gives numbers as the labels are.
    """
    config, name = description.config, description.model
    assert model.head is not None, "a whole model has a head"
    linear = model.head.output
    head = {
        "weight": linear.weight.detach() * config.label_std,
        "bias": linear.bias.detach() * config.label_std + config.label_mean,
    }
    shape = published(name, head_task(config.kind)) if config.technique in ("full", "lora") else None
    state = {key: parameter.detach() for key, parameter in model.trained().items() if not key.startswith(_HEAD)}
    if shape is None:
        save_tensors(folder / TRAINED, state | {f"{_HEAD}{key}": tensor for key, tensor in head.items()})
    elif config.technique == "full":
        _save_whole(folder, model, head, description, shape)
    else:
        matrices = {key.removeprefix(_BACKBONE): tensor for key, tensor in state.items()}
        settings = {"r": config.lora_rank, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
        save_lora(folder, matrices, head, model.backbone, base_of(name), shape, **settings)
    save_tokenizer(name, folder)
    kept = replace(description, model=kept_name(name), config=replace(config, label_mean=0.0, label_std=1.0))
    write_text(folder / TRAINED_DESCRIPTION, to_json(kept) + "\n")
    return folder


def _save_whole(folder: Path, model: TechniqueStage, head: Mapping[str, Tensor], about: TrainedDescription, shape: Published) -> None:
    config = model_config(about.model)
    names = about.class_names or tuple(f"LABEL_{number}" for number in range(about.config.num_outputs))
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    with parameters_on_meta():
        whole = published_model(config, shape.task)
    whole.to_empty(device="cpu")
    stage = LayerStack(whole.base_model).stage(0, model.backbone.num_layers)
    stage.load_state_dict(model.backbone.state_dict())
    whole.get_submodule(shape.head).load_state_dict(dict(head))
    config.architectures, config.dtype = [type(whole).__name__], "float32"
    save_tensors(folder / "model.safetensors", whole.state_dict(), {"format": "pt"})
    write_text(folder / WHOLE_MODEL, config.to_json_string())


def load_trained(folder: Path | str) -> tuple[TechniqueStage, TrainedDescription]:
    """Return the whole model with what was trained, in evaluation mode.  Raises ConfigError if the folder holds none or it is damaged."""
    folder, asked = Path(folder), f"The fine-tuned model '{folder}' was asked for."
    is_whole, is_peft = (folder / WHOLE_MODEL).is_file(), (folder / PEFT_CONFIG).is_file()
    weights = None if is_whole else PEFT_WEIGHTS if is_peft else TRAINED
    description, state = load_saved(folder, asked, TrainedDescription, TRAINED_DESCRIPTION, weights)
    stack = load_stack(str(folder) if is_whole else description.model)
    if description.quantization is not None:
        quantize(stack, description.quantization)
    model = TechniqueStage(stack.stage(0, stack.num_layers), description.config)
    if is_whole or is_peft:
        shape = published(str(folder) if is_whole else description.model, head_task(description.config.kind))
        assert shape is not None, "so it was saved"
        if is_whole:
            read = {name: tensor.read(torch.float32) for name, tensor in (stored_weights(str(folder)) or {}).items() if shape.head in name}
            state, prefix = dict(model.trained()), ""
        else:
            matrices = [name.removeprefix(_BACKBONE) for name in model.trained() if name.startswith(_BACKBONE)]
            read, prefix = state, "base_model.model."
            names = peft_names(model.backbone, matrices, shape.prefix)
            state = {f"{_BACKBONE}{own}": read[name] for own, name in names.items() if name in read}
        for key in ("weight", "bias"):
            state.pop(f"{_HEAD}{key}", None)
            if (name := f"{prefix}{shape.head}.{key}") in read:
                state[f"{_HEAD}{key}"] = read[name]
    set_trained(model, state)
    model.eval()
    return model, description
