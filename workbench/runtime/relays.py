"""Tensors between real devices travel over TLS 1.3 through relays.

gloo listens on the loopback, and the addresses that it publishes are rewritten.
Each device's agent relays (see ssh_agent).  Of the store's values only gloo's addresses are changed.  The address of a
peer with a higher rank is replaced by a port on the reader's own loopback, which leads to the peer.  An address of a
lower rank is never connected to, because of two addresses gloo connects to the lower one.
"""

from __future__ import annotations

import functools
import shlex
import socket
import struct
import subprocess
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from workbench.core.errors import RuntimeSetupError
from workbench.runtime.ssh import Connection
from workbench.runtime.ssh_agent import LOWEST

_SIZE = struct.Struct("<Q")
_STORAGE_BYTES = 136
"""Sizes in gloo's address: a sockaddr_storage and a number."""
_LOOPBACK = socket.inet_aton("127.0.0.1")
_NEVER = ("127.0.0.2", 9)


_MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=workbench "
    "-keyout - -out -"
)


def make_certificate() -> bytes:
    """Return a key and a certificate for one run.  Raises RuntimeSetupError without openssl."""
    request = "Tensors between devices were to be encrypted."
    try:
        done = subprocess.run(shlex.split(_MAKE_CERTIFICATE), capture_output=True)
    except OSError as error:
        problem = f"openssl cannot be started: {error.strerror}."
        raise RuntimeSetupError(
            request, problem, 'Install it, or write data = "plain" for a network of your own.'
        ) from error
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip()
        raise RuntimeSetupError(
            request,
            f"openssl made no certificate: {errors}.",
            'Fix it, or write data = "plain" for your own network.',
        )
    return done.stdout


def gloo_port(value: bytes) -> int | None:
    """Return the loopback port at which gloo listens, from a value in the store.  None if the value is not an address
    of gloo.
    """
    offset = _place(value)
    if (
        offset is None
        or value[offset : offset + 2] != struct.pack("=H", socket.AF_INET)
        or value[offset + 4 : offset + 8] != _LOOPBACK
    ):
        return None
    return struct.unpack_from(">H", value, offset + 2)[0]


def with_address(value: bytes, host: str, port: int) -> bytes:
    """Return gloo's value with the address replaced."""
    offset = _place(value)
    assert offset is not None
    return value[: offset + 2] + struct.pack(">H", port) + socket.inet_aton(host) + value[offset + 8 :]


def _place(value: bytes) -> int | None:
    """Return the offset of gloo's socket address, which follows a host's name and the address's size."""
    if len(value) < _SIZE.size or (offset := 2 * _SIZE.size + _SIZE.unpack_from(value)[0]) + _STORAGE_BYTES > len(
        value
    ):
        return None
    return offset if _SIZE.unpack_from(value, offset - _SIZE.size)[0] == _STORAGE_BYTES else None


class _Exposed(NamedTuple):
    rank: int
    address: Future[Any]


class Relays:
    """The relays of one run.  failed(rank, error): called with errors of a device's relay."""

    def __init__(self, failed: Callable[[int, BaseException], None]) -> None:
        self._failed = failed
        self._exposed: dict[str, _Exposed] = {}

    def publish(self, rank: int, connection: Connection, key: str, value: bytes) -> None:
        """Process a key and value that a device has set.  If the value is an address, make it reachable for the other
        devices.
        """
        port = gloo_port(value)
        if port is not None:
            future = connection.post("expose", port=port)
            self._exposed[key] = _Exposed(rank, future)
            future.add_done_callback(
                lambda exposed: self._failed(rank, error) if (error := exposed.exception()) is not None else None
            )

    def reply(self, rank: int, connection: Connection, key: str, say: Callable[[bytes], None], value: bytes) -> None:
        """Send a requested value to a device.  An address is first replaced by one at which the device reaches its
        peer.
        """
        exposed = self._exposed.get(key)
        if exposed is None or exposed.rank == rank or gloo_port(value) is None:
            say(value)
        elif exposed.rank < rank:
            say(with_address(value, *_NEVER))
        else:
            exposed.address.add_done_callback(functools.partial(self._reach, rank, connection, say, value))

    def _reach(
        self, rank: int, connection: Connection, say: Callable[[bytes], None], value: bytes, exposed: Future[Any]
    ) -> None:
        if exposed.exception() is not None:  # the fault of the other device, which `publish` reports
            return
        host, port = exposed.result()
        connection.post("reach", host=host, port=port).add_done_callback(functools.partial(self._say, rank, say, value))

    def _say(self, rank: int, say: Callable[[bytes], None], value: bytes, reached: Future[Any]) -> None:
        if (error := reached.exception()) is not None:
            self._failed(rank, error)
        else:
            say(with_address(value, LOWEST, reached.result()))
