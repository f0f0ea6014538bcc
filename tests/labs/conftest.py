"""A table of a paper is reproduced once for all notebooks that show it: each time takes a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from workbench_labs import reproduction


@pytest.fixture(scope="session", autouse=True)
def _tables_are_reproduced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "reproduced", functools.cache(reproduction.reproduced))
        yield
