"""Add trainable values to a stage's projections (P-RGE, section 3.1 and Appendix B), or train the model's own parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.initialization import HEAD_DEVIATION, seeded_generator
from workbench.models.lora import projections
from workbench.models.quantization import QuantizedLinear
from workbench.models.stack import BackboneStage
from workbench.models.zeroth_order.adapted import DoraLinear, LoraFaLinear, LoraLinear, PartModule, PooledHead, VeraLinear
from workbench.models.zeroth_order.config import TrainableConfig
from workbench.models.zeroth_order.trainables import HEAD, Binding, Trainables, flatten

_NAMES = {"lora_fa": "LoRA-FA", "lora": "LoRA", "dora": "DoRA", "vera": "VeRA"}


def inject(stage: BackboneStage, config: TrainableConfig, pooled: PooledHead | None, binding: Binding) -> Trainables:
    """Replace the projections of a stage's layers with adapted ones, and return the trainable values.

    pooled: a head that is also trained.  The frozen matrices depend only on config.seed and the projections' places in the whole model,
    so that they are the same in stages and in the whole model.  Raises ConfigError for a family without the projections.
    """
    modules: list[tuple[str, int, PartModule]] = []
    layers = projections(stage, config.roles, technique=_NAMES[config.technique], all_of_them=False)
    shared = _shared_matrices(stage, layers, config) if config.technique == "vera" else None
    for index, paths in layers.items():
        for path in paths.values():
            base = stage.layers[index].get_submodule(path)
            if isinstance(base, PartModule):
                raise ConfigError(
                    f"{_NAMES[config.technique]} was asked for.", f"Layer {index} has adapted projections already.", "Load the model again."
                )
            name = f"layers.{index}.{path}"
            adapted = _adapted(base, config, name, binding, shared)
            stage.layers[index].set_submodule(path, adapted)
            modules.append((name, int(index), adapted))
    if pooled is not None:
        modules.append(("head", HEAD, pooled))
    trainables = flatten(modules, binding)
    starts = {slot.name: slot.start for slot in trainables.slots}
    for name, _, module in modules:
        module.starts = {own: starts[f"{name}.{own}"] for own in dict(module.named_parameters(recurse=False))}
    return trainables


def sizes_of(stage: BackboneStage, config: TrainableConfig) -> tuple[int, ...]:
    """Return the sizes of the parameters that `inject` would add to a stage, which may be on the meta device."""
    layers = projections(stage, config.roles, technique=_NAMES[config.technique], all_of_them=False)
    bases = (stage.layers[index].get_submodule(path) for index, paths in layers.items() for path in paths.values())
    return tuple(size for base in bases for size in config.sizes(*shape_of(base)))


def own_parameters(model: nn.Module, binding: Binding) -> Trainables:
    """Make all of a model's own parameters trainable and return them, each once.  Raises ConfigError if they are quantized."""
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ConfigError(
            "Training of all parameters was asked for.", "The backbone's are quantized.", "Leave quantization out, or train LoRA-FA's."
        )
    model.requires_grad_(True)
    parameters = dict(model.named_parameters())
    return Trainables(parameters, [HEAD] * len(parameters), None, binding)


def pooled_head(hidden_size: int, num_outputs: int, seed: int, binding: Binding) -> PooledHead:
    """Return a small random head."""
    weight = torch.randn(hidden_size, num_outputs, generator=seeded_generator(seed, "head.weight")) * HEAD_DEVIATION
    return PooledHead(weight, binding)


def frozen_a(seed: int, name: str, rows: int, rank: int) -> Tensor:
    """Return A (rows, rank) drawn as in peft (Kaiming's uniform distribution), which depends only on seed and name."""
    return torch.empty(rows, rank).uniform_(-(rows**-0.5), rows**-0.5, generator=seeded_generator(seed, name))


def shape_of(base: Any) -> tuple[int, int]:
    """Return a projection's (inputs, outputs), for nn.Linear, GPT-2's Conv1D or a quantized one."""
    if hasattr(base, "in_features"):
        return base.in_features, base.out_features
    return tuple(base.weight.shape)


def _adapted(
    base: nn.Module, config: TrainableConfig, name: str, binding: Binding, shared: tuple[Tensor, Tensor] | None
) -> LoraFaLinear | LoraLinear | VeraLinear:
    rows, columns = shape_of(base)
    dtype = base.weight.dtype
    if shared is not None:
        return VeraLinear(base, shared[0][:rows].to(dtype), shared[1][:, :columns].to(dtype), binding)
    a, scale = frozen_a(config.seed, f"{name}.A", rows, config.rank), config.alpha / config.rank
    if config.technique == "lora_fa":
        return LoraFaLinear(base, (a * scale).to(dtype), columns, binding)
    return (LoraLinear if config.technique == "lora" else DoraLinear)(base, a, columns, binding, scale)


def _shared_matrices(stage: BackboneStage, layers: dict[str, dict[str, str]], config: TrainableConfig) -> tuple[Tensor, Tensor]:
    """Return VeRA's A (k, r) and B (r, out), sized for the largest projection.  Smaller ones use a corner, as in peft."""
    shapes = [shape_of(stage.layers[index].get_submodule(path)) for index, paths in layers.items() for path in paths.values()]
    rows, columns = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    # Kaiming's uniform distribution for a matrix (r, k), or (out, r), with gain 1 / sqrt(3): 1 / sqrt(fan in).
    return frozen_a(config.seed, "vera.A", rows, config.rank), frozen_a(config.seed, "vera.B", config.rank, columns)
