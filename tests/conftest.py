"""What makes every group of tests quicker: imports are shorter, and collections of garbage skip what was imported."""

from __future__ import annotations

import gc
import sys

gc.disable()  # until all is imported: collections in between take a fifth of the time
# nbformat imports jsonschema, which builds a parser of internationalized addresses (1 s) where this package is
# installed; no schema here has such an address.  Only this process is without it: what tests start has it.
if "jsonschema" not in sys.modules:
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
# transformers' Trainer imports peft, and that bitsandbytes, which loads PyTorch's compiler (1.6 s).
sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]


def pytest_collection_finish() -> None:
    """Take the libraries' hundreds of thousands of objects, which live as long as the process, out of collections."""
    import hypothesis  # noqa: F401  # its plugin does at the end, and then looks for what refers to a frozen object

    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *gc.get_threshold()[1:])  # what is left is little: looking for it rarely saves a twentieth
