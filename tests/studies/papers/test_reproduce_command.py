from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from workbench.cli.output import Commands
from workbench_studies.papers import COMPARE, PAPERS
from workbench_studies.papers.command import reproduce

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.command()(reproduce)


@app.callback()
def several() -> None:
    """Keep the command's name even though it is the only one."""


def call(*words: object):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_a_table_is_printed_and_written(tmp_path):
    result = call("pac_plus", "Table I", "--out", tmp_path, "--png", "no")
    assert result.exit_code == 0, result.output
    assert "full, activations" in result.stdout and "-2.0 %" in result.stdout
    assert "finding  " in result.stdout
    written = json.loads((tmp_path / "table1.json").read_text())
    assert written["source"] == "computed"
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "table1.json", "table1.html", "plotly.min.js"}


def test_json_has_paper_ours_and_deviation(tmp_path):
    result = call("pac_plus", "fig3", "table1", "--json", "--out", tmp_path, "--png", "no")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert set(printed) == {"fig3", "table1"}
    [cell] = [
        comparison for comparison in printed["table1"]["comparisons"] if comparison["labels"] == ["full", "activations"]
    ]
    assert cell["paper"] == 5.33
    assert cell["deviation"] == pytest.approx(100 * (cell["ours"] / 5.33 - 1))


def test_the_list_says_what_is_simulated_and_what_executes():
    printed = json.loads(call("pac_plus", "--list", "--json").stdout)
    assert printed["table5"]["source"] == "simulated" and printed["table6"]["source"] == "executed"
    assert "fig18-executed" in call("pac_plus", "--list").stdout
    of_all = json.loads(call("--list", "--json").stdout)
    assert of_all["pac_plus"] == printed
    assert set(of_all) == {*PAPERS, COMPARE}
    assert all(f"({paper})" in call().stdout for paper in of_all)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("pac_plus", "table9"), "There are: fig3, table1, table5"),
        (("pac",), "Known are pac_plus"),
        (("pac_plus", "fig3", "--all"), "--all is everything already"),
        (("pac_plus", "fig3", "--data", "/nowhere/at/all"), "no such folder"),
        (("pac_plus", "fig3", "--seeds", "0"), "--seeds"),
    ],
)
def test_what_cannot_be_meant_is_answered_in_one_line(words, told):
    result = call(*words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--out", "--kept"])
def test_a_file_in_place_of_the_folder_is_named(option, tmp_path):
    (tmp_path / "taken").write_text("")
    result = call("pac_plus", "fig3", option, tmp_path / "taken")
    assert result.exit_code == 2 and "It is a file" in result.stderr


def test_trainings_are_kept_and_found_in_a_folder(tmp_path):
    def run(out: str):
        words = ("p_rge", "table2", "--quick", "--kept", tmp_path / "kept", "--out", tmp_path / out, "--png", "no")
        result = call(*words)
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / out / "table2.json").read_text()), result.stderr

    first, outcome = run("first")
    kept = tmp_path / "kept" / "trials"
    logs = sorted((kept / "steps").glob("*.jsonl"))
    assert len(logs) == 3 * 3 and "step 2, validation" in outcome
    # Logs of seeds and scalars alone are enough: they are replayed, and scored again.
    for path in (*kept.glob("*.json"), *(kept / "steps").glob("*.curve.json")):
        path.unlink()
    before = [path.read_bytes() for path in logs]
    again, replayed = run("again")
    assert again["comparisons"] == first["comparisons"] and again["series"] == first["series"]
    assert [path.read_bytes() for path in logs] == before
    assert "step 2, validation" in replayed
    # With its outcomes there as well nothing is trained or scored.
    assert "step 2, validation" not in run("third")[1]
