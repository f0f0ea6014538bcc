"""Shared air: how many copies of a frame pass it, and that all of them do and nobody receives one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyroute2", reason="only Linux has it")

from workbench.core.cluster import Cluster, Link
from workbench.core.errors import RuntimeSetupError
from workbench.core.run_folder import child_environment
from workbench.core.serial import to_json
from workbench.runtime.network import EmulatedNetwork
from workbench.runtime.radio import copies, require_similar_rates

# Sends bytes between endpoints, several at once, and prints what has passed: the bytes of each class of the air, and
# those that left and entered each device.  A socket belongs to the namespace in which it was created.
_SEND = """
import json, os, socket, sys, threading
from pyroute2 import IPRoute
from workbench.core.serial import from_json
from workbench.runtime.namespaces import CLONE_NEWNET, CLONE_NEWUSER, enter
from workbench.runtime.network import Endpoint
*ends, hub = [from_json(end, Endpoint) for end in sys.argv[2:]]
ways, size = json.loads(sys.argv[1])
places = [os.open(end.network_path, os.O_RDONLY) for end in (*ends, hub)]
if hub.user_path:
    user = os.open(hub.user_path, os.O_RDONLY)
    enter(user, CLONE_NEWUSER)
receivers, senders = [], []
for source, to in ways:
    enter(places[to], CLONE_NEWNET)
    with socket.create_server((ends[to].address, 5001)) as server:
        enter(places[source], CLONE_NEWNET)
        senders.append(socket.create_connection((ends[to].address, 5001)))
        receivers.append(server.accept()[0])
threads = [threading.Thread(target=sender.sendall, args=(bytes(size),)) for sender in senders]
for thread in threads:
    thread.start()
for receiver in receivers:
    assert len(receiver.recv(size, socket.MSG_WAITALL)) == size
passed = {"congestion": receivers[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\\0").decode()}
for rank, place in enumerate(places):
    enter(place, CLONE_NEWNET)
    with IPRoute() as netlink:
        if rank < len(ends):
            [link] = netlink.get_links(netlink.link_lookup(ifname="eth0")[0])
            counters = link.get_attr("IFLA_STATS64")
            passed[f"device {rank}"] = [counters["tx_bytes"], counters["rx_bytes"]]
            continue
        for message in netlink.get_classes(netlink.link_lookup(ifname="air0")[0]):
            basic = message.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")
            passed[f"class {message['handle'] & 0xFFFF:#x}"] = basic["bytes"]
print(json.dumps(passed))
"""


def stations(make_cluster: Callable[..., Cluster], *mbit_per_s: float) -> Cluster:
    cluster = make_cluster(len(mbit_per_s))
    devices = tuple(
        replace(device, link=Link(bytes_per_s=125_000 * rate))
        for device, rate in zip(cluster.devices, mbit_per_s, strict=True)
    )
    return replace(cluster, devices=devices, medium="wifi")


def sending(network: EmulatedNetwork, ways: list[tuple[int, int]], size: int) -> subprocess.Popen[str]:
    """Start _SEND: so many bytes on each way."""
    hub = replace(network.endpoints[0], network_path=f"/proc/{network.holder_pid}/ns/net")
    ends = [to_json(endpoint) for endpoint in (*network.endpoints, hub)]
    command = [sys.executable, "-c", _SEND, json.dumps([ways, size]), *ends]
    return subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True)


@given(st.floats(1, 31))
def test_the_copies_of_all_packets_take_the_times_on_air(times: float) -> None:
    """A packet's number ends with each byte equally often.  No packet gets two additional copies."""
    reference, keys = copies(times)
    patterns = [[int(number, 16) for number in key.removesuffix("+5").split("/")] for key in keys]
    more = [sum(number & mask == value for value, mask in patterns) for number in range(256)]
    assert max(more) <= 1
    assert 1 + reference + sum(more) / 256 == pytest.approx(times, abs=1 / 128)


def test_of_packets_in_a_row_about_as_many_have_a_copy_more_as_of_all() -> None:
    """Also of every second one: two devices that answer each other number data and acknowledgements by turns."""
    for times in (1.25, 1.5, 1.75, 2.5):
        reference, keys = copies(times)
        patterns = [[int(number, 16) for number in key.removesuffix("+5").split("/")] for key in keys]
        for step in (1, 2, 3):
            numbers = [number % 256 for number in range(0, 64 * step, step)]
            chosen = sum(number & mask == value for value, mask in patterns for number in numbers)
            assert reference + chosen / 64 == pytest.approx(times - 1, abs=0.07)


def test_stations_whose_rates_differ_too_much_are_refused(make_cluster: Callable[..., Cluster]) -> None:
    require_similar_rates(stations(make_cluster, 60, 60, 1))
    require_similar_rates(stations(make_cluster, 60))
    with pytest.raises(RuntimeSetupError, match=r"from device-2>device-1 takes 32\.5 times .* at most 31"):
        require_similar_rates(stations(make_cluster, 64, 64, 1))


@pytest.mark.usefixtures("kernel_links")
def test_slow_stations_take_the_air_with_copies_that_nobody_receives(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Compared with the bytes that the kernel counts as sent, those sent again included, so no busy host matters."""
    cluster = replace(
        stations(make_cluster, 64, 64, 16, 8), pairs={"device-2>device-1": Link(bytes_per_s=125_000 * 12)}
    )
    times = {(1, 3): 4.5, (2, 1): 32 / 12, (0, 2): 2.5}
    air, size, frame = cluster.air, 200_000, 4110
    assert air is not None and air.most_bytes_per_s == 4e6
    with closing(EmulatedNetwork.create(cluster, tmp_path)) as network:
        network.shape(cluster.with_slow_links({"device-0>device-2": 3.0}))
        network.shape(cluster.with_slower_links(0.1))
        with sending(network, list(times), size) as process:
            passed = json.loads(process.communicate()[0])
    assert passed["congestion"] == "reno"
    for (source, to), many in times.items():
        assert air.times_on_air(source, to) == pytest.approx(many)
        sent = passed[f"device {source}"][0]
        assert sent > size and passed[f"class {0x10 + source:#x}"] == pytest.approx(many * sent, abs=8 * frame)
        assert size < passed[f"device {to}"][1] < 1.2 * sent


@pytest.mark.usefixtures("kernel_links")
def test_a_rate_changes_while_frames_are_on_air(make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """None of them is lost, and none gets around the air: the kernel counts as many bytes there as were sent, and the
    copies."""
    cluster, size = stations(make_cluster, 64, 64), 2_000_000
    slow = cluster.with_slow_links({"device-0>device-1": 3.0})
    with closing(EmulatedNetwork.create(cluster, tmp_path)) as network, sending(network, [(0, 1)], size) as process:
        rates = cycle((slow, cluster))
        while process.poll() is None:
            network.shape(next(rates))
        passed = json.loads(process.communicate()[0])
    sent = passed["device 0"][0]
    assert size < sent < 1.05 * size and sent - 8 * 4110 <= passed["class 0x10"] < 3 * sent
