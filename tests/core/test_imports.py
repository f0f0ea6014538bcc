"""A library that is imported without another."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from workbench.core.imports import hidden


def test_a_module_is_missing_only_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_for_it.py").write_text("try:\n    import heavy_module\nexcept ImportError:\n    heavy_module = None\n")
    (tmp_path / "heavy_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden("heavy_module"):
        assert importlib.import_module("asks_for_it").heavy_module is None
    heavy = importlib.import_module("heavy_module")
    with hidden("heavy_module"):  # nothing is gained by then
        assert sys.modules["heavy_module"] is heavy
    assert sys.modules["heavy_module"] is heavy
    for name in ("asks_for_it", "heavy_module"):
        monkeypatch.delitem(sys.modules, name)
