"""Exchange tensors between PyTorch, NumPy and JAX (Confidant, section 3.5).

Within a process this uses DLPack: both sides share the memory, except that XLA gets a copy if the address is
unsuitable.  Between devices a pipeline over gloo sends only the data: its program states shape and dtype of every
value, and our frameworks share one layout.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError, check_choice, installation

FRAMEWORKS = ("torch", "numpy", "jax")
_WIDE = ("float64", "int64")


def check_jax() -> None:
    """Raise ConfigError if JAX is not installed."""
    if find_spec("jax") is None:
        raise ConfigError(
            "A tensor or a device of JAX was asked for.",
            "The package 'jax' is not installed.",
            f'Install it ({installation("jax")}), or take framework = "torch".',
        )


@cache
def require_jax() -> Any:
    """Return the module jax, on the CPU, with one thread if torch uses one.  Raises ConfigError if it is
    not installed.
    """
    check_jax()
    if "jax" not in sys.modules and torch.get_num_threads() == 1:  # an emulated device has only one core
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
        os.environ.setdefault("NPROC", "1")
    import jax

    jax.config.update("jax_platforms", "cpu")
    return jax


def to_torch(tensor: Any) -> Tensor:
    """Return a tensor of any of the FRAMEWORKS as a torch tensor in the same memory."""
    if isinstance(tensor, Tensor):
        return tensor.detach()
    if isinstance(tensor, np.ndarray):
        is_narrow = tensor.dtype.name == "bfloat16"  # NumPy has no bfloat16; ml_dtypes, a dependency of JAX, adds it
        array = torch.from_numpy(tensor.view(np.int16) if is_narrow else tensor)
        return array.view(torch.bfloat16) if is_narrow else array
    shared: Tensor = torch.from_dlpack(tensor)
    return shared


def from_torch(tensor: Tensor, framework: str) -> Any:
    """Return a torch tensor as a tensor of another framework, in the same memory where possible.

    Raises ConfigError if the framework is unknown or not installed, or does not have the dtype.
    """
    check_choice("framework", framework, FRAMEWORKS)
    tensor = tensor.detach()
    if framework == "torch":
        return tensor
    if framework == "numpy":
        if tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.view(torch.int16).numpy().view(require_jax().numpy.bfloat16.dtype)
    jax = require_jax()
    if type_name(tensor) in _WIDE and not jax.config.jax_enable_x64:
        raise ConfigError(
            f"A tensor of {type_name(tensor)} for JAX was asked for.",
            "JAX computes with 32 bits by default.",
            "Convert the tensor to float32 or int32 first, or set JAX_ENABLE_X64=1.",
        )
    return jax.numpy.from_dlpack(tensor.contiguous())


def type_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as 'float32'."""
    return str(tensor.dtype).removeprefix("torch.")
