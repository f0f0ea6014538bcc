"""What the notebooks write at their smallest settings does not outlive the tests."""

import shutil
import tempfile
from pathlib import Path

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the notebooks' temporary output (see workbench.widgets.settings.output_folder), if this session's notebooks wrote it."""
    if any(item.nodeid.startswith(("notebooks/", "tests/browser/")) for item in session.items):
        shutil.rmtree(Path(tempfile.gettempdir()) / "workbench-tiny", ignore_errors=True)
