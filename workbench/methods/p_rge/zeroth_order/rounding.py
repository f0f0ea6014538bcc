"""Whether the compute dtype keeps a perturbation (P-RGE, section 4.2).

A pass in 16 bits keeps 8 (bfloat16) or 11 (float16) binary digits of every number.  A perturbation smaller than half
the last digit is rounded away, and the two losses then differ only by chance.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from workbench.methods.p_rge.zeroth_order.adapted import LoraFaLinear, LoraLinear
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel
from workbench.models.quantization import dense_weight


class PrecisionWarning(UserWarning):
    """The compute dtype rounds perturbations away."""


def smallest_epsilon(model: CausalModel) -> float:
    """Return the epsilon below which the compute dtype rounds away the perturbations of at least half of the trainable
    values.

    For parameters perturbed in place, a value w keeps a change of half its last digit: unit / 2 |w|.  A change of
    LoRA's B appears in a projection's output: for inputs of variance 1 it is epsilon times |A| (Frobenius), relative to
    outputs of about
    |W| / sqrt(outputs), of which again half the last digit remains.  The median over layers is returned; 0 if there is
    nothing to compare with (VeRA).
    """
    half = torch.finfo(model.dtype).eps / 2
    if model.trainables.flat is None:
        values = (
            parameter.detach().float() for parameter in model.trainables.parameters.values() if parameter.dim() > 1
        )
        thresholds = [half * float(value.square().mean().sqrt()) for value in values]
    else:
        thresholds = [
            half
            * float(dense_weight(module.base).float().norm())
            / math.sqrt(module.B.shape[1])
            / float(_a(module).float().norm())
            for module in model.modules()
            if isinstance(module, LoraFaLinear | LoraLinear)
        ]
    return float(torch.tensor(thresholds).median()) if thresholds else 0.0


def warn_of_rounding(model: CausalModel, epsilon: float) -> None:
    """Warn (PrecisionWarning) if epsilon is too small for the model's compute dtype."""
    smallest = smallest_epsilon(model)
    if epsilon < smallest:
        name = str(model.dtype).removeprefix("torch.")
        warnings.warn(
            f"epsilon = {epsilon:g} is too small for {name}: it keeps "
            f"{1 - round(math.log2(torch.finfo(model.dtype).eps))} binary digits, "
            f"and below {smallest:.1g} most of the perturbation is rounded away, so that the two losses of a "
            "query differ by chance. "
            f"Raise epsilon{'' if model.dtype == torch.float32 else ', or compute in float32'}.",
            PrecisionWarning,
            stacklevel=3,
        )


def _a(module: LoraFaLinear | LoraLinear) -> Tensor:
    return module.a if isinstance(module, LoraFaLinear) else module.A.detach() * module.scale
