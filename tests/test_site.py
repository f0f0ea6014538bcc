"""The site of docs/: it builds, every link leads somewhere, and what is generated from the code is there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from generate import MARKER
from generate.outputs import page_of

from tests.clusters import cluster_of
from tests.plans import staged_plan
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.core.serial import to_json

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs LABS=none` does."""
    folder = tmp_path_factory.mktemp("site")
    [options] = re.findall(r"\$\(BIN\)/sphinx-build (.*) build/site", (ROOT / "Makefile").read_text())
    words = [sys.executable, "-m", "sphinx", *options.split(), str(folder)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_a_page_that_is_complete_on_the_site_only_says_so() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    filled = {path for path, text in texts.items() if MARKER.search(text)}
    assert filled and {path for path in filled if "`make docs`" not in texts[path]} == set()


@pytest.mark.slow
def test_reference_pages_have_what_the_code_declares(site: Path) -> None:
    expected = {
        "commands": ["workbench kit", "--snapshot-to", "workbench reproduce"],
        "options": ["unfreeze_every", "gradient_norm", "after_loss", "section VI-A"],
        "cluster-file": ["leave_if_throttled", "jetson-nano-h", "galaxy-env-b"],
        "schedule-text": ["0STEP (gacc:0.0.0 gacc:0.1.0)", "hybrid_1f1b"],
        "faults": ["SIGSTOP"],
        "report": ["noticed_s", "overrun_share"],
        "python": ["get_parallel_adapter_model", "world_size"],
    }
    for page, words in expected.items():
        text = re.sub(r"<[^>]+>", "", (site / f"docs/reference/{page}.html").read_text(encoding="utf-8"))
        assert [word for word in words if word not in text.replace("&gt;", ">")] == [], page
        assert "generated:" not in text


@pytest.mark.slow
def test_the_schema_of_reports_accepts_a_report_and_refuses_another(site: Path) -> None:
    schema = json.loads((site / "docs/reference/report.schema.json").read_text())
    plan = staged_plan((1, {0: 1}), method="pac_plus")
    report = Report(source="simulated", mode="simulate", job=Job(), cluster=cluster_of(1), plan=plan)
    written = json.loads(to_json(report))
    jsonschema.validate(written, schema)
    with pytest.raises(jsonschema.ValidationError, match="'guessed' is not one of"):
        jsonschema.validate(written | {"source": "guessed"}, schema)


def test_a_lab_shows_live_figures_and_says_what_was_executed(tmp_path: Path) -> None:
    figure = {"data": [{"y": [1, 2], "name": "</script>"}], "layout": {"height": 300}}
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "RunPanel(children=())"}
    outputs = [
        {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.plotly.v1+json": figure}},
        {"output_type": "display_data", "metadata": {}, "data": widget},
        {"output_type": "stream", "name": "stdout", "text": "\rloading: 40%"},
        {"output_type": "stream", "name": "stdout", "text": ["\rloading: 80%"]},
        {"output_type": "stream", "name": "stdout", "text": "\rdone        "},
        {"output_type": "stream", "name": "stderr", "text": "\r     \r"},
    ]
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": "# Lab"},
        {"cell_type": "code", "metadata": {"jupyter": {"source_hidden": True}}, "source": "1", "outputs": outputs},
    ]
    (tmp_path / "lab.ipynb").write_text(json.dumps({"cells": cells, "metadata": {"widgets": {}}}), encoding="utf-8")
    shown = json.loads(page_of(tmp_path / "lab.ipynb", "tiny"))
    assert "its numbers mean nothing" in shown["cells"][1]["source"] and shown["metadata"] == {}
    drawn, control, text = shown["cells"][2]["outputs"]
    html = drawn["data"]["text/html"]
    assert "min-height:300px" in html and html.count("</script>") == 1
    assert json.loads(re.search(r"<script[^>]*>(.*)</script>", html)[1])["data"] == figure["data"]
    assert control["data"]["text/html"] == '<p class="control">RunPanel: a control, which works in the notebook.</p>'
    assert text["name"] == "stdout" and text["text"].strip() == "done"  # of a progress bar the last line is left
    assert shown["cells"][2]["metadata"]["tags"] == ["hide-input"]


def test_every_environment_variable_of_ours_is_documented() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    sources = [
        path
        for name in ("workbench", "workbench_labs", "workbench_studies", "tests")
        for path in (ROOT / name).rglob("*.py")
    ]
    used = {name for path in sources for name in re.findall(r"\bWORKBENCH_[A-Z_]+", path.read_text())}
    assert used == set(re.findall(r"\bWORKBENCH_[A-Z_]+", page))


def texts_of(path: Path) -> list[str]:
    """Return the strings of a module; of an f-string what stands between the values."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_troubleshooting_quotes_what_the_code_says() -> None:
    sources = [path for name in ("workbench", "workbench_labs") for path in (ROOT / name).rglob("*.py")]
    output = "\n".join([*(text for path in sources for text in texts_of(path)), (ROOT / "Makefile").read_text()])
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    # Three dots, and numbers, stand for what differs from case to case.
    parts = [part.strip(" .'") for quote in quotes for part in re.split(r"\.\.\.|\. |\d+x?", quote)]
    assert len(parts) > 30
    assert [part for part in parts if part not in output] == []
