"""Calls of the command line in this process: typer makes all commands again for each, in most of its time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.testing

import workbench.cli  # noqa: F401  # its folder for torch's compiler is in the cache, which a test may move later


@pytest.fixture(scope="session", autouse=True)
def _commands_are_made_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield
