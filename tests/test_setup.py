"""What `make setup` runs to install on several kinds of machine: the Makefile itself, with an interpreter and a uv that
only take notes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$(dirname "$0")/uv" "$3/bin/uv" ;;
    "-m pip config get global."*) cat "$HOME/pip-${5#global.}" 2>/dev/null ;;
    "-m pip install "*) shift 3; echo "pip $*" >>"$HOME/notes"; case " $* " in *" $FAILING "*) exit 1 ;; esac ;;
esac
"""
UV = """#!/bin/sh
shift 5; echo "uv $*" >>"$HOME/notes"
case " $* " in *" $FAILING "*) exit 1 ;; esac
"""
UV_ITSELF = "pip --disable-pip-version-check --quiet --only-binary uv uv"
ALL = "-e .[all,docs,executorch,test,trackers] -e ./workbench_studies"
EXECUTORCH = "--no-deps --only-binary executorch executorch; sys_platform != 'linux' or platform_machine != 'aarch64'"
CPU, AS_IT_IS = (
    [UV_ITSELF, f"uv --torch-backend=cpu {ALL}", f"uv {EXECUTORCH}"],
    [UV_ITSELF, f"uv {ALL}", f"uv {EXECUTORCH}"],
)


class Machine:
    """A machine with nothing set up.  system: as `uname -sm` says it."""

    def __init__(self, folder: Path, system: str) -> None:
        self.home, self.notes = folder, folder / "notes"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("python3", PYTHON), ("uv", UV), ("uname", f"#!/bin/sh\necho {system}\n")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        (folder / "workbench_studies").mkdir()
        for name in ("Makefile", "pyproject.toml", "workbench_studies/pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = {
            "HOME": str(folder),
            "PATH": path,
            "FAILING": "nothing",
            "UV_CONFIG_FILE": str(folder / "uv.toml"),
        }

    def set_up(self, *words: str, code: int = 0) -> tuple[list[str], str]:
        """Return the commands that installed, and what was said."""
        make = ["make", "--no-print-directory", ".venv/.installed", *words]
        done = subprocess.run(make, cwd=self.home, env=self.environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return self.notes.read_text().splitlines() if self.notes.exists() else [], done.stderr


KINDS = {"x86": "Linux x86_64", "x86, own index": "Linux x86_64", "aarch64": "Linux aarch64", "macOS": "Darwin arm64"}


@pytest.mark.parametrize("kind", KINDS)
def test_where_torch_comes_from_on_four_kinds_of_machine(kind: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, KINDS[kind])
    if "own index" in kind:
        (tmp_path / "pip-extra-index-url").write_text("https://own.example/simple\n")
    commands, text = machine.set_up()
    assert commands == (CPU if kind == "x86" else AS_IT_IS)
    assert "ndex" not in text


OWN = {
    "pip's file": {"pip-index-url": "https://own.example/simple"},
    "pip's wheels": {"pip-find-links": "/wheels"},
    "pip without index": {"pip-no-index": "true"},
    "uv's file": {"uv.toml": '[[index]]\nurl = "https://own.example/simple"\n'},
    "uv's file, older": {"uv.toml": 'extra-index-url = ["https://own.example/simple"]\n'},
    "pip's variable": {"PIP_INDEX_URL": "https://own.example/simple"},
    "uv's variable": {"UV_INDEX": "https://own.example/simple"},
    "uv's older variable": {"UV_INDEX_URL": "https://own.example/simple"},
    "uv's choice": {"UV_TORCH_BACKEND": "cu130"},
    "options": {"PIP_ARGS": "--extra-index-url https://own.example/simple"},
    "short options": {"PIP_ARGS": "-f /wheels"},
}
NOT_OWN = {
    "pip's other settings": {"pip-cert": "/etc/cert.pem"},
    "uv's other settings": {"uv.toml": 'index-strategy = "first-index"\n'},
}


@pytest.mark.parametrize("where", [*OWN, *NOT_OWN])
def test_an_index_of_ones_own_is_asked_for_torch_too(where: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "Linux x86_64")
    for name, value in (OWN | NOT_OWN)[where].items():
        if name.isupper():
            machine.environment[name] = value
        else:
            (tmp_path / name).write_text(value)
    commands, _ = machine.set_up()
    assert any("--torch-backend" in command for command in commands) == (where in NOT_OWN)


@pytest.mark.parametrize(
    ("system", "torch"), [("Linux x86_64", "auto"), ("Linux aarch64", "cpu"), ("Darwin arm64", "cpu")]
)
def test_a_build_that_is_asked_for(system: str, torch: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, system)
    (tmp_path / "pip-index-url").write_text("https://own.example/simple\n")
    assert machine.set_up(f"TORCH={torch}")[0][1] == f"uv --torch-backend={torch} {ALL}"


def test_the_default_index_can_be_asked_for_and_nonsense_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "Linux x86_64")
    assert "There is cpu, auto and default" in machine.set_up("TORCH=gpu", code=2)[1]
    assert machine.set_up("TORCH=default")[0] == AS_IT_IS


@pytest.mark.parametrize("failing", ["--torch-backend=cpu", "--only-binary", "-e"])
def test_what_fails_is_replaced_and_the_size_is_said_once(failing: str, tmp_path: Path) -> None:
    """torch's index is out of reach; uv has no wheel for this machine; and nothing can be installed at all."""
    machine = Machine(tmp_path, "Linux x86_64")
    machine.environment["FAILING"] = failing
    commands, text = machine.set_up(code=2 if failing == "-e" else 0)
    backend, plain, pip = f"uv --torch-backend=cpu {ALL}", f"uv {ALL}", f"pip --disable-pip-version-check --quiet {ALL}"
    assert (
        commands[1:]
        == {
            "--torch-backend=cpu": [backend, plain, f"uv {EXECUTORCH}"],
            "--only-binary": [pip, f"pip --disable-pip-version-check --quiet {EXECUTORCH}"],
            "-e": [backend, plain, pip],
        }[failing]
    )
    assert text.count("several GB") == 1 and ("Installing with pip" in text) == (failing != "--torch-backend=cpu")


def test_a_finished_set_up_does_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "Linux x86_64")
    commands, _ = machine.set_up()
    assert machine.set_up()[0] == commands


RUNS = '#!/bin/sh\ncase "$*" in *workbench*) ;; *pytest*) exec {python} "$@" ;; esac\n'
UNSTABLE = """
from pathlib import Path

def test_that_holds():
    pass

def test_that_fails():
    runs = Path(__file__).with_suffix(".runs")
    runs.write_text((runs.read_text() if runs.exists() else "") + "+")
    assert len(runs.read_text()) {passes}
"""


@pytest.mark.parametrize(
    ("passes", "repeat", "code", "runs"), [("> 1", "yes", 0, "++"), ("> 1", "", 2, "+"), ("> 9", "yes", 2, "++")]
)
def test_continuous_integration_repeats_what_fails_once_and_names_it(
    passes: str, repeat: str, code: int, runs: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("workbench_studies", "tests/core", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "workbench_studies/pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for name, text in {
        "python": RUNS.format(python=sys.executable),
        "ruff": "#!/bin/sh\n",
        "mypy": "#!/bin/sh\n",
    }.items():
        (tmp_path / ".venv/bin" / name).write_text(text)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / ".venv/.installed").touch()
    (tmp_path / "tests/core/test_it.py").write_text(UNSTABLE.format(passes=passes))
    command = ["make", "test", "TEST_GROUPS=tests/core mypy", f"REPEAT={repeat}"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to load them takes most of the time
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "tests/core/test_it.runs").read_text() == runs
    assert ("Unstable" in done.stdout and "FAILED tests/core/test_it.py" in done.stdout.split("Unstable")[-1]) == (
        not code
    )
