"""Projections with added trainable values, computed for several perturbed copies at once (P-RGE, section 3.1, Figure 1).

A batch of P parts has rows (P*E, t): part p has rows [p*E, (p+1)*E).  All parts share x W; the trainable values use batched matmuls.
LoRA: Hu et al., ICLR 2022.  LoRA-FA: Zhang et al., arXiv:2308.03303.  DoRA: Liu et al., ICML 2024, Eq. 5.  VeRA: Kopiczko et al.,
ICLR 2024, Eq. 2.

A pass in 16 bits (P-RGE, section 4.2) keeps 8 (bfloat16) or 11 (float16) binary digits of every number.  A perturbation smaller than half
the last digit is rounded away, and the two losses then differ only by chance.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.models.quantization import dense_weight
from workbench.models.zeroth_order.trainables import Binding

if TYPE_CHECKING:
    from workbench.models.zeroth_order.causal_model import CausalModel


class PartModule(nn.Module):
    """A module with as many copies of its parameters as a batch has parts.

    binding: shared by a whole model.  starts: the index of each parameter's first value in theta, by name.
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


class LoraFaLinear(PartModule):
    """y = x W + (x A) B, A frozen.

    base: the frozen projection: nn.Linear, GPT-2's Conv1D or a quantized one.  a: (k, r), multiplied by alpha / r.  B: (r, out) zeros.
    """

    a: Tensor

    def __init__(self, base: nn.Module, a: Tensor, out_features: int, binding: Binding) -> None:
        super().__init__(binding)
        self.base = base
        self.register_buffer("a", a)
        self.B = nn.Parameter(torch.zeros(a.shape[1], out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        return add_product(self.base(x), x @ self.a, self.values("B", x.dtype))


class LoraLinear(PartModule):
    """y = x W + alpha / r (x A) B.  A: (k, r).  B: (r, out) zeros."""

    def __init__(self, base: nn.Module, a: Tensor, out_features: int, binding: Binding, scale: float) -> None:
        super().__init__(binding)
        self.base, self.scale = base, scale
        self.A = nn.Parameter(a.float())
        self.B = nn.Parameter(torch.zeros(a.shape[1], out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Return y (P*E, t, out) for x (P*E, t, k)."""
        a = self.values("A", x.dtype)
        low = torch.bmm(x.reshape(len(a), -1, x.shape[-1]), a * self.scale)
        return add_product(self.base(x), low, self.values("B", x.dtype))


class DoraLinear(LoraLinear):
    """y = m (x V) / |V| + b with V = W + alpha / r A B; |V| and m have one value per output.  A, B as in LoRA; m starts as |W|."""

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
        """Return |V| (P, out) without computing V: |w + A b|^2 = |w|^2 + 2 b (A w) + b (A A) b.  It gets no gradient (section 4.3)."""
        a, b = a.detach(), b.detach()
        weight = dense_weight(self.base).float()
        crossed = 2 * torch.matmul(a.mT, weight.T) + torch.bmm(torch.bmm(a.mT, a), b)
        return (weight.square().sum(dim=1) + (crossed * b).sum(dim=1)).clamp(min=1e-24).sqrt()


class VeraLinear(PartModule):
    """y = x W + lambda_b * ((lambda_d * (x A)) B).  a: (k, r), b: (r, out), frozen and shared by all layers; lambda_d 0.1, lambda_b 0."""

    a: Tensor
    b: Tensor

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, binding: Binding) -> None:
        super().__init__(binding)
        self.base = base
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
    """A linear head on the mean of the last hidden states, for models without a vocabulary.  weight: (d, outputs).  bias: (outputs,)."""

    def __init__(self, weight: Tensor, binding: Binding) -> None:
        super().__init__(binding)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(weight.shape[1]))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (P, E, outputs) float32 for hidden states (P*E, t, d) and a mask (E, t)."""
        weight, bias = self.values("weight", torch.float32), self.values("bias", torch.float32)
        share = (attention_mask / attention_mask.sum(dim=1, keepdim=True)).repeat(len(weight), 1)
        pooled = torch.bmm(share[:, None], hidden.float()).view(len(weight), -1, hidden.shape[-1])
        return torch.baddbmm(bias[:, None], pooled, weight)


def add_product(y: Tensor, low: Tensor, b: Tensor) -> Tensor:
    """Return y + low b for each part: y (P*E, t, out), low (P*E, t, r) or (P, E*t, r), b (P, r, out).  In place without autograd."""
    low = low.reshape(len(b), -1, low.shape[-1])
    parts = y.view(len(b), -1, y.shape[-1])
    if torch.is_grad_enabled() and (b.requires_grad or low.requires_grad or y.requires_grad):
        return torch.baddbmm(parts, low, b).view_as(y)
    parts.baddbmm_(low, b)
    return y


class PrecisionWarning(UserWarning):
    """The compute dtype rounds perturbations away."""


def smallest_epsilon(model: CausalModel) -> float:
    """Return the epsilon below which the compute dtype rounds away the perturbations of at least half of the trainable values.

    For parameters perturbed in place, a value w keeps a change of half its last digit: unit / 2 |w|.  A change of LoRA's
    B appears in a projection's output: for inputs of variance 1 it is epsilon times |A| (Frobenius), relative to outputs of about
    |W| / sqrt(outputs), of which again half the last digit is kept.  The median over layers is returned; 0 if there is nothing to
    compare with (VeRA).
    """
    half = torch.finfo(model.dtype).eps / 2
    if model.trainables.flat is None:
        found = [half * _typical(parameter) for parameter in model.trainables.parameters.values() if parameter.dim() > 1]
    else:
        found = [
            half * float(dense_weight(module.base).float().norm()) / math.sqrt(module.B.shape[1]) / float(_a(module).float().norm())
            for module in model.modules()
            if isinstance(module, LoraFaLinear | LoraLinear)
        ]
    return float(torch.tensor(found).median()) if found else 0.0


def warn_of_rounding(model: CausalModel, epsilon: float) -> None:
    """Warn (PrecisionWarning) if epsilon is too small for the model's compute dtype."""
    smallest = smallest_epsilon(model)
    if epsilon < smallest:
        name = str(model.dtype).removeprefix("torch.")
        warnings.warn(
            f"epsilon = {epsilon:g} is too small for {name}: it keeps {1 - round(math.log2(torch.finfo(model.dtype).eps))} binary digits, "
            f"and below {smallest:.1g} most of the perturbation is rounded away, so that the two losses of a query differ by chance. "
            "Raise epsilon, or compute in float32.",
            PrecisionWarning,
            stacklevel=3,
        )


def _typical(parameter: Tensor) -> float:
    return float(parameter.detach().float().square().mean().sqrt())


def _a(module: LoraFaLinear | LoraLinear) -> Tensor:
    return module.a if isinstance(module, LoraFaLinear) else module.A.detach() * module.scale
