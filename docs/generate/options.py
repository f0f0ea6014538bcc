"""The settings of a job, and each method's own, from their declarations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import get_type_hints

from generate.words import cell, described, meanings, table, value
from workbench.core.effects import Effect
from workbench.core.job import Job
from workbench.core.methods import JOB_FIELDS, FormField, declaration_of, registered
from workbench.methods.option_values import Published, published_settings
from workbench.models.techniques import TechniqueConfig

HEAD = ("setting", "default", "values", "the paper's", "has an effect with", "meaning")


def method_options() -> str:
    """Return a section for the job's settings and one for each method's."""
    sections = ["## Every method's: a job\n", _settings(Job, {}, JOB_FIELDS)]
    for method in sorted(registered()):
        declared = declaration_of(method)
        options, of_job = published_settings(declared.options)
        sections.append(f"## {declared.title or method}: `--method {method}`\n")
        sections.append(_settings(declared.options, options, declared.form))
        if of_job:
            words = ", ".join(f"{name} = {one.value} ({one.where})" for name, one in of_job.items())
            sections.append(f"Settings of the job in the paper: {words}.\n")
    return "\n".join(sections)


def _settings(kind: type, published: dict[str, Published], form: Mapping[str, FormField]) -> str:
    hints = get_type_hints(kind, include_extras=True)
    says = {name: field.tooltip for name, field in form.items()}
    says |= ({} if kind is Job else meanings(TechniqueConfig)) | meanings(kind)
    rows = []
    for field in fields(kind):
        words, declarations = described(hints[field.name])
        effects = list(dict.fromkeys(one.needed for one in declarations if isinstance(one, Effect)))
        paper = published.get(field.name)
        rows.append(
            (
                f"`{field.name}`",
                "" if field.default is MISSING else value(field.default),
                cell(words),
                f"{value(paper.value)} ({paper.where})" if paper else "",
                cell("; ".join(effects)),
                cell(says.get(field.name, "")),
            )
        )
    return table(HEAD, rows)
