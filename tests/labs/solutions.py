"""The solutions in the labs' source notebooks, as texts and as functions that a notebook's cell defines."""

from __future__ import annotations

import json
import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from workbench_labs.course.lab import EXERCISES

ROOT = Path(__file__).parents[2]
Functions = dict[str, Callable[..., Any]]


def source_path(lab: str) -> Path:
    """Return a lab's source notebook."""
    [path] = (ROOT / "labs").glob(f"{lab}_*.ipynb")
    return path


def sources(lab: str) -> dict[str, str]:
    """Return the solutions of a lab's source notebook, by exercise."""
    cells = json.loads(source_path(lab).read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if "exercise" in cell["metadata"].get("tags", [])]
    return {text.split("(")[0].removeprefix("def "): text for text in texts}


SOLUTIONS = sources("02")
ALL = {lab: sources(lab) for lab in EXERCISES}


def defined(source: str) -> Functions:
    scope: dict[str, Any] = {}
    exec(source, scope)
    return {name: value for name, value in scope.items() if callable(value)}


def written(text: str, name: str) -> Callable[..., Any]:
    """Return a function as a notebook's cell defines it: with a text that can be found again."""
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"shared": lambda function: function}
    exec(compile(text, file, "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def run_cells(cells: Sequence[dict[str, Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook's cells in this process, where torch is loaded already, and fail with the first cell that does.

    Return the value that each cell shows, by the cell's id.  Parameters are set that the notebook has.

    Their functions are those of the main module, as in a kernel: devices get them by value.
    """
    quiet = Config(HistoryManager={"enabled": False})
    main, shown = sys.modules["__main__"], dict[str, Any]()
    shell = InteractiveShell.instance(config=quiet, user_module=ModuleType("__main__"))
    shell.display_formatter.active_types = shell.display_formatter.format_types  # a figure's HTML, too
    try:
        for cell in (cell for cell in cells if cell["cell_type"] == "code"):
            done = shell.run_cell("".join(cell["source"]))
            done.raise_error()
            shown[cell["id"]] = done.result
            if "parameters" in cell["metadata"].get("tags", []):
                shell.push({name: value for name, value in parameters.items() if name in shell.user_ns})
    finally:
        InteractiveShell.clear_instance()
        sys.modules["__main__"] = main
    return shown
