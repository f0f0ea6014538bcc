"""Whether a perturbation survives the compute type's rounding (P-RGE, section 4.2: passes in 16 bits).

A pass in 16 bits keeps 8 (bfloat16) or 11 (float16) binary digits of every number.  A perturbation smaller than half of the last
of them is rounded away, and the losses on both sides differ by chance alone.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from workbench.models.quantization import dense_weight
from workbench.models.zeroth_order.adapted import DoraLinear, LoraFaLinear, LoraLinear
from workbench.models.zeroth_order.causal_model import CausalModel


class PrecisionWarning(UserWarning):
    """A perturbation that the compute type rounds away."""


def smallest_epsilon(model: CausalModel) -> float:
    """Return the epsilon below which the compute type rounds away the perturbations of at least half of what is trained.

    Of parameters that are perturbed where they lie, a value w keeps a change of half its last digit: unit / 2 |w|.  Of LoRA's
    B the change appears in a projection's output: for inputs of variance 1, epsilon times |A| (Frobenius) beside outputs of about
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
            if isinstance(module, LoraFaLinear | LoraLinear | DoraLinear)
        ]
    return float(torch.tensor(found).median()) if found else 0.0


def warn_of_rounding(model: CausalModel, epsilon: float) -> None:
    """Warn (PrecisionWarning) if an epsilon is too small for the type that a model computes in."""
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


def _a(module: LoraFaLinear | LoraLinear | DoraLinear) -> Tensor:
    return module.a if isinstance(module, LoraFaLinear) else module.A.detach() * module.scale
