"""The notebooks as files: no outputs in git, one parameters cell, kernels that everybody has, no algorithm of their
own."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest

from workbench.core.errors import ConfigError
from workbench.runs.notebooks import require_parameters

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(set(FOLDER.glob("*.ipynb")) - {FOLDER / "index.ipynb"})
MOST_UNFOLDED = 12  # lines of parameters or imports that stand in sight
BUILT = {path.name for path in (FOLDER.parent / "labs").glob("*.ipynb")}  # labs with solutions, which students build
MOST_LINES, MOST_IMPORTS = 12, 4  # of a cell that a student sees, in these
MAX_LINES = 45  # of a cell other than the parameters and the imports, which are folded


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_has_no_outputs(self, path: Path) -> None:
        assert all(not cell.outputs and cell.execution_count is None for cell in code_cells(path))

    def test_is_valid_and_runs_on_any_python_kernel(self, path: Path) -> None:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"

    def test_leads_back_to_the_index_and_on_to_its_paper(self, path: Path) -> None:
        first, *_, last = (cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert "[All labs](index.ipynb)" in first and "[All labs](index.ipynb)" in last
        assert re.search(r"\]\(https://(arxiv|doi|openreview)\.\S+\)", last)

    def test_begins_with_words(self, path: Path) -> None:
        for cell in code_cells(path)[:2]:
            is_folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
            assert is_folded or len(cell.source.splitlines()) <= MOST_UNFOLDED

    def test_runs_without_the_studies(self, path: Path) -> None:
        assert not [cell.source for cell in code_cells(path) if "workbench_studies" in cell.source]

    def test_has_one_parameters_cell_with_plain_values(self, path: Path) -> None:
        [parameters] = [cell for cell in code_cells(path) if "parameters" in cell.metadata.get("tags", [])]
        assert parameters is code_cells(path)[0] or parameters.source == code_cells(path)[0].source
        assert all(isinstance(node, ast.Assign | ast.ImportFrom) for node in ast.parse(parameters.source).body)

    def test_says_what_one_learns_and_ends_with_exercises_and_reading(self, path: Path) -> None:
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert "**What you will learn**" in text and "## Further reading" in text
        assert "lab.exercise(" in text or not path.name[0].isdigit()  # only labs have a number

    def test_cells_are_short_and_define_no_algorithm(self, path: Path) -> None:
        for cell in code_cells(path)[2:]:
            assert len(cell.source.splitlines()) <= (MOST_LINES if path.name in BUILT else MAX_LINES), cell.source
            if not cell.source.startswith("%"):
                tree = ast.parse(cell.source)
                assert not any(isinstance(node, ast.ClassDef | ast.While) for node in ast.walk(tree)), cell.source
                functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
                assert all(len(function.body) <= 8 for function in functions), cell.source

    def test_a_lab_to_build_says_what_and_how_long_and_asks_for_words(self, path: Path) -> None:
        if path.name not in BUILT:
            pytest.skip("nothing is built in it")
        first = nbformat.read(path, as_version=4).cells[0].source
        assert all(f"| {row} |" in first for row in ("Time", "You need", "You build", "Devices"))
        assert "](../docs/pictures/" in first and "](../docs/glossary.md)" in first
        text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert "lab.guess(" in text and "lab.compare(" in text and "lab.explain(" in text and "lab.submit()" in text
        assert "**Recall.**" in text and "pen question.**" in text
        imports = [line for line in code_cells(path)[1].source.splitlines() if re.match("from|import", line)]
        assert len(imports) <= MOST_IMPORTS


def test_every_link_between_notebooks_and_docs_leads_somewhere() -> None:
    index = FOLDER / "index.ipynb"
    for path in (*NOTEBOOKS, index):
        cells = nbformat.read(path, as_version=4).cells
        words = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        links = re.findall(r"\]\(([^)]+)\)", re.sub("`[^`]*`", "", words))
        local = [link for link in links if not link.startswith("https://")]
        assert local and all((FOLDER / link).is_file() for link in local), local
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\(([^)]+\.ipynb)\)", index.read_text()))
    assert not [cell for cell in code_cells(index) if cell.outputs or cell.execution_count]


def test_parameters_are_found_beside_magics_and_annotations(tmp_path: Path) -> None:
    source = "%matplotlib inline\n!ls\nmodel: str = 'tiny-bert'  # annotated\nepochs, seed = 1, 2\n"
    cell = {"cell_type": "code", "source": source, "metadata": {"tags": ["parameters"]}}
    (tmp_path / "mine.ipynb").write_text(json.dumps({"cells": [cell]}))
    require_parameters(tmp_path / "mine.ipynb", dict.fromkeys(("model", "epochs", "seed")))
    with pytest.raises(ConfigError, match=r"Its parameters are model, epochs, seed\. Did you mean 'epochs'"):
        require_parameters(tmp_path / "mine.ipynb", {"epoch": 1})
