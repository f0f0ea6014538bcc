"""Notebooks in one session of tests: none runs twice, and what they write at their smallest settings does not outlive
the tests.
"""

import shutil
import tempfile
from pathlib import Path

import pytest

IN_BROWSER = "tests/browser/test_notebooks_in_jupyterlab.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cells of a notebook that a browser runs in this session: all of them, and no error may occur there
    either.
    """
    in_browser = set()
    for item in items:
        if item.nodeid.startswith(IN_BROWSER) and not any(mark.args[0] for mark in item.iter_markers("skipif")):
            in_browser.add(f"notebooks/{item.callspec.params['name']}.ipynb")  # type: ignore[attr-defined]
    left_out = [item for item in items if item.nodeid.partition("::")[0] in in_browser]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the notebooks' temporary output (see workbench.widgets.controls.output_folder), if this session's
    notebooks wrote it.
    """
    if any(item.nodeid.startswith(("notebooks/", "tests/browser/")) for item in session.items):
        shutil.rmtree(Path(tempfile.gettempdir()) / "workbench-tiny", ignore_errors=True)
