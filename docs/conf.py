"""How Sphinx builds the site: sources are the pages of docs/ and the labs, where they stand, so links are the same."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import plotly
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
# nbformat imports jsonschema, which builds a parser of internationalized addresses where this package is installed.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

from generate import filled, report_schema  # noqa: E402
from generate.labs import stored_output  # noqa: E402
from generate.outputs import page_of  # noqa: E402

from workbench.plots import style  # noqa: E402

project = "Edge LLM Workbench"
release = version = version_of("edge-llm-workbench")
project_copyright = ""
language = "en"

extensions = ["myst_nb"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb"]
exclude_patterns = ["**/.ipynb_checkpoints", "docs/_static/**", "docs/generate/**", "docs/pictures/README.md"]
# Sphinx looks through every folder that is not left out, .venv among them.
exclude_patterns += [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "notebooks")]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nb_execution_mode = "off"
smartquotes_action = "qe"  # not D: an option's two hyphens are no dash

html_math_renderer = "mathml"
html_theme = "furo"
html_title = project
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static", str(Path(plotly.__file__).parent / "package_data/plotly.min.js")]
html_css_files = ["site.css", "figures.css"]
highlight_language = "none"
pygments_style = "friendly"


def visit_math(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script or a network."""
    is_block = isinstance(node, nodes.math_block)
    written = convert(node.astext(), display="block" if is_block else "inline")
    translator.body.append(f'<div class="formula">{written}</div>' if is_block else written)
    raise nodes.SkipNode


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what is generated from the code into a page."""
    if name.startswith("docs/"):
        source[0] = filled(source[0])
    elif not name.endswith("index"):
        lab = ROOT / f"{name}.ipynb"
        source[0] = page_of(*(stored_output(lab) or (lab, "")))


def add_figures(app: Sphinx, name: str, *_: Any) -> None:
    """Load what draws the figures of a lab or a comparison, on its page alone."""
    page = ROOT / f"{name}.md"
    is_compared = page.is_file() and "<!-- generated: comparison" in page.read_text(encoding="utf-8")
    if is_compared or name.startswith("notebooks/"):
        app.add_js_file("plotly.min.js")
        app.add_js_file("figures.js")


def write_entry(app: Sphinx, error: Exception | None) -> None:
    """Let the site's top folder lead to its first page, and put report.json's schema next to its page."""
    if error is None and app.builder.name == "html":
        dark = style.DARK_PAGE(style.dark_css('body:not([data-theme="light"]) .lab-figure'))
        dark += style.dark_css('body[data-theme="dark"] .lab-figure')
        (Path(app.outdir) / "_static/figures.css").write_text(dark, encoding="utf-8")
        (Path(app.outdir) / "docs/reference/report.schema.json").write_text(report_schema(), encoding="utf-8")
        page = f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
        page += f'<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">{project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what conf.py adds to Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("source-read", fill)
    app.connect("html-page-context", add_figures)
    app.connect("build-finished", write_entry)
