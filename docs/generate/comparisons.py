"""The comparisons of all methods, and the adviser's check, from the results that ship with the studies."""

from __future__ import annotations

import json

from generate.outputs import figure_html
from generate.words import cell, table
from workbench_studies.bench.advise import WORDS as ADVISE_SETTINGS
from workbench_studies.bench.advise import shipped as advise_file
from workbench_studies.papers import COMPARE, Table, find_item
from workbench_studies.papers.command import number_text
from workbench_studies.papers.result import shipped_result

LARGEST = 40
"""Rows of a table that a page shows; a longer one is in the result's file."""


def comparison(name: str) -> str:
    """Return a comparison's figures, claims, findings, tables and explanation."""
    result = shipped_result(COMPARE, name)
    assert result is not None
    figures = [
        figure_html(json.loads(figure.to_json()), f"figure-{slug}")
        for slug, _, figure in find_item(COMPARE, name).draw(result)
    ]
    claims = [
        f"- {'as we expected' if one.holds else '**not as we expected**'}: {cell(one.claim)} ({cell(one.found)})"
        for one in result.checks
    ]
    claims += [f"- {cell(one)}" for one in result.findings]
    tables = [_shown(one) for one in result.tables if len(one.rows) <= LARGEST]
    machine = ", ".join(f"{key} {value}" for key, value in result.environment.items())
    words = [*map(cell, result.explanation), *([f"Executed with {cell(machine)}."] if machine else [])]
    return "\n\n".join([*figures, "\n".join(claims), *tables, *words])


def _shown(one: Table) -> str:
    rows = table(one.columns, [[cell(number_text(value)) for value in row] for row in one.rows])
    return f"**{cell(one.title)}**\n\n{rows}\n{cell(one.note)}"


def advise_check() -> str:
    """Return what `workbench bench advise` has executed so far."""
    if not advise_file().is_file():
        return "Not executed yet."
    result = json.loads(advise_file().read_text(encoding="utf-8"))
    settings = result["settings"]
    rows = [
        [
            str(setting["setting"]),
            str(setting["devices"]),
            str(setting["executed"]),
            cell(setting["first"]),
            f"{setting['first_over_best']:.3f}",
            f"{setting['deviation']:.1%}",
            "" if setting["valid"] else "(!)",
        ]
        for setting in settings
    ]
    columns = ("setting", "devices", "executed", "first choice", "over the best", "median deviation", "")
    num_executed = sum(point["measured_s"] is not None for point in result["combinations"])
    words = (
        f"Executed so far: {len(settings)} of {len(ADVISE_SETTINGS)} settings, {num_executed} combinations. The first "
        f"choice is within 5 % of the best in {result['first_within_5_percent']} of them. The median deviation "
        f"of the prediction is {result['median_deviation'] or 0:.1%}."
    )
    if not all(setting["valid"] for setting in settings):
        words += " (!): the host did not keep pace with some of them."
    machine = ", ".join(f"{key} {value}" for key, value in result["where"].items())
    return f"{table(columns, rows)}\n{words} Executed with {cell(machine)}.\n"
