"""The ring to play with."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.trainings.rings import Training
from workbench_labs.learning import LearningLab, Tried
from workbench_labs.ring import RingLab, memory_by_depth, ring_memory_bytes, ring_table, ring_timeline


def test_the_ring_of_figure_2() -> None:
    rows = {row[0]: row[1:] for row in ring_table((4, 5, 2, 3), 3).rows}
    assert rows["device 1"][0] == "initiator" and rows["device 4"][0] == "terminator"
    assert [rows[f"device {number}"][2:4] for number in (1, 2, 3, 4)] == [
        ("4", "0"),
        ("5", "0"),
        ("2", "0"),
        ("0", "3"),
    ]
    assert rows["device 4"][4] == "activation to device 1, the initiator" and rows["device 4"][5].startswith("nothing")
    deeper = {row[0]: row[1:] for row in ring_table((4, 5, 2, 3), 4, initiator=1).rows}
    assert deeper["device 3"][0] == "terminator" and deeper["device 4"][5] == "gradient to device 3"


def test_whole_mini_batches_of_a_ring_take_what_the_arithmetic_says() -> None:
    assert ring_timeline((3, 3, 3, 3), 12).makespan_s == pytest.approx(4 * 24)
    assert ring_timeline((3, 3, 3, 3), 12, micro_batches=4).makespan_s == pytest.approx(4 * 10.5)


def test_the_lab_follows_its_sliders(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = RingLab()
    assert "terminator" in lab.table.value
    lab.depth.value = 12
    lab.wait()
    assert "24 layer times a mini-batch, 1.00 times as fast as one device" in lab.headline.value
    lab.micro_batches.value = 4
    lab.wait()
    assert "10.5 layer times" in lab.headline.value and lab.message.value == ""
    shown: list[Any] = []
    monkeypatch.setattr("workbench.widgets.controls.display", lambda value, **_: shown.append(value))
    lab._ipython_display_()
    assert "10.5 layer times" in shown[-1].data and "need their kernel" in shown[-1].data  # what stays without it


def test_a_frozen_block_keeps_no_activations() -> None:
    """Weights 10 MB, activations 1 MB, and a few bytes of messages."""
    needs = ring_memory_bytes((4, 5, 2, 3), 4, 10_000_000, 1_000_000)
    assert [round(nbytes / 1e6) for nbytes in needs] == [40, 50, 21, 33]
    ring = memory_by_depth().data[-1]
    assert list(ring.y) == sorted(ring.y) and ring.y[-1] > 1.5 * ring.y[0]


def test_what_a_ring_learns_is_trained_once_for_each_setting() -> None:
    training = Training(model="tiny-bert-2", steps=8, points=2, batch_size=4, max_length=16, limits=(32, 8, 8))
    lab = LearningLab(training, [Tried(unfreezing="all"), Tried(every=2)])
    everything, stepwise = (lab.learned[one] for one in (Tried(unfreezing="all"), Tried(every=2)))
    assert everything.depths == (2,) * 8 and stepwise.depths == (1, 1, 2, 2, 2, 2, 2, 2)
    assert stepwise.times[-1] < everything.times[-1] and stepwise.curve.losses != everything.curve.losses
    assert [line.name for line in lab.by_time().data] == ["iid, all", "iid, steps every 2"]
    lab.scheme.value, lab.rule.value = "FedAvg", "dirichlet:0.5"
    lab.wait()
    assert lab.learned[Tried(unfreezing="all", rule="dirichlet:0.5", scheme="FedAvg")].times[-1] == 8 * 6.0
    assert "dirichlet:0.5, FedAvg: last loss" in lab.headline.value and "iid, steps every 2" in lab.table.value
    assert lab.message.value == ""
