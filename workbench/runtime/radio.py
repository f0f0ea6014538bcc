"""Emulate the shared air of a Wi-Fi network in the kernel: all traffic of the bridge passes one interface with HTB.

Each port of the bridge redirects what its device sends to an intermediate functional block (IFB).  Its HTB has one
parent class, which is the air, and a leaf for each sender.  Leaves borrow from the parent in turns, so all that send
share the air equally.  The air's rate is that between two stations, so it contains what an access point repeats.
HTB shares bytes, not time on air: all stations must have the same rate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from workbench.core.cluster import Cluster
from workbench.core.errors import RuntimeSetupError
from workbench.runtime.pacing import FRAME_BYTES

AIR = "air0"
_BURST_BYTES = 2048
"""Bytes by which the kernel may catch up on a late timer, but by which a message after a pause is early."""
_WITH_HEADERS = 1 + 2 * 66 / (FRAME_BYTES - 52)
"""Bytes that pass for each byte of content: Ethernet, IP and TCP headers of a frame and of its acknowledgement."""
_WINDOW = 64
"""Frames that TCP sends without an acknowledgement from the start."""
_ROOT, _PARENT, _OTHER, _FIRST = 0x10000, 0x1, 0x2, 0x10
_ETHERNET_ALL, _ETHERNET_IP = 0x0003, 0x0800
_INGRESS = 0xFFFF0000
_QUEUE = 4096
"""The most frames that wait in a leaf: more than TCP's windows hold."""


def build_air(hub: IPRoute, ports: Sequence[int]) -> None:
    """Let everything that enters the bridge by its ports pass the air first.  Raises NetlinkError if not allowed."""
    hub.link("add", ifname=AIR, kind="ifb")
    air = hub.link_lookup(ifname=AIR)[0]
    hub.link("set", index=air, state="up", mtu=FRAME_BYTES, txqlen=_QUEUE)
    redirect = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": air}
    for port in ports:
        hub.tc("add", "ingress", port)
        hub.tc(
            "add-filter",
            "u32",
            port,
            parent=_INGRESS,
            prio=1,
            protocol=_ETHERNET_ALL,
            target=_ROOT | _PARENT,
            keys=["0x0/0x0+0"],
            action=redirect,
        )


def suit_tcp_to_air(device_side: IPRoute, index: int) -> None:
    """Set how TCP behaves in a device's network namespace, so that a message takes its time on air and little else.

    Small send buffers: a large message counts as sent when it is nearly through the air, and the next one of its sender
    follows.  No slow start, also not after a pause, no delayed acknowledgements, and no waiting for more to send: each
    would keep a message waiting.  index: the index of the device's interface.
    """
    metrics = {"initcwnd": _WINDOW, "initrwnd": _WINDOW, "quickack": 1, "rto_min": 1000}
    device_side.route("replace", dst="10.77.0.0/16", oif=index, scope="link", metrics=metrics)
    for name, value in (
        ("tcp_wmem", "4096 262144 262144"),
        ("tcp_rmem", "4096 1048576 4194304"),
        ("tcp_slow_start_after_idle", "0"),
        ("tcp_autocorking", "0"),
    ):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)


def shape_air(hub: IPRoute, cluster: Cluster, addresses: Sequence[str]) -> None:
    """Set the air of `build_air` to a cluster's rates.  addresses: the IPv4 address of each rank."""
    air = hub.link_lookup(ifname=AIR)[0]
    with contextlib.suppress(NetlinkError):  # the first time there is nothing to delete
        hub.tc("del", "htb", air, _ROOT)
    bits = max(1000, int(common_rate(cluster) * _WITH_HEADERS * 8))
    hub.tc("add", "htb", air, _ROOT, default=_OTHER)
    _add_class(hub, air, _PARENT, _ROOT, bits, bits)
    _add_class(hub, air, _OTHER, _ROOT | _PARENT, 1000, bits)  # questions for addresses
    for minor, address in enumerate(addresses, start=_FIRST):
        _add_class(hub, air, minor, _ROOT | _PARENT, 1000, bits)
        packed = int.from_bytes(bytes(map(int, address.split("."))), "big")
        keys = [f"{packed:#x}/0xffffffff+12"]  # source address in the IP header
        hub.tc("add-filter", "u32", air, parent=_ROOT, prio=1, protocol=_ETHERNET_IP, target=_ROOT | minor, keys=keys)


def common_rate(cluster: Cluster) -> float:
    """Return the bytes per second between any two stations.

    Raises RuntimeSetupError if it differs between pairs: HTB shares bytes, which is time on air only then.
    """
    ranks = range(cluster.world_size)
    paths = {cluster.link(a, b).bytes_per_s: (a, b) for a in ranks for b in ranks if a != b}
    if len(paths) > 1:
        slow, fast = (paths[rate] for rate in (min(paths), max(paths)))
        names = cluster.names
        words = [f"{names[a]}>{names[b]} {8e-6 * cluster.link(a, b).bytes_per_s:.3g} Mbit/s" for a, b in (slow, fast)]
        raise RuntimeSetupError(
            f"Cluster '{cluster.name}' was to be emulated on shared air.",
            f"Its stations have different rates: {', '.join(words)}.",
            "Give all devices the same bandwidth_mbit_per_s and no [[link]], or use --mode simulate.",
        )
    return next(iter(paths), 1e9)


def _add_class(hub: IPRoute, air: int, minor: int, parent: int, bits: int, most_bits: int) -> None:
    hub.tc(
        "add-class",
        "htb",
        air,
        _ROOT | minor,
        parent=parent,
        rate=f"{bits}bit",
        ceil=f"{most_bits}bit",
        burst=_BURST_BYTES,
        cburst=_BURST_BYTES,
        quantum=FRAME_BYTES,
    )
