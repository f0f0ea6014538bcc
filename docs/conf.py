"""How Sphinx builds the site: sources are the pages of docs/ and the labs, where they stand, so links are the same."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

project = "Edge LLM Workbench"
release = version = version_of("edge-llm-workbench")
project_copyright = ""
language = "en"

extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb"]
exclude_patterns = ["**/.ipynb_checkpoints", "docs/_static/**"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "off"

html_theme = "furo"
html_title = project
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_style = "friendly"


def write_entry(app: Sphinx, error: Exception | None) -> None:
    """Let the site's top folder lead to its first page."""
    if error is None and app.builder.name == "html":
        page = f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
        page += f'<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">{project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what conf.py adds to Sphinx."""
    app.connect("build-finished", write_entry)
