"""Add trained LoRA matrices to their base model's weights: W + alpha / r B A (Hu et al., ICLR 2022, section 4.1).

The whole model is written as transformers reads it: a folder, which needs neither the workbench nor peft.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from workbench.core.errors import ConfigError, WriteError
from workbench.core.files import make_folder
from workbench.core.serial import write_text
from workbench.models.chat_template import TEMPLATE_FILE
from workbench.models.configuration import is_tiny, model_config
from workbench.models.loading import load_model
from workbench.models.lora import PEFT_WEIGHTS, PeftTask, read_peft_config
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.quiet import quiet_transformers
from workbench.models.saving import published, published_model, require_floats, save_tokenizer
from workbench.models.tokenizer import TextTokenizer

_MATRIX = ".lora_A.weight"


def merged_lora(name: str, folder: Path) -> Any:
    """Return the Hugging Face model `name` with the LoRA matrices in a folder (peft's files) added to its weights, and
    with the head if it was trained, too.

    Raises ConfigError if the matrices do not fit the model.
    """
    request = f"The LoRA matrices in '{folder}' were to be merged into '{name}'."
    settings = read_peft_config(folder)
    state = require_floats(load_file(folder / PEFT_WEIGHTS), request)
    task, shape = settings["task_type"], published(name, settings["task_type"])
    assert shape is not None, "so it was saved"
    model = whole_model(name, task) if shape.head else load_model(name)
    prefix, scale = f"base_model.model.{shape.prefix}", settings["lora_alpha"] / settings["r"]
    with torch.no_grad():
        for key in (key for key in state if key.endswith(_MATRIX)):
            path = key.removeprefix(prefix).removesuffix(_MATRIX)
            try:
                module: Any = model.base_model.get_submodule(path)
                update = scale * state[key.replace("lora_A", "lora_B")] @ state[key]
                # GPT-2's Conv1D stores its weight as (in, out).
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
                weight += update.to(weight.dtype)
            except (AttributeError, KeyError, RuntimeError) as error:
                raise ConfigError(request, f"'{path}' does not fit: {error}.", "Take both of one run.") from error
        if shape.head:
            outputs = len(state[f"base_model.model.{shape.head}.weight"])
            head = nn.Linear(model.config.hidden_size, outputs, dtype=torch.float32)
            head.load_state_dict({key: state[f"base_model.model.{shape.head}.{key}"] for key in ("weight", "bias")})
            model.set_submodule(shape.head, head)
            model.config.num_labels = outputs
    return model


def whole_model(name: str, task: PeftTask) -> Any:
    """Return transformers' class for a task with a model's weights.

    A tiny model's head is its word embedding; a head of classes keeps random weights.
    """
    config, base = model_config(name), load_model(name)
    if task in ("CAUSAL_LM", "SEQ_2_SEQ_LM") and not is_tiny(name):
        return base
    config.tie_word_embeddings = config.tie_word_embeddings or is_tiny(name)
    with parameters_on_meta():
        model = published_model(config, task)
    model.to_empty(device="cpu")
    # A class of tokens has no pooler, which our models may have.
    keys = model.base_model.load_state_dict(base.base_model.state_dict(), strict=False)
    assert not keys.missing_keys, keys.missing_keys
    model.tie_weights()
    return model.eval()


def save_whole(folder: Path, name: str, model: Any, tokenizer: TextTokenizer, ends: Collection[int]) -> None:
    """Write a whole model's folder, as from_pretrained reads it: weights in the base model's dtype, tokenizer, chat
    template, and the ends of its texts.

    Raises ConfigError if the folder has files already, WriteError if it cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"The model in '{folder}' was asked for.", "The folder has files.", "Choose an empty one.")
    make_folder(folder)
    stored = getattr(torch, str(getattr(model_config(name), "dtype", None) or "float32").removeprefix("torch."))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = sorted(ends)
    try:
        with quiet_transformers():
            model.to(stored).save_pretrained(folder)
        save_tokenizer(name, folder)
        if model.can_generate():
            write_text(folder / TEMPLATE_FILE, tokenizer.whole_template)
    except (OSError, SafetensorError, WriteError) as error:  # safetensors wraps the system's errors
        shutil.rmtree(folder, ignore_errors=True)  # a part of a model is of no use, and in the way of the next try
        raise WriteError(
            f"The model in '{folder}' was asked for.",
            f"It could not be written: {error}.",
            "Free some space, or choose another place.",
        ) from error
