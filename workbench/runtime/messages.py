"""Encode what travels between machines: msgpack of typed values, tensors and arrays in it as safetensors.  Decoding runs no code."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.serial import shown


def encode(value: Any) -> bytes:
    """Return a value as bytes: dataclasses, named tuples, builtins, paths, tensors and arrays.  Raises ConfigError for anything else."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_encode_other)
    except (TypeError, OverflowError, NotImplementedError) as error:
        raise ConfigError("A message was to be sent.", f"It cannot be encoded: {error}.", "Send data, not live objects.") from error


def decode(data: bytes, kind: Any, what: str) -> Any:
    """Return a value of the type `kind`.  Raises RuntimeSetupError, which names `what` was expected, for bytes that are none."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_other)
    except Exception as error:  # the bytes may be anybody's: whatever is wrong with them, nothing was run
        raise RuntimeSetupError(
            f"{what} was expected.",
            f"What came is something else: {shown(str(error), 200)}.",
            "Start the same version of the workbench on every device; let nobody else reach the port of rank 0.",
        ) from error


class Call(NamedTuple):
    """A function that may be called on another machine, and the types of what it is given, publishes and returns."""

    name: str
    function: Callable[[Any, Any], Any]
    payload: Any
    event: Any
    result: Any


class CallTable:
    """The functions that may be called, by name.

    events: 'module:function' of each -> 'module:class' of what it publishes besides dicts, '' for nothing.  The other types are those of
    the function's annotations.
    """

    def __init__(self, events: Mapping[str, str]) -> None:
        self._events = events

    def named(self, name: str) -> Call:
        """Return a function by its name.  Raises RuntimeSetupError for one that is not in the table; nothing is imported then."""
        if name not in self._events:
            raise RuntimeSetupError(
                f"The function '{shown(name)}' was to be called on another device.",
                "It is not in the table of functions that may be.",
                "Start the same version of the workbench on every device; let nobody else reach the port of rank 0.",
            )
        function, event = _attribute(name), self._events[name]
        types = typing.get_type_hints(function)
        result = types.pop("return")
        payload = list(types.values())[1]
        return Call(name, function, payload, dict[str, Any] | _attribute(event) if event else dict[str, Any], result)

    def call(self, function: Callable[[Any, Any], Any]) -> Call:
        """Return the entry of a function.  Raises RuntimeSetupError for one that is not in the table."""
        return self.named(f"{function.__module__}:{function.__qualname__}")


def _attribute(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _encode_other(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return safetensors.torch.save({"": value.detach().contiguous()})
    if isinstance(value, np.ndarray):
        return safetensors.numpy.save({"": np.ascontiguousarray(value)})
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is torch.Tensor:
        return safetensors.torch.load(value)[""]
    if kind is np.ndarray:
        return safetensors.numpy.load(value)[""]
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise TypeError(f"a {kind.__name__} does not travel")
