"""`workbench schedule`: a published schedule or a file, simulated, saved and read again."""

from __future__ import annotations

from functools import partial

import pytest
from in_process import answer, call

CSV = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


found = partial(answer, "schedule")


def test_without_a_name_all_are_listed() -> None:
    result = call("schedule")
    for name in ("1f1b", "asynchronous_1f1b", "ring", "split_heads", "hetpipe"):
        assert name in result.output
    assert found()["ring"]["sizes"]["unfrozen_layers"] == 2


def test_a_published_schedule_is_simulated() -> None:
    words = ("1f1b", "--ranks", "3", "--micro-batches", "5", "--cost", "F=2", "--cost", "B=3", "--size", "ctx=10")
    summed = found(*words)
    assert summed["makespan_s"] == 35.0 and summed["bubble_fraction"] == pytest.approx(1 - 25 / 35)
    assert [rank["contexts"] for rank in summed["ranks"]] == [3, 2, 1] and [
        rank["peak_bytes"] for rank in summed["ranks"]
    ] == [30, 20, 10]
    shown = call("schedule", *words, "--grid").output
    assert "35 s in all, 28.6% of it idle (simulated)" in shown and "rank 2   2F0 2B0" in shown


def test_links_take_time_by_bytes_and_latency() -> None:
    plain = found("1f1b", "--ranks", "2", "--micro-batches", "1", "--size", "act=1e6", "--size", "grad=5e5")
    slow = found(
        "1f1b",
        "--ranks",
        "2",
        "--micro-batches",
        "1",
        "--size",
        "act=1e6",
        "--size",
        "grad=5e5",
        "--mbits",
        "8",
        "--cost",
        "SEND=0.25",
    )
    assert slow["makespan_s"] - plain["makespan_s"] == pytest.approx(1.0 + 0.5 + 2 * 0.25)
    assert slow["ranks"][0]["bytes_sent"] == 1_000_000


def test_torchs_csv_is_read_saved_and_read_again(tmp_path) -> None:
    rows, program, chart = tmp_path / "rows.csv", tmp_path / "rows.program", tmp_path / "chart.html"
    rows.write_text(CSV)
    first = found(str(rows), "--size", "act=7", "--save", str(program), "--draw", str(chart))
    assert first["makespan_s"] == 9.0 and "plotly" in chart.read_text()
    again = found(str(program))
    assert {**again, "schedule": ""} == {**first, "schedule": ""}
    changed = tmp_path / "changed.program"
    changed.write_text(program.read_text().replace("= 2.0", "= 3.0"))
    assert found(str(changed))["makespan_s"] == 12.0 and found(str(changed))["digest"] != first["digest"]


def test_a_plain_schedules_text_takes_costs(tmp_path) -> None:
    file = tmp_path / "plain.txt"
    file.write_text("# by hand\nrank 0\nin x\n0F0 (x) -> (y)\nout y\n")
    assert found(str(file), "--cost", "F=4")["makespan_s"] == 4.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{csv}", "--ranks", "3"), "is a file"),
        (("{program}", "--cost", "F=1"), "has its costs in it"),
        (("{csv}", "--cost", "G=1"), "The schedule has B, F,"),
        (("{csv}", "--size", "acts=1"), "The schedule has act,"),
        (("{csv}", "--cost", "F=-1"), "--cost F=-1"),
        (("{csv}", "--cost", "F"), "F=0.5"),
        (("{csv}", "--size", "act=nan"), "act=1e6"),
        (("{csv}", "--mbits", "0"), "asks for mbits = 0.0"),
        (("{csv}", "--mbits", "1e-320"), "asks for mbits = 1e-320"),
        (("1f1b", "--option", "ranks=4", "--option", "ranks=5"), "ranks=4 was given, too"),
        (("{deadlock}",), "cycle within one rank"),
        (("{cell}",), "row 1, column 2"),
        (("{binary}",), "binary"),
        (("{folder}",), "folder"),
        (("1f1b", "--option", "waves=2"), "It has ranks, micro_batches"),
        (("nothing.csv",), "or name a file"),
    ],
)
def test_bad_input_is_one_error(tmp_path, words: tuple[str, ...], said: str) -> None:
    files = {"csv": CSV, "deadlock": "0B0,0F0\n", "cell": "0F0,0G0\n"}
    names = {name: str(tmp_path / name) for name in (*files, "program", "binary", "folder")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    if "{program}" in words:
        found(names["csv"], "--save", names["program"])
    result = call("schedule", *(word.format(**names) for word in words))
    assert result.exit_code == 2
    assert said in result.stderr
