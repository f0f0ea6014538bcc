"""The papers' settings: declared next to our defaults, taken by as_published, named in reports where ours differ."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from in_process import call

from workbench.core import Job
from workbench.core.errors import ConfigError
from workbench.core.methods import declaration_of
from workbench.methods.option_values import as_published, differences_note, published_settings, read_options

WITH_PAPER = ("pac_plus", "p_rge", "ringada", "galaxy_plus")


@pytest.mark.parametrize("method", WITH_PAPER)
def test_each_published_value_is_allowed_differs_from_the_default_and_says_where_it_stands(method: str) -> None:
    settings = declaration_of(method).options
    options, of_job = published_settings(settings)
    defaults = {field.name: field.default for field in fields(settings)}
    for name, option in options.items():
        assert getattr(read_options(method, settings, {name: option.value}), name) == option.value != defaults[name]
    for name, option in of_job.items():
        assert (
            getattr(
                replace(Job(), **{name: option.value, **({"micro_batches": 1} if name == "batch_size" else {})}), name
            )
            == option.value
        )
        assert getattr(Job(), name) != option.value
    assert all(one.where for one in (*options.values(), *of_job.values()))


@pytest.mark.parametrize("method", WITH_PAPER)
def test_a_job_as_published_has_no_difference_and_one_of_ours_names_each(method: str) -> None:
    settings = declaration_of(method).options
    options, of_job = published_settings(settings)
    ours, theirs = Job(method=method), as_published(Job(method=method, as_published=True))
    assert differences_note(theirs) == "All settings that the paper states are the paper's."
    assert as_published(theirs) == theirs and as_published(ours) == ours
    note = differences_note(ours)
    assert "--as-published" in note and all(f"{name}=" in note for name in (*options, *of_job))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ringada"}, {"micro_batches": 1, "options": {"replan": False}}),
        ({"method": "ringada", "micro_batches": 2}, {"micro_batches": 2}),
        ({"method": "ringada", "options": {"replan": True}}, {"options": {"replan": True}}),
        ({"method": "pac_plus", "options": {"cache_dtype": "int8"}}, {"batch_size": 16, "max_length": 128}),
        ({"method": "p_rge"}, {"batch_size": 4, "learning_rate": 1e-3, "options": {"steps": 20_000}}),
        ({"method": "galaxy_plus", "options": {"system": "megatron_lm"}}, {"options": {"system": "megatron_lm"}}),
    ],
)
def test_settings_given_otherwise_stay(given: dict[str, Any], expected: dict[str, Any]) -> None:
    job = as_published(Job(**given, as_published=True))
    assert {name: getattr(job, name) for name in expected} == expected
    assert given.get("options", {}).items() <= job.options.items()


def test_what_still_differs_is_named() -> None:
    job = as_published(Job(options={"order": "all"}, as_published=True))
    assert (
        differences_note(job) == "Settings that differ from the paper, whose values are in brackets: order=all (given)."
    )


def test_confidant_s_defaults_are_published_and_fine_tuning_is_no_paper_s_method() -> None:
    for method in ("confidant", "fine_tuning"):
        assert differences_note(Job(method=method)) == ""
    job = Job(method="confidant", as_published=True)
    assert as_published(job) == job
    with pytest.raises(
        ConfigError, match=r"published settings of fine_tuning were asked for.*Leave --as-published out"
    ):
        as_published(Job(method="fine_tuning", as_published=True))


def test_the_commands_take_it_and_their_help_names_the_values() -> None:
    for command in ("run", "simulate", "plan"):
        text = " ".join(call(command, "--help", columns=200).output.split())
        assert "--as-published" in text and "order=all (paper: given)" in text
