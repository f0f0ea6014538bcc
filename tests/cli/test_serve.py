from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from in_process import answer, call

from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import Fault, parse_faults
from workbench.methods.common.services import ServiceInterrupted
from workbench.methods.galaxy_plus.serving.records import (
    ReschedulingSettings,
    ServedRequest,
    ServingEvent,
    ServingReport,
    StreamSettings,
)
from workbench.methods.galaxy_plus.serving.stream import event_line

CLUSTER = load_cluster("galaxy-env-b")


def test_a_stream_in_virtual_time_is_written_and_summed_up(tmp_path: Path) -> None:
    words = [
        "serve",
        "--mode",
        "simulate",
        "--model",
        "DistilBERT",
        "--cluster",
        "galaxy-env-b",
        "--length",
        "96",
        "--requests",
        "60",
    ]
    faults = ["--fault", "slow:rpi-l-1:5@2-8s", "--fault", "kill:2@12-14"]
    path = tmp_path / "serving.json"
    content = answer(*words, *faults, "--rate", "4", "--report", path, "--out", tmp_path)
    report = ServingReport.read(path)
    assert content["requests answered"] == len(report.requests) == 60
    assert content["requests lost"] == 0 and content["devices excluded"] >= 1 and content["devices lost"] == 1
    assert [fault.kind for fault in report.faults] == ["slow", "kill"]
    assert content["latency p95 (s)"] == report.percentile_s(0.95)
    assert (tmp_path / "serving.html").is_file() and str(path) in content["files"]
    plain = call(*words, "--requests", "2")
    assert "simulated" in plain.stdout and "answers per second" in plain.stdout


def test_an_interrupted_service_leaves_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        stream = StreamSettings(num_requests=9)
        request = ServedRequest(number=0, arrival_s=0.0, start_s=0.0, end_s=1.0, tokens=8, plan=0)
        fields: dict[str, Any] = {"model": "tiny-bert", "cluster": CLUSTER, "source": "emulated", "fidelity": "paced"}
        results = {
            "rescheduling": ReschedulingSettings(),
            "plans": (),
            "requests": (request,),
            "notes": ("The service was interrupted.",),
        }
        raise ServiceInterrupted(ServingReport(stream=stream, **fields, **results))

    monkeypatch.setattr("workbench.methods.galaxy_plus.serving.stream.serve_emulated", interrupted)
    path = tmp_path / "serving.json"
    result = call("serve", "--model", "tiny-bert", "--cluster", "laptop", "--report", path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted."
    assert "The service was interrupted." in result.stdout and f"Written     {path}" in result.stdout
    assert len(ServingReport.read(path).requests) == 1


def test_faults_as_words() -> None:
    slow, kill = Fault(kind="slow", rank=2, start=10.0, end=30.0, factor=4.0), Fault(kind="kill", rank=3, start=5.0)
    assert parse_faults("slow:rpi-m:4@10-30s; kill:3@5", CLUSTER, "s") == (kill, slow)
    gone = Fault(kind="leave", rank=2, start=20, end=40, unit="step")
    assert (
        parse_faults("leave:rpi-m@step20; return:rpi-m@40", CLUSTER)
        == parse_faults("leave:2@20-40", CLUSTER)
        == (gone,)
    )


def test_events_are_told_with_their_device() -> None:
    event = ServingEvent(time_s=3.14159, kind="straggler", rank=2, value=4.0)
    assert event_line(event, CLUSTER) == "     3.14 s  straggler rpi-m 4.00 times slower than the others"
