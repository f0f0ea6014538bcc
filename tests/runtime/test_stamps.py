"""A message carries when its emulated device sent it, and by how much this machine was behind; the members of a
collective tell each other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from gloo_pairs import cluster_of

from tests.waiting import LIMIT_S
from workbench.core.costs import MESSAGE_S, Spec
from workbench.core.schedule import NONE, Op, Value, recv, send
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


class Members:
    """A process group in which another member began at given times, and whose all-reduce of the content ends late."""

    def __init__(self, device_s: float, machine_s: float, takes_s: float) -> None:
        self.times, self.takes_s = torch.tensor([device_s, machine_s], dtype=torch.float64), takes_s
        self.sums = self.begins = 0

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Members:
        if options is None:
            self.sums += 1
            time.sleep(self.takes_s)
        else:
            self.begins += 1
            tensors[0].copy_(torch.maximum(tensors[0], self.times))
        return self

    def wait(self) -> None:
        """All is done at once."""


REDUCE_S = 2 * (0.01 + 2 * 0.002 + MESSAGE_S)


@pytest.mark.parametrize("medium", ["switch", "wifi"])
@pytest.mark.parametrize("behind_s", [0.0, 0.003, 1.0])
@pytest.mark.parametrize("takes_s", [0.0, REDUCE_S + 0.002, REDUCE_S + 0.05])
def test_a_collective_ends_when_the_last_members_device_has_had_its_time(
    medium: str, behind_s: float, takes_s: float
) -> None:
    """On a switch.  What this machine was behind at its beginning, up to GRAIN_S, does not count; the rest is late.  On
    shared air nothing says when it is due, and nobody sends when it began: that would take air.
    """
    cluster = cluster_of("ab", bytes_per_s=2 * SIZE / 0.01, latency_s=0.002, host_share=1.0)
    links = RankLinks(cluster=replace(cluster, medium=medium), rank=0, fidelity="kernel")
    machine_s = time.monotonic()
    group = Members(machine_s - behind_s, machine_s - 1e-6, takes_s)
    transport = Transport(cast(Any, group), 0, subgroup=lambda ranks: cast(Any, group), links=links)
    op = Op("ALLREDUCE", 0, NONE, NONE, (), (), (0, 1))
    result, span = transport.collective(op, torch.ones(SIZE), (), machine_s - 2.0)
    now_s = time.monotonic()
    transport.close()
    assert group.sums == 1 and torch.equal(result, torch.ones(SIZE)) and span.start_s == machine_s - 2.0
    if medium == "wifi":
        assert group.begins == 0 and span.late_s == 0.0
        assert takes_s + 2 * 2 * 0.002 - 1e-4 <= span.end_s - machine_s <= now_s - machine_s
        return
    made_up_s = min(behind_s, GRAIN_S)
    due_s = group.times[0].item() + REDUCE_S
    assert span.end_s == pytest.approx(due_s + span.late_s, abs=1e-9, rel=0) and span.late_s >= 0.0
    assert span.late_s >= machine_s + takes_s - due_s - GRAIN_S
    assert span.late_s <= max(0.0, now_s - due_s - made_up_s) + 1e-4
