"""Cache the shapes of models: to read one again takes two seconds, most of them for imports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from workbench.assets.fetch import cache_folder
from workbench.core.errors import ConfigError
from workbench.core.serial import read_stored, text_digest, write_json
from workbench.models.hub import has_weights, locate, shape_settings

FORMAT = 1
"""Raise it when the same configuration gives other facts."""
T = TypeVar("T")


def cached_facts(name: str, kind: type[T], find: Callable[[], T]) -> T:
    """Return a kind of facts of a model from `find`, or those of an earlier call from the same files and library.

    Models on the hub are not cached.  An unreadable file is written again.
    """
    source = _source(name)
    if source is None:
        return find()
    conditions = json.dumps([FORMAT, kind.__name__, metadata.version("transformers"), name, source], sort_keys=True)
    path = cache_folder() / "facts" / f"{text_digest(conditions, 20)}.json"
    facts = read_stored(path, kind)
    if facts is None:
        facts = find()
        with contextlib.suppress(ConfigError):  # a cache that cannot be written
            write_json(path, facts)
    return facts


def _source(name: str) -> Any:
    """Return what a model's facts depend on: the settings of a shape, or the size and age of a folder's files."""
    if not has_weights(name):
        return shape_settings(name)
    folder = locate(name)
    if not isinstance(folder, Path):
        return None
    with contextlib.suppress(OSError):
        states = ((path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file())
        return [(file, state.st_size, state.st_mtime_ns) for file, state in states]
    return None
