"""Storage and compute dtypes of a backbone's weights; block-wise codes (PAC+, section IV-D, Eq. 1-2, Fig. 8).

The reference is block-wise quantization by the largest magnitude (PAC+, section IV-D, Eq. 1-2; NF4 and double
quantization: QLoRA).
QLoRA: Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023; the 16
values of NF4 are those of its appendix E.  |x - x'| is at most absmax / 254 for int8, absmax / 14 for int4, and half
the widest gap between two neighbours (0.152) times absmax for nf4, where absmax is the block's.  Constants below 1e-36
lose precision, as all subnormal numbers do; such weights are negligible.

Codes of 4 bits are looked up in pairs: a table has the two values of each byte.
Measured on one thread of an x86-64 core, in milliseconds for a 1024 x 1024 matrix to float32 (the matmul with 32 x 32
tokens takes 20): int8 0.7, int4 and nf4 0.8.  No library does this for us.  Apart from NF4, the int8 and 4-bit formats
of bitsandbytes and torchao use other grids than Eq. 1; bitsandbytes' kernel for NF4 takes 0.4 ms, for some block sizes
on some processors.  Its Linear4bit always computes in bfloat16 and has no gradient.  torchao's linear layers are 3 to
10 % slower than dense float32 ones at these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.names import FLOAT_TYPES, EmbeddingStorage, FloatType, StorageType
from workbench.core.ranges import require_ranges

UNPACK_FLOPS = {"float32": 36, "float16": 36, "bfloat16": 36, "int8": 90, "int4": 100, "nf4": 100}
"""Time of turning a stored weight into one to compute with, in operations of a float32 matmul on the same core.

Measured on one thread, 768 x 768 weights to float32.  With 154 GFLOP/s: float16 36, bfloat16 37, int8 90.  With 100
GFLOP/s: int4 and nf4 96 to 110.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """Options of `quantize`.

    storage: dtype in which the matrices of linear layers are stored.  compute: dtype to which they are dequantized, and
    dtype of all activations.
    block_size: number of values that share one constant (int8, int4, nf4); even.
    double_quantization: store the blocks' constants as int8 too, as QLoRA does (section 3 there), which saves 0.38 bits
    per weight.
    embeddings: storage dtype of word embeddings; None is `storage` if that is a float type, else `compute`.
    """

    storage: StorageType = "int8"
    compute: FloatType = "float32"
    block_size: int = 64
    double_quantization: bool = False
    embeddings: EmbeddingStorage | None = None

    def __post_init__(self) -> None:
        require_ranges(self, "A quantized model")
        if self.block_size < 2 or self.block_size % 2:
            raise ConfigError(
                f"Blocks of {self.block_size} weights were asked for.",
                "Two codes of 4 bits share a byte.",
                "Choose an even block_size.",
            )
        if self.double_quantization and self.storage in FLOAT_TYPES:
            raise ConfigError(
                f"Double quantization was asked for with {self.storage} storage.",
                "Only int8, int4 and nf4 have constants to quantize.",
                "Choose one of them, or leave double_quantization out.",
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the compute dtype as a torch dtype."""
        return getattr(torch, self.compute)

    @property
    def embedding_storage(self) -> str:
        """Return the storage dtype of embeddings."""
        if self.embeddings is not None:
            return self.embeddings
        return self.storage if self.storage in FLOAT_TYPES else self.compute

    def bytes_of(self, storage: str, block_size: int | None = None) -> float:
        """Return the bytes of a weight in a storage type, with its share of the constants.  block_size: None is the
        configuration's.
        """
        if storage in FLOAT_TYPES:
            return float(getattr(torch, storage).itemsize)
        size = block_size or self.block_size
        constant = 1 + 4 / CONSTANTS_BLOCK if self.double_quantization else 4
        return (1.0 if storage == "int8" else 0.5) + constant / size

    @property
    def unpack_flops(self) -> float:
        """Return the operations that dequantizing a weight costs (see UNPACK_FLOPS)."""
        return 0.0 if self.storage == self.compute else float(UNPACK_FLOPS[self.storage])

    @property
    def description(self) -> str:
        """Return a short text that is equal for configurations whose activations are equal up to rounding."""
        blocks = "" if self.storage in FLOAT_TYPES else f"/{self.block_size}{'d' if self.double_quantization else ''}"
        return f"{self.storage}{blocks}+{self.embedding_storage}+{self.compute}"


LEVELS = {"int8": 127, "int4": 7}
"""The largest code of the symmetric integer dtypes; Eq. 1 has 127."""

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of N(0, 1), scaled to [-1, 1], with an exact zero (QLoRA, section 3 and appendix E)."""

CONSTANTS_BLOCK = 256
"""Number of constants that share a second-level constant in double quantization (QLoRA, section 3)."""

_NF4 = torch.tensor(NF4_VALUES)
_NF4_MIDPOINTS = ((_NF4[1:] + _NF4[:-1]) / 2).tolist()

_PART_VALUES = 31 << 10
"""Values that are quantized at a time: fewer than torch divides over threads (32,768), because threads would wait for
each other at each of many short operations."""


def _pairs(values: Tensor) -> Tensor:
    """Return the two values of each byte, (256,), as one complex number, because one look-up is faster than two.

    values: the values of the 16 codes.
    """
    return torch.complex(values.repeat_interleave(16), values.repeat(16))


_PAIRS = {"nf4": _pairs(_NF4), "int4": _pairs(torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32))}


def quantize_blocks(values: Tensor, storage: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor in contiguous blocks; return codes and constants (Eq. 1).

    values: any shape and float dtype.  storage: int8, int4 or nf4.  The last block is padded with zeros.
    Returns codes, (num_blocks, block_size) int8, or for the 4-bit types (num_blocks, block_size / 2) uint8 with the
    first of two codes in the upper half of a byte; and absmax, (num_blocks,) float32.  Raises ConfigError if a value is
    not finite.
    """
    flat = values.detach().reshape(-1)
    num_blocks = -(-len(flat) // block_size)
    width, dtype = (block_size, torch.int8) if storage == "int8" else (block_size // 2, torch.uint8)
    codes = torch.empty(num_blocks, width, dtype=dtype, device=flat.device)
    absmax = torch.empty(num_blocks, device=flat.device)
    # A part at a time, in the processor's cache and without floats of the tensor's size.
    part = max(1, _PART_VALUES // block_size)
    for first in range(0, num_blocks, part):
        portion = flat[first * block_size : (first + part) * block_size].float()
        blocks = F.pad(portion, (0, -len(portion) % block_size)).view(-1, block_size)
        largest = torch.amax(blocks.abs(), dim=1, out=absmax[first : first + part])
        # x / absmax * 127 instead of 127 / absmax * x, which overflows for tiny blocks.  A block of zeros stays zero.
        scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        codes[first : first + part] = _coded(scaled, storage)
    if not bool(absmax.isfinite().all()):
        raise ConfigError(
            f"Weights were to be stored as {storage}.",
            "Some are infinite or not a number.",
            "Check the model's files, or load it as float32.",
        )
    return codes, absmax


def _coded(scaled: Tensor, storage: str) -> Tensor:
    """Return the codes of values from -1 to 1, (num_blocks, block_size), in the form of `quantize_blocks`."""
    if storage in LEVELS:
        codes = scaled.mul_(LEVELS[storage]).round_().to(torch.int8)
        return codes if storage == "int8" else _pack(codes)
    counts, above = torch.zeros_like(scaled), torch.empty_like(scaled)
    for midpoint in _NF4_MIDPOINTS:  # as torch.bucketize does, in less time: comparisons into floats are vectorized
        counts += torch.gt(scaled, midpoint, out=above)
    return _pack(counts.to(torch.int8))


def dequantize_blocks(codes: Tensor, absmax: Tensor, storage: str) -> Tensor:
    """Dequantize codes and absmax from `quantize_blocks` to (num_blocks, block_size) float32 (Eq. 2)."""
    if len(codes) != len(absmax):
        raise ValueError(f"{len(codes)} blocks of codes and {len(absmax)} constants")
    scale = absmax / LEVELS[storage] if storage in LEVELS else absmax
    if storage == "int8":
        return codes * scale[:, None]
    pairs = _PAIRS[storage].to(codes.device).index_select(0, codes.flatten().int())
    return torch.view_as_real(pairs).view(len(codes), -1).mul_(scale[:, None])


def quantize_constants(absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the blocks' constants to int8 (double quantization): return codes, their constants, and the subtracted
    mean.

    absmax: (num_blocks,).  Codes are (ceil(num_blocks / 256), 256) int8.  QLoRA uses 8-bit floats here; we apply Eq. 1
    again.
    """
    mean = absmax.mean()
    codes, second = quantize_blocks(absmax - mean, "int8", CONSTANTS_BLOCK)
    return codes, second, mean


def dequantize_constants(codes: Tensor, second: Tensor, mean: Tensor, count: int) -> Tensor:
    """Return the (count,) float32 constants quantized by `quantize_constants`."""
    # Rounding must not make a constant near zero negative.
    return (dequantize_blocks(codes, second, "int8").view(-1)[:count] + mean).clamp_(min=0)


def _pack(codes: Tensor) -> Tensor:
    pairs = codes.view(torch.uint8).view(len(codes), -1, 2)
    return (pairs[..., 0] << 4) | (pairs[..., 1] & 15)
