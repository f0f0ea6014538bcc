"""Projections with added trainable values, computed for several perturbed copies at once (P-RGE, section 3.1, Figure
1).

A batch of P parts has rows (P*E, t): part p has rows [p*E, (p+1)*E).  All parts share x W; the trainable values use
batched matmuls.
LoRA: Hu et al., ICLR 2022.  LoRA-FA: Zhang et al., arXiv:2308.03303.  DoRA: Liu et al., ICML 2024, Eq. 5.  VeRA:
Kopiczko et al., ICLR 2024, Eq. 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.zeroth_order.directions import Shape
from workbench.methods.p_rge.zeroth_order.trainables import HEAD, Binding, TrainableConfig, Trainables, flatten
from workbench.models.initialization import HEAD_DEVIATION, seeded_generator
from workbench.models.lora import ALL_ROLES, ROLES, projections
from workbench.models.quantization import QuantizedLinear, dense_weight
from workbench.models.stack import BackboneStage


class PartModule(nn.Module):
    """A module with as many copies of its parameters as a batch has parts.

    binding: the binding that a whole model shares.  starts: the index of each parameter's first value in theta, by
    name.
    """

    def __init__(self, binding: Binding) -> None:
        super().__init__()
        self.binding = binding
        self.starts: dict[str, int] = {}

    def values(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return (P, *shape) of a parameter: its perturbed copies, or if none are bound the parameter itself."""
        parameter = self.get_parameter(name)
        copies = self.binding.copies
        if copies is None:
            return parameter[None].to(dtype)
        start = self.starts[name] - self.binding.start
        return copies[:, start : start + parameter.numel()].view(-1, *parameter.shape).to(dtype)


class AdaptedLinear(PartModule):
    """A frozen projection with added values.  base: nn.Linear, GPT-2's Conv1D or a quantized one."""

    def __init__(self, base: nn.Module, binding: Binding) -> None:
        super().__init__(binding)
        self.base = base

    @property
    def weight(self) -> Any:
        """Return the frozen weight, whose dtype some models read."""
        return self.base.weight


class LoraFaLinear(AdaptedLinear):
    """y = x W + (x A) B, A frozen.

    a: (k, r), multiplied by alpha / r.  B:
    (r, out) zeros.
    """

    a: Tensor

    def __init__(self, base: nn.Module, a: Tensor, out_features: int, binding: Binding) -> None:
        super().__init__(base, binding)
        self.register_buffer("a", a)
        self.B = nn.Parameter(torch.zeros(a.shape[1], out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        return add_product(self.base(x), x @ self.a, self.values("B", x.dtype))


class LoraLinear(AdaptedLinear):
    """y = x W + alpha / r (x A) B.  A: (k, r).  B: (r, out) zeros."""

    def __init__(self, base: nn.Module, a: Tensor, out_features: int, binding: Binding, scale: float) -> None:
        super().__init__(base, binding)
        self.scale = scale
        self.A = nn.Parameter(a.float())
        self.B = nn.Parameter(torch.zeros(a.shape[1], out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        a = self.values("A", x.dtype)
        low = torch.bmm(x.reshape(len(a), -1, x.shape[-1]), a * self.scale)
        return add_product(self.base(x), low, self.values("B", x.dtype))


class DoraLinear(LoraLinear):
    """y = m (x V) / |V| + b with V = W + alpha / r A B; |V| and m have one value per output.  A, B as in LoRA; m starts
    as |W|.
    """

    def __init__(self, base: nn.Module, a: Tensor, out_features: int, binding: Binding, scale: float) -> None:
        super().__init__(base, a, out_features, binding, scale)
        self.magnitude = nn.Parameter(dense_weight(base).float().norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        a, b = self.values("A", x.dtype) * self.scale, self.values("B", x.dtype)
        bias = self.base.bias
        y = self.base(x) if bias is None else self.base(x) - bias
        y = add_product(y, torch.bmm(x.reshape(len(a), -1, x.shape[-1]), a), b)
        gain = self.values("magnitude", torch.float32) / self._norms(a.float(), b.float())
        y = (y.view(len(a), -1, y.shape[-1]) * gain.to(y.dtype)[:, None]).view_as(y)
        return y if bias is None else y + bias

    def _norms(self, a: Tensor, b: Tensor) -> Tensor:
        """Return |V| (P, out) without computing V: |w + A b|^2 = |w|^2 + 2 b (A w) + b (A A) b.  It gets no gradient
        (section 4.3).
        """
        a, b = a.detach(), b.detach()
        weight = dense_weight(self.base).float()
        crossed = 2 * torch.matmul(a.mT, weight.T) + torch.bmm(torch.bmm(a.mT, a), b)
        return (weight.square().sum(dim=1) + (crossed * b).sum(dim=1)).clamp(min=1e-24).sqrt()


class VeraLinear(AdaptedLinear):
    """y = x W + lambda_b * ((lambda_d * (x A)) B).  a: (k, r), b: (r, out), frozen and shared by all layers; lambda_d
    0.1, lambda_b 0.
    """

    a: Tensor
    b: Tensor

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, binding: Binding) -> None:
        super().__init__(base, binding)
        self.register_buffer("a", a)
        self.register_buffer("b", b)
        self.lambda_d = nn.Parameter(torch.full((a.shape[1],), 0.1))
        self.lambda_b = nn.Parameter(torch.zeros(b.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        d, b = self.values("lambda_d", x.dtype), self.values("lambda_b", x.dtype)
        low = (x @ self.a).view(len(d), -1, d.shape[1]) * d[:, None]
        y = self.base(x)
        return y + ((low @ self.b) * b[:, None]).view_as(y)


class PooledHead(PartModule):
    """A linear head on the mean of the last hidden states, for models without a vocabulary.  weight: (d, outputs).
    bias: (outputs,).
    """

    def __init__(self, hidden_size: int, num_outputs: int, seed: int, binding: Binding) -> None:
        super().__init__(binding)
        weight = torch.randn(hidden_size, num_outputs, generator=seeded_generator(seed, "head.weight")) * HEAD_DEVIATION
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(num_outputs))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (P, E, outputs) float32 for hidden states (P*E, t, d) and a mask (E, t)."""
        weight, bias = self.values("weight", torch.float32), self.values("bias", torch.float32)
        share = (attention_mask / attention_mask.sum(dim=1, keepdim=True)).repeat(len(weight), 1)
        pooled = torch.bmm(share[:, None], hidden.float()).view(len(weight), -1, hidden.shape[-1])
        return torch.baddbmm(bias[:, None], pooled, weight)


def add_product(y: Tensor, low: Tensor, b: Tensor) -> Tensor:
    """Return y + low b for each part: y (P*E, t, out), low (P*E, t, r) or (P, E*t, r), b (P, r, out).  In place unless
    something is differentiated.
    """
    low = low.reshape(len(b), -1, low.shape[-1])
    parts = y.view(len(b), -1, y.shape[-1])
    is_dual = forward_ad.unpack_dual(b).tangent is not None
    if is_dual or (torch.is_grad_enabled() and (b.requires_grad or low.requires_grad or y.requires_grad)):
        return torch.baddbmm(parts, low, b).view_as(y)
    parts.baddbmm_(low, b)
    return y


_NAMES = {"lora_fa": "LoRA-FA", "lora": "LoRA", "dora": "DoRA", "vera": "VeRA"}


def inject(stage: BackboneStage, config: TrainableConfig, pooled: PooledHead | None, binding: Binding) -> Trainables:
    """Replace the projections of a stage's layers with adapted ones, and return the trainable values.

    pooled: a head that is also trained.  The frozen matrices depend only on config.seed and the projections' places in
    the whole model, so that they are the same in stages and in the whole model.  Raises ConfigError for a family
    without the projections.
    """
    modules: list[tuple[str, int, PartModule]] = []
    layers = _projections(stage, config)
    shared = _shared_matrices(stage, layers, config) if config.technique == "vera" else None
    for index, paths in layers.items():
        for path in paths.values():
            base = stage.layers[index].get_submodule(path)
            if isinstance(base, PartModule):
                raise ConfigError(
                    f"{_NAMES[config.technique]} was asked for.",
                    f"Layer {index} has adapted projections already.",
                    "Load the model again.",
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
        module.starts = {
            parameter_name: starts[f"{name}.{parameter_name}"]
            for parameter_name in dict(module.named_parameters(recurse=False))
        }
    return trainables


def _projections(stage: BackboneStage, config: TrainableConfig) -> dict[str, dict[str, str]]:
    roles = ROLES if config.projections == "query_value" else ALL_ROLES
    return projections(stage, roles, technique=_NAMES[config.technique], all_of_them=False)


def shapes_of(stage: BackboneStage, config: TrainableConfig) -> tuple[Shape, ...]:
    """Return the shapes of the parameters that `inject` would add to a stage, which may be on the meta device."""
    layers = _projections(stage, config)
    bases = (stage.layers[index].get_submodule(path) for index, paths in layers.items() for path in paths.values())
    return tuple(shape for base in bases for shape in config.shapes(*shape_of(base)))


def own_parameters(model: nn.Module, binding: Binding) -> Trainables:
    """Make all of a model's own parameters trainable and return them, each once.  Raises ConfigError if they are
    quantized.
    """
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ConfigError(
            "Training of all parameters was asked for.",
            "The backbone's are quantized.",
            "Leave quantization out, or train LoRA-FA's.",
        )
    model.requires_grad_(True)
    parameters = dict(model.named_parameters())
    return Trainables(parameters, [HEAD] * len(parameters), None, binding)


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


def _shared_matrices(
    stage: BackboneStage, layers: dict[str, dict[str, str]], config: TrainableConfig
) -> tuple[Tensor, Tensor]:
    """Return VeRA's A (k, r) and B (r, out), sized for the largest projection.  Smaller ones use a corner, as
    in peft.
    """
    shapes = [
        shape_of(stage.layers[index].get_submodule(path)) for index, paths in layers.items() for path in paths.values()
    ]
    rows, columns = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    # Kaiming's uniform distribution for a matrix (r, k), or (out, r), with gain 1 / sqrt(3): 1 / sqrt(fan in).
    return frozen_a(config.seed, "vera.A", rows, config.rank), frozen_a(config.seed, "vera.B", config.rank, columns)
