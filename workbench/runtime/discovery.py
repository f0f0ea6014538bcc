"""Find devices in the local network by multicast DNS (zeroconf), and announce one.

A device that is found is a candidate: nothing is sent to it, and its host key is accepted only by `workbench kit check
--trust`.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import platform
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from workbench import __version__
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.serial import shown

OURS = "_workbench._tcp.local."
KINDS = (OURS, "_ssh._tcp.local.", "_workstation._tcp.local.")
"""Raspberry Pi OS and other systems announce the last two if avahi is installed."""
SEARCH_S = 2.0
"""A device is found 0.5 to 1.2 s after its first announcement."""
SSH_PORT = 22
MOST_ADDRESSES = 1024


class Candidate(NamedTuple):
    """A device found in the network.  about: the device's description of itself, '' if it gives none; not to be
    trusted.
    """

    name: str
    address: str
    port: int
    about: Mapping[str, str]


def about_this_machine() -> dict[str, str]:
    """Return the properties that a device announces; none is secret."""
    import psutil

    battery = getattr(psutil, "sensors_battery", lambda: None)()
    return {
        "cores": str(os.cpu_count() or 1),
        "memory_mb": str(psutil.virtual_memory().total // 10**6),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "framework": "torch",
        "battery": "" if battery is None else f"{battery.percent:.0f} %",
        "version": __version__,
    }


@contextmanager
def announced(name: str, about: Mapping[str, str], *, interfaces: Sequence[str] | None = None) -> Iterator[str]:
    """Announce this device under a name inside the block; yield its addresses, separated by commas.

    interfaces: addresses of the network interfaces to use; None: all.  Raises ConfigError if the name is taken or
    invalid.
    """
    import zeroconf

    request = f"Announcing this device as '{name}' was asked for."
    own_addresses = list(interfaces) if interfaces else _own_addresses()
    if not own_addresses:
        raise RuntimeSetupError(request, "This machine has no network.", "Connect it.")
    network = _network(request, interfaces)
    try:
        addresses = [ipaddress.ip_address(address).packed for address in own_addresses]
        service = zeroconf.ServiceInfo(
            OURS, f"{name}.{OURS}", port=SSH_PORT, addresses=addresses, properties=dict(about), server=f"{name}.local."
        )
        network.register_service(service)
        yield ", ".join(own_addresses)
    except zeroconf.NonUniqueNameException:
        raise ConfigError(
            request, "Another device in this network has that name.", "Choose another with --name."
        ) from None
    except zeroconf.BadTypeInNameException:
        raise ConfigError(request, "That cannot be a device's name.", "Take letters, digits and hyphens.") from None
    finally:
        network.close()


def discover(search_s: float = SEARCH_S, *, interfaces: Sequence[str] | None = None) -> tuple[Candidate, ...]:
    """Return the devices found within `search_s` seconds, by address.  Raises RuntimeSetupError without a network."""
    import zeroconf

    network, services, lock = (
        _network("Devices in this network were looked for.", interfaces),
        set[tuple[str, str]](),
        threading.Lock(),
    )

    def note(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        with lock:
            services.add((service_type, name))

    try:
        browser = zeroconf.ServiceBrowser(network, list(KINDS), handlers=[note])
        time.sleep(search_s)
        browser.cancel()
        candidates: dict[str, Candidate] = {}
        for kind, name in sorted(
            services, key=lambda service: (KINDS.index(service[0]), service[1])
        ):  # our kind first: it has more details
            service = network.get_service_info(kind, name, timeout=1000)
            for address in service.parsed_addresses(zeroconf.IPVersion.V4Only) if service is not None else ():
                about = {key: value or "" for key, value in service.decoded_properties.items()} if kind == OURS else {}
                port = service.port if kind != KINDS[2] else SSH_PORT
                candidates.setdefault(
                    address, Candidate(name.removesuffix(f".{kind}").partition(" ")[0], address, port, about)
                )
        return tuple(candidates[address] for address in sorted(candidates, key=ipaddress.ip_address))
    finally:
        network.close()


def named_alike(candidates: Sequence[Candidate]) -> str:
    """Return a sentence for each name with several addresses; '' if there is none."""
    places = {
        candidate.name: ", ".join(other.address for other in candidates if other.name == candidate.name)
        for candidate in candidates
    }
    alike = [
        f"'{shown(name)}' has the addresses {addresses}." for name, addresses in places.items() if ", " in addresses
    ]
    return " ".join(
        [*alike, "Take one for each device; a second device of that name needs another (--announce --name)."]
        if alike
        else []
    )


def listening(subnet: str) -> list[str]:
    """Return the addresses of a subnet (10.0.0.0/24) at which something listens at SSH's port.  Raises ConfigError."""
    request = f"The devices of '{subnet}' were looked for."
    try:
        hosts = [
            str(address)
            for address in itertools.islice(ipaddress.ip_network(subnet, strict=False).hosts(), MOST_ADDRESSES + 1)
        ]
    except ValueError as error:
        raise ConfigError(request, f"It is not a subnet: {error}.", "Write it as 10.0.0.0/24.") from None
    if len(hosts) > MOST_ADDRESSES:
        raise ConfigError(
            request, f"It has more than {MOST_ADDRESSES} addresses.", "Write a smaller one, or the devices' addresses."
        )

    def answers(host: str) -> bool:
        try:
            socket.create_connection((host, SSH_PORT), 1.0).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(64) as pool:
        return [host for host, is_there in zip(hosts, pool.map(answers, hosts), strict=True) if is_there]


def _network(request: str, interfaces: Sequence[str] | None) -> Any:
    import zeroconf

    chosen = zeroconf.InterfaceChoice.All if interfaces is None else list(interfaces)
    try:
        return zeroconf.Zeroconf(interfaces=chosen, ip_version=zeroconf.IPVersion.V4Only)
    except OSError as error:
        raise RuntimeSetupError(
            request, f"Multicast is not possible: {error.strerror}.", "Connect this machine to the devices' network."
        ) from None


def _own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses without the loopback's."""
    import psutil

    every = (entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET)
    return [entry.address for entry in every if not ipaddress.ip_address(entry.address).is_loopback]
