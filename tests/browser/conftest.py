"""One JupyterLab and one browser for all tests here: to start them takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked_kernel import forked_kernels
from jupyterlab_browser import FOLDER, SMALLEST, Lab, browser, jupyterlab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with (
        forked_kernels(folder, SMALLEST) as variables,
        jupyterlab(folder, [], variables) as address,
        browser(folder) as driver,
    ):
        yield Lab(address, driver, folder / "work" / FOLDER)
