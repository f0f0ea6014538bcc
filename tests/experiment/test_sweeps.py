"""`workbench sweep` and `workbench compare` from end to end, in virtual time: a grid, an interruption, the rest of it,
a comparison."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import made_up_report
import nbformat
import psutil
import pytest
from in_process import call
from tiny_job import write_data

from tests.waiting import LIMIT_S, wait_for
from workbench import experiment
from workbench.core import Report
from workbench.core.errors import ConfigError
from workbench.runs.comparison import reports_frame, sides
from workbench.runs.comparison_page import better, figures
from workbench.runs.grids import make_points

METHODS, BANDWIDTHS = ("pac_plus", "fine_tuning", "galaxy_plus"), (1.0, 10.0, 1000.0)


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    """A command without its bandwidths: three methods, one with two seeds and a second width that does not fit the
    model."""
    (tmp_path / "grid.toml").write_text(
        f'method = {list(METHODS)}\nmodel = "tiny-bert"\ntask = "sst2"\ndata = "{write_data(tmp_path / "data")}"\n'
        'cluster = "pac-env-b"\nepochs = 2\nbatch_size = 16\nsimulate = true\n'
        "[pac_plus]\nseed = [0, 1]\n[pac_plus.options]\nreduction = [4, 5]\n"
    )
    return ["sweep", tmp_path / "grid.toml", "--out", tmp_path / "my out"]


def test_a_sweep_is_interrupted_goes_on_and_is_compared(
    words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    run, folder = experiment.run, tmp_path / "my out"

    def counted(job, cluster, mode, **settings):
        if len(began) == 5:
            raise KeyboardInterrupt
        began.append(f"{job.method} {cluster.devices[0].link.bytes_per_s / 125e3:g} {job.options}")
        return run(job, cluster, mode, **settings)

    words += ["--bandwidth", "1,10,1000"]
    monkeypatch.setattr(experiment, "run", counted)
    stopped = call(*words)
    assert stopped.exit_code == 130, stopped.output
    assert "Interrupted" in stopped.stderr and "The same command goes on" in stopped.stderr
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 0 < len(before) < len(began) + 1
    monkeypatch.setattr(experiment, "run", run)
    # Threads stand in for processes, each of which would import torch again.
    monkeypatch.setattr("workbench.runs.sweeps.ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))

    reference = call(*words, "--at-once", 2)
    assert reference.exit_code == 1, reference.output
    assert all(path.stat().st_mtime_ns == written for path, written in before.items()), "a point was run again"
    assert reference.stderr.count("done before") == len(before)
    failed = [json.loads(path.read_text()) for path in (folder / "failed").iterdir()]
    assert {(one["point"]["option.reduction"], one["error"]) for one in failed} == {(5, "ConfigError")}
    assert f"Next: workbench compare '{folder}' --out" in reference.stderr
    assert len(failed) == 6 and "32 is not a multiple of 5" in failed[0]["found"]
    again = call(*words, "--json")
    content = json.loads(again.stdout)
    assert again.exit_code == 1 and len(content["done"]) == 12 and len(content["failed"]) == 6

    frame = reports_frame(folder)
    assert len(frame) == 12 and set(frame["bandwidth"]) == set(BANDWIDTHS) and set(frame["label"]) == {"simulated"}
    for row in frame.to_dict("records"):
        report = Report.read(row["file"])
        assert (row["method"], row["seed"], row["epochs"]) == (report.job.method, report.job.seed, 2)
        rate = sum(step.samples for step in report.steps) / sum(step.predicted_s or math.nan for step in report.steps)
        assert row["samples_per_s"] == pytest.approx(rate)
        assert math.isnan(row["cached_step_s"]) == (row["method"] != "pac_plus")
    slow, fast = (
        frame[(frame["method"] == "fine_tuning") & (frame["bandwidth"] == rate)]["step_s"].item() for rate in (1, 1000)
    )
    assert slow >= fast
    assert list(frame.columns).index("option.reduction") < list(frame.columns).index("valid")
    compared = sides(frame)
    assert [side.results["step_s"].num_runs for side in compared] == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert compared[7].settings == {"method": "pac_plus", "bandwidth": 10.0, "option.reduction": 4.0}
    assert compared[7].name == "pac_plus, bandwidth 10, reduction 4"
    values = frame[(frame["method"] == "pac_plus") & (frame["bandwidth"] == 10)]["step_s"]
    assert compared[7].results["step_s"][:2] == pytest.approx(
        (values.mean(), abs(values.iloc[0] - values.iloc[1]) / math.sqrt(2))
    )
    table = (folder / "points.csv").read_text().splitlines()
    assert len(table) == 19 and sum(",failed," in line for line in table) == 6

    page = tmp_path / "page.html"
    shown = call("compare", folder, "--out", page)
    assert shown.exit_code == 0 and "12 runs (simulated)" in shown.stdout
    text = page.read_text()
    for said in ("Time of a step", "bytes sent in a step", "largest memory of a device", "Mbit", ">galaxy_plus</td>"):
        assert said.lower() in text.lower()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--bandwidth", "1,fast"), "The bandwidth 'fast' was asked for. It is no number."),
        (("--bandwidth", "1,,2"), "One of them is empty."),
        (("--epochs", "1,many"), "The value 'many' of epochs was asked for."),
        (("--micro-batches", "2,3"), "16 is not a multiple of 3"),
        (("--method", "pac_plus,p_rgee"), "Did you mean 'p_rge'?"),
        (("--method", "p_rge"), "Settings of 'pac_plus' were given."),
        (("--option", "reducton=4"), "Did you mean 'reduction'?"),
        (("--cluster", "laptob"), "Did you mean 'laptop'?"),
        (("--repeats", "2"), "All would be the same."),
        (("--cluster-profile", "nope"), "Engines of the profile 'nope' were asked for. The profiles are slurm."),
        (("--cluster-profile", "slrm"), "Did you mean 'slurm'?"),
        (("--cluster-profile", "../../x"), "Make it: ipython profile create"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(
    more: tuple[str, ...], said: str, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run", lambda *_, **__: pytest.fail("a point ran"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "ipython" / "profile_slurm").mkdir(parents=True)
    result = call(*words, *more)
    assert [path.name for path in (tmp_path / "ipython").iterdir()] == ["profile_slurm"]
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert said in result.stderr
    assert not (tmp_path / "my out").exists()


ON_ENGINES = """
import signal, sys
from pathlib import Path
from workbench.runs import sweeps
signal.signal(signal.SIGTERM, signal.default_int_handler)
with sweeps._engines(1, Path(sys.argv[1])) as workers:
    print(workers.submit(len, "abc").result(), flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("ending", [[signal.SIGKILL], [signal.SIGTERM, signal.SIGTERM]])
def test_no_controller_and_no_engine_outlives_a_sweep_on_a_profile(
    ending: list[signal.Signals], tmp_path: Path
) -> None:
    profile = tmp_path / "profile_here"
    profile.mkdir()

    words = [sys.executable, "-c", ON_ENGINES, str(profile)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sweep:
        try:
            assert sweep.stdout is not None and sweep.stdout.readline() == "3\n"
            started = psutil.Process(sweep.pid).children(recursive=True)
            assert len(started) > 2
            for number in ending:
                sweep.send_signal(number)
            sweep.wait(LIMIT_S)
        finally:
            sweep.kill()
    wait_for(lambda: not any(map(is_there, started)), "the end of the controller and its engine")


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("repeats = 0", "repeats = 0: Expected `int` >= 1"),
        ("repeats = 'x'", "repeats = 'x': Expected `int`"),
        ("simulate = 'yes'", "simulate = 'yes': Expected `bool`"),
        ("seed = []", "The setting 'seed' was to be varied. It has no values."),
        ("seed = [-1]", "Expected `int` >= 0"),
        ("faults = ['kill:zeta@step2']", "The devices of 'laptop' are"),
        ("data = ['absent']\ntask = 'sst2'", "The data in 'absent' was asked for. There is no such folder."),
        (
            "data = ['/dev/null']\ntask = 'sst2'",
            "It is a file, and the task 'sst2' has its own data. For data of your own",
        ),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused_before_anything_runs(
    grid: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run", lambda *_, **__: pytest.fail("a point ran"))
    (tmp_path / "grid.toml").write_text(f"model = ['tiny-bert']\n{grid}\n")
    result = call("sweep", tmp_path / "grid.toml", "--out", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert said in result.stderr and not (tmp_path / "out").exists()


def test_executed_points_are_not_run_at_once(tmp_path: Path) -> None:
    result = call("sweep", "--model", "tiny-bert", "--seed", "0,1", "--at-once", 2, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "spoil each other's times" in result.stderr
    (tmp_path / "not.json").write_text("{}")
    assert "not.json" in call("compare", tmp_path).stderr and call("compare", tmp_path / "out").exit_code == 2


def test_a_notebook_runs_with_the_parameters_of_each_point(tmp_path: Path) -> None:
    source = made_up_report.report(executed=False).write(tmp_path / "made_up.json")
    cells = (
        "seed, output = 0, ''",
        f"import shutil\nassert seed < 2\nshutil.copy({str(source)!r}, output + '/report.json')",
    )
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "book.ipynb")
    words = ("sweep", "--notebook", tmp_path / "book.ipynb", "--out", tmp_path / "out")
    assert "Its parameters are seed, output." in call(*words, "--epochs", 2).stderr
    result = call(*words, "--seed", "1,2")
    assert result.exit_code == 1 and "1 of 2 points done" in result.stderr, result.output
    assert "seed 2: failed: PapermillExecutionError: AssertionError" in result.stderr
    assert len(reports_frame(tmp_path / "out")) == 1


def test_a_comparison_sets_origins_apart_and_names_what_is_better(tmp_path: Path) -> None:
    measured, simulated = made_up_report.report(), made_up_report.report(executed=False)
    for name, made in (("a", measured), ("b", simulated)):
        made.write(tmp_path / f"{name}-0.json")
        replace(made, job=replace(made.job, method="fine_tuning")).write(tmp_path / f"{name}-1.json")
    shown = call("compare", tmp_path, "--out", tmp_path / "page")
    assert shown.exit_code == 0 and str(tmp_path / "page.html") in shown.stdout.replace("\n", "")
    page = (tmp_path / "page.html").read_text()
    assert "The settings that differ: method." in page
    assert re.findall(r"<label for='tab\d'>([^<]+)</label>", page) == ["emulated, kernel links (2)", "simulated (2)"]
    assert page.count("Download the table as CSV") == 2 and "method%2Cruns%2C" in page
    directions = {
        name: better(name)
        for name in ("samples_per_s", "step_s", "accuracy", "latency p95 s", "requests per s", "loss")
    }
    higher = {name for name, words in directions.items() if words == "higher is better"}
    assert higher == {"samples_per_s", "accuracy", "requests per s"}


def test_a_result_of_one_side_alone_is_left_to_the_table(tmp_path: Path) -> None:
    example_report = made_up_report.report()
    example_report.write(tmp_path / "a.json")
    replace(
        example_report,
        job=replace(example_report.job, seed=0, method="fine_tuning"),
        metrics={"accuracy": 0.7, "f1": 0.6},
    ).write(tmp_path / "b.json")
    titles = [figure.layout.title.text for figure in figures(sides(reports_frame(tmp_path)))]
    assert any("Accuracy" in title for title in titles) and not any("F1" in title for title in titles)


def test_a_sweep_takes_real_devices_and_no_mixture(tmp_path: Path) -> None:
    text = '[defaults]\nmodel = "rpi-4b-m"\n[[device]]\nname = "a"\naddress = "h"\n[[device]]\nname = "b"\n'
    (tmp_path / "half.toml").write_text(text)
    (tmp_path / "kit.toml").write_text(text + 'address = "i"\n')
    assert len(make_points({"model": ["tiny-bert"], "cluster": [str(tmp_path / "kit.toml")], "seed": [0, 1]})) == 2
    with pytest.raises(ConfigError, match="their links are as fast as they are"):
        make_points({"model": ["tiny-bert"], "cluster": [str(tmp_path / "kit.toml")], "bandwidth": [100]})
    with pytest.raises(ConfigError, match="b has no address"):
        make_points({"model": ["tiny-bert"], "cluster": [str(tmp_path / "half.toml")]})
