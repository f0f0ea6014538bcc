"""The message in which Confidant exchanges a tensor between frameworks (section 3.5): flat data, shape, an integer for
the dtype, and a map of framework-specific information.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from workbench.core.errors import ConfigError, check_choice
from workbench.models.cross_framework import from_torch, to_torch, type_name

TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
"""The number of a dtype is its index here, because the paper gives no numbers."""
_HEAD = struct.Struct("<BBI")  # number of the dtype, number of axes, bytes of the map
_ALIGNED = 64
"""Alignment of the data in bytes."""


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
        """Return the fields of a tensor of any of cross_framework.FRAMEWORKS.  Raises ConfigError for a dtype without a
        number.
        """
        torch_tensor = to_torch(tensor)
        check_choice("type", type_name(torch_tensor), TYPES)
        return cls(torch_tensor.reshape(-1), tuple(torch_tensor.shape), TYPES.index(type_name(torch_tensor)), info)

    def to(self, framework: str) -> Any:
        """Return the tensor in one of cross_framework.FRAMEWORKS (see from_torch)."""
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
