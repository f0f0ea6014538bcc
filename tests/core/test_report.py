"""A report that is read back is one that can be: every number of it is a number, every device one of its cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up_report import report

from workbench.core import Report
from workbench.core.errors import ConfigError
from workbench.core.report import ALL_WEIGHTS, TRAINED_WEIGHTS
from workbench.core.serial import to_json
from workbench.core.summary import energy_j, headline, summary_rows

WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative measured time": (
        lambda r: r["steps"][1].update(measured_s=-1),
        r"steps\[1\].measured_s = -1: Expected "
        r"`float` >= 0",
    ),
    "a negative predicted time": (lambda r: r["steps"][2].update(predicted_s=-0.5), r"steps\[2\].predicted_s = -0.5"),
    "a negative epoch": (lambda r: r["epochs"][0].update(seconds=-2), r"epochs\[0\].seconds = -2"),
    "a negative phase": (
        lambda r: r.update(phases_s={"whole run": -2}),
        r"phases_s\[...\] = {'whole run': -2}: "
        r"Expected `float`",
    ),
    "a negative size": (lambda r: r.update(bytes={"sent": -2}), r"bytes\[...\] = {'sent': -2}: Expected `int`"),
    "a plan that takes no time": (
        lambda r: r["sweep"][0].update(predicted_s=0),
        r"sweep\[0\].predicted_s = 0: Expected "
        r"`float` > 0",
    ),
    "a span before the beginning": (
        lambda r: spans(r)[0].__setitem__(2, -1),
        "from -1 to 1 s in its timeline 'first epoch, predicted'",
    ),
    "a span that ends before it starts": (
        lambda r: spans(r)[0].__setitem__(3, -1),
        "0F0 of device 0 lasts from 0 to -1 s",
    ),
    "a span of no device": (lambda r: spans(r)[0].__setitem__(0, 7), "0F0 is of device 7 of 2"),
    "a plan of missing devices": (
        lambda r: r["plan"]["stages"][0]["shares"][0].update(rank=7),
        "plan names device 7; the cluster has 2",
    ),
    "a cluster with a device less": (lambda r: r["cluster"]["devices"].pop(), "plan names device 1; the cluster has 1"),
    "a timeline with a device less": (lambda r: timeline(r)["device_names"].pop(), "is of device 1 of 1"),
    "a timeline with a device more": (
        lambda r: timeline(r).update(device_names=[*"abc"], memory=[], budget_bytes=[]),
        "has 3 devices",
    ),
    "memory of a device less": (lambda r: timeline(r)["memory"].pop(), "'memory' has 1 entries for 2 devices"),
    "memory before the beginning": (lambda r: timeline(r)["memory"][0][0].__setitem__(0, -1), "memory of device 0"),
    "a metric that is no number": (lambda r: r["metrics"].update(f1=None), "null"),
    "a dilation of nothing": (lambda r: r.update(dilation=-3), "dilation = -3: Expected `float` > 0"),
    "an epoch before the first": (
        lambda r: r["epochs"][0].update(epoch=-1),
        r"epochs\[0\].epoch = -1: Expected "
        r"`int` >= 0",
    ),
    "an epoch after the last": (lambda r: r.update(chosen_epoch=99), "It chose epoch 99 of 3"),
    "links emulated between real devices": (lambda r: r.update(source="real", fidelity="kernel"), "They are real"),
    "a share of fewer samples than none": (
        lambda r: r["plan"]["stages"][0]["shares"][0].update(samples=-5),
        r"samples = -5: Expected `int` >= 0",
    ),
    "another version's": (
        lambda r: r.update(schema_version=99),
        "Another version of the workbench wrote it: schema_version = 99",
    ),
    "a field that nobody knows": (lambda r: r["steps"][0].update(los=1.0), "no field 'los' there. Did you mean 'loss'"),
    "a loss without an end": (lambda r: r["steps"][0].update(loss=float("inf")), "malformed"),
}


def timeline(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["timelines"]["first epoch, predicted"]


def spans(raw: dict[str, Any]) -> list[list[Any]]:
    return timeline(raw)["spans"]


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    spoil, result = WRONG[name]
    raw = json.loads(to_json(report()))
    spoil(raw)
    (tmp_path / "report.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"(Asked to|In '.*report.json').*{result}"):
        Report.read(tmp_path / "report.json")


def test_a_report_survives_windows_and_no_other_encoding(tmp_path: Path) -> None:
    path = report(valid=False).write(tmp_path / "report.json")
    text = path.read_text(encoding="utf-8")
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(text, encoding=encoding)
        assert Report.read(path) == report(valid=False)
    for data in (text.encode("utf-16"), text.replace("pair", "pär").encode("latin-1")):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="It is not UTF-8 text"):
            Report.read(path)


def test_energy_by_hand() -> None:
    """fast computes for 4 of 10 s and sends 4 MB: 1 W, and 4 W x 4 s and 4 J in 10 s; over an epoch of 2 s."""
    example_report = report()
    fast, slow = example_report.cluster.devices
    fast = replace(fast, watts_busy=5.0, watts_idle=1.0, joules_per_byte=1e-6)
    first = replace(
        example_report, cluster=replace(example_report.cluster, devices=(fast, slow)), epochs=example_report.epochs[:1]
    )
    assert energy_j(first) == {"fast": pytest.approx(2.0 * (1 + (4 * 4 + 4) / 10))}
    assert ("Energy", "6 J (0.433 mAh at 3.85 V), modelled: fast 6 J") in summary_rows(first)
    assert energy_j(replace(first, epochs=example_report.epochs)) == {}, "nothing is known of a cached step"


@pytest.mark.parametrize(
    ("seconds", "step", "epoch"), [(1234.5, "1,234 s", "1234.5 s"), (0.0123, "12.3 ms", "0.0123 s")]
)
def test_long_and_short_times_are_readable(seconds: float, step: str, epoch: str) -> None:
    example_report = report()
    [first, *_] = example_report.steps
    timed = replace(
        example_report,
        metrics={},
        steps=(replace(first, predicted_s=seconds, measured_s=None),),
        epochs=(replace(example_report.epochs[0], seconds=seconds),),
    )
    assert f"takes {step} (simulated)" in headline(timed)
    assert dict(summary_rows(timed))["Epoch"].startswith(f"{epoch} through")


def test_the_share_of_trained_weights_is_shown_where_the_number_of_all_is_known() -> None:
    example_report = replace(report(), bytes={TRAINED_WEIGHTS: 4 * 25})
    assert "Weights" not in dict(summary_rows(example_report))
    for number, text in ((100, "25.0% are trained: 25 numbers"), (25, "all are trained: 25 numbers")):
        known = replace(example_report, bytes={**example_report.bytes, ALL_WEIGHTS: 4 * number})
        assert dict(summary_rows(known))["Weights"] == text
