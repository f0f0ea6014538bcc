"""Confidant's labs: partitions by hand, versions of weights, stale descents, heads over processors, recoveries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from widget_reports import make_report

from tests.clusters import with_devices
from workbench.core.catalogue import load_cluster
from workbench.core.report import Recovery
from workbench_labs.course.lab import exercises_of
from workbench_labs.course.verdict import WrongAnswerError
from workbench_labs.heads_by_hand import HeadsLab, head_profile
from workbench_labs.never_drain import recovery_table
from workbench_labs.partition_by_hand import PartitionLab
from workbench_labs.planning import on_this_computer
from workbench_labs.weight_versions import StaleLab, stashed, version_table, version_words


def test_a_partition_by_hand_against_equation_3() -> None:
    lab = PartitionLab("BERT-Base", load_cluster("pac-env-b"), batch_size=16, tokens=128)
    assert lab.partition.cuts == (0, 3, 6, 9, 12) and "Out of memory: nano-h lacks 1.4 GB" in lab.headline.value
    buttons = {child.description: child for child in lab.children[0].children if hasattr(child, "click")}
    buttons["Eq. 3"].click()
    lab.wait()
    assert lab.partition.cuts == (0, 1, 2, 8, 12) and "(+0% against Eq. 3 in this order)" in lab.headline.value
    order, drawn = exercises_of("10")["order"], {"batch_size": 16}
    with pytest.raises(WrongAnswerError, match="in the cluster's order"):
        order.judge(lab.answer, drawn)
    buttons["By speed"].click()
    lab.wait()
    assert "nano-h lacks 672 MB" in lab.headline.value and "too little" in lab.table.value
    with pytest.raises(WrongAnswerError, match="does not fit: nano-h"):
        order.judge(lab.answer, drawn)
    buttons["Best order"].click()
    lab.wait()
    assert lab.partition.order != (0, 1, 2, 3) and "Out of memory" not in lab.headline.value
    assert "with yours" in order.judge(lab.answer, drawn)
    lab.cuts[0].value = 12
    lab.wait()
    assert "has none" in lab.message.value and "No pipeline" in lab.headline.value and lab.table.value == ""


@pytest.mark.parametrize(
    ("preset", "found"),
    [("Eq. 3", "nothing fits into the devices"), ("Best order", "leaves out nano-h; here each device")],
)
def test_cuts_that_the_sliders_cannot_show_are_refused(preset: str, found: str) -> None:
    """One device has no memory: in an order of all devices nothing fits, and the best order is without it."""
    cluster = with_devices(
        load_cluster("pac-env-b"), memory_bytes=lambda device: 10**6 if device.name == "nano-h" else 8 * 10**9
    )
    lab = PartitionLab("BERT-Base", cluster, batch_size=16, tokens=128)
    before = lab.answer
    buttons = {child.description: child for child in lab.children[0].children if hasattr(child, "click")}
    buttons[preset].click()
    lab.wait()
    assert found in lab.message.value and lab.answer == before


def test_versions_are_where_the_paper_says() -> None:
    timeline = stashed(4, 8)
    assert [version_words(timeline, rank, 13.5) for rank in (0, 3)] == [
        "v1 (newest) for 4; v0 for 1, 2, 3",
        "v3 (newest) for 3",
    ]
    rows = version_table(timeline).rows
    assert rows[6] == ("6", "v3", "v4", "v5", "v6", "v7")
    assert rows[2] == ("2", "v0", "v0", "v1", "v2", "v3")


def test_stale_gradients_run_away_at_rates_that_fresh_ones_bear() -> None:
    lab = StaleLab(0.3)
    assert "All come down" in lab.headline.value
    lab.learning_rate.value = 0.7
    lab.wait()
    assert "Delays of 2, 3 run away" in lab.headline.value


def test_heads_by_hand_against_algorithm_1_and_the_optimum() -> None:
    lab = HeadsLab(head_profile(3))
    assert "Algorithm 1 4-6-2" in lab.headline.value and "optimum 4-5-3" in lab.headline.value
    lab.counts[0].value += 1
    lab.wait()
    assert "1 head too many" in lab.headline.value
    for slider, count in zip(lab.counts, (4, 5, 3), strict=True):
        slider.value = count
    lab.wait()
    assert "+0% against the optimum" in lab.headline.value and lab.message.value == ""


def test_recoveries_of_several_runs() -> None:
    report = make_report(first_s=8.0, cached_s=2.0)
    recovery = Recovery(
        what="kill beta", step=1, noticed_s=0.1, planned_s=0.2, resumed_s=0.3, repeated=1, predicted_s=0.5
    )
    rows = recovery_table({"killed": replace(report, mode="execute", recoveries=(recovery,)), "quiet": report}).rows
    assert rows[0][1:5] == ("kill beta", "0.10", "0.20", "0.30") and rows[0][-3:] == ("0.50", "0.60", "")
    assert rows[1][1] == "nothing changed"


def test_a_kits_devices_are_emulated_with_its_links() -> None:
    pair = load_cluster("pair")
    kit = with_devices(pair, address=lambda one: f"pi@{one.name}", host_share=None)
    emulated = on_this_computer(kit)
    assert kit.is_real and not emulated.is_real and emulated.link(0, 1) == kit.link(0, 1)
    assert on_this_computer(pair) == pair
