"""Write tensors as a safetensors file, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from workbench.core.errors import WriteError
from workbench.core.files import whole_file


def save_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors under their names, as whole_file does.  Raises WriteError if the system refuses."""
    with whole_file(path) as part:
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata=metadata)
        except SafetensorError as error:  # it wraps the system's errors
            raise WriteError(f"Writing '{path}' was asked for.", f"{error}.", "Free some space, or choose another place.") from error
