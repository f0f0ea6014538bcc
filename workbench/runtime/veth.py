"""Build the emulated network inside the holder process: bridge, veth pairs, HTB rates (by pyroute2).

The transport emulates latency and jitter (runtime/transport.py), because many kernels have no netem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from workbench.core.cluster import Cluster, Link
from workbench.runtime.namespaces import CLONE_NEWNET, enter, new_network_namespace, unshare
from workbench.runtime.pacing import FRAME_BYTES
from workbench.runtime.radio import build_air, shape_air

INTERFACE = "eth0"
_BRIDGE = "bridge0"
# Bursts and segments of 16 KB.  With larger ones a message of some hundred kB would pass far above the rate.
_BURST_BYTES = 16384
_WITH_HEADERS = 1 + 66 / 1448
"""Bytes that HTB counts for each byte of content: Ethernet, IP and TCP headers of each frame of 1,514 bytes."""
_WINDOW = 64
"""Frames that TCP sends without an acknowledgement from the start."""
_RTAX_RTO_MIN = 13
"""A route's smallest time-out (linux/rtnetlink.h), which the kernel heeds only if it is locked."""
_ROOT = 0x10000
_DEFAULT_CLASS = 0x10
_ETHERNET_IP = 0x0800


class LinkEnd(NamedTuple):
    """One device's namespace: a descriptor that keeps it alive, its interface and its address."""

    descriptor: int
    interface: str
    address: str


def address_of(rank: int) -> str:
    """Return the IPv4 address of a rank, in 10.77.0.0/16."""
    return f"10.77.{rank // 250}.{rank % 250 + 1}"


def build_links(cluster: Cluster) -> tuple[LinkEnd, ...]:
    """Join all devices by a bridge in a new namespace of this process; return their ends.

    Each access link is shaped at the device's end (upload) and at the bridge's end (download).  Pairs with a different
    rate get a separate class at the sender's end, selected by destination address.  Wi-Fi is shaped in the bridge (see
    radio.py).  Raises OSError if not allowed.
    """
    is_shared = cluster.medium == "wifi"
    mtu = {"mtu": FRAME_BYTES, "gso_max_size": FRAME_BYTES} if is_shared else {}
    unshare(CLONE_NEWNET)
    descriptors = [new_network_namespace() for _ in cluster.devices]
    ends = tuple(LinkEnd(descriptor, INTERFACE, address_of(rank)) for rank, descriptor in enumerate(descriptors))
    with _netlink() as hub:
        hub.link("add", ifname=_BRIDGE, kind="bridge")
        bridge = hub.link_lookup(ifname=_BRIDGE)[0]
        hub.link("set", index=bridge, state="up")
        for rank in range(cluster.world_size):
            port_name = f"port{rank}"
            peer = {"ifname": INTERFACE, "net_ns_fd": descriptors[rank], **mtu}
            hub.link("add", ifname=port_name, kind="veth", peer=peer, **mtu)
            port = hub.link_lookup(ifname=port_name)[0]
            hub.link("set", index=port, master=bridge, state="up")
        if is_shared:
            build_air(hub)
    for rank in range(cluster.world_size):
        with _inside(descriptors[rank]), _netlink() as device_side:
            loopback = device_side.link_lookup(ifname="lo")[0]
            device_side.link("set", index=loopback, state="up")
            index = device_side.link_lookup(ifname=INTERFACE)[0]
            device_side.addr("add", index=index, address=address_of(rank), prefixlen=16)
            device_side.link("set", index=index, state="up")
            _suit_tcp(device_side, index)
    shape_links(cluster, descriptors)
    return ends


def _suit_tcp(device_side: IPRoute, index: int) -> None:
    """Set how TCP behaves in a device's network namespace, so that a message takes its time on the link and little
    else.

    Small send buffers: a large message counts as sent when it is nearly through, and the next one of its sender
    follows.  No slow start, also not after a pause, no delayed acknowledgements, and no waiting for more to send: each
    would keep a message waiting.  No early signs of a loss: none happens, but an acknowledgement waits behind what its
    device sends, and TCP would then send fewer frames at once.  The congestion control that every kernel has: BBR,
    which some hosts prefer, sends at a rate of its own, and with it or with CUBIC the all-reduces of a slow link took
    up to 1.39 of their time.  index: the index of the device's interface.
    """
    metrics = {"initcwnd": _WINDOW, "initrwnd": _WINDOW, "quickack": 1, "rto_min": 1000, "lock": 1 << _RTAX_RTO_MIN}
    device_side.route("replace", dst="10.77.0.0/16", oif=index, scope="link", metrics=metrics)
    for name, value in (
        ("tcp_wmem", "4096 262144 262144"),
        ("tcp_rmem", "4096 1048576 4194304"),
        ("tcp_slow_start_after_idle", "0"),
        ("tcp_autocorking", "0"),
        ("tcp_congestion_control", "reno"),
        ("tcp_early_retrans", "0"),
    ):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)


def shape_links(cluster: Cluster, descriptors: Sequence[int]) -> None:
    """Set the links of `build_links` to the cluster's rates.  Raises OSError if not allowed."""
    if cluster.medium == "wifi":
        with _netlink() as hub:
            ports = [hub.link_lookup(ifname=f"port{rank}")[0] for rank in range(cluster.world_size)]
            shape_air(hub, cluster, [address_of(rank) for rank in range(cluster.world_size)], ports)
        return
    names = cluster.names
    for rank, device in enumerate(cluster.devices):
        pairs = {}
        for name, link in cluster.pairs.items():
            source, destination = name.split(">")
            if source == device.name:
                pairs[address_of(names.index(destination))] = link
        with _netlink() as hub:
            _shape(hub, hub.link_lookup(ifname=f"port{rank}")[0], device.link, {})
        with _inside(descriptors[rank]), _netlink() as device_side:
            _shape(device_side, device_side.link_lookup(ifname=INTERFACE)[0], device.link, pairs)


def _shape(netlink: IPRoute, index: int, link: Link, pairs: dict[str, Link]) -> None:
    """Limit an interface's egress."""
    netlink.link("set", index=index, gso_max_size=_BURST_BYTES)
    with contextlib.suppress(NetlinkError):  # the first time there is nothing to delete
        netlink.tc("del", "htb", index, _ROOT)
    netlink.tc("add", "htb", index, _ROOT, default=_DEFAULT_CLASS)
    _add_class(netlink, index, _DEFAULT_CLASS, link)
    for number, (address, pair_link) in enumerate(pairs.items(), start=_DEFAULT_CLASS + 1):
        _add_class(netlink, index, number, pair_link)
        keys = [f"{int(ip_address(address)):#x}/0xffffffff+16"]  # destination address in the IP header
        netlink.tc(
            "add-filter", "u32", index, parent=_ROOT, prio=1, protocol=_ETHERNET_IP, target=_ROOT | number, keys=keys
        )


def _add_class(netlink: IPRoute, index: int, number: int, link: Link) -> None:
    bits = max(1000, int(link.bytes_per_s * _WITH_HEADERS * 8))
    speed = f"{bits}bit"
    netlink.tc(
        "add-class",
        "htb",
        index,
        _ROOT | number,
        parent=_ROOT,
        rate=speed,
        ceil=speed,
        burst=_BURST_BYTES,
        cburst=_BURST_BYTES,
    )


@contextlib.contextmanager
def _inside(descriptor: int) -> Iterator[None]:
    with open("/proc/thread-self/ns/net") as original:
        enter(descriptor, CLONE_NEWNET)
        try:
            yield
        finally:
            enter(original.fileno(), CLONE_NEWNET)


@contextlib.contextmanager
def _netlink() -> Iterator[IPRoute]:
    try:
        with IPRoute() as netlink:
            yield netlink
    except NetlinkError as error:
        raise OSError(error.code, f"netlink: {error.args[1]}") from error
