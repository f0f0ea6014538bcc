"""Parts of a notebook: some cells, those that these need, and those that depend on them.

Every lab runs whole once, with its solutions (test_course.py); what students get and a browser run parts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_parts(shown: Mapping[Path, Collection[str]], path: Path) -> None:
    """Write a notebook of the cells with these ids of some notebooks, and those that give them their names, without the
    text."""
    parts = []
    for notebook, ids in shown.items():
        document = json.loads(notebook.read_text(encoding="utf-8"))
        cells = document["cells"]
        chosen = {number for number, cell in enumerate(cells) if cell["id"] in ids}
        assert len(chosen) == len(set(ids)), f"{notebook.name} has other cells than {ids}"
        parts += [cells[number] for number in sorted(needed(cells, chosen))]
    path.write_text(json.dumps(document | {"cells": parts}), encoding="utf-8")


def needed(cells: Sequence[dict[str, Any]], chosen: set[int]) -> set[int]:
    """Return the numbers of the chosen cells, of the parameters, and of the cells that define what these read."""
    [first] = [number for number, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", ())]
    expected, taken = {first} | chosen, set[int]()
    while left := expected - taken:
        number = max(left)
        taken.add(number)
        for name in _names(cells[number], ast.Load):
            defining = [index for index in range(number) if name in _names(cells[index], ast.Store)]
            expected |= set(defining[-1:])
    return taken


def depending(cells: Sequence[dict[str, Any]], changed: set[int]) -> set[int]:
    """Return the numbers of the changed cells and of the later ones that read what a changed one defines."""
    names, results = set[str](), set[int]()
    for number, cell in enumerate(cells):
        if number in changed or _names(cell, ast.Load) & names:
            results.add(number)
            names |= _names(cell, ast.Store)
        else:
            names -= _names(cell, ast.Store)
    return results


def _names(cell: dict[str, Any], context: type[ast.expr_context]) -> set[str]:
    """Return the names that a cell reads before it sets them (ast.Load), or those that it assigns, defines or imports
    (ast.Store)."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code" or source.startswith("%"):
        return set()
    read, written = set[str](), set[str]()
    for statement in ast.parse(source).body:
        nodes = list(ast.walk(statement))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        comprehended = {
            id(name) for node in nodes if isinstance(node, ast.comprehension) for name in ast.walk(node.target)
        }
        local = {name.id for name in names if id(name) in comprehended}
        read |= {name.id for name in names if isinstance(name.ctx, ast.Load)} - written - local
        written |= {name.id for name in names if isinstance(name.ctx, ast.Store)} - local
        written |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        written |= {
            name.asname or name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names
        }
    return read if context is ast.Load else written
