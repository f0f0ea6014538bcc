"""A cache of tests' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workbench.runtime.engines import default_pool


@contextmanager
def own_cache(folders: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """Keep apart what is measured and fetched; in the end stop the engines, which have this cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(folders.mktemp("cache")))
        yield patch
        default_pool().stop()
