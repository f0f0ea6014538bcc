"""Quantized backbones: weights are stored in few bits and dequantized for compute (PAC+, section IV-D, Eq. 1-2, Fig.
8).
"""

from workbench.models.quantization.config import QuantizationConfig, dequantize_blocks, quantize_blocks
from workbench.models.quantization.stored import (
    QuantizedEmbedding,
    QuantizedLinear,
    StoredWeight,
    dense_weight,
    held_bytes,
    is_linear,
    quantize,
)
