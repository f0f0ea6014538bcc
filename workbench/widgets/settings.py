"""What the notebooks' parameters begin with: small under test, of full size for a person."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

TINY_VARIABLE = "WORKBENCH_TINY"


def tiny() -> bool:
    """Return whether the environment asks for the smallest settings (WORKBENCH_TINY=1), so that a test runs every cell fast.

    Papermill's own parameters come after the parameters cell and win.
    """
    return os.environ.get(TINY_VARIABLE, "") not in ("", "0")


def output_folder(name: str) -> Path:
    """Return where a notebook writes: figures/NAME beside the notebooks' folder, or a temporary folder at the smallest settings."""
    if tiny():
        return Path(tempfile.gettempdir()) / "workbench-tiny" / name
    return Path("..") / "figures" / name
