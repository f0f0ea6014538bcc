"""Exchange tensors between PyTorch, NumPy and JAX (Confidant, section 3.5).

Within a process this uses DLPack: both sides share the memory, except that XLA gets a copy if the address is
unsuitable.  Between devices it uses the paper's four fields: flat data, shape, an integer for the dtype, and a map of
framework-specific information.
A pipeline over gloo sends only the data: its program states shape and dtype of every value, and our frameworks share
one layout.
"""

from __future__ import annotations

import os
import struct
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import ConfigError, check_choice, installation

FRAMEWORKS = ("torch", "numpy", "jax")
TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
"""The number of a dtype is its index here, because the paper gives no numbers."""
_WIDE = ("float64", "int64")
_HEAD = struct.Struct("<BBI")  # number of the dtype, number of axes, bytes of the map
_ALIGNED = 64
"""Alignment of the data in bytes."""


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
    """Return the name of a tensor's dtype, as in TYPES."""
    return str(tensor.dtype).removeprefix("torch.")


class Adapted(NamedTuple):
    """A tensor in the paper's four fields.

    data: (values,), any dtype in TYPES.  info: framework-specific information.
    """

    data: Tensor
    shape: tuple[int, ...]
    type_number: int
    info: dict[str, str]

    @classmethod
    def of(cls, tensor: Any, **info: str) -> Adapted:
        """Return the fields of a tensor of any of the FRAMEWORKS.  Raises ConfigError for a dtype without a number."""
        torch_tensor = to_torch(tensor)
        check_choice("type", type_name(torch_tensor), TYPES)
        return cls(torch_tensor.reshape(-1), tuple(torch_tensor.shape), TYPES.index(type_name(torch_tensor)), info)

    def to(self, framework: str) -> Any:
        """Return the tensor in one of the FRAMEWORKS (see from_torch)."""
        return from_torch(self.data.reshape(self.shape), framework)

    def message(self, form: Literal["binary", "json"] = "binary") -> bytearray:
        """Return the four fields as one message: binary, or JSON as in the paper (section 4)."""
        if form == "json":
            fields = {"data": self.data.tolist(), "shape": self.shape, "type": self.type_number, "info": self.info}
            return bytearray(msgspec.json.encode(fields))
        sizes, info = struct.pack(f"<{len(self.shape)}Q", *self.shape), msgspec.json.encode(self.info)
        info += b" " * (-(_HEAD.size + len(sizes) + len(info)) % _ALIGNED)
        content = bytearray(_HEAD.pack(self.type_number, len(self.shape), len(info)) + sizes + info)
        content += self.data.contiguous().view(torch.uint8).numpy().data
        return content

    @classmethod
    def read(cls, message: bytearray, form: Literal["binary", "json"] = "binary") -> Adapted:
        """Decode a message.  Binary data stays in the message's memory.  Raises ConfigError if the message is
        incomplete.
        """
        try:
            if form == "json":
                fields = msgspec.json.decode(message)
                shape, number = tuple(fields["shape"]), fields["type"]
                return cls(
                    torch.tensor(fields["data"], dtype=getattr(torch, TYPES[number])), shape, number, fields["info"]
                )
            number, axes, length = _HEAD.unpack_from(message)
            shape, position = struct.unpack_from(f"<{axes}Q", message, _HEAD.size), _HEAD.size + 8 * axes
            dtype, begin = getattr(torch, TYPES[number]), position + length
            data = (
                torch.frombuffer(message, dtype=dtype, offset=begin)
                if len(message) > begin
                else torch.empty(0, dtype=dtype)
            )
            adapted = cls(data, shape, number, msgspec.json.decode(message[position:begin]))
            adapted.data.reshape(shape)
        except (struct.error, ValueError, KeyError, IndexError, TypeError, RuntimeError) as error:
            raise ConfigError(
                f"A message of {len(message)} bytes was read as a tensor.", f"It is none: {error}.", "Send it again."
            ) from None
        return adapted
