"""What imports what: the workbench neither its labs nor its studies, a floor only lower ones, the lowest neither torch
nor transformers."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "workbench"

# Each package or module of workbench stands on one floor; those of one floor do not import each other.
FLOORS = (
    ("core",),
    ("schedules", "planners", "plots", "assets"),
    ("simulator",),
    ("models", "tasks", "profiler"),
    ("runtime",),
    ("methods",),
    ("trainings", "experiment"),
    ("runs", "server"),
    ("widgets", "cli"),
    ("__main__",),
)
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = {*FLOORS[0], *FLOORS[1], *FLOORS[2], "cli", "__main__"}
PROGRAM_OF_RANKS = "cli/torchrun.py"
"""The command line never imports it: torchrun starts it on every device."""
HEAVY = {"torch", "transformers", "datasets", "evaluate"}

NEVER = {
    "workbench": {"workbench_labs", "workbench_studies"},
    "workbench_labs": {"workbench_studies"},
    "workbench_studies": {"workbench_labs"},
}
"""What each package imports nothing of: a user runs without the studies, and a lab can be deleted."""

MODULES = sorted(
    path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"
)


@cache
def imports_in(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports anywhere in a file, also those inside functions."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def imported(path: Path) -> set[str]:
    """Every module that the file imports anywhere, also inside functions, as dotted names."""
    names: set[str] = set()
    for node in imports_in(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def unit(module: str) -> str:
    """The package (or single module) of workbench that a file belongs to."""
    return module.split("/")[0].removesuffix(".py")


def faults(module: str, names: set[str]) -> list[str]:
    own, results = unit(module), []
    for name in sorted(names):
        parts = name.split(".")
        if (
            parts[0] == "workbench"
            and len(parts) > 1
            and parts[1] in FLOOR
            and parts[1] != own
            and FLOOR[parts[1]] >= FLOOR[own]
        ):
            results.append(f"{module} (floor {FLOOR[own]}) imports {name} (floor {FLOOR[parts[1]]})")
        if own in WITHOUT_TORCH and module != PROGRAM_OF_RANKS and parts[0] in HEAVY:
            results.append(f"{module} imports {name}, but {own} must work without it")
    return results


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_from_lower_floors_only(module: str) -> None:
    assert unit(module) in FLOOR, f"{unit(module)} stands on no floor: add it to FLOORS"
    assert faults(module, imported(PACKAGE / module)) == []


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {dotted(path): path for name in NEVER for path in (ROOT / name).rglob("*.py")}


@pytest.mark.parametrize("folder", [*NEVER, "tests"])
def test_modules_that_are_imported_are_there(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in imports_in(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in NEVER:
                assert node.module in SOURCES, f"{path}:{node.lineno}"


@pytest.mark.parametrize("package", NEVER)
def test_package_imports_no_other_that_stands_beside_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} & NEVER[package] == set(), path


def test_no_module_imports_itself_through_others() -> None:
    imports = {}
    for name, path in SOURCES.items():
        nodes = [node for node in imports_in(path) if isinstance(node, ast.ImportFrom)]
        pairs = [(node.module or "", alias.name) for node in nodes for alias in node.names]
        named = {f"{module}.{what}" if f"{module}.{what}" in SOURCES else module for module, what in pairs}
        imports[name] = named & SOURCES.keys() - {name}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for one in imports[waiting.pop()] - seen:
                seen.add(one)
                waiting.append(one)
        return seen

    reach = {name: reached(name) for name in SOURCES}
    circles = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in SOURCES if name in reach[name]
    }
    assert circles == set()


def test_the_rule_can_fail() -> None:
    assert faults("core/plan.py", {"workbench.plots.gantt"})
    assert faults("plots/gantt.py", {"workbench.simulator"})
    assert faults("plots/gantt.py", {"torch.nn"})
    assert not faults("plots/gantt.py", {"workbench.core.timeline", "workbench.plots.style", "plotly"})


def test_third_party_imports_are_declared() -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    projects = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in ("", "workbench_studies")
    ]
    project, studies = projects
    optional = [
        line
        for extra, lines in (project["optional-dependencies"] | studies["optional-dependencies"]).items()
        if extra not in ("all", "test")
        for line in lines
    ]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"] + optional}
    declared.add("executorch")  # installed apart, without what it asks for (see pyproject.toml and the Makefile)
    distribution = {"sklearn": "scikit-learn", "choreographer": "kaleido"}  # kaleido's own browser driver
    transitive = {
        "packaging",
        "tokenizers",
        "IPython",
        "jinja2",
        "traitlets",
        "huggingface_hub",
        "pandas",
        "pyarrow",
    }  # come with others
    undeclared = {}
    for path in (path for package in NEVER for path in (ROOT / package).rglob("*.py")):
        for name in imported(path):
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top in transitive or top in NEVER
            if not known and canonicalize_name(distribution.get(top, top)) not in declared:
                undeclared[str(path)] = top
    assert undeclared == {}


def test_the_page_on_architecture_lists_the_floors_and_names_files_that_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == [set(names) for names in FLOORS[:-1]]
    assert all(f"`{package}`" in text for package in NEVER)
    assert all((ROOT / name).is_file() for name in re.findall(r"`(workbench/[\w/]+\.py)`", text))
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {
        path.stem for path in PACKAGE.glob("[a-z]*.py")
    }
    assert rooms | {"__main__"} == {name for names in FLOORS for name in names}


METHODS = sorted(path.parent.name for path in PACKAGE.glob("methods/*/options.py") if path.parent.name != "training")
USERS = {
    "fine_tuning": {"methods/confidant/method.py", "methods/confidant/options.py"},
    "p_rge": {"cli/engine.py", "cli/predict.py", "trainings/queries.py"},
}
"""What imports from a method's folder: its commands, small trainings, and Confidant, which extends fine-tuning."""


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_a_folder_that_can_be_deleted(method: str) -> None:
    others = [module for module in MODULES if not module.startswith(f"methods/{method}/")]
    package = f"workbench.methods.{method}"
    users = {
        module for module in others if any(f"{name}.".startswith(f"{package}.") for name in imported(PACKAGE / module))
    }
    assert users == USERS.get(method, set())
    # Also as a part of another name.
    named = [module for module in others if re.search(rf"(?<![a-z]){method}(?![a-z])", (PACKAGE / module).read_text())]
    assert len(named) <= 4, named
