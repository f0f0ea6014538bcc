"""Backbones whose weights are stored in few bits and computed with in more (PAC+, section IV-D, Eq. 1-2, Fig. 8)."""

from workbench.models.quantization.backbone import dense_weight, held_bytes, quantize
from workbench.models.quantization.codes import dequantize_blocks, quantize_blocks
from workbench.models.quantization.config import ENGINES, STORAGE_TYPES, FloatType, QuantizationConfig
from workbench.models.quantization.engines import import_bitsandbytes, resolve_engine
from workbench.models.quantization.stored import QuantizedEmbedding, QuantizedLinear, StoredWeight

__all__ = [
    "ENGINES", "STORAGE_TYPES", "FloatType", "QuantizationConfig", "QuantizedEmbedding", "QuantizedLinear", "StoredWeight",
    "dense_weight", "dequantize_blocks", "held_bytes", "import_bitsandbytes", "quantize", "quantize_blocks", "resolve_engine",
]  # fmt: skip
