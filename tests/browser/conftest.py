"""One JupyterLab and one browser for all tests here: to start them takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked_kernel import forked_kernels
from jupyterlab_browser import FOLDER, SMALLEST, Lab, browser, jupyterlab
from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


@pytest.fixture(scope="session")
def lab(chromium: Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with forked_kernels(folder, SMALLEST) as variables, jupyterlab(folder, [], variables) as address:
        yield Lab(address, chromium, folder / "work" / FOLDER)
