from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from workbench.cli import doctor
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import RuntimeSetupError
from workbench.core.run_folder import child_environment
from workbench.core.serial import to_json
from workbench.runtime.network import EmulatedNetwork, Endpoint, probe, require_open_files

# Runs inside an endpoint: prints its interfaces, its address and the rates of its HTB classes in bytes/s.
_LOOK = """
import json, socket, sys
from workbench.core.serial import from_json
from workbench.runtime.network import Endpoint
end = from_json(sys.argv[1], Endpoint)
end.enter()
from pyroute2 import IPRoute
with IPRoute() as netlink:
    index = netlink.link_lookup(ifname=end.interface)[0]
    rates = {}
    for message in netlink.get_classes(index):
        options = message.get_attr("TCA_OPTIONS")
        rates[message["handle"]] = options.get_attr("TCA_HTB_RATE64") or options.get_attr("TCA_HTB_PARMS")["rate"]
    filters = len(list(netlink.get_filters(index)))
with socket.create_server((end.address, 5000)) as server:
    congestion = server.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\\0").decode()
print(json.dumps([sorted(name for _, name in socket.if_nameindex()), sorted(rates.values()), filters, congestion]))
"""


# Sends bytes from an endpoint, or receives all that come; prints when it began, or when it had all of them.
_EXCHANGE = """
import socket, sys, time
from workbench.core.serial import from_json
from workbench.runtime.network import Endpoint
way, end, port, *more = sys.argv[1:]
end = from_json(end, Endpoint)
end.enter()
if way == "receive":
    with socket.create_server((end.address, int(port))) as server:
        print("ready", flush=True)
        channel, _ = server.accept()
        while channel.recv(1 << 16):
            pass
        print(time.monotonic())
else:
    with socket.create_connection((more[0], int(port))) as channel:
        print(time.monotonic())
        channel.sendall(bytes(int(more[1])))
"""


def exchange(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _EXCHANGE, *arguments]
    return subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True)


def exchanges(network: EmulatedNetwork, ways: list[tuple[int, int]], size: int) -> tuple[list[float], list[float]]:
    """Send so many bytes from device to device, all at once; return when each began, and when each had arrived."""
    ends = [to_json(endpoint) for endpoint in network.endpoints]
    receivers = [exchange("receive", ends[to], str(5001 + number)) for number, (_, to) in enumerate(ways)]
    assert [receiver.stdout.readline() for receiver in receivers if receiver.stdout] == ["ready\n"] * len(ways)
    senders = [
        exchange("send", ends[source], str(5001 + number), network.endpoints[to].address, str(size))
        for number, (source, to) in enumerate(ways)
    ]
    begins = [float(sender.communicate(timeout=LIMIT_S)[0]) for sender in senders]
    return begins, [float(receiver.communicate(timeout=LIMIT_S)[0]) for receiver in receivers]


def look(endpoint: Endpoint) -> tuple[list[str], list[int], int, str]:
    answer = subprocess.run(
        [sys.executable, "-c", _LOOK, to_json(endpoint)],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return tuple(json.loads(answer))  # type: ignore[return-value]


def with_headers(*bytes_per_s: int) -> list[object]:
    """Return the kernel's rates: of a frame of 1,514 bytes 66 are Ethernet's, IP's and TCP's headers."""
    return [pytest.approx(rate * 1514 / 1448, abs=1) for rate in bytes_per_s]


def namespace_of(endpoint: Endpoint) -> int:
    return os.stat(endpoint.network_path).st_ino


def users_of(namespace: int) -> list[int]:
    users = []
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if entry.stat().st_ino == namespace:
                users.append(int(entry.parts[2]))
        except OSError:
            continue
    return users


def test_probe_says_what_works_and_why() -> None:
    support = probe()
    assert support.fidelity in ("kernel", "paced")
    assert support.reason
    assert bool(support.remedy) == (support.fidelity == "paced") or sys.platform != "linux"


@pytest.mark.usefixtures("kernel_links")
class TestKernelLinks:
    def test_each_device_has_its_interface_address_and_rate(
        self, make_cluster: Callable[..., Cluster], tmp_path: Path
    ) -> None:
        cluster = make_cluster(3, mbit_per_s=100)
        slow = replace(cluster.devices[2], link=Link(bytes_per_s=1.25e6))
        cluster = replace(
            cluster, devices=(*cluster.devices[:2], slow), pairs={"device-0>device-1": Link(bytes_per_s=2.5e6)}
        )
        with closing(EmulatedNetwork.create(cluster, tmp_path)) as network:
            assert len({namespace_of(endpoint) for endpoint in network.endpoints}) == 3
            assert len({endpoint.address for endpoint in network.endpoints}) == 3
            interfaces, rates, filters, congestion = look(network.endpoints[0])
            assert {"lo", "eth0"} <= set(interfaces)
            assert rates == with_headers(2_500_000, 12_500_000)
            assert filters > 0 and congestion == "reno"
            assert look(network.endpoints[2])[1] == with_headers(1_250_000)
            network.shape(cluster.with_slower_links(2.0))
            _, rates, filters_again, _ = look(network.endpoints[0])
            assert rates == with_headers(1_250_000, 6_250_000)
            assert filters_again == filters
            assert look(network.endpoints[2])[1] == with_headers(625_000)

    @pytest.mark.parametrize("frame_loss", [0.0, 0.5])
    def test_all_that_send_at_once_share_the_air(
        self, frame_loss: float, make_cluster: Callable[..., Cluster], tmp_path: Path
    ) -> None:
        """Two pairs at 8 Mbit/s between stations: their bytes pass one after the other, also both ways; if half of the
        frames get lost, twice."""
        cluster = replace(make_cluster(4, mbit_per_s=64), medium="wifi", frame_loss=frame_loss)
        size, ways = 400_000, [(0, 1), (1, 0), (2, 3)]
        with closing(EmulatedNetwork.create(cluster, tmp_path)) as network:
            network.shape(cluster.with_slower_links(4.0))
            assert look(network.endpoints[0])[1] == []
            begins, over = exchanges(network, ways, size)
        assert max(over) - min(begins) >= (len(ways) * size - 20_000) / 1e6 / (1 - frame_loss)

    def test_messages_that_share_a_wire_pass_it_at_its_rate(
        self, make_cluster: Callable[..., Cluster], tmp_path: Path
    ) -> None:
        """Two at once from one device, and two at once to one, at 8 Mbit/s: the last one is not earlier than if one had
        followed the other.  Bursts may be early, at both ends of a path."""
        cluster = make_cluster(4, mbit_per_s=8)
        size, ways, burst = 200_000, [(0, 1), (0, 2), (1, 3), (2, 3)], 32_768
        with closing(EmulatedNetwork.create(cluster, tmp_path)) as network:
            begins, over = exchanges(network, ways, size)
        for first, second in ((0, 1), (2, 3)):
            passing_s = max(over[first], over[second]) - min(begins[first], begins[second])
            assert passing_s >= (2 * size - 2 * burst) / 1e6

    def test_namespaces_vanish_with_the_holder(self, make_cluster: Callable[..., Cluster], tmp_path: Path) -> None:
        network = EmulatedNetwork.create(make_cluster(2), tmp_path)
        path = network.endpoints[0].network_path
        namespace = namespace_of(network.endpoints[0])
        holder = network.holder_pid
        with open(path):  # so that its number does not become that of another process's
            network.close()
            assert not os.path.exists(path)
            assert not os.path.exists(f"/proc/{holder}")
            assert users_of(namespace) == []

    def test_holder_ends_when_its_owner_closes_the_pipe(
        self, make_cluster: Callable[..., Cluster], tmp_path: Path
    ) -> None:
        with closing(EmulatedNetwork.create(make_cluster(2), tmp_path)) as network:
            assert network._holder.stdin is not None
            network._holder.stdin.close()
            assert network._holder.wait(LIMIT_S) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces need Linux")
def test_refusal_is_a_clear_error(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeSetupError, match="fidelity='paced'"):
        EmulatedNetwork.create(make_cluster(2), tmp_path)
    assert probe().fidelity == "paced"


LISTENER = """
import os, socket, sys, time
from workbench.core.serial import from_json
from workbench.runtime.network import Endpoint
from_json(sys.argv[1], Endpoint, source="").enter()
with socket.create_server(("127.0.0.1", int(sys.argv[2]))) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()[0]
    connection.sendall(b"reached")
"""


@pytest.mark.privileged
def test_other_users_of_this_machine_cannot_connect_to_devices_with_paced_links(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Both devices reach each other at their loopback, which is not this machine's."""
    try:
        network = EmulatedNetwork.create(make_cluster(2), tmp_path, "paced")
    except RuntimeSetupError as error:
        pytest.skip(str(error))
    with closing(network):
        first, second = network.endpoints
        assert (first.interface, first.address) == ("lo", "127.0.0.1")
        words = [sys.executable, "-c", LISTENER, to_json(first), "0"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=child_environment()) as device:
            assert device.stdout is not None
            port = device.stdout.readline().strip()
            with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port)), 20):
                pass
            reach = (
                LISTENER.partition("with socket")[0]
                + "print(socket.create_connection(('127.0.0.1', int(sys.argv[2]))).recv(7))"
            )
            done = subprocess.run(
                [sys.executable, "-c", reach, to_json(second), port],
                capture_output=True,
                text=True,
                env=child_environment(),
            )
            assert done.stdout == "b'reached'\n", done.stderr
        network.shape(make_cluster(2))  # other rates are nothing to it


def test_the_doctor_says_where_others_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **named: object) -> None:
        raise RuntimeSetupError("Namespaces were asked for.", "They are not allowed.")

    monkeypatch.setattr(EmulatedNetwork, "create", refuse)
    emulated, devices = doctor._links()
    assert emulated.state == "degraded" and "They are not allowed" in emulated.found
    assert devices.state == "degraded" and "other users of this machine can connect" in devices.found


@pytest.mark.parametrize(
    ("limits", "raised_to"),
    [
        ((64, 64), None),
        ((64, 4096), 96),
        ((64, resource.RLIM_INFINITY), 96),
        ((1024, 1024), 1024),
        ((resource.RLIM_INFINITY,) * 2, -1),
    ],
)
def test_a_limit_on_open_files_is_raised_or_told(
    limits: tuple[int, int], raised_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = list(limits)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: now.__setitem__(0, limits[0]))
    if raised_to is None:
        with pytest.raises(
            RuntimeSetupError, match=r"^4 devices .* A process may have 64 open files here; 96 are needed"
        ):
            require_open_files(4)
    else:
        require_open_files(4)
        assert now == [raised_to, limits[1]]
