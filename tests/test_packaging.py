"""pyproject.toml, constraints.txt and environment.yml describe one set of packages."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, requires, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from workbench.cli.doctor import TORCH_FOR_ARMV8_0

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def by_name(lines: list[str]) -> dict[str, Requirement]:
    requirements = [Requirement(line) for line in lines]
    named = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    assert len(named) == len(requirements), "a package is named twice"
    return named


EXTRAS = PROJECT["optional-dependencies"]
DECLARED = PROJECT["dependencies"] + [line for name, extra in EXTRAS.items() if name != "all" for line in extra]
LINUX, MACOS = (
    {"sys_platform": "linux", "platform_system": "Linux"},
    {"sys_platform": "darwin", "platform_system": "Darwin"},
)
RASPBERRY_PI = LINUX | {"platform_machine": "aarch64"}


def applying(lines: Iterable[str], **environment: str) -> dict[str, Requirement]:
    """Return the requirements that apply to a machine, by name; by default this one."""
    requirements = map(Requirement, lines)
    return by_name(
        [
            str(requirement)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate(environment)
        ]
    )


DIRECT = applying(DECLARED)
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
OLDEST = "3.11.0"
LOCK = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
NOT_INSTALLED = {
    ("docutils", "0.23"): ">=3.9",
    ("jax", "0.12.0.1"): ">=3.12",
    ("jaxlib", "0.12.0.1"): ">=3.12",
    ("soupsieve", "2.10"): ">=3.8",
    ("soupsieve", "4.1.1"): ">=3.11.5",
    ("sphinx", "9.1.1"): ">=3.12",
    ("sphinx", "9.2.0"): ">=3.13",
}
"""What older or newer Pythons than this one get, with the Requires-Python of that release."""


def pins_of(python: str = platform.python_version(), **environment: str) -> dict[str, Requirement]:
    """Return the pins that apply to a Python."""
    named = {
        "python_full_version": python,
        "python_version": ".".join(python.split(".")[:2]),
        "implementation_version": python,
    }
    return applying(map(str, LOCK), **(named | environment))


PINNED = pins_of()


def test_environment_yml_repeats_pyproject() -> None:
    [pip] = [entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict)]
    options, packages = (
        [line for line in pip if line.startswith("--")],
        [line for line in pip if not line.startswith("--")],
    )
    assert sorted(map(str, map(Requirement, packages))) == sorted(map(str, map(Requirement, DECLARED)))
    assert options == ["--constraint constraints.txt", "--editable .", "--editable ./workbench_studies"]
    assert CONDA["name"] == PROJECT["name"]


BOUND_ABOVE = ("anywidget",)
"""What is held back on every machine, for the reason that pyproject.toml gives."""


def test_environment_yml_takes_an_allowed_python() -> None:
    [python] = [line for line in CONDA["dependencies"] if isinstance(line, str) and line.startswith("python")]
    assert Version(python.split("=")[1]) in Requirement(f"python{PROJECT['requires-python']}").specifier


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_direct_dependency_has_a_lower_bound_and_a_pin_that_satisfies_it(name: str) -> None:
    upper = ["<"] if name in BOUND_ABOVE else []
    assert sorted(specifier.operator for specifier in DIRECT[name].specifier) == [*upper, ">="]
    assert pinned_version(name) in DIRECT[name].specifier


def pinned_version(name: str) -> str:
    [specifier] = PINNED[name].specifier
    assert specifier.operator == "==", f"{name} is not pinned exactly"
    assert "+" not in specifier.version, f"{name} is pinned to one build"
    return specifier.version


def closure(direct: Iterable[Requirement] = DIRECT.values()) -> dict[str, Requirement]:
    """Every installed package that the direct dependencies need on this machine, by name."""
    results: dict[str, Requirement] = {}
    visited, waiting = set(), list(direct)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in visited or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        visited.add((name, extras))
        results[name] = requirement
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append(Requirement(re.sub(r";.*", "", line)))
    return results


def test_constraints_pin_everything_that_gets_installed() -> None:
    # torch's GPU builds bring libraries that torch itself pins to one version.
    unpinned = {
        name for name in closure() if name not in PINNED and not name.startswith(("nvidia-", "cuda-", "triton"))
    }
    assert unpinned == set()


def excluded(pins: dict[str, Requirement], python: str) -> set[str]:
    """Return the pins whose release does not allow a Python; known of what is installed, and of what NOT_INSTALLED
    names."""
    results = set()
    for name, pin in pins.items():
        [specifier] = pin.specifier
        try:
            distribution = metadata(name)
        except PackageNotFoundError:
            continue  # of another machine
        if distribution["Version"].split("+")[0] == specifier.version:
            allowed = distribution["Requires-Python"] or ""
        else:
            assert (name, specifier.version) in NOT_INSTALLED, (
                f"{name}=={specifier.version} applies to {python}; which Pythons does it allow?"
            )
            allowed = NOT_INSTALLED[name, specifier.version]
        if Version(python) not in SpecifierSet(allowed):
            results.add(name)
    return results


def test_no_pin_excludes_the_oldest_python() -> None:
    assert Version(OLDEST) in SpecifierSet(PROJECT["requires-python"])
    assert excluded(pins_of(OLDEST), OLDEST) == set()
    assert excluded(pins_of(OLDEST) | by_name(["soupsieve==4.1.1"]), OLDEST) == {"soupsieve"}, (
        "what once kept Debian 12 out"
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64"])
@pytest.mark.parametrize("python", [OLDEST, "3.11.5", "3.12.0", "3.13.0", "3.14.0"])
def test_every_python_and_machine_gets_one_pin_of_each_direct_dependency(python: str, machine: str) -> None:
    system = (MACOS if machine == "arm64" else LINUX) | {"platform_machine": machine}
    pins, declared = pins_of(python, **system), applying(DECLARED, **system)
    assert all(str(pins[name].specifier).removeprefix("==") in declared[name].specifier for name in declared)
    assert {"soupsieve", "uv"} <= set(pins) and ("executorch" in pins) == (machine != "aarch64")


def test_aarch64_linux_gets_a_torch_that_runs_on_armv8_0_and_has_a_cpu_build() -> None:
    assert str(pins_of(**RASPBERRY_PI)["torch"].specifier) == f"=={TORCH_FOR_ARMV8_0}"
    bound = applying(DECLARED, **RASPBERRY_PI)["torch"].specifier
    assert not [one for one in ("2.6.0", "2.10.0", "2.11.0", "2.13.0") if one in bound]
    assert {str(pins_of(platform_machine=one, **LINUX)["torch"].specifier) for one in ("x86_64", "ppc64le")} == {
        "==2.13.0"
    }
    # The wheels for Python 3.11 and 3.13 on the default index, 104 MB each.
    lock = (ROOT / "data/hashes.txt").read_text()
    [digests] = re.findall(rf"^torch=={TORCH_FOR_ARMV8_0}(?:.*\\\n)+", lock, re.MULTILINE)
    assert "62b3fd888277946918cba4478cf849303da5359f0fb4e3bfb86b0533ba2eaf8d" in digests
    assert "c29455d2b910b98738131990394da3e50eea8291dfeb4b12de71ecf1fdeb21cb" in digests


@pytest.mark.network
@pytest.mark.parametrize("system", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin"])
@pytest.mark.parametrize("python", [OLDEST, "3.12", "3.13", "3.14"])
def test_every_pin_has_a_wheel(python: str, system: str) -> None:
    if "network" not in os.environ.get("WORKBENCH_TESTS", ""):
        pytest.skip("asks the package index: WORKBENCH_TESTS=network")
    uv = [
        str(ROOT / ".venv/bin/uv"),
        "pip",
        "compile",
        "--quiet",
        "--only-binary",
        ":all:",
        "--all-extras",
        "--constraint",
        "constraints.txt",
    ]
    command = [*uv, "--python-platform", system, "--python-version", python, "pyproject.toml"]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


HIDING = """
import sys
hidden = set(sys.argv[1].split())

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import importlib
import workbench.cli.torchrun
for name in workbench.cli.torchrun.CALLS._events:
    importlib.import_module(name.partition(":")[0])
"""


def test_a_device_takes_part_without_any_extra() -> None:
    needed = {*closure(applying(PROJECT["dependencies"]).values()), canonicalize_name(PROJECT["name"])}
    modules = {
        name: {canonicalize_name(owner) for owner in owners} for name, owners in packages_distributions().items()
    }
    hidden = {name for name, owners in modules.items() if not owners & needed}
    assert {"datasets", "ipyparallel", "jupyterlab", "pandas", "plotly"} <= hidden and "torch" not in hidden
    subprocess.run([sys.executable, "-c", HIDING, " ".join(hidden)], check=True, capture_output=True, text=True)


def test_the_lock_has_digests_of_every_pin_and_no_other() -> None:
    lock = (ROOT / "data/hashes.txt").read_text()
    blocks = re.split(r"(?<!\\)\n", lock.strip())[1:]
    heads = [re.sub(r" *\\$", "", block.splitlines()[0]) for block in blocks]
    assert [str(Requirement(head)) for head in heads] == [str(pin) for pin in LOCK]
    for block in blocks:
        assert all(
            re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line) for line in block.splitlines()[1:] or [""]
        ), block


def test_build_backend_is_pinned() -> None:
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert pinned_version("hatchling") in Requirement(backend).specifier


def test_this_environment_is_the_pinned_one() -> None:
    try:
        version(PROJECT["name"])
    except PackageNotFoundError:
        pytest.skip("the package is not installed, so its environment is not the Makefile's")
    installed = {name: version(name).split("+")[0] for name in closure() if name in PINNED}
    assert installed == {name: pinned_version(name) for name in installed}


def test_console_script_and_version() -> None:
    import workbench

    assert PROJECT["scripts"] == {"workbench": "workbench.__main__:main"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", workbench.__version__)


def test_peft_is_imported_without_bitsandbytes() -> None:
    """import_peft hides it."""
    direct = re.compile(r"^\s*(import|from) (peft|bitsandbytes)\b", re.MULTILINE)
    importing = {
        str(path.relative_to(ROOT)) for path in (ROOT / "workbench").rglob("*.py") if direct.search(path.read_text())
    }
    assert importing <= {"workbench/models/lora.py"}


CELLS = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
import workbench, workbench_labs
assert all(module.__file__.startswith(sys.argv[2]) for module in (workbench, workbench_labs))
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"])).raise_error()
        if "parameters" in cell["metadata"].get("tags", ()):
            shell.push({"cluster_name": "pair", "model": "tiny-bert-2", "epochs": 1, "train_samples": 64})
assert not [name for name in sys.modules if name.startswith("workbench_studies")]
"""


@pytest.mark.slow
def test_a_wheel_without_the_studies_runs_the_quickstart(tmp_path: Path) -> None:
    installed, temporary = tmp_path / "installed", tmp_path / "t"
    temporary.mkdir()
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:  # as pip does
        opened.extractall(installed)
    assert not (installed / "workbench_studies").exists()
    # The checkout is on every interpreter's path, too, as it is installed in editable form.
    (installed / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [one for one in sys.path if one != {str(ROOT)!r}]\n"
    )
    settings = {"PYTHONPATH": str(installed), "TMPDIR": str(temporary), "WORKBENCH_TINY": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", CELLS, str(ROOT / "notebooks/00_quickstart.ipynb"), str(installed)]
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(temporary.rglob("index.html")), done.stdout[-2000:]


def test_the_studies_wheel_has_its_commands_and_its_papers_and_nothing_of_the_workbench(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT / "workbench_studies", check=True, capture_output=True, text=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        [commands] = [opened.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "[workbench.commands]" in commands and "reproduce = workbench_studies.papers.command:reproduce" in commands
    papers = {name.split("/")[2] for name in names if name.endswith("/items.toml")}
    assert (
        papers == {"pac_plus", "galaxy_plus", "p_rge", "ringada", "confidant", "compare"}
        and "workbench_studies/bench/bench.toml" in names
    )
    assert all(name.startswith(("workbench_studies/", "edge_llm_workbench_studies")) for name in names)
    assert not [name for name in names if "/trials/" in name]
