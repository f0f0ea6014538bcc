"""Tokenized prompts in one file, so that a device trains without tokenizer and task."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core.errors import ConfigError
from workbench.core.files import whole_file

_FIELDS = ("input_ids", "targets", "positions", "target_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompts:
    """Prompts as arrays.  input_ids: (n, t) int64, padded on the right.  targets, positions, target_mask: (n, k) as in PromptBatch."""

    input_ids: Any
    targets: Any
    positions: Any
    target_mask: Any

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, indices: Any) -> EnginePrompts:
        """Return some of them, as a batch."""
        return EnginePrompts(**{name: getattr(self, name)[list(indices)] for name in _FIELDS})

    def write(self, path: Path) -> None:
        """Write them as NumPy's .npz."""
        with whole_file(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **{name: np.asarray(getattr(self, name)) for name in _FIELDS})

    @classmethod
    def read(cls, path: Path) -> EnginePrompts:
        """Read them back.  Raises ConfigError for a file that holds none."""
        try:
            with np.load(path, allow_pickle=False) as held:
                return cls(**{name: held[name] for name in _FIELDS})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"The prompts in '{path}' were asked for.", f"They do not load: {error}.", "Export them: workbench export --prompts FILE."
            ) from error
