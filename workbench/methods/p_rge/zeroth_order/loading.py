"""Load models for training with forward passes: backbone, head and trainable values.  A pipeline stage reads only its
own weights.

Trained values are saved in a file that names their model.  LoRA-FA's and LoRA's matrices are also saved as an adapter
for peft.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.core.serial import to_json
from workbench.methods.p_rge.zeroth_order.adapted import LoraFaLinear, LoraLinear, shapes_of
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel
from workbench.methods.p_rge.zeroth_order.trainables import TrainableConfig
from workbench.models.configuration import model_facts, model_on_meta
from workbench.models.loading import load_language_model_head, load_stack, load_stage
from workbench.models.lora import save_lora
from workbench.models.quantization import quantize
from workbench.models.quantization.config import QuantizationConfig
from workbench.models.saving import PeftTask, Published, TrainedDescription, base_of, published, require_floats
from workbench.models.stack import BackboneStage, LayerStack
from workbench.models.stored_tensors import save_tensors


def load_causal_model(
    name: str,
    config: TrainableConfig,
    *,
    span: tuple[int, int] | None = None,
    quantization: QuantizationConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> CausalModel:
    """Return a complete model with added trainable values, or a stage of it.

    span: layers [start, stop), with the embedding or head at either end of the model, read layer by layer.  A stage's
    trainable values, their noise and the frozen matrices equal those of the same layers in the whole model.
    quantization: how the frozen backbone is stored.  dtype: dtype of weights and activations without quantization.
    From now on this process keeps freed memory (see keep_freed_memory).
    Raises ConfigError and MissingDataError as load_stack does, and ConfigError as CausalModel and quantize do.
    """
    keep_freed_memory()
    stage: BackboneStage
    if (
        span is None and quantization is not None
    ):  # read layer by layer, as a device does: the floats never exist at once
        span = (0, model_facts(name).num_layers)
    if span is None:
        stack = load_stack(name, dtype, with_head=True)
        stage, head = stack.stage(0, stack.num_layers), stack.language_model_head
    else:
        stage = load_stage(
            name,
            *span,
            dtype,
            after_layer=None if quantization is None else lambda layer: quantize(layer, quantization),
        )
        head = (
            load_language_model_head(name, dtype) if stage.family.generates and stage.stop == stage.num_layers else None
        )
    # Together, so that a head tied to the word embedding stays tied.
    frozen = nn.ModuleList([stage] if head is None else [stage, head]).requires_grad_(False)
    if quantization is not None:
        quantize(frozen, quantization)
    model = CausalModel(stage, None if head is None else frozen[1], config)
    if stage.start and config.technique != "full":
        skeleton = LayerStack(model_on_meta(name))
        model.trainables.preceding = shapes_of(skeleton.stage(0, stage.start), config)
    return model


TRAINED = "trained.safetensors"
"""Name of the file in a run's folder."""
_METADATA = "workbench"


def metadata_of(description: TrainedDescription[TrainableConfig]) -> dict[str, str]:
    """Return a description of trained values as metadata of a safetensors file.  A frozen A is drawn again from its
    seed.
    """
    return {_METADATA: to_json(description, indent=-1)}


def save_trained(path: Path, state: Mapping[str, Tensor], description: TrainedDescription[TrainableConfig]) -> None:
    """Write trained values, trainables.state(), with their description."""
    save_tensors(path, state, metadata_of(description))


def find_trained(path: Path | str) -> Path | None:
    """Find the file of trained values for a path: itself, or TRAINED in a folder or in the folder's adapter/.  None if
    not found.
    """
    folder = Path(path)
    for file in (folder, folder / TRAINED, folder / "adapter" / TRAINED):
        if file.is_file():
            return file
    return None


def load_trained(path: Path | str) -> tuple[CausalModel, TrainedDescription[TrainableConfig]]:
    """Return a model with the values trained by a run, or by a program in an inference engine.

    path: as in find_trained.  Raises ConfigError if the file is missing, damaged or of another kind, and as
    load_causal_model does.
    """
    request, trained_file = f"The trained values '{path}' were asked for.", find_trained(path)
    if trained_file is None:
        raise ConfigError(request, f"There is no such file, and no {TRAINED} in such a folder.", "Check the path.")
    try:
        with safe_open(trained_file, "pt") as file:
            text = (file.metadata() or {}).get(_METADATA, "")
            state: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a mapping
        description = msgspec.json.decode(text, type=TrainedDescription[TrainableConfig])
    except SafetensorError as error:
        raise ConfigError(request, f"The file is damaged: {error}.", "Train again, or take a copy.") from error
    except msgspec.DecodeError as error:
        wrong = "The file does not describe the model of its values, or an earlier version wrote it."
        raise ConfigError(request, wrong, "Train again, or give one that P-RGE wrote.") from error
    dtype = getattr(torch, description.dtype)
    model = load_causal_model(description.model, description.config, quantization=description.quantization, dtype=dtype)
    model.trainables.load_state(require_floats(state, request))
    return model, description


def save_for_peft(folder: Path, model: CausalModel, *, name: str) -> Published | None:
    """Write the files that peft reads over the base model, with the head if it was trained; return transformers' class
    of the result.

    name: the model's name.  LoRA-FA's A is included: for peft it is LoRA.  Writes nothing and returns None for other
    techniques, and for a model that no class of transformers can represent.
    """
    config, state = model.config, dict[str, Tensor]()
    assert model.is_first and model.is_last, "a stage of a model is not an adapter of it"
    words: PeftTask = "CAUSAL_LM" if model.backbone.num_encoder_layers is None else "SEQ_2_SEQ_LM"
    shape = published(name, words if model.pooled is None else "TOKEN_CLS")
    if config.technique not in ("lora_fa", "lora") or shape is None:
        return None
    for path, module in model.backbone.named_modules():
        if isinstance(module, LoraFaLinear | LoraLinear):
            a = module.a / (config.alpha / config.rank) if isinstance(module, LoraFaLinear) else module.A
            state[f"{path}.lora_A.default.weight"] = a.detach().float().T
            state[f"{path}.lora_B.default.weight"] = module.B.detach().T
    head = (
        {} if model.pooled is None else {"weight": model.pooled.weight.detach().T, "bias": model.pooled.bias.detach()}
    )
    settings = {"r": config.rank, "lora_alpha": config.alpha, "lora_dropout": 0.0}
    save_lora(folder, state, head, model.backbone, base_of(name), shape, **settings)
    return shape


KEPT_BYTES = 256 << 20
"""Upper limit of kept memory: one layer frees this much at 8,192 tokens of width 576."""
_KEPT_SHARE = 16
"""... and at most this part of the machine's memory."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the memory freed by one layer and reuse it for the next; return whether it does.

    By default glibc returns this memory to the system after every layer and requests it again page by page, which takes
    a fifth of a forward pass of 512 tokens.  Nothing changes if the user has set the allocator in the environment, or
    with another C library.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if change is None:
        return False
    threshold = min(KEPT_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _KEPT_SHARE)
    return bool(change(_MMAP_THRESHOLD, threshold) and change(_TRIM_THRESHOLD, threshold))
