"""Parts of a notebook: some cells, and the cells that these need.

Every notebook runs whole without a browser (tests/labs/test_student_notebooks.py); a browser shows the rest.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection
from pathlib import Path


def write_part(notebook: Path, shown: Collection[str], folder: Path) -> Path:
    """Write a notebook with all its text, the cells with these ids and those that give them their names."""
    whole = json.loads(notebook.read_text(encoding="utf-8"))
    cells = whole["cells"]
    [first] = [number for number, cell in enumerate(cells) if "parameters" in cell["metadata"].get("tags", ())]
    needed, taken = {first} | {number for number, cell in enumerate(cells) if cell["id"] in shown}, set[int]()
    assert len(needed) == len(set(shown)) + 1, f"{notebook.name} has other cells than {shown}"
    while left := needed - taken:
        number = max(left)
        taken.add(number)
        for name in _names("".join(cells[number]["source"]), ast.Load):
            earlier = [one for one in range(number) if cells[one]["cell_type"] == "code"]
            defining = [one for one in earlier if name in _names("".join(cells[one]["source"]), ast.Store)]
            needed |= set(defining[-1:])
    whole["cells"] = [cell for number, cell in enumerate(cells) if cell["cell_type"] != "code" or number in taken]
    path = folder / notebook.name
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def _names(source: str, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a cell reads (ast.Load), or those that it assigns, defines or imports (ast.Store)."""
    if source.startswith("%"):
        return set()
    nodes = list(ast.walk(ast.parse(source)))
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    if context is ast.Store:
        found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        found |= {one.asname or one.name for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    return found
