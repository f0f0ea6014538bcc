"""The notebooks as files: no outputs in git, one parameters cell, kernels that everybody has, no algorithm of their
own."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import nbformat
import pytest

from workbench.core.errors import ConfigError
from workbench.runs.notebooks import require_parameters

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_LINES = 45  # of a cell without the parameters


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_the_notebooks_are_there() -> None:
    names = "00_quickstart 01_devices 02_pac_plus 03_hybrid_parallelism 04_p_rge 05_galaxy_plus 06_ringada 07_confidant"
    names += " 08_write_the_simulator"
    assert {path.stem for path in NOTEBOOKS} >= set(names.split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_has_no_outputs(self, path: Path) -> None:
        assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))

    def test_is_valid_and_runs_on_any_python_kernel(self, path: Path) -> None:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"

    def test_runs_without_the_studies(self, path: Path) -> None:
        assert not [cell.source for cell in code_cells(path) if "workbench_studies" in cell.source]

    def test_has_one_parameters_cell_with_plain_values(self, path: Path) -> None:
        [parameters] = [cell for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
        assert parameters is code_cells(path)[0] or parameters.source == code_cells(path)[0].source
        assert all(isinstance(node, ast.Assign | ast.ImportFrom) for node in ast.parse(parameters.source).body)

    def test_says_what_one_learns_and_ends_with_exercises_and_reading(self, path: Path) -> None:
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert (
            "**What you will learn**" in text
            and ("exercises.check_" in text or "lab.exercise(" in text)
            and "## Further reading" in text
        )

    def test_cells_are_short_and_define_no_algorithm(self, path: Path) -> None:
        for cell in code_cells(path)[1:]:
            assert len(cell.source.splitlines()) <= MAX_LINES, cell.source
            if not cell.source.startswith("%"):
                tree = ast.parse(cell.source)
                assert not any(isinstance(node, ast.ClassDef | ast.While) for node in ast.walk(tree)), cell.source
                functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
                assert all(len(function.body) <= 8 for function in functions), cell.source


def test_parameters_are_found_beside_magics_and_annotations(tmp_path: Path) -> None:
    source = "%matplotlib inline\n!ls\nmodel: str = 'tiny-bert'  # annotated\nepochs, seed = 1, 2\n"
    cell = {"cell_type": "code", "source": source, "metadata": {"tags": ["parameters"]}}
    (tmp_path / "mine.ipynb").write_text(json.dumps({"cells": [cell]}))
    require_parameters(tmp_path / "mine.ipynb", dict.fromkeys(("model", "epochs", "seed")))
    with pytest.raises(ConfigError, match=r"Its parameters are model, epochs, seed\. Did you mean 'epochs'"):
        require_parameters(tmp_path / "mine.ipynb", {"epoch": 1})
