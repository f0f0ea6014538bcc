"""Importing this module imports transformers and what all of its models need, in a third of the time that a plain import takes.

Left out are torch's compiler, the splitting of tensors by torch.distributed.tensor, and the losses that need scipy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.utils import import_utils

_COMPILER = "torch._dynamo"
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""A module of the compiler's that transformers imports, and that does not need the compiler."""


def postpone_compiler() -> None:
    """Let libraries mark what torch's compiler may compile without importing it: optimizers and transformers' models only do that.

    It is imported as soon as anything else is asked of it.
    """
    if _COMPILER not in sys.modules:
        found = importlib.util.find_spec(_COMPILER)
        if found is not None and found.submodule_search_locations is not None:
            torch._dynamo = sys.modules[_COMPILER] = _Postponed(found.submodule_search_locations)
            importlib.import_module(_ALONE)
            sys.meta_path.insert(0, _BeforeCompiler())


class _Postponed(ModuleType):
    """Stands in for torch's compiler."""

    def __init__(self, folders: Sequence[str]) -> None:
        super().__init__(_COMPILER)
        self.__path__ = list(folders)
        self.disable = self.allow_in_graph = self.assume_constant_result = _unmarked
        self.graph_break = lambda *arguments, **options: None
        self.trace_rules = SimpleNamespace(clear_lru_cache=self.graph_break)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _import_compiler()
        return getattr(sys.modules[_COMPILER], name)


class _BeforeCompiler:
    """An importer that sees to it that the compiler is whole before another of its modules is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Import the compiler if need be; the module asked for is then there, too."""
        if not name.startswith(f"{_COMPILER}.") or not isinstance(sys.modules.get(_COMPILER), _Postponed):
            return None
        _import_compiler()
        module = importlib.import_module(name)
        self._spec, module.__spec__ = module.__spec__, None  # with one it would be run a second time
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back."""
        module.__spec__ = self._spec


def _import_compiler() -> None:
    if isinstance(sys.modules.get(_COMPILER), _Postponed):
        del sys.modules[_COMPILER], torch._dynamo
    importlib.import_module(_COMPILER)


def _unmarked(function: Any = None, *arguments: object, **options: object) -> Any:
    return function if function is not None else _unmarked


_LEFT_OUT = [
    (module, name, getattr(module, name))
    for module in (transformers.utils, import_utils)
    for name in ("is_torch_distributed_available", "is_scipy_available")
]

_structure_of = import_utils.create_import_structure_from_path
postpone_compiler()
try:
    # All models' files were read when transformers was imported, under their folder's name.
    import_utils.create_import_structure_from_path = lambda path: _structure_of(Path(path).parent if str(path).endswith(".py") else path)
    for module, name, _ in _LEFT_OUT:
        setattr(module, name, lambda: False)
    for name in ("masking_utils", "modeling_utils"):
        importlib.import_module(f"transformers.{name}")
finally:
    import_utils.create_import_structure_from_path = _structure_of
    for module, name, is_available in _LEFT_OUT:
        setattr(module, name, is_available)
