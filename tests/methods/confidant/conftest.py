"""A job of Confidant, and a whole run of it, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiny_job import tiny_job, write_data

from tests.caches import own_cache
from workbench.core import Job, Report
from workbench.core.profile import Grid
from workbench.methods.confidant import method as confidant
from workbench.methods.fine_tuning.measure import measure_parts

from .tiny_runs import run


@pytest.fixture(scope="package")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Four mini-batches an epoch, in windows of two."""
    with own_cache(tmp_path_factory) as patch:
        patch.setattr(confidant, "measure_parts", parts_in_proportion)
        options = {"drain_every": 2}
        yield tiny_job(
            write_data(tmp_path_factory.mktemp("data")),
            method="confidant",
            epochs=2,
            learning_rate=1e-4,
            options=options,
        )


def parts_in_proportion(*model: Any, **settings: Any) -> dict[str, Grid]:
    """Measure, and leave out the times of one group alone: by those, chance would decide what the processors get of
    so small a model."""
    result = measure_parts(*model, **settings)
    assert set(result) == {f"{part}{way}{count}" for part in "HC" for way in "FB" for count in ("", "1")}
    return {kind: grid for kind, grid in result.items() if not kind.endswith("1")}


@pytest.fixture(scope="package")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(job, tmp_path_factory.mktemp("whole"))
