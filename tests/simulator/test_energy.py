"""Energy: busy power while a device computes, idle power for the rest of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.costs import TableCosts
from workbench.core.errors import ConfigError
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.simulator import energy, simulate

CLUSTER = Cluster(
    name="two",
    devices=tuple(
        Device(name=name, flops_per_s=1e9, memory_bytes=1, link=Link(bytes_per_s=1e6), watts_busy=busy, watts_idle=1.0)
        for name, busy in (("a", 5.0), ("b", 10.0))
    ),
)
SCHEDULE = Schedule.from_text("""
    rank 0
    0F0 () -> (a)
    0F1 () -> () @compute1
    SEND 0>1 (a) -> () @send
    rank 1
    RECV 0>1 () -> (a) @recv
    1F0 (a) -> ()
""")


def test_busy_and_idle() -> None:
    """Two streams at once burn no more than one; communication counts as idle."""
    timeline = simulate(Program(schedule=SCHEDULE, costs=TableCosts(seconds_by_kind={"F": 2.0, "SEND": 3.0}), devices=("a", "b")))
    result = energy(timeline, CLUSTER)
    assert result.busy_joules == (2 * 5.0, 2 * 10.0)
    assert result.idle_joules == (5 * 1.0, 5 * 1.0)


def test_unknown_power_and_another_cluster() -> None:
    """No figure is made up."""
    timeline = simulate(Program(schedule=SCHEDULE, costs=TableCosts(seconds_by_kind={}), devices=("a", "b")))
    with pytest.raises(ConfigError, match="'a' has no watts_busy"):
        energy(timeline, replace(CLUSTER, devices=tuple(replace(device, watts_busy=0.0) for device in CLUSTER.devices)))
    with pytest.raises(ConfigError, match="has 1"):
        energy(timeline, CLUSTER.part(range(1, CLUSTER.world_size)))
