"""The method of docs/a-new-method.md, taken from the page: simulated, executed, with a killed device, interrupted and resumed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_job import tiny_job, two_devices, write_data

import workbench
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.errors import ConfigError
from workbench.methods import METHODS
from workbench.methods.base import Event
from workbench.runtime.engines import default_pool

PAGE = Path(workbench.__file__).parent.parent / "docs" / "a-new-method.md"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Write the page's files where this process and its engines find them; the table gets its line."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "bitfit").mkdir()
    (folder / "bitfit" / "__init__.py").write_text('"""BitFit."""\n')
    parts = [(re.match(r"[^\n]*`(bitfit/\w+\.py)`\n", part), part) for part in PAGE.read_text().split("\n## ")]
    files = [(match.group(1), part.partition("```python\n")[2].partition("```")[0]) for match, part in parts if match]
    assert [name for name, _ in files] == ["bitfit/prepare.py", "bitfit/phases.py", "bitfit/method.py"]
    for name, text in files:
        (folder / name).write_text(text)
    default_pool().stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(str(folder))
        patch.setitem(METHODS, "bitfit", "bitfit.method:BitFit")
        yield replace(tiny_job(write_data(tmp_path_factory.mktemp("data"))), method="bitfit", epochs=2, learning_rate=1e-4)
        default_pool().stop()
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitfit"]:
            del sys.modules[name]


def run(job: Job, folder: Path, **settings: object) -> Report:
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced", **settings)  # type: ignore[arg-type]


def losses(report: Report) -> list[float]:
    return [step.loss for step in report.steps if step.loss is not None]


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(job, tmp_path_factory.mktemp("whole"))


def test_simulated(job: Job) -> None:
    report = experiment.run(job, two_devices(), "simulate")
    assert len(report.steps) == 8 and all(step.predicted_s for step in report.steps)


def test_executed_it_equals_one_device(job: Job, whole: Report, tmp_path: Path) -> None:
    alone = experiment.run(job, two_devices().part([0]), workdir=tmp_path, fidelity="paced")
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-3)
    assert len(losses(whole)) == 8


def test_a_device_is_killed(job: Job, whole: Report, tmp_path: Path) -> None:
    slow = two_devices(share=0.1)  # steps are left when it is killed
    report = experiment.run(replace(job, faults="kill:beta@step3"), slow, workdir=tmp_path, fidelity="paced")
    assert "beta is lost" in " ".join(report.notes)
    assert losses(report) == pytest.approx(losses(whole), rel=1e-3)


def test_interrupted_and_resumed(job: Job, whole: Report, tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path, progress=stop)
    resumed = run(job, tmp_path, resume=True)
    assert resumed.notes[0].startswith("Resumed after step")
    assert losses(resumed) == losses(whole)


def test_what_does_not_exist_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"option 'rank' of bitfit .* Known: dropout"):
        experiment.run(replace(job, options={"rank": 4}), two_devices(), "simulate")
