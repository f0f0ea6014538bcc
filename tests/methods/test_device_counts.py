"""Devices that measure themselves tell how far they are."""

from __future__ import annotations

from typing import Any

from tests.methods.conftest import four_devices
from workbench.methods.base import Event
from workbench.methods.common.device_counts import TELL_EVERY_S, of_slowest, publishing
from workbench.runtime.context import RankContext


class Told:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, event: Any) -> None:
        self.events.append(event)


def test_the_device_with_most_left_is_shown_and_no_device_tells_too_often() -> None:
    cluster, shown, now_s = four_devices(), list[Event](), [0.0]
    take = of_slowest(shown.append, [device.name for device in cluster.devices])
    channels = [Told() for _ in cluster.devices]
    tell = [
        publishing(
            RankContext(
                rank=rank, world_size=4, device=device, cluster=cluster, fidelity="real", channel=channels[rank]
            ),
            clock=lambda: now_s[0],
        )
        for rank, device in enumerate(cluster.devices)
    ]
    for step in range(3):
        for rank, report in enumerate(tell):
            report(Event("note", message="not counted"))
            report(Event("count", message="timings", step=step * rank, num_steps=10))
            report(Event("count", message="timings", step=9, num_steps=10))  # too soon after the other
        now_s[0] += TELL_EVERY_S
    for rank, channel in enumerate(channels):
        assert len(channel.events) == 3
        for event in channel.events:
            take(rank, event)
    # Device 0 stays at nothing done, so it is the one that is waited for.
    last = shown[-1]
    assert (last.rank, last.step, last.num_steps) == (0, 0, 10)
    assert last.message == f"timings on {cluster.devices[0].name}"
