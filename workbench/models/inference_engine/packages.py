"""Import ExecuTorch, an extra, without the quantization toolkit that its package asks for and float32 programs do not need."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from workbench.core.errors import ConfigError

_TOOLKIT = ("torchao", "torchao.quantization", "torchao.quantization.pt2e", "torchao.quantization.pt2e.utils")
_AFFINE = "quant_affine_configs"
"""The XNNPACK patterns that need the toolkit even to be listed; they match quantized activations only."""


def require_executorch() -> None:
    """Raise ConfigError if ExecuTorch is not installed."""
    if find_spec("executorch") is None:
        raise ConfigError(
            "A program of the inference engine was asked for.",
            "The package executorch is not installed.",
            "Install the extra 'executorch' (pip install 'edge-llm-workbench[executorch]', then pip install --no-deps executorch==1.5.1).",
        )


def xnnpack_partitioner() -> Any:
    """Return what chooses the pieces of a program that XNNPACK computes."""
    with quiet(), _toolkit():
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    return XnnpackPartitioner(configs=[config for config in ALL_PARTITIONER_CONFIGS if not config.__module__.endswith(_AFFINE)])


def bindings() -> Any:
    """Return the runtime's binding to Python.  Raises ConfigError as require_executorch.

    It is the module below `executorch.runtime`, which would import the exporter too: seconds and 100 MB that a device does not have.
    """
    require_executorch()
    with quiet():
        from executorch.extension.pybindings import _C
    return _C


@contextmanager
def quiet() -> Iterator[None]:
    """Show no warnings, of which ExecuTorch has many: its interfaces are called experimental, and some decorators are deprecated."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _toolkit() -> Iterator[None]:
    """Let `torchao` be imported where it is not installed: XNNPACK's patterns take two predicates of convolutions from it.

    Installed for good it would change how peft and transformers load, so that the stand-ins are gone again afterwards.
    """
    if find_spec("torchao") is not None:
        yield
        return
    for name in _TOOLKIT:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []  # a package
    predicates: Any = sys.modules[_TOOLKIT[-1]]
    aten = torch.ops.aten
    predicates._is_conv_node = _calls(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    predicates._is_conv_transpose_node = _calls(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
    try:
        yield
    finally:
        for name in _TOOLKIT:
            del sys.modules[name]


def _calls(*targets: Any) -> Any:
    return lambda node: node.op == "call_function" and node.target in targets
