"""The command line on bad input: one clear line each."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import made_up_report
import pytest
from in_process import call
from tiny_job import CLUSTER_FILE, write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))
    monkeypatch.setattr("workbench.runtime.engine_starter.warm_up", lambda **_: None)  # no device will start


def refused(*words: str) -> dict[str, str]:
    """Call a command that must be refused; return its error from --json, having checked that the plain one is the same
    line."""
    as_json = call(*words, "--json")
    assert as_json.exit_code == 2, as_json.output
    error = json.loads(as_json.stdout)
    plain = call(*words)
    assert (plain.exit_code, plain.stdout) == (2, "")
    text = plain.stderr.splitlines()[-1]
    assert text == " ".join(
        part for part in (f"{error['error']}:", error["asked"], error["found"], error["todo"]) if part
    )
    return error


@pytest.mark.parametrize(
    ("words", "found", "todo"),
    [
        (("--method", "pac-plus"), "Known are confidant, fine_tuning", "'pac_plus'?"),
        (("--model", "tiny-bort"), "tiny-gpt2", "'tiny-bert'?"),
        (("--model", "all-MiniLM-L6"), "all-MiniLM-L6-v2", "'all-MiniLM-L6-v2'?"),
        (("--model", "quite unknown"), "not a hub name", "a folder or a hub name"),
        (("--task", "sentimnt"), "stsb", "'sentiment'?"),
        (("--cluster", "laptob"), "pac-env-a", "'laptop'?"),
        (("--cluster", "nowhere.toml"), "no such file", "Check the path"),
        (("--option", "reducton=4"), "backbone_dtype, reduction", "'reduction'?"),
        (("--option", "reduction=four"), "a whole number", "Change it"),
        (("--option", "order=best"), "one of given, all", "Change it"),
        (("--option", "dropout=1.5", "--model", "tiny-bert"), "at least 0 and below 1", "Lower dropout"),
        (("--option", "reduction=5", "--model", "tiny-bert"), "32 is not a multiple of 5", "divisor"),
        (("--option", "reduction"), "not KEY=VALUE", "reduction=8"),
        (("--epochs", "0"), "at least 1", "Raise epochs"),
        (("--epochs", "many"), "'--epochs'", "--help"),
        (("--batch-size", "30"), "not a multiple of 4", "Change one"),
        (("--learning-rate", "nan"), "above 0", "Give learning_rate a number"),
        (("--train-samples", "0"), "at least 1", "Raise train_samples"),
        (("--max-length", "2", "--model", "tiny-bert"), "Special tokens", "Raise max_length"),
        (("--mode", "emulate"), "'simulate', 'execute'", "--help"),
        (("--no-such-option",), "No such option", "--help"),
    ],
)
def test_what_cannot_be_meant(words: tuple[str, ...], found: str, todo: str, data: Path) -> None:
    options = dict(zip(("--task", "--data"), ("sst2", str(data)), strict=True))
    given = [word for name, value in options.items() if name not in words for word in (name, value)]
    error = refused("run", *given, *words)
    assert found in error["found"]
    assert todo in error["todo"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = two\n", "malformed"),
        ('name = "none"\n', "no devices"),
        (
            CLUSTER_FILE.replace("gflops = 30", "gflops = 30\nbandwidth_mbit_per_s = -5"),
            "line 4: Device 'alpha' asks for bandwidth",
        ),
        (CLUSTER_FILE.replace("host_share = 0.4", "host_share = 0"), "Device 'beta' asks for host_share = 0"),
        (CLUSTER_FILE.replace("memory_mb", "memmory_mb"), "Did you mean 'memory_mb'?"),
        (
            CLUSTER_FILE.replace("host_share = 0.5", 'host_share = 0.5\naddress = "pi.local"'),
            "beta has no address, the others have",
        ),
        (CLUSTER_FILE.replace("host_share = 0.4", ""), "beta has no host_share"),
    ],
)
def test_clusters_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    error = refused("run", "--cluster", str(tmp_path / "mine.toml"), "--model", "tiny-bert")
    assert said in " ".join(error.values())


def test_datasets_that_hold_nothing(tmp_path: Path) -> None:
    empty = write_data(tmp_path / "empty", train=0)
    assert (
        "train split has 0 samples"
        in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(empty))["found"]
    )
    (empty / "SST-2" / "train.tsv").write_text("")
    assert (
        "train split has 0 samples"
        in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(empty))["found"]
    )
    assert (
        "no such folder"
        in refused("run", "--model", "tiny-bert", "--task", "sst2", "--data", str(tmp_path / "none"))["found"]
    )


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.experiment.run", lambda *_, **__: pytest.fail("the run began"))
    assert "It is a folder" in refused("run", "--report", str(tmp_path))["found"]
    (tmp_path / "file").touch()
    assert "Not a directory" in refused("simulate", "--report", str(tmp_path / "file" / "report.json"))["found"]


def test_a_disk_that_fills_up_during_the_run_costs_the_file_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, hint in (("execute", True), ("simulate", False)):
        monkeypatch.setattr(
            "workbench.experiment.run", lambda *_, mode=mode, **__: made_up_report.report(executed=mode == "execute")
        )
        invoked = call("run", "--mode", mode, "--report", "/dev/full")
        assert invoked.exit_code == 2 and "Devices     fast" in invoked.stderr
        text = invoked.stderr.splitlines()[-1]
        assert text.startswith(
            "WriteError: Writing '/dev/full' was asked for. No space left on device. Free some space"
        )
        assert ("--resume" in text) is hint
    assert Path("/dev/full").is_char_device()


def test_figures_are_drawn_into_folders_only(tmp_path: Path) -> None:
    path = made_up_report.report().write(tmp_path / "report.json")
    for out, found in (
        (path, "File exists"),
        (path / "below", "Not a directory"),
        ("/proc/figures", "No such file"),
        ("/dev/null", "File exists"),
    ):
        assert found in refused("draw", str(path), "--out", str(out))["found"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("number", "todo"),
    [
        (errno.ENOSPC, "Free some space, or choose another place."),
        (errno.EFBIG, "Raise the limit on the size of a file (ulimit -f unlimited)."),
        (errno.EMFILE, "Raise the limit on open files (ulimit -n 1024)."),
        (errno.EROFS, "Choose another place."),
    ],
)
def test_what_the_system_refuses_is_told_with_its_cause(
    number: int, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr("workbench.experiment.plan", fails)
    error = refused("plan")
    assert (error["found"], error["todo"]) == (f"{os.strerror(number)}: '/somewhere'.", todo)


def test_unknown_commands() -> None:
    invoked = call("simulat")
    assert (invoked.exit_code, invoked.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'simulate'?" in invoked.stderr


def test_mistakes_of_the_first_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What newcomers typed: each is refused with the way on, a mistyped path before the libraries are loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "workbench.experiment", None)
    (tmp_path / "reviews.csv").touch()
    (tmp_path / "downloads").mkdir()
    assert refused("run", "--data", "review.csv")["todo"] == "Did you mean 'reviews.csv'?"
    assert "workbench kit init" in refused("kit", "check")["todo"]
    unknown = refused("kit", "init", "pi@pi0.local", "--model", "rpi-4b")
    assert "rpi-5" in unknown["found"] and unknown["todo"].startswith("Did you mean 'rpi-4b-")
    wrong = refused("advise", "--for", "speed")["found"]
    assert wrong.startswith("Invalid value for '--for': 'speed' is not one of 'time'")
    assert refused("labs", "collect", "download")["todo"] == "Did you mean 'downloads'?"


def test_scores_of_what_answers_no_prompts(tmp_path: Path) -> None:
    assert "predicts no words" in refused("evaluate", "tiny-bert")["found"]
    assert "not a folder" in refused("evaluate", str(tmp_path / "none"))["found"]
