"""Who turns codes into weights: our reference, or a kernel of bitsandbytes; chosen by measurement.

Measured on two cores with AVX-512 (milliseconds for a 1024 x 1024 matrix to float32, one thread; the product with 32 x 32 tokens takes
21.6): int8: reference 0.48, bitsandbytes' block-wise table 0.73, torchao's int8 weight-only 0.49; nf4: reference 1.44, bitsandbytes
0.22.  The order is the same for all shapes of MiniLM and for widths of 768 and 1024, with one thread and with two.
Left out: bitsandbytes' Linear4bit, whose fused product computes in bfloat16 whatever the compute type says, has no gradient and is
slower in bfloat16 than dequantizing first; torchao's linear layers, 3 to 10 % slower than dense float32 ones at these sizes and
without a gain over the reference.  Both libraries' int8 and 4-bit formats beside NF4 have other grids than Eq. 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.quantization.config import FLOAT_TYPES, dequantize_blocks

BITSANDBYTES_BLOCKS = (64, 128, 256, 512, 1024)
"""Block sizes that its kernels know and compute exactly."""


def resolve_engine(storage: str, engine: str, block_size: int = 64) -> str:
    """Return 'reference' or 'bitsandbytes' for a storage type.

    Raises ConfigError if an engine is named that is not installed or does not know the type or the block size.
    """
    fits = storage == "nf4" and block_size in BITSANDBYTES_BLOCKS
    if engine == "auto":
        return "bitsandbytes" if fits and has_bitsandbytes() else "reference"
    if engine == "bitsandbytes" and storage not in FLOAT_TYPES:
        asked = f"The quantization engine bitsandbytes was asked for {storage} weights in blocks of {block_size}."
        if not fits:
            sizes = ", ".join(map(str, BITSANDBYTES_BLOCKS))
            raise ConfigError(asked, f"It has nf4 in blocks of {sizes}.", "Take one of these, or the engine 'auto'.")
        if not has_bitsandbytes():
            raise ConfigError(
                asked, "It is not installed.", "Run pip install 'edge-llm-workbench[quantization]', or take the engine 'auto'."
            )
    return "bitsandbytes" if engine == "bitsandbytes" and fits else "reference"


def dequantize(codes: Tensor, absmax: Tensor, storage: str, engine: str, dtype: torch.dtype) -> Tensor:
    """Return (num_blocks, block_size) weights of type `dtype`; codes and absmax as from codes.quantize_blocks."""
    if engine == "bitsandbytes":
        import_bitsandbytes()
        blocks, size = len(codes), 2 * codes.shape[1]
        return torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, size, storage, (blocks, size), dtype)
    return dequantize_blocks(codes, absmax, storage).to(dtype)


def has_bitsandbytes() -> bool:
    """Return whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None


def import_bitsandbytes() -> Any:
    """Return the module bitsandbytes, imported without its notes and without its attempt to download a kernel.

    When the package `kernels` is installed, bitsandbytes asks the hub for a kernel while it is imported, and says so when it gets
    none.  Raises ConfigError if it is installed but does not load.
    """
    loaded = sys.modules.get("bitsandbytes")
    if loaded is not None:
        return loaded
    noisy = [logging.getLogger(name) for name in ("bitsandbytes.backends.cpu.ops", "bitsandbytes.cextension")]
    hidden = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails at once
    for logger in noisy:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("bitsandbytes")
    except Exception as error:
        raise ConfigError(
            "The quantization engine bitsandbytes was asked for.",
            f"It is installed but does not load: {error}.",
            "Install it again, or take the engine 'reference'.",
        ) from error
    finally:
        for logger in noisy:
            logger.disabled = False
        if hidden is None:
            sys.modules.pop("kernels", None)
        else:
            sys.modules["kernels"] = hidden
