"""`workbench report`: what real boards did, without a word that could name them or their owner."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from generate.boards import sent_reports
from in_process import call

from tests.plans import staged_plan
from workbench.core.cluster import Cluster, Device, Link, Processor
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.report import Report, StepRecord
from workbench.core.serial import from_json, to_json
from workbench.runs.board_report import BoardReport, board_report, read_board_report

SECRET = "zanzibar"
"""In everything that an owner names."""
LINK = Link(bytes_per_s=1.25e8, latency_s=1e-4)
PLAN = staged_plan((6, {0: 8, 1: 8}), method="pac_plus", micro_batches=2, notes=(f"{SECRET}-0 is slow",))
KIT = """
name = "zanzibar"
[defaults]
model = "rpi-5"
key = "~/.ssh/zanzibar"
[[device]]
name = "zanzibar-0"
address = "zanzibar@10.0.0.4"
[[device]]
name = "zanzibar-1"
address = "zanzibar@zanzibar.local"
"""
MEASURED = KIT.replace(
    'address = "zanzibar@10.0.0.4"', 'address = "zanzibar@10.0.0.4"\ngflops = 51.2\nmemory_gb_per_s = 8.5'
) + ('[[link]]\nfrom = "zanzibar-0"\nto = "zanzibar-1"\nbandwidth_mbit_per_s = 938.0\nlatency_ms = 0.31\n')


def real_run(**changes: Any) -> Report:
    """Return a report of two boards whose owner has named everything that can be named."""
    boards = tuple(
        Device(
            name=f"{SECRET}-{rank}",
            address=f"{SECRET}@10.0.0.{rank}",
            key=f"/home/{SECRET}/.ssh/id",
            python=f"/home/{SECRET}/python",
            model="rpi-5" if rank else SECRET,
            flops_per_s=51.2e9,
            memory_bytes=7 * 10**9,
            memory_bytes_per_s=8.5e9,
            processors=(Processor(name=SECRET, flops_per_s=5e10), Processor(name=f"{SECRET}2", flops_per_s=1e9)),
            link=LINK,
        )
        for rank in range(2)
    )
    cluster = Cluster(
        name=SECRET,
        description=f"the boards of {SECRET}",
        devices=boards,
        pairs={f"{SECRET}-0>{SECRET}-1": LINK},
    )
    job = Job(
        model=f"/home/{SECRET}/model",
        task="sentiment",
        data=f"/home/{SECRET}/reviews.csv",
        columns=f"text={SECRET}",
        options={"save": SECRET},
        faults=f"kill:{SECRET}-0@step2",
        batch_size=32,
        micro_batches=2,
    )
    steps = tuple(
        StepRecord(epoch=0, step=step, samples=32, cached=False, predicted_s=1.0, measured_s=1.0 + step / 10)
        for step in range(3)
    )
    report = Report(
        source="real",
        mode="execute",
        job=job,
        cluster=cluster,
        plan=PLAN,
        steps=steps,
        notes=(f"{SECRET}-0 used 3 J",),
        environment={"host": SECRET},
        artifacts={SECRET: f"/home/{SECRET}"},
        phases_s={SECRET: 1.0},
    )
    return replace(report, **changes)


def texts_in(value: Any) -> set[str]:
    """Return all texts in a JSON value, keys left out."""
    if isinstance(value, str):
        return {value}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(texts_in, parts))


def test_nothing_that_the_owner_has_named_is_shared(tmp_path: Path) -> None:
    written = real_run().write(tmp_path / "report.json")
    assert written.read_text().count(SECRET) > 20
    shared = tmp_path / "shared.json"
    done = call("report", written, "--share", shared)
    assert done.exit_code == 0, done.output
    text = shared.read_text()
    assert SECRET not in text and "10.0.0" not in text and "/home" not in text
    known = {"own", "rpi-5", "pac_plus", "switch", "tls", "workbench board report"}
    assert {one for one in texts_in(json.loads(text)) if not re.fullmatch(r"[\d.a-z+]+|\d{4}-\d\d", one)} <= known
    result = read_board_report(shared)
    assert result.run is not None and (result.run.method, result.run.model, result.run.task) == (
        "pac_plus",
        "own",
        "own",
    )
    assert (result.run.predicted_s, result.run.measured_s, result.run.num_faults) == (1.0, 1.1, 1)
    assert [board.model for board in result.boards] == ["own", "rpi-5"]
    assert result.boards[0].processors_gflops == (50.0, 1.0) and result.boards[0].storage_mb_per_s is None
    assert (result.links[0].source, result.links[0].destination, result.links[0].mbit_per_s) == (0, 1, 1000.0)


@pytest.fixture
def shared(tmp_path: Path) -> BoardReport:
    return board_report(str(real_run().write(tmp_path / "report.json")), now=lambda: datetime(2026, 11, 28, tzinfo=UTC))


def test_every_text_of_the_file_has_a_fixed_form(shared: BoardReport) -> None:
    document = json.loads(to_json(shared))
    assert document["month"] == "2026-11"
    for part in (document, document["boards"][0], document["run"]):
        for name in [name for name, value in part.items() if isinstance(value, str)]:
            kept, part[name] = part[name], f"/home/{SECRET} @"
            with pytest.raises(ConfigError, match="shared"):
                from_json(json.dumps(document), BoardReport, source="shared")
            part[name] = kept
    document["note"] = SECRET
    with pytest.raises(ConfigError, match="note"):
        from_json(json.dumps(document), BoardReport, source="shared")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"source": "emulated", "fidelity": "kernel"}, "emulated on one machine"),
        ({"source": "simulated", "mode": "simulate"}, "only simulated"),
    ],
)
def test_a_run_without_boards_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    written = real_run(**changes).write(tmp_path / "report.json")
    with pytest.raises(ConfigError, match=f"{why}, so it says nothing about a board"):
        board_report(str(written))


def test_a_kit_is_shared_once_it_has_measured_itself(tmp_path: Path) -> None:
    file = tmp_path / "kit.toml"
    file.write_text(KIT)
    with pytest.raises(ConfigError, match="Its speeds are the catalogue's"):
        board_report(str(file))
    file.write_text(KIT.replace("address", "# address"))
    with pytest.raises(ConfigError, match="they are emulated"):
        board_report(str(file))
    file.write_text(MEASURED)
    result = board_report(str(file))
    first, second = result.boards
    assert (first.gflops, first.memory_gb_per_s, first.storage_mb_per_s) == (51.2, 8.5, None)
    assert (second.gflops, second.memory_gb_per_s) == (None, None), "what the catalogue says is not measured"
    assert (result.links[0].mbit_per_s, result.links[0].latency_ms, result.run) == (938.0, 0.31, None)
    printed = call("report", file)
    assert json.loads(printed.output)["boards"][0]["gflops"] == 51.2 and SECRET not in printed.output


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("links", 0, "destination"), 2, "a link from board 0 to board 2 and has 2 boards"),
        (("links", 0, "destination"), 0, "from board 0 to board 0"),
        (("boards", 1, "model"), "board-of-mine", "The catalogue has no board 'board-of-mine'"),
        (("boards", 1, "sustained"), [[0, 1], [60, 1.5]], "sustained"),
        (("boards", 1, "sustained"), [[0, 0.5], [60, 0.4]], "Begin with"),
        (("run", "task"), "letters-of-mine", "no task 'letters-of-mine'"),
        (("month",), "2026-13", "month"),
    ],
)
def test_a_file_that_contradicts_itself_or_names_what_is_unknown_is_refused(
    shared: BoardReport, place: tuple[str | int, ...], value: object, why: str
) -> None:
    document = json.loads(to_json(shared))
    part = document
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    with pytest.raises(ConfigError, match=re.escape(why)):
        from_json(json.dumps(document), BoardReport, source="shared")


def test_a_page_shows_what_was_sent(tmp_path: Path, shared: BoardReport) -> None:
    sent = tmp_path / "sent"
    sent.mkdir()
    assert "No report has been sent yet" in sent_reports(sent)
    (sent / "one.json").write_text(to_json(shared))
    page = sent_reports(sent)
    assert "| `rpi-5` | 51.2 | 60 | -15% |" in page and "1 s predicted, 1.1 s measured" in page
    first, second = shared.boards
    hot = replace(shared, boards=(first, replace(second, sustained=((0.0, 1.0), (180.0, 0.8)))))
    assert shared.run is not None
    (sent / "one.json").write_text(to_json(replace(hot, run=replace(shared.run, predicted_s=None))))
    assert "Board 1 has 80% of its speed after 180 s of computing." in sent_reports(sent)
    (sent / "one.json").write_text(to_json(shared).replace('"rpi-5"', '"a b"'))
    with pytest.raises(ConfigError, match=r"one\.json"):
        sent_reports(sent)
