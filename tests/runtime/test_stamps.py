"""A message carries when its emulated device sent it, and by how much this machine was behind."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from gloo_pairs import cluster_of

from tests.waiting import LIMIT_S
from workbench.core.costs import Spec
from workbench.core.schedule import NONE, Value, recv, send
from workbench.runtime.ingress import Due
from workbench.runtime.pacing import GRAIN_S, RankLinks
from workbench.runtime.stamps import Stamp, stamped, without_stamp
from workbench.runtime.step_values import StepValues
from workbench.runtime.transport import Transport, _Expected, _Source

SIZE = 500


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3,), (5, 7)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int64", "int8", "bool"])
def test_a_message_that_carries_its_times_keeps_its_content(dtype: str, shape: tuple[int, ...]) -> None:
    content = (torch.randn(shape) * 100).to(getattr(torch, dtype))
    received, stamp = without_stamp(stamped(content, Stamp(1234.5, 0.25)), Spec(shape, dtype))
    assert received.dtype == content.dtype and torch.equal(received, content)
    assert stamp == Stamp(1234.5, 0.25)


class Captured:
    """A process group that keeps the messages that it is to send."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def send(self, buffers: list[torch.Tensor], *where: int) -> Captured:
        self.buffers += buffers
        return self

    def wait(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("behind_s", [0.002, 1.0])
@pytest.mark.parametrize("medium", ["switch", "wifi"])
def test_a_message_begins_when_its_device_had_the_value(medium: str, behind_s: float) -> None:
    """This machine has it later, by up to GRAIN_S; the message says by how much."""
    cluster = cluster_of("ab", bytes_per_s=4 * SIZE / 0.01, latency_s=0.002, host_share=1.0)
    links = RankLinks(cluster=replace(cluster, medium=medium), rank=0, fidelity="kernel")
    group = Captured()
    transport = Transport(
        cast(Any, group),
        0,
        subgroup=lambda ranks: pytest.fail("no collective"),
        links=links,
    )
    tile = Value("tile", 0, NONE)
    values = StepValues({tile: 1}, {}, {}, timeout_s=LIMIT_S)
    present = transport.expect_sends([send(tile, 0, 1)], values, [])
    values.put(tile, torch.ones(SIZE), 0.0)
    ready_s = time.monotonic() - behind_s
    present(tile, torch.ones(SIZE), ready_s)
    transport.close()
    (buffer,) = group.buffers
    _, stamp = without_stamp(buffer, Spec((SIZE,)))
    if stamp.behind_s < GRAIN_S - 1e-9:
        assert stamp.sent_s == ready_s and stamp.behind_s >= behind_s
    else:
        assert stamp.behind_s == pytest.approx(GRAIN_S) and stamp.sent_s >= ready_s


def test_a_message_that_was_sent_too_late_came_earlier_for_its_device() -> None:
    """By as much as it was sent too late, but not before it was due."""
    tile = Value("tile", 0, NONE)
    message_of = _Expected(recv(tile, 0, 1), Spec((SIZE,)), StepValues({tile: 1}, {tile: 0}, {}, timeout_s=LIMIT_S), [])
    transport = Transport(cast(Any, Captured()), 1, subgroup=lambda ranks: pytest.fail("no collective"))
    due = Due(time.monotonic() - 0.002)
    transport._deliver(_Source(), message_of, torch.ones(SIZE), Stamp(due.end_s - 1.0, 0.003), due)
    transport.close()
    (span,) = message_of.spans
    arrival = message_of.values.get(tile)
    assert arrival.time_s == span.end_s and arrival.late_s() == span.end_s - due.end_s
    assert span.end_s == due.end_s or span.end_s <= time.monotonic() - 0.003
