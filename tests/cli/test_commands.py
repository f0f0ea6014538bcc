from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from in_process import answer, call
from made_up_report import cluster, report
from typer.testing import CliRunner

from tests.waiting import LIMIT_S
from workbench.__main__ import main
from workbench.cli.app import ADDED, GROUPS, STUDIES, add_commands
from workbench.cli.job import parse_options
from workbench.cli.output import Commands, summary
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.methods import declaration_of, registered
from workbench.core.report import Report
from workbench.methods.base import Event
from workbench_studies.bench.command import BENCHES

COMMANDS = (*(command.__name__ for commands in GROUPS.values() for command in commands), *STUDIES)


@pytest.fixture
def experiment(monkeypatch):
    """Stand in for experiment.py: records what it is called with and returns the made-up report."""
    calls = []
    fake = types.ModuleType("workbench.experiment")

    def run(job, described, mode="execute", *, progress=None, workdir=None, resume=False, fidelity="auto"):
        calls.append((job, described, mode, workdir, resume, fidelity))
        progress(Event("phase", stage=fake.stage))
        if fake.raises is not None:
            raise fake.raises
        return report(executed=mode == "execute")

    def plan(job, described, *, progress):
        calls.append((job, described))
        if fake.raises is not None:
            raise fake.raises
        return report().plan

    fake.run, fake.plan, fake.calls, fake.raises, fake.stage = run, plan, calls, None, ""
    monkeypatch.setitem(sys.modules, "workbench.experiment", fake)
    monkeypatch.setattr("workbench.cli.app.load_cluster", lambda name: cluster())
    return fake


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json_and_help(name: str) -> None:
    result = call(name, "--help", columns=200)
    assert result.exit_code == 0
    assert "--json" in result.output


def test_who_knows_nothing_is_told_what_to_do_first() -> None:
    assert "workbench doctor" in call().stdout and call("--version").stdout.startswith("workbench 0")


def test_the_help_of_run_has_groups_and_explains_the_options_of_the_named_method() -> None:
    for method in registered():
        lines = call("run", "--method", method, "--help", columns=80).output
        text = " ".join(lines.split())
        declared = text.partition(f"Options of {method}, ")[2]
        defaults = declaration_of(method).defaults.items()
        assert all(f"{name}={'' if default is None else default}" in declared for name, default in defaults)
        assert "workbench run --method NAME --help" in text and max(map(len, lines.splitlines())) <= 80
    groups = [text.index(f"─ {name} ─") for name in ("What", "Where", "How", "Faults and recovery", "Output")]
    assert groups == sorted(groups) and "<bool>" not in text


def test_the_help_of_run_names_every_method_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from workbench.__main__ import main; sys.argv = ['workbench', 'run', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'transformers', 'datasets', 'numpy', 'scipy', 'plotly', 'papermill')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.splitlines()[-1] == "[]" and all(method in done.stdout for method in registered())


def test_a_closed_output_is_no_error() -> None:
    script = 'exec "$0" -m workbench devices <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable], check=False, timeout=LIMIT_S).returncode == 0


def test_names_stay_whole_in_narrow_tables(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("devices").stdout.splitlines()
    assert (
        sum("laptop-core" in line for line in lines) == 4
        and len({line.index("laptop-core") for line in lines if "laptop-core" in line}) == 1
    )


def test_eval_samples_limit_both_splits(experiment) -> None:
    call("run", "--eval-samples", "8", "--test-samples", "9")
    assert (experiment.calls[0][0].validation_samples, experiment.calls[0][0].test_samples) == (8, 9)


def test_run_fills_in_the_job(experiment, tmp_path) -> None:
    result = call(
        *(
            "run",
            "--model",
            "tiny-bert",
            "--task",
            "mrpc",
            "--epochs",
            "2",
            "--seed",
            "7",
            "--batch-size",
            "16",
            "--micro-batches",
            "2",
        ),
        *("--learning-rate", "0.001", "--train-samples", "64", "--data", "folder", "--fidelity", "paced", "--resume"),
        *("--workdir", str(tmp_path), "--option", "reduction=4", "--option", "init=pruned"),
    )
    assert result.exit_code == 0, result.output
    [(job, _, mode, workdir, resume, fidelity)] = experiment.calls
    assert job == Job(
        model="tiny-bert",
        task="mrpc",
        epochs=2,
        seed=7,
        batch_size=16,
        micro_batches=2,
        learning_rate=1e-3,
        train_samples=64,
        data="folder",
        options={"reduction": 4, "init": "pruned"},
    )
    assert (mode, workdir, resume, fidelity) == ("execute", tmp_path, True, "paced")


def test_defaults_are_the_jobs_own(experiment) -> None:
    assert call("run").exit_code == 0
    assert experiment.calls[0][0] == Job()


def test_run_writes_the_report_and_sums_it_up(experiment, tmp_path) -> None:
    path = tmp_path / "out" / "report.json"
    result = call("run", "--report", str(path))
    assert Report.read(path) == report()
    assert "accuracy 0.800" in result.stdout
    assert "8.0 times shorter" in result.stdout
    assert str(path) in result.stdout


@pytest.mark.parametrize("words", [("simulate",), ("run", "--mode", "simulate")])
def test_simulate_is_run_in_virtual_time(experiment, words: tuple[str, ...]) -> None:
    result = call(*words, "--json")
    assert experiment.calls[0][2] == "simulate"
    assert json.loads(result.stdout)["source"] == "simulated"


def test_plan_as_table_and_as_json(experiment) -> None:
    table = call("plan").stdout
    assert "layers [3, 3] on 1 device each" in table
    assert "fast 8" in table
    assert answer("plan")["micro_batch_size"] == 8


def test_interrupt_says_how_to_go_on(experiment) -> None:
    experiment.raises = KeyboardInterrupt()
    results = call("run"), call("run", "--resume")
    assert [result.exit_code for result in results] == [130, 130]
    assert ["--resume" in result.stderr for result in results] == [False, True], "nothing has been trained yet"
    experiment.stage = "train"
    assert "--resume" in call("run").stderr


def test_sigterm_ends_a_command_as_ctrl_c_does(monkeypatch, tmp_path) -> None:
    """So a bench that is terminated removes its folders."""
    monkeypatch.setattr("workbench_studies.bench.recovery.run", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["workbench", "bench", "recovery", "--only", "lora,kill"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="130"):
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == []


def test_devices_lists_and_shows_clusters() -> None:
    names = answer("devices", "--list")
    assert "laptop" in names
    shown = answer("devices")
    assert [device["host_share"] for device in shown["devices"]] == [0.5, 0.5, 0.27, 0.13]
    assert shown["devices"][0]["name"] in call("devices").stdout


def test_draw_writes_figures_of_a_report(tmp_path) -> None:
    path = report().write(tmp_path / "report.json")
    trace = str(tmp_path / "trace.json")
    files = answer("draw", path, "--out", tmp_path / "figures", "--png", "no", "--trace", trace)
    assert files[0].endswith("index.html") and files[-1] == trace
    assert "traceEvents" in json.loads(Path(trace).read_text())
    assert (tmp_path / "figures" / "epoch_times.html").is_file()


def test_bench_dispatches_by_its_table(monkeypatch) -> None:
    fake = types.ModuleType("fake_bench")
    fake.bench = lambda say: {"ratio": 0.9}
    monkeypatch.setitem(sys.modules, "fake_bench", fake)
    monkeypatch.setitem(BENCHES, "fake", "fake_bench")
    assert answer("bench", "fake") == {"fake": {"ratio": 0.9}}
    assert "0.9" in call("bench", "fake").stdout
    fake.bench = lambda say: {"points": [{"mbit_per_s": 125, "ratio": 0.87654321}, {"mbit_per_s": 250, "ratio": 0.9}]}
    shown = call("bench", "fake").stdout
    assert "mbit per s" in shown and "0.8765" in shown
    assert "{" not in shown, "points are a table, not a dump"


class Added:
    """A command that another distribution names; load: returns it, or fails."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self.value, self.load = name, f"another.package:{name}", load


@pytest.fixture
def call_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Call a command line to which other distributions have added commands."""

    def call(added: Sequence[Added], *words: str) -> Any:
        monkeypatch.setattr(
            "workbench.cli.app.entry_points", lambda group: [one for one in added if group == "workbench.commands"]
        )
        other = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
        other.callback()(lambda: None)
        add_commands(other)
        return CliRunner().invoke(other, list(words))

    return call


def test_another_distribution_adds_a_command(call_with) -> None:
    def greet(name: str) -> None:
        """Say hello."""
        typer.echo(f"Hello, {name}")

    added = [Added("greet", lambda: greet)]
    assert call_with(added, "greet", "world").stdout == "Hello, world\n"
    help_text = call_with(added, "--help").stdout
    assert ADDED in help_text and "Say hello." in help_text and "reproduce" not in help_text


@pytest.mark.parametrize(
    "words", [("reproduce", "pac_plus", "--all"), ("bench",), ("bench", "--help"), ("reproduce", "--json")]
)
def test_without_the_studies_their_commands_say_what_to_install(call_with, words: tuple[str, ...]) -> None:
    result = call_with([], *words)
    assert result.exit_code == 2 and "pip install --no-deps ./workbench_studies" in result.output
    assert ("--json" in words) == result.stdout.startswith("{")


def test_a_command_that_cannot_be_loaded_takes_no_other_with_it_and_ours_keep_their_names(call_with) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'gone'")

    added = [Added("odd", broken), Added("run", broken), Added("bench", lambda: lambda: typer.echo("measured"))]
    assert call_with(added, "bench").stdout == "measured\n"
    result = call_with(added, "odd", "--anything")
    assert (
        result.exit_code == 2 and "'another.package:odd'" in result.output and "No module named 'gone'" in result.output
    )
    assert "No such command 'run'" in call_with(added, "run").output


def test_options_are_json_where_they_are_json() -> None:
    assert parse_options(["a=1", "b=true", "c=text", "d=[1, 2]", "e=x=y"]) == {
        "a": 1,
        "b": True,
        "c": "text",
        "d": [1, 2],
        "e": "x=y",
    }
    with pytest.raises(ConfigError):
        parse_options(["=1"])


def test_a_run_shows_the_notes_of_its_plan() -> None:
    noted = report()
    noted = replace(
        noted, plan=replace(noted.plan, notes=("On beta processors share each layer: heads 8 on cpu, 4 on gpu.",))
    )
    assert "Notes       On beta processors share each layer: heads 8 on cpu, 4 on gpu." in summary(noted)


def test_summary_says_what_is_invalid() -> None:
    busy = summary(report(valid=False))
    assert "(!) Host too busy: 23%" in busy
    step = "1000 ms (!) measured (emulated, kernel links, host too busy)"
    assert all(measured in busy for measured in ("2.0 s (!)", "0.25 s (!)", "8.0 times shorter (!)", step))
    assert "5.0% over 3 plans" in busy  # the sweep was measured by itself
    assert "800 ms predicted (simulated)" in busy and "accuracy 0.800" in busy
    assert "(!)" not in summary(report())
    lines = summary(report()).splitlines()
    assert "Step        1000 ms measured" not in lines
    assert any(
        "800 ms predicted (simulated), 1000 ms measured (emulated, kernel links), first epoch" in line for line in lines
    )
    assert any("median deviation 5.0% over 3 plans" in line for line in lines)


def test_a_terminal_that_is_not_utf_8_shows_characters_by_number(tmp_path: Path) -> None:
    device = '[[device]]\nname = "a"\ngflops = 5\nmemory_mb = 100\n'
    (tmp_path / "mine.toml").write_text(f'description = "Zw\u00f6lf \U0001f600"\n{device}', encoding="utf-8")
    words = [sys.executable, "-m", "workbench", "devices", "--cluster", str(tmp_path / "mine.toml")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"Zw\xf6lf \U0001f600" in done.stdout
