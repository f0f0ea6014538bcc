"""Load only the layers of one stage: the other layers' weights are neither read nor allocated.

A device with a small memory could not hold the whole model for a moment only to keep a third of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from workbench.models.stack import BackboneStage, LayerStack


def partial_stage(
    folder: Path, config: Any, build: Callable[[Any], nn.Module], start: int, stop: int, dtype: torch.dtype, separator_id: int | None
) -> BackboneStage | None:
    """Return layers [start, stop) of the model in `folder`, or None if its files do not allow a partial load.

    build: makes a model of a config; it is called once on the meta device and once for a one-layer model that lends its
    constant buffers (position numbers, rotary frequencies), which are in no file.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    with torch.device("meta"):
        model = build(config)
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    stage = LayerStack(model, separator_id=separator_id).stage(start, stop)
    with safe_open(path, framework="pt") as file:
        keys = file.keys()
        for module in stage.modules():
            for local, parameter in list(module.named_parameters(recurse=False)):
                key = _key(names[id(parameter)], keys)
                if key is None:
                    return None
                setattr(module, local, nn.Parameter(file.get_tensor(key).to(dtype), requires_grad=False))
    _lend_buffers(stage, config, build)
    return stage.eval()


def _key(name: str, keys: list[str]) -> str | None:
    # A checkpoint saved with a head has its base model under a prefix such as "bert.".
    matching = [key for key in keys if key == name or key.endswith(f".{name}")]
    return min(matching, key=len) if matching else None


def _lend_buffers(stage: BackboneStage, config: Any, build: Callable[[Any], nn.Module]) -> None:
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    small.vocab_size = 1 + max(token for token in (7, config.pad_token_id) if token is not None)
    with torch.random.fork_rng(devices=[]):
        lender = LayerStack(build(small)).stage(0, 1)
    lent = dict(lender.named_buffers())
    for name, buffer in list(stage.named_buffers()):
        if buffer.is_meta:
            path, _, local = name.rpartition(".")
            parts = path.split(".")
            if parts[0] == "layers":
                parts[1] = "0"
            stage.get_submodule(path).register_buffer(local, lent[".".join([*parts, local])], persistent=False)
