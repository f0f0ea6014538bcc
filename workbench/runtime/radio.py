"""Emulate the shared air of a Wi-Fi network in the kernel: all traffic of the bridge passes one interface with HTB.

Each port of the bridge redirects what its device sends to an intermediate functional block (IFB).  Its HTB has one
parent class, which is the air, and a leaf for each sender.  Leaves borrow from the parent in turns, so all that send
share the air equally.

HTB shares bytes; stations of different rates share time on air.  So the air has the rate of the two stations that need
the least time for a byte, and a frame between two that need k times as long is followed into HTB by k - 1 copies of
itself.  A port makes them by mirroring.  The IFB drops a mirrored frame once it has passed HTB, because it only
sends redirected ones back to the bridge (drivers/net/ifb.c); nobody receives a copy.  The rate between two stations
contains what an access point repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from pyroute2 import IPRoute

from workbench.core.cluster import Cluster
from workbench.core.errors import RuntimeSetupError
from workbench.core.units import three_figures
from workbench.runtime.pacing import FRAME_BYTES

AIR = "air0"
_BURST_BYTES = 2048
"""Bytes by which the kernel may catch up on a late timer, but by which a message after a pause is early."""
_WITH_HEADERS = 1 + 2 * 66 / (FRAME_BYTES - 52)
"""Bytes that pass for each byte of content: Ethernet, IP and TCP headers of a frame and of its acknowledgement."""
_ROOT, _PARENT, _OTHER, _FIRST = 0x10000, 0x1, 0x2, 0x10
_ETHERNET_ALL, _ETHERNET_IP = 0x0003, 0x0800
_INGRESS = 0xFFFF0000
_QUEUE = 131_072
"""The most frames that wait in a leaf: more than TCP's windows hold, with their copies."""
_BIT, _BITS = 2, 6
"""The bits of a packet's identification that choose those with one copy more.  A connection counts its packets there.
The lowest bits are left out: where two devices answer each other by turns, data have only even or odd numbers."""
_PRIORITIES = 1, 3
"""Priorities of a port's filters, in turn; the kernel tries lower numbers first."""
_MOST_ACTIONS = 32
"""The most actions of a filter (TCA_ACT_MAX_PRIO in linux/pkt_cls.h): copies of a frame, and the frame itself."""


def build_air(hub: IPRoute) -> None:
    """Create the interface that is the air.  Raises NetlinkError if not allowed."""
    hub.link("add", ifname=AIR, kind="ifb")
    hub.link("set", index=hub.link_lookup(ifname=AIR)[0], state="up", mtu=FRAME_BYTES, txqlen=_QUEUE)


def shape_air(hub: IPRoute, cluster: Cluster, addresses: Sequence[str], ports: Sequence[int]) -> None:
    """Let everything that enters the bridge pass the air first, at a cluster's rates.  Frames that wait for the air
    are kept when its rates change.

    addresses, ports: the IPv4 address of each rank, and the index of its port.  Raises NetlinkError if not allowed.
    """
    air, index = cluster.air, hub.link_lookup(ifname=AIR)[0]
    assert air is not None
    packed = [int(ip_address(address)) for address in addresses]
    is_new = all(discipline.get_attr("TCA_KIND") != "htb" for discipline in hub.get_qdiscs(index))
    bits = max(1000, int(air.most_bytes_per_s * _WITH_HEADERS * 8))
    if is_new:
        hub.tc("add", "htb", index, _ROOT, default=_OTHER)
    command = "add-class" if is_new else "change-class"
    _set_class(hub, command, index, _PARENT, _ROOT, bits, bits)
    _set_class(hub, command, index, _OTHER, _ROOT | _PARENT, 1000, bits)  # questions for addresses
    for minor, address in enumerate(packed, start=_FIRST):
        _set_class(hub, command, index, minor, _ROOT | _PARENT, 1000, bits)
        keys = [f"{address:#x}/0xffffffff+12"]  # source address in the IP header
        if is_new:
            target = _ROOT | minor
            hub.tc("add-filter", "u32", index, parent=_ROOT, prio=1, protocol=_ETHERNET_IP, target=target, keys=keys)
    for source, port in enumerate(ports):
        others = {address: air.times_on_air(source, to) for to, address in enumerate(packed) if to != source}
        _lead_through_air(hub, port, index, others)


def _lead_through_air(hub: IPRoute, port: int, air: int, times: Mapping[int, float]) -> None:
    """Lead all frames that enter by a port through the air.

    times: how many times as long as the frame itself those to a destination take there, by its address.  New filters
    are added before the old ones are removed: no frame bypasses the air.
    """
    before = {message["info"] for message in hub.get_filters(port, parent=_INGRESS)}
    if not before:
        hub.tc("add", "ingress", port)
    first = next(prio for prio in _PRIORITIES if all(info >> 16 not in (prio, prio + 1) for info in before))
    for address, many in times.items():
        num_copies, more = copies(many)
        keys = [f"{address:#x}/0xffffffff+16"]  # destination address in the IP header
        for packets in more:
            _pass_air(hub, port, air, first, [*keys, packets], num_copies + 1)
        if num_copies:
            _pass_air(hub, port, air, first, keys, num_copies)
    _pass_air(hub, port, air, first + 1, ["0x0/0x0+0"], 0)
    for info in sorted(before):  # of each priority and protocol
        hub.tc("del-filter", index=port, parent=_INGRESS, info=info)


def copies(times: float) -> tuple[int, tuple[str, ...]]:
    """Return how many copies of each frame pass the air, and keys of u32 for the packets of which one more does.

    times: how many times as long as the frame's own time on air all of them take.  The part that is no whole number is
    rounded to a 64th; a key selects a half, a quarter ... of all packets, no two the same packet.
    """
    integer, part = divmod(round((times - 1) * 2**_BITS), 2**_BITS)
    keys = []
    for bit in range(_BITS):
        if part >> (_BITS - 1 - bit) & 1:
            mask = (2 ** (bit + 1) - 1) << _BIT
            keys.append(f"{1 << (_BIT + bit):#x}/{mask:#x}+5")  # low byte of the identification in the IP header
    return integer, tuple(keys)


def require_similar_rates(cluster: Cluster) -> None:
    """Raise RuntimeSetupError if two stations need the air so much longer than others that no filter has the copies."""
    air, names, ranks = cluster.air, cluster.names, range(cluster.world_size)
    assert air is not None
    pairs = [(air.times_on_air(a, b), f"{names[a]}>{names[b]}") for a in ranks for b in ranks if a != b]
    times, slowest = max(pairs, default=(1.0, ""))
    if times > _MOST_ACTIONS - 1:
        raise RuntimeSetupError(
            f"Cluster '{cluster.name}' was to be emulated on shared air.",
            f"A byte from {slowest} takes {three_figures(times)} times as long as one of the fastest path, "
            f"at most {_MOST_ACTIONS - 1} can be emulated.",
            "Give the stations rates that are closer to each other, or use --mode simulate.",
        )


def _pass_air(hub: IPRoute, port: int, air: int, prio: int, keys: Sequence[str], num_copies: int) -> None:
    """Lead frames that enter by a port through the air, each behind some copies of itself.

    prio: one of _PRIORITIES for a device's frames; the next one for all others.
    """
    to_air = {"kind": "mirred", "direction": "egress", "ifindex": air}
    actions = [*({**to_air, "action": "mirror"} for _ in range(num_copies)), {**to_air, "action": "redirect"}]
    protocol = _ETHERNET_IP if prio in _PRIORITIES else _ETHERNET_ALL
    target = _ROOT | _PARENT
    hub.tc(
        "add-filter",
        "u32",
        port,
        parent=_INGRESS,
        prio=prio,
        protocol=protocol,
        target=target,
        keys=keys,
        action=actions,
    )


def _set_class(hub: IPRoute, command: str, air: int, minor: int, parent: int, bits: int, most_bits: int) -> None:
    hub.tc(
        command,
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
