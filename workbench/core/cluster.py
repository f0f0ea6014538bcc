"""Devices, their links, and clusters of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.core.errors import ConfigError
from workbench.core.heat import Levels, require_curve
from workbench.core.medium import Air, Medium, relayed
from workbench.core.ranges import (
    Fraction,
    JoulesPerByte,
    Latency,
    Loss,
    Name,
    NumBytes,
    Port,
    Rate,
    Share,
    Slowing,
    Text,
    WattHours,
    Watts,
    require_range,
    require_ranges,
)
from workbench.core.serial import shown
from workbench.core.units import counted

_ADDRESS = re.compile(
    r"(?:ssh://)?(?P<user>\w[\w.+\\-]*@)?"
    r"(?:(?P<host>\w[\w.-]*)|\[(?P<boxed>[0-9a-fA-F:.]+(?:%\w+)?)\]|(?P<bare>[0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*(?:%\w+)?))"
    r"(?::(?P<port>\d{1,5}))?/?"
)


def split_address(text: str) -> tuple[str, int | None]:
    """Return 'user@host' and the port of an address as ssh and people write it: 'user@host:2222', 'user@[::1]:22',
    'ssh://host'.

    Raises ConfigError for anything else, such as an option of ssh.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"] or 22) < 65_536:
        todo = "Write user@host, where host is a name, a number, or a Host of ~/.ssh/config."
        raise ConfigError(f"The address '{shown(text)}' was given.", "It is not the address of a device.", todo)
    host = match["host"] or match["boxed"] or match["bare"]
    return f"{match['user'] or ''}{host}", int(match["port"]) if match["port"] else None


MEGABIT_BYTES = 125_000
"""Bytes of a megabit: files, forms and tables have rates in Mbit/s."""
Factors = Mapping[Any, float]
"""How many times slower than described devices are, by rank, and links, by 'sender>receiver'."""
DataPlane = Literal["tls", "plain", "wireguard"]
Framework = Literal["torch", "jax"]
"""The library that computes a device's layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A processor of a device (Confidant, section 3.3).  flops_per_s: sustained FLOP/s in fp32."""

    name: Name
    flops_per_s: Rate

    def __post_init__(self) -> None:
        require_ranges(self, f"Processor '{shown(self.name)}'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's access link.  bytes_per_s: payload rate in each direction.  latency_s: one way.

    It leads to the switch: messages leave one after another, and those that come at once from several devices share the
    rate equally.  On Wi-Fi it is the station's way to the access point, and the rate that it has alone.
    """

    bytes_per_s: Rate
    latency_s: Latency = 0.0

    def __post_init__(self) -> None:
        require_ranges(self, "A link")

    @property
    def mbit_per_s(self) -> float:
        """Return the rate in Mbit/s."""
        return self.bytes_per_s / MEGABIT_BYTES

    def slower(self, factor: float) -> Link:
        """Return the link `factor` times slower, latency included."""
        return Link(bytes_per_s=self.bytes_per_s / factor, latency_s=self.latency_s * factor)

    def transfer_s(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take over this link without other traffic."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster.

    flops_per_s: sustained FLOP/s in fp32, used for analytic costs.  memory_bytes: budget of a plan's tensors, without
    what the runtime, libraries and allocator take (see MemoryBudget).  host_share: the share of one host core at which
    the device is emulated (0.5: half the speed of a core), None if it is not emulated.  address: 'user@host' of a real
    device, reached over SSH.  port, key: port and key file for SSH, if the SSH settings do not have them.
    python: the interpreter on the device that has the workbench's libraries, '' for the one that `workbench kit setup`
    installed.
    watts_busy, watts_idle: power while it computes, and while it does not.  joules_per_byte: additional energy of each
    byte that it sends.  storage_bytes_per_s: sequential read rate.  storage_write_bytes_per_s: sequential write rate;
    None: as fast as it reads.  memory_bytes_per_s: rate of reading and writing memory, which bounds the pass of a
    single token; None: not known, and left out.
    battery: the remaining charge, from 0 to 1.  battery_wh: capacity of the battery, which determines how fast the
    charge of an emulated device falls; 0: mains power.
    leave_below: the charge below which it gives notice and leaves, 0: never.  leave_if_throttled: whether it also
    leaves if heat slows it down.
    framework: the library that computes its layers.
    sustained: its speed as it gets hot (see workbench.core.heat); (): it keeps its speed.
    """

    name: Name
    flops_per_s: Rate
    memory_bytes: NumBytes
    link: Link
    host_share: Share | None = None
    address: Name | None = None
    port: Port | None = None
    key: Text = ""
    python: Text = ""
    processors: tuple[Processor, ...] = ()
    watts_busy: Watts = 0.0
    watts_idle: Watts = 0.0
    joules_per_byte: JoulesPerByte = 0.0
    storage_bytes_per_s: Rate = 90e6
    storage_write_bytes_per_s: Rate | None = None
    memory_bytes_per_s: Rate | None = None
    battery: Share = 1.0
    battery_wh: WattHours = 0.0
    leave_below: Fraction = 0.0
    leave_if_throttled: bool = False
    framework: Framework = "torch"
    model: Text = ""
    sustained: Levels = ()

    def __post_init__(self) -> None:
        require_ranges(self, f"Device '{shown(self.name)}'")
        require_curve(self.sustained, f"Device '{shown(self.name)}'")
        names = [processor.name for processor in self.processors]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            request = f"Device '{shown(self.name)}' names a processor '{shown(twice[0])}'."
            raise ConfigError(request, f"There are {names.count(twice[0])} of that name.", "Name each once.")
        if self.address is None:
            return
        address, port = split_address(self.address)
        if address != self.address:
            todo = f'Write address = "{address}"' + (f" and port = {port}." if port else ".")
            raise ConfigError(
                f"Device '{self.name}' has the address '{shown(self.address)}'.", "ssh takes the parts apart.", todo
            )

    def stored_s(self, nbytes: float) -> float:
        """Return the seconds in which its storage writes so many bytes, one after the other."""
        return nbytes / (self.storage_write_bytes_per_s or self.storage_bytes_per_s)

    def loaded_s(self, nbytes: float) -> float:
        """Return the seconds in which its storage reads so many bytes, one after the other."""
        return nbytes / self.storage_bytes_per_s

    def charge(self, after_s: float, *, is_idle: bool = False) -> float:
        """Return the charge, from 0 to 1, after this many seconds of computing, or of waiting, by the power model."""
        watts = self.watts_idle if is_idle else self.watts_busy
        used = after_s * watts / (3600 * self.battery_wh) if self.battery_wh else 0.0
        return max(0.0, self.battery - used)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices joined by a medium; rank r is devices[r].  pairs: links that differ from the access links, keyed
    'name>name'.

    medium: whether each device has its own wire to a switch, or all share the air of a Wi-Fi network.  There a
    pair's link leads from station to station, past the access point.  jitter_s: mean of the additional delay of each
    message on Wi-Fi.  frame_loss: share of the frames on Wi-Fi that get lost, which the radio sends again.
    data: how tensors travel between real devices: by our TLS relays, as plain TCP, or as plain TCP in a WireGuard
    network.
    """

    name: Text
    devices: tuple[Device, ...]
    pairs: dict[str, Link] = field(default_factory=dict)
    description: Text = ""
    data: DataPlane = "tls"
    medium: Medium = "switch"
    jitter_s: Latency = 0.0
    frame_loss: Loss = 0.0

    def __post_init__(self) -> None:
        require_ranges(self, "A cluster")
        if self.medium == "switch" and (self.jitter_s or self.frame_loss):
            key, value = ("jitter_ms", 1e3 * self.jitter_s) if self.jitter_s else ("frame_loss", self.frame_loss)
            request = f"Cluster '{self.name}' asks for {key} = {value:g}."
            raise ConfigError(request, "Its medium is a switch.", 'Leave it out, or set medium = "wifi".')
        if not self.devices:
            raise ConfigError(
                f"Cluster '{self.name}' was asked for.", "It has no devices.", "Describe at least one [[device]]."
            )
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"Cluster '{self.name}' names a device '{name}'.",
                    f"There are {names.count(name)} of that name.",
                    "Name each once.",
                )
        places: dict[tuple[str, int], str] = {}
        for device in self.devices:
            place = (device.address or device.name).rpartition("@")[2], device.port or 22
            if device.address and (other := places.setdefault(place, device.name)) != device.name:
                request = f"Cluster '{self.name}' names the address '{shown(device.address)}'."
                raise ConfigError(
                    request, f"'{other}' and '{device.name}' have it.", "Give every device a different address."
                )
        for pair in self.pairs:
            unknown = [name for name in pair.split(">") if name not in names]
            request = f"Cluster '{self.name}' describes the link '{shown(pair)}'."
            if unknown or pair.count(">") != 1:
                rename = "Rename devices with '>' in their names, then write" if ">" in "".join(names) else "Write"
                raise ConfigError(request, f"Its devices are {', '.join(names)}.", f"{rename} 'name>name'.")
            if len(set(pair.split(">"))) == 1:
                raise ConfigError(request, "It leads from a device to itself.", "Name two devices.")

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return len(self.devices)

    @property
    def is_real(self) -> bool:
        """Return whether a device has an address; the cluster then runs over SSH."""
        return any(device.address for device in self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the devices' names, by rank."""
        return tuple(device.name for device in self.devices)

    @property
    def in_words(self) -> str:
        """Return '1 device', '4 devices'."""
        return counted(self.world_size, "device")

    @property
    def air(self) -> Air | None:
        """Return the air that the devices share; None if each has its own wire."""
        if self.medium == "switch":
            return None
        ranks = {device.name: str(rank) for rank, device in enumerate(self.devices)}
        pairs = {">".join(ranks[end] for end in pair.split(">")): link for pair, link in self.pairs.items()}
        return Air(
            bytes_per_s=tuple(self._got_through * device.link.bytes_per_s for device in self.devices),
            pairs={pair: self._got_through * link.bytes_per_s for pair, link in pairs.items()},
            jitter_s=self.jitter_s,
        )

    def link(self, source: int, destination: int) -> Link:
        """Return the path between two ranks as it is without other traffic.

        Through a switch it has the rate of the slower access link.  Through an access point each byte is sent twice, at
        the rates of both, and lost frames are sent again.  Its latency is the sum of both latencies, and of the mean
        jitter.
        """
        link = self._links.get((source, destination))
        if link is None:
            link = self._links[source, destination] = self._link(source, destination)
        return link

    @functools.cached_property
    def _links(self) -> dict[tuple[int, int], Link]:
        return {}  # simulations ask for the same paths again and again

    def _link(self, source: int, destination: int) -> Link:
        sender, receiver = self.devices[source], self.devices[destination]
        path = self.pairs.get(f"{sender.name}>{receiver.name}") or _path(sender.link, receiver.link, self.medium)
        if self.medium == "switch":
            return path
        rate = self._got_through * path.bytes_per_s
        return Link(bytes_per_s=rate, latency_s=path.latency_s + self.jitter_s)

    @property
    def _got_through(self) -> float:
        """Return the share of the frames that need not be sent again."""
        return 1 - self.frame_loss

    def part(self, ranks: Sequence[int], factors: Factors | None = None) -> Cluster:
        """Return the cluster of the given devices, in this order.  Raises ConfigError if `ranks` is empty.

        factors: the share of its memory that a device has for the run now, by its name; other keys are ignored.
        """
        devices = tuple(self.devices[rank] for rank in ranks)
        if factors:
            devices = tuple(
                replace(device, memory_bytes=max(1, int(device.memory_bytes * factors.get(device.name, 1))))
                for device in devices
            )
        names = {device.name for device in devices}
        return replace(
            self,
            devices=devices,
            pairs={pair: link for pair, link in self.pairs.items() if names.issuperset(pair.split(">"))},
        )

    def emulated(self, host_share: float) -> Cluster:
        """Return the cluster with emulated devices of the same links, each with this share of a core."""
        return self.with_devices(address=None, host_share=host_share)

    def with_devices(self, **values: Any) -> Cluster:
        """Return the cluster with these values on every device."""
        return self.with_each(lambda device: replace(device, **values))

    def with_each(self, change: Callable[[Device], Device]) -> Cluster:
        """Return the cluster with every device as `change` returns it."""
        return replace(self, devices=tuple(map(change, self.devices)))

    def with_slower_links(self, factor: float) -> Cluster:
        """Return the cluster with all links `factor` times slower, latency and jitter included."""
        return replace(self, jitter_s=self.jitter_s * factor).with_links(lambda link: link.slower(factor))

    def with_slow_links(self, factors: Factors) -> Cluster:
        """Return the cluster with some links slower, by 'sender>receiver'; other keys, and devices that are not here,
        are ignored.  On Wi-Fi a radio then has a lower rate and the same latency.
        """
        ranks, pairs = {device.name: rank for rank, device in enumerate(self.devices)}, dict(self.pairs)
        for pair, factor in factors.items():
            ends = [ranks.get(name) for name in str(pair).split(">")]
            if len(ends) == 2 and None not in ends:
                steady = replace(self, jitter_s=0.0, frame_loss=0.0)  # both are added to a pair's link
                link = steady.link(*ends)  # type: ignore[arg-type]  # neither is None
                slow = link.slower(factor)
                pairs[pair] = slow if self.medium == "switch" else replace(slow, latency_s=link.latency_s)
        return replace(self, pairs=pairs) if pairs != self.pairs else self

    def with_bandwidth(self, megabit_per_s: float) -> Cluster:
        """Return the cluster with all device links at the same rate and no different pairs; latencies do not change."""
        return replace(self, pairs={}).with_links(lambda link: replace(link, bytes_per_s=megabit_per_s * MEGABIT_BYTES))

    def with_links(self, change: Callable[[Link], Link]) -> Cluster:
        """Return the cluster with every link, those of pairs too, as `change` returns it."""
        pairs = {pair: change(link) for pair, link in self.pairs.items()}
        return replace(self, pairs=pairs).with_each(lambda device: replace(device, link=change(device.link)))

    def host_shares(self) -> tuple[float, ...]:
        """Return each device's share of a core of this machine.  Raises ConfigError if a device has no share and so
        cannot be emulated.
        """
        without = [device.name for device in self.devices if device.host_share is None]
        if without:
            raise ConfigError(
                f"Cluster '{self.name}' was to be emulated here.",
                f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} no host_share.",
                "Give each device one (0.5 is half as fast as a core of this machine), or use --mode simulate.",
            )
        return tuple(device.host_share or 1.0 for device in self.devices)

    def slowed(self, rank: int, factor: float) -> Cluster:
        """Return the cluster with one device `factor` times slower (a straggler)."""
        device = self.devices[rank]
        require_range(factor, Slowing, f"Slowing device '{device.name}'", "factor")
        share = None if device.host_share is None else min(1.0, device.host_share / factor)
        slow = replace(
            device,
            flops_per_s=device.flops_per_s / factor,
            host_share=share,
            processors=tuple(
                replace(processor, flops_per_s=processor.flops_per_s / factor) for processor in device.processors
            ),
        )
        return replace(self, devices=(*self.devices[:rank], slow, *self.devices[rank + 1 :]))


@functools.lru_cache(maxsize=4096)  # planners ask for the same few paths thousands of times
def _path(sender: Link, receiver: Link, medium: Medium) -> Link:
    rate_of = relayed if medium == "wifi" else min
    return Link(
        bytes_per_s=rate_of(sender.bytes_per_s, receiver.bytes_per_s),
        latency_s=sender.latency_s + receiver.latency_s,
    )
