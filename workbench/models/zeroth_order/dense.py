"""Keep a layer's quantized weights dense while several passes go through it (P-RGE, Appendix F.2, Figure 6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from workbench.models.quantization import QuantizedLinear, StoredWeight


class HeldWeight(StoredWeight):
    """A matrix that was dequantized before."""

    def __init__(self, dense: Tensor) -> None:
        super().__init__(dense.shape, dense.dtype)
        self._dense = dense

    def dequantize(self) -> Tensor:
        """Return all of it, (rows, columns)."""
        return self._dense

    def __getitem__(self, rows: Any) -> Tensor:
        """Return some rows."""
        return self._dense[rows]


@contextmanager
def dequantized(layer: nn.Module) -> Iterator[None]:
    """Dequantize a layer's weights once for all passes inside; behind them only the codes are left."""
    linears = [module for module in layer.modules() if isinstance(module, QuantizedLinear)]
    stored = [linear.weight for linear in linears]
    try:
        for linear in linears:
            linear.weight = HeldWeight(linear.weight.dequantize())
        yield
    finally:
        for linear, weight in zip(linears, stored, strict=True):
            linear.weight = weight
