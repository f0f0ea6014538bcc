"""How a backbone's weights are kept and in which type it computes (PAC+, section IV-D, Fig. 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from workbench.core.errors import ConfigError, did_you_mean

FloatType = Literal["float32", "float16", "bfloat16"]
StorageType = Literal["float32", "float16", "bfloat16", "int8", "int4", "nf4"]
EmbeddingStorage = Literal["float32", "float16", "bfloat16", "int8"]
Engine = Literal["auto", "reference", "bitsandbytes"]

FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)
STORAGE_TYPES: tuple[str, ...] = get_args(StorageType)
ENGINES: tuple[str, ...] = get_args(Engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """What `quantize` makes of a backbone.

    storage: of the matrices of linear layers.  compute: what they are dequantized to, and the type of all activations.
    block_size: values that share one constant (int8, int4, nf4); even.
    double_quantization: keep the blocks' constants as int8 too, as QLoRA does (section 3 there), 0.38 bits less for each weight.
    engine: 'reference' follows the equations in torch; 'bitsandbytes' has a faster kernel for nf4; 'auto' takes what was measured
    to be the fastest of those installed: bitsandbytes for nf4, the reference for all others.
    embeddings: storage of word embeddings; None is `storage` if that is a float type, else `compute`.
    """

    storage: StorageType = "int8"
    compute: FloatType = "float32"
    block_size: int = 64
    double_quantization: bool = False
    engine: Engine = "auto"
    embeddings: EmbeddingStorage | None = None

    def __post_init__(self) -> None:
        _check("storage type", self.storage, STORAGE_TYPES)
        _check("compute type", self.compute, FLOAT_TYPES)
        _check("quantization engine", self.engine, ENGINES)
        if self.embeddings is not None:
            _check("storage type of embeddings", self.embeddings, get_args(EmbeddingStorage))
        if self.block_size < 2 or self.block_size % 2:
            raise ConfigError(
                f"Blocks of {self.block_size} weights were asked for.", "Two codes of 4 bits share a byte.", "Choose an even block_size."
            )
        if self.double_quantization and self.storage in FLOAT_TYPES:
            raise ConfigError(
                f"Double quantization was asked for with {self.storage} storage.",
                "Only int8, int4 and nf4 have constants to quantize.",
                "Choose one of them, or leave double_quantization out.",
            )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the compute type as torch's."""
        return getattr(torch, self.compute)

    @property
    def embedding_storage(self) -> str:
        """Return the storage type of embeddings."""
        if self.embeddings is not None:
            return self.embeddings
        return self.storage if self.storage in FLOAT_TYPES else self.compute

    @property
    def description(self) -> str:
        """Return a short text that is the same for configurations whose activations are the same up to rounding."""
        blocks = "" if self.storage in FLOAT_TYPES else f"/{self.block_size}{'d' if self.double_quantization else ''}"
        return f"{self.storage}{blocks}+{self.embedding_storage}+{self.compute}"


def _check(what: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise ConfigError(f"The {what} '{found}' was asked for.", f"Known are {', '.join(known)}.", did_you_mean(str(found), known))
