"""Importing this module imports transformers and what all of its models need, in a third of the time that a plain import takes.

Left out are torch's compiler, the splitting of tensors by torch.distributed.tensor, and the losses that need scipy.
"""

import importlib
from pathlib import Path

import transformers
from transformers.utils import import_utils

from workbench.models.postponed_compiler import postpone_compiler

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
