"""Bad input over every command and file: exit code 2, one sentence that quotes it, no traceback, no hang, nothing
written."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import operator
import os
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import bad_inputs
import made_up_report
import pytest
from tiny_job import CLUSTER_FILE, write_data
from typer.testing import CliRunner

from tests.waiting import LIMIT_S
from workbench.core.errors import CacheError
from workbench.core.job import Job
from workbench.core.serial import to_json
from workbench.methods.common.folder import begin_folder, holds_run

HANGS_AFTER_S = int(LIMIT_S)
LINK = '[[link]]\nfrom = "{}"\nto = "{}"\nbandwidth_mbit_per_s = {}'
TEXTS = {
    "long": "a" * 300,
    "digits": "9" * 400,
    "brackets": "[" * 5000,
    "nested": "[" * 100_000,
    "again": LINK.format("alpha", "beta", 2),
    "back": LINK.format("beta", "alpha", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """words: the command, with places such as {file} in it.  files: what is written before, by name.  quote: what the
    message must hold."""

    words: str
    quote: str
    files: tuple[tuple[str, str], ...] = ()
    app: str = "workbench.cli.app"


def split(text: str) -> list[tuple[str, str]]:
    """Return each line's input and what the message must quote of it: its last value, or what stands behind the
    arrow."""
    results = []
    for line in filter(None, text.splitlines()):
        given, arrow, quote = line.rpartition(" -> ") if " -> " in line else (line, "", "")
        words = given.strip()
        results.append((words, quote if arrow else shlex.split(words)[-1].rpartition("=")[2]))
    return results


def cases() -> Iterator[Case]:
    for words, quote in split(bad_inputs.COMMANDS):
        yield Case(words=words, quote=quote)
    for command, options in (("run", bad_inputs.NUMBERS | bad_inputs.TRAINING), ("simulate", bad_inputs.NUMBERS)):
        for option, values in options.items():
            yield from (
                Case(
                    words=f"{command} --data {{data}} --task sst2 --model tiny-bert {option} {value}",
                    quote=value.replace("e300", "e+300"),
                )
                for value in values.split()
            )
    for method, text in bad_inputs.OPTIONS.items():
        model = "tiny-gpt2" if method == "p_rge" else "tiny-bert"
        job = (
            f"simulate --cluster {{sound}} --method {method} --model {model} --task sst2 --data {{data}} "
            "--train-samples 16"
        )
        for words, quote in split(text):
            yield Case(
                words=" ".join([job, *(f"--option {word}" for word in re.split(r" (?=\w+=)", words))]), quote=quote
            )
    for words, quote in split(bad_inputs.STEP_FAULTS):
        job = "run --cluster {sound} --model tiny-bert --task sst2 --data {data} --train-samples 16"
        yield Case(words=f"{job} --fault {words}", quote=quote)
    for words, quote in split(bad_inputs.FAULTS):
        yield Case(
            words=f"serve --cluster {{sound}} --model tiny-bert --mode simulate --requests 20 --fault {words}",
            quote=quote,
        )
    for part, text in bad_inputs.CLUSTERS.items():
        assert part in CLUSTER_FILE
        for given, quote in split(text):
            spoiled = CLUSTER_FILE.replace(part, given.format(**TEXTS).replace("\\n", "\n"), 1)
            yield Case(
                words="simulate --cluster {folder}/mine.toml --model tiny-bert",
                quote=quote,
                files=(("mine.toml", spoiled),),
            )
    for given, quote in split(bad_inputs.JOBS):
        files = (("job.json", given.format(**TEXTS)),)
        yield Case(words="--job {folder}/job.json", quote=quote, files=files, app="workbench.cli.torchrun")
    sound = json.loads(to_json(made_up_report.report()))
    for given, quote in split(bad_inputs.REPORTS):
        path, _, value = given.partition(" = ")
        yield Case(
            words="draw {folder}/spoiled.json --out {folder}/figures",
            quote=quote,
            files=(("spoiled.json", spoiled_json(sound, path, value)),),
        )


def spoiled_json(sound: dict, path: str, value: str) -> str:
    """Return the JSON of a report with one value replaced."""
    spoiled = copy.deepcopy(sound)
    *steps, last = (int(step) if step.isdigit() else step for step in path.split("."))
    place = functools.reduce(operator.getitem, steps, spoiled)
    assert last in place if isinstance(place, dict) else last < len(place)
    place[last] = json.loads(value)
    return json.dumps(spoiled)


CASES = tuple(cases())


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make the files and folders that cases name, everything below one folder."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "file.csv").write_text("text,label\n")
    (folder / "binary.toml").write_bytes(b"name = 'caf\xe9'\n")
    (folder / "sound.toml").write_text(CLUSTER_FILE)
    (folder / "loop.toml").symlink_to("loop.toml")
    for name in ("empty", "here"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe.toml")
    names = {
        "file": "file.csv",
        "binary": "binary.toml",
        "sound": "sound.toml",
        "loop": "loop.toml",
        "fifo": "pipe.toml",
        "empty": "empty",
    }
    results = {
        "folder": folder,
        "data": write_data(folder / "data"),
        "report": made_up_report.report().write(folder / "report.json"),
    }
    return (
        TEXTS
        | {name: str(path) for name, path in results.items()}
        | {name: str(folder / file) for name, file in names.items()}
    )


@pytest.fixture(autouse=True)
def _nothing_hangs() -> Iterator[None]:
    def end(*_: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANGS_AFTER_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(words: list[str], app: str) -> str:
    """Call a command that must be refused, and return its only sentence."""
    called = CliRunner().invoke(importlib.import_module(app).app, words)
    assert not isinstance(called.exception, Exception), repr(called.exception)
    assert (called.exit_code, called.stdout) == (2, ""), called.output
    errors = [line for line in called.stderr.splitlines() if re.match(r"\w+Error: ", line)]
    assert errors == called.stderr.splitlines()[-1:]
    assert "Traceback" not in called.stderr and not re.search(r"\w(Error|Exception)\b", errors[0].partition(": ")[2])
    assert errors[0].isprintable() and len(errors[0]) < 1500
    return errors[0]


def held(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.lstat().st_size if path.is_file() else 0) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{number}: {case.words[:60]} {case.quote[:20]}" for number, case in enumerate(CASES)]
)
def test_refused_in_one_sentence(case: Case, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(places["folder"])
    monkeypatch.chdir(folder / "here")
    monkeypatch.setenv("WORKBENCH_CACHE", str(folder / "cache"))
    monkeypatch.setattr("workbench.runtime.engine_starter.warm_up", lambda **_: None)  # no device will start
    for name, text in case.files:
        (folder / name).write_text(text)
    before = held(folder)
    output = refusal(shlex.split(case.words.format(**places)), case.app)
    quote = re.escape(case.quote.format(**places))
    if len(case.quote) == 1:  # a letter or a digit, as a word of its own
        quote = rf"(?<!\w){quote}(?!\w)"
    if not re.search(quote, output):
        pytest.fail(f"{case.quote!r} is not quoted in: {output}")
    if held(folder) != before:
        pytest.fail(f"written: {held(folder) ^ before}")


def test_there_are_many() -> None:
    assert len(set(CASES)) == len(CASES) >= 300


@pytest.mark.parametrize("holding", ["./", "snapshots/", "fingerprint.txt/", "adapter/x", "steps", "notes.txt"])
def test_folders_without_a_run_are_not_resumed(holding: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / holding
    (path if holding.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if holding and not path.is_dir():
        path.write_text("x")
    before = held(tmp_path)
    assert "It holds no run" in refusal(
        ["run", "--model", "tiny-bert", "--resume", "--workdir", str(tmp_path / "run")], "workbench.cli.app"
    )
    assert held(tmp_path) == before


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (Job(epochs=7, options={"reduction": 4}), "epochs = 7 instead of 3, option reduction = 4 instead of None"),
        (Job(data="there"), "data = there instead of None"),
        (Job(), "the plan, the model's weights or the dataset have changed"),
    ],
)
def test_resuming_another_job_names_what_differs(kept: Job, found: str, tmp_path: Path) -> None:
    begin_folder(tmp_path, "another", kept)
    with pytest.raises(CacheError, match=re.escape(found)):
        holds_run(tmp_path, "mine", Job())
    assert holds_run(tmp_path, "another", kept)
    of_a_former_version = to_json(Job()).replace('"snapshot_every"', '"backup_every"')
    holes = "another\n", 1 << 37
    for other, size in (
        *((text, None) for text in ("another\n{", "another\n", "", "\xff", f"another\n{of_a_former_version}")),
        holes,
    ):
        (tmp_path / "fingerprint.txt").write_text(other)
        if size is not None:  # larger than the memory
            os.truncate(tmp_path / "fingerprint.txt", size)
        with pytest.raises(
            CacheError, match=r"Another version of the workbench made it, or its fingerprint\.txt was changed"
        ):
            holds_run(tmp_path, "mine", Job())
