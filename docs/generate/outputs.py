"""A lab's outputs for the site: figures as scripts of the page, controls as a note, everything without a network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

FIGURE, CONTROL = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"
NOTES = {
    "tiny": "Executed at the smallest settings, so that this page is built in minutes: its numbers mean nothing. "
    "Run the lab to see real ones.",
    "real": "Executed at its real size.",
    "": "Not executed for this page.",
}


def page_of(lab: Path, size: str) -> str:
    """Return a notebook for the site as JSON.  size: of its outputs, '' if it has none."""
    notebook = json.loads(lab.read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            outputs = _without_progress(cell)
            cell["outputs"] = [_output(one, f"figure-{number}-{place}") for place, one in enumerate(outputs)]
            if cell["metadata"].get("jupyter", {}).get("source_hidden"):
                cell["metadata"].setdefault("tags", []).append("hide-input")
    notebook["metadata"].pop("widgets", None)
    notebook["cells"].insert(1, {"cell_type": "markdown", "id": "site", "metadata": {}, "source": f"> {NOTES[size]}"})
    return json.dumps(notebook)


def _without_progress(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a cell's outputs without what a later line of a progress bar has overwritten."""
    outputs = [one | {"text": "".join(one["text"])} if "text" in one else one for one in cell["outputs"]]
    merged, _ = CoalesceStreamsPreprocessor().preprocess_cell(nbformat.from_dict(cell | {"outputs": outputs}), {}, 0)
    return [one for one in merged["outputs"] if one["output_type"] != "stream" or one["text"].strip()]


def _output(output: dict[str, Any], name: str) -> dict[str, Any]:
    data = output.get("data", {})
    if FIGURE in data:
        return _shown(output, figure_html(data[FIGURE], name))
    if CONTROL in data:
        kind = "".join(data.get("text/plain", "")).partition("(")[0]
        return _shown(output, f'<p class="control">{escape(kind)}: a control, which works in the notebook.</p>')
    return output


def _shown(output: dict[str, Any], html: str) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": {"text/html": html}}


def figure_html(figure: dict[str, Any], name: str) -> str:
    """Return the place of a figure on a page, and its data."""
    height = figure.get("layout", {}).get("height", 450)
    content = json.dumps({"data": figure["data"], "layout": figure["layout"]}).replace("</", "<\\/")
    return (
        f'<div id="{name}" class="lab-figure" style="min-height:{height:g}px"></div>\n'
        f'<script type="application/json" class="lab-figure-data" data-for="{name}">{content}</script>'
    )
