"""Docstrings and pages name only what there is: each dotted name of ours is a module, or something in one."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("workbench", "workbench_labs", "workbench_studies")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "data/README.md",
    ROOT / "workbench_studies/papers/README.md",
]
DOTTED = re.compile(r"(?<![\w/.-])[a-z]\w*(?:\.\w+)+")
QUOTED = re.compile(r"`([^`\n]+)`")
FILES = {"py", "md", "toml", "csv", "json", "jsonl", "html", "txt", "yml", "sh", "pt", "bin", "ipynb", "safetensors"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


@cache
def names_in(module: str) -> dict[str, ast.AST]:
    """Return what a module defines or imports, by name."""
    results: dict[str, ast.AST] = {}
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            results[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            results |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            results[node.id] = node
    return results


TOPS = {part for name in MODULES for part in name.split(".")}
GROUPS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]) | {"workbench.commands"}
NOT_OURS = {"layers.I.PATH.lora_A.default.weight", "config.bottleneck"} | GROUPS
"""A tensor's name in a file, a field of a file; groups of entry points."""


@cache
def resolves(name: str) -> bool:
    """Return whether a dotted name is a module of ours or something in one.  Its first parts may be left out."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        head, rest = ".".join(parts[:end]), parts[end:]
        modules = [module for module in MODULES if f".{module}".endswith(f".{head}")]
        if any(not rest or rest[0] in names_in(module) for module in modules):
            return True
    return False


def stale(text: str, given: Iterable[str] = ()) -> list[str]:
    """Return the names in a text that look like ours and are not there.  given: names of arguments, whose attributes
    are no modules."""
    results = []
    for name in sorted(set(DOTTED.findall(text)) - NOT_OURS):
        head, last = name.split(".")[0], name.split(".")[-1]
        if last == "py":
            results += [name] if not any(path.as_posix().endswith(f"/{name}") for path in SOURCES) else []
        elif last not in FILES and head in TOPS and head not in given and not resolves(name):
            results.append(name)
    return results


def documented(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Yield every docstring of a file, and every string under a constant, that has a dotted name, with its line and the
    names of arguments that it may mean."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for child in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
                and DOTTED.search(child.value.value)
            ):
                arguments = (
                    {node.arg for node in ast.walk(node) if isinstance(node, ast.arg)}
                    if not isinstance(node, ast.Module)
                    else set()
                )
                fields = {
                    node.target.id
                    for node in ast.walk(node)
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                }
                yield child.lineno, child.value.value, arguments | fields


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_what_there_is(package: str) -> None:
    for path in SOURCES:
        if path.is_relative_to(ROOT / package):
            for line, text, given in documented(path):
                assert stale(text, given) == [], f"{path.relative_to(ROOT)}:{line}"


def test_comments_of_data_name_what_there_is() -> None:
    tables = [path for package in (*PACKAGES, "data") for path in (ROOT / package).rglob("*.toml")]
    for path in tables:
        comments = re.findall(r"^#.*", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert stale("\n".join(comments)) == [], path.relative_to(ROOT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_what_there_is(page: Path) -> None:
    for quoted in QUOTED.findall(page.read_text(encoding="utf-8")):
        assert stale(quoted) == [], quoted


@pytest.mark.parametrize("name", ["workbench.profiler.stacks", "profiler.stacks", "core.plan.Plans", "absent_file.py"])
def test_the_rule_can_fail(name: str) -> None:
    assert stale(f"See {name}, which is gone.") == [name]
    assert stale("See workbench.core.plan.Plan, core.plan and plan.py, given to config.seed.", {"config"}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_link_to_what_there_is(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [link for link in links if link and "://" not in link and not (page.parent / link).exists()]
    assert not missing
