"""Tensors between real devices: two agents of this machine, whose relays speak TLS 1.3 over its loopback."""

from __future__ import annotations

import functools
import os
import queue
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ssh_hosts import over_pipes, real_cluster

from tests.waiting import LIMIT_S
from workbench.core.errors import RuntimeSetupError
from workbench.runtime import relays
from workbench.runtime.engine_slots import KeyStore
from workbench.runtime.pipe_engine import Asked, ChannelStore
from workbench.runtime.relays import Relays, gloo_port, make_certificate
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_agent import CERTIFICATE, LOWEST


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Connection]]:
    certificate = tmp_path / "run.pem"
    certificate.write_bytes(make_certificate())
    results = [Connection(device.name, over_pipes(tmp_path)(device)) for device in real_cluster().devices]
    for agent in results:
        agent.open()
        agent.send_file(certificate, CERTIFICATE).result(LIMIT_S)
    yield results
    for agent in results:
        agent.close()


@pytest.fixture
def served() -> Iterator[tuple[int, list[int]]]:
    """A port of the loopback at which everything is sent back, and how many bytes came over each connection."""
    server, counts = socket.create_server(("127.0.0.1", 0)), []

    def echo(connection: socket.socket, number: int) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                counts[number] += len(data)
                connection.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection = server.accept()[0]
                counts.append(0)
                threading.Thread(target=echo, args=(connection, len(counts) - 1), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield server.getsockname()[1], counts
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def test_bytes_pass_both_ways_and_nobody_without_the_certificate_does(
    agents: list[Connection], served: tuple[int, list[int]], tmp_path: Path
) -> None:
    host, port = agents[0].ask("expose", port=served[0])
    for strange in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\x16\x03\x01" + os.urandom(500)):
        with suppress(OSError), socket.create_connection((host, port), 20) as plain:  # it may be closed at any moment
            plain.sendall(strange)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 16):  # an alert, and the end
                pass
    other = tmp_path / "other.pem"
    other.write_bytes(make_certificate())
    for certificate in (None, other):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate is not None:
            context.load_cert_chain(certificate)
        answer = b""
        with suppress(OSError), context.wrap_socket(socket.create_connection((host, port), 20)) as secure:
            secure.sendall(b"let me in")
            answer = secure.recv(100)
        assert answer == b""
    assert not served[1]  # none of them came as far as the port

    data, back = os.urandom(3_000_000), bytearray()
    with socket.create_connection((LOWEST, agents[1].ask("reach", host=host, port=port)), 20) as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        while len(back) < len(data):
            back += connection.recv(1 << 16)
        sender.join()
    assert bytes(back) == data and served[1] == [len(data)]


def test_an_aged_certificate_is_refused(
    agents: list[Connection], served: tuple[int, list[int]], tmp_path: Path
) -> None:
    aged = tmp_path / "aged.pem"
    aged.write_bytes(make_certificate())
    words = ["openssl", "x509", "-in", str(aged), "-signkey", str(aged), "-days", "-1"]
    yesterdays = subprocess.run(words, capture_output=True, check=True).stdout
    aged.write_bytes(aged.read_bytes().partition(b"-----BEGIN CERTIFICATE")[0] + yesterdays)
    for agent in agents:
        agent.send_file(aged, CERTIFICATE).result(LIMIT_S)
    host, port = agents[0].ask("expose", port=served[0])
    with (
        suppress(ConnectionError),
        socket.create_connection((LOWEST, agents[1].ask("reach", host=host, port=port)), 20) as connection,
    ):
        connection.sendall(b"let me in")
        assert connection.recv(100) == b""
    assert not served[1]


def test_gloo_finds_its_peers_through_relays(agents: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one for each agent, in two threads."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    kept, sums, errors, addresses = KeyStore(), {}, [], []
    between = Relays(lambda rank, error: errors.append(error))

    def ask(rank: int, asked: Asked, timeout_s: float | None) -> bytes:
        mine: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        reply = mine.put
        if asked.operation == "set":
            between.publish(rank, agents[rank], asked.keys[0], asked.value)
        elif asked.operation == "get":
            reply = functools.partial(between.reply, rank, agents[rank], asked.keys[0], mine.put)
        kept.ask(rank, asked, reply)
        value = mine.get(timeout=LIMIT_S)
        if asked.operation == "get":
            addresses.append(gloo_port(value))
        return value

    def join(rank: int) -> None:
        own = ChannelStore(functools.partial(ask, rank))
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", own), rank, 2, timedelta(seconds=20))
        tensor = torch.full((200_000,), float(rank + 1))
        group.allreduce([tensor]).wait()
        sums[rank] = tensor.sum().item()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sums == {0: 600_000.0, 1: 600_000.0} and not errors
    assert addresses.count(None) == 2  # the peers' are no addresses of 127.0.0.1
    assert not ChannelStore(functools.partial(ask, 0)).check(["nothing"])


def test_only_gloos_addresses_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (
        b"",
        b"1",
        b"\xff" * 300,
        bytes(300),
        (2).to_bytes(8, "little") + b"vm" + (136).to_bytes(8, "little") + bytes(136),
    ):
        assert gloo_port(value) is None
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeSetupError, match=r"openssl cannot be started.*data = \"plain\""):
        relays.make_certificate()
