"""Save an adapter as safetensors and JSON, whole or not at all, and load it in a fresh process to predict the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json, write_text
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization.config import QuantizationConfig
from workbench.models.tensor_files import save_tensors

T = TypeVar("T")

WEIGHTS, DESCRIPTION = "adapter.safetensors", "adapter.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterDescription:
    """What a saved adapter is for.  model: the backbone's name.  quantization: of the backbone."""

    config: ParallelAdapterConfig
    model: str
    task: str
    max_length: int
    quantization: QuantizationConfig | None = None
    schema_version: int = 1


def save_adapter(folder: Path | str, state: Mapping[str, Tensor], description: AdapterDescription) -> Path:
    """Write a whole adapter's state_dict (or the union of its stages') and return the folder.

    Raises ConfigError if the state is not whole.  Weights go first: a folder with a description is complete.
    """
    folder = Path(folder)
    # Loading checks names and shapes, so that nobody finds out later.
    _build(description.config, state, f"The adapter for '{folder}'")
    save_tensors(folder / WEIGHTS, state)
    write_text(folder / DESCRIPTION, to_json(description) + "\n")
    return folder


def load_adapter(folder: Path | str) -> tuple[ParallelAdapter, AdapterDescription]:
    """Return a saved adapter, in evaluation mode.  Raises ConfigError if the folder holds none or it is damaged."""
    description, state = load_saved(Path(folder), f"The adapter '{folder}' was asked for.", AdapterDescription, DESCRIPTION, WEIGHTS)
    return _build(description.config, state, f"The adapter '{folder}'").eval(), description


def load_saved(folder: Path, asked: str, kind: type[T], description: str, weights: str | None) -> tuple[T, dict[str, Tensor]]:
    """Return the description and the tensors of what was trained, from files of these names; weights: None reads none.

    asked: sentence for the error.  Raises ConfigError if one of them is missing or damaged.
    """
    try:
        found = from_json((folder / description).read_bytes(), kind, source=f"'{folder / description}'")
        return found, {} if weights is None else load_file(folder / weights)
    except OSError as error:
        raise ConfigError(asked, f"{error.strerror or error}: '{error.filename or weights}'.", "Check the folder.") from error
    except SafetensorError as error:
        raise ConfigError(asked, f"Its {weights} is damaged: {error}.", "Train it again, or take a copy.") from error


def _build(config: ParallelAdapterConfig, state: Mapping[str, Tensor], what: str) -> ParallelAdapter:
    adapter = ParallelAdapter(config)
    try:
        adapter.load_state_dict(dict(state))
    except RuntimeError as error:
        first = " ".join(str(error).split("\n")[1:2]).strip() or str(error)
        raise ConfigError(f"{what} was asked for.", f"Its weights do not fit its description: {first}", "Check the folder.") from error
    return adapter
