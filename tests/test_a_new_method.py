"""The method of docs/a-new-method.md, taken from the page: simulated, executed, with a killed device, interrupted and
resumed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import answer, call
from tiny_job import tiny_job, two_devices, write_data

import workbench
from tests.caches import own_cache
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.methods import declaration_of, registered
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS
from workbench.core.summary import summary_rows
from workbench.methods import calls
from workbench.methods.base import Event
from workbench.models.loading import load_stack
from workbench.runtime.engines import default_pool
from workbench.runtime.messages import CallTable
from workbench.runtime.ssh_setup import code_files
from workbench.widgets import JobForm

LIMIT_S = 300
PAGE = Path(workbench.__file__).parent.parent / "docs" / "a-new-method.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page's files, and install them as a package into an empty folder, without a network."""
    project, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    (project / "bitfit").mkdir()
    (project / "bitfit" / "__init__.py").write_text('"""BitFit."""\n')
    parts = [(re.match(r"[^\n]*`([\w/]+\.(?:py|toml))`\n", part), part) for part in PAGE.read_text().split("\n## ")]
    files = [
        (match.group(1), re.split(r"```(?:python|toml)\n", part)[1].partition("```")[0])
        for match, part in parts
        if match
    ]
    names = ("options", "prepare", "phases", "method")
    assert [name for name, _ in files] == ["pyproject.toml", *(f"bitfit/{name}.py" for name in names)]
    for name, text in files:
        (project / name).write_text(text)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", site, project], check=True, timeout=LIMIT_S
    )
    return site


@pytest.fixture(scope="module")
def job(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Return a job of the installed method, which this process and its engines find as they find any installed
    package."""
    default_pool().stop()
    with own_cache(tmp_path_factory) as patch:
        patch.setenv("PYTHONPATH", str(site))
        patch.syspath_prepend(str(site))
        registered.cache_clear()
        yield replace(
            tiny_job(write_data(tmp_path_factory.mktemp("data"))), method="bitfit", epochs=2, learning_rate=1e-4
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitfit"]:
            del sys.modules[name]
    registered.cache_clear()


def run(job: Job, folder: Path, **settings: object) -> Report:
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced", **settings)  # type: ignore[arg-type]


def losses(report: Report) -> list[float]:
    return [step.loss for step in report.steps if step.loss is not None]


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(job, tmp_path_factory.mktemp("whole"))


def test_simulated(job: Job, whole: Report) -> None:
    report = experiment.run(job, two_devices(), "simulate")
    assert len(report.steps) == 8 and all(step.predicted_s for step in report.steps)
    assert report.bytes[TRAINED_WEIGHTS] == whole.bytes[TRAINED_WEIGHTS]


def test_executed_it_equals_one_device(job: Job, whole: Report, tmp_path: Path) -> None:
    alone = experiment.run(job, two_devices().part([0]), workdir=tmp_path, fidelity="paced")
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-3)
    assert len(losses(whole)) == 8
    layers = load_stack(job.model).layers
    biases = sum(one.numel() for name, one in layers.named_parameters() if name.endswith("bias"))
    shown = dict(summary_rows(whole))["Weights"]
    count = whole.bytes[TRAINED_WEIGHTS] // 4
    assert biases <= count < biases + 1000 and shown.endswith(f"% are trained: {count:,} numbers")
    assert shown.startswith(f"{4 * count / whole.bytes[ALL_WEIGHTS]:.1%} ")


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
    assert resumed.notes[0].startswith(("Resumed after step", "Resumed after epoch"))
    assert losses(resumed) == losses(whole)


def test_what_does_not_exist_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"option 'rank' of bitfit .* Known: dropout"):
        experiment.run(replace(job, options={"rank": 4}), two_devices(), "simulate")


def test_the_command_line_lists_it(job: Job) -> None:
    words = [sys.executable, "-m", "workbench", "run", "--help", "--method", "bitfit"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    assert "Options of bitfit" in shown and "dropout=0.1" in shown
    assert "bitfit" in call("run", "--help").output
    settings = {"method": "bitfit", "model": job.model, "task": job.task, "data": job.data, "option": "dropout=0"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    assert answer("simulate", *words)["job"]["options"] == {"dropout": 0}


def test_forms_offer_it(job: Job) -> None:
    form = JobForm()
    form.controls["method"].value = "bitfit"
    assert form.job == Job(method="bitfit")


def test_devices_may_be_asked_for_its_functions_and_for_no_others(job: Job) -> None:
    table = CallTable(calls._declared())
    assert str(table.named("bitfit.method:BitFit.serve_rank").parts.kind("job")) == "bitfit.phases.BitFitRankJob | None"
    payload = table.named("bitfit.method:BitFit.measure_rank").payload
    assert str(payload) == "tuple[bitfit.prepare.PreparedJob, bool]"
    with pytest.raises(WorkbenchError, match=r"It is not in the table of functions that may be\."):
        table.named("bitfit.method:plan_job")
    assert declaration_of("bitfit").trains


def test_a_device_over_ssh_gets_it_with_the_workbench(job: Job, tmp_path: Path) -> None:
    for source, name in code_files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, tmp_path / name)
    script = (
        "import bitfit, workbench; from workbench.core.methods import declaration_of, registered\n"
        "print(bitfit.__file__, workbench.__file__, *registered()); declaration_of('bitfit')"
    )
    settings = {"capture_output": True, "text": True, "check": True, "timeout": LIMIT_S}
    brought = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", script], env=brought, **settings)  # type: ignore[call-overload]
    method, package, *methods = done.stdout.split()
    assert all(Path(path).is_relative_to(tmp_path) for path in (method, package))
    assert methods == list(registered()) and methods[-1] == "bitfit"
