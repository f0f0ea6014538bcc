"""Devices, their links and clusters of them: what there is to plan for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from workbench.core.errors import ConfigError


def _require_positive(owner: str, **quantities: float) -> None:
    for name, quantity in quantities.items():
        if not (quantity > 0 and math.isfinite(quantity)):
            raise ConfigError(f"{owner} asks for {name} = {quantity}.", "It must be a positive, finite number.", f"Set {name} above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A processor of a device (Confidant, section 3.3).  flops_per_s: sustained FLOP/s in fp32."""

    name: str
    flops_per_s: float

    def __post_init__(self) -> None:
        _require_positive(f"Processor '{self.name}'", flops_per_s=self.flops_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device's access link to the switch.  bytes_per_s: payload rate, each way.  latency_s: one way."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("A link", bytes_per_s=self.bytes_per_s)
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ConfigError(f"A link asks for latency_s = {self.latency_s}.", "It must not be negative.", "Set latency_s to 0 or more.")

    def transfer_s(self, nbytes: int) -> float:
        """Return the seconds that `nbytes` take over this link, unloaded."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a cluster.

    flops_per_s: sustained FLOP/s in fp32, used for analytic costs.  memory_bytes: budget for the job,
    above the runtime's own footprint.  host_share: the share of one core of the host at which the device
    is emulated (0.5: twice as slow as a core), None if it is not meant to be emulated.  address: SSH host
    of a real device.  watts_busy, watts_idle: power.  storage_bytes_per_s: sequential read rate.
    """

    name: str
    flops_per_s: float
    memory_bytes: int
    link: Link
    host_share: float | None = None
    address: str | None = None
    processors: tuple[Processor, ...] = ()
    watts_busy: float = 0.0
    watts_idle: float = 0.0
    storage_bytes_per_s: float = 90e6
    model: str = ""

    def __post_init__(self) -> None:
        owner = f"Device '{self.name}'"
        _require_positive(owner, flops_per_s=self.flops_per_s, memory_bytes=self.memory_bytes, storage_bytes_per_s=self.storage_bytes_per_s)
        if self.host_share is not None:
            _require_positive(owner, host_share=self.host_share)
        if min(self.watts_busy, self.watts_idle) < 0:
            raise ConfigError(f"{owner} asks for negative power.", f"{self.watts_busy} W, {self.watts_idle} W.", "Set it to 0 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices joined by a switch; rank r is devices[r].  pairs: links that differ, keyed 'name>name'."""

    name: str
    devices: tuple[Device, ...]
    pairs: dict[str, Link] = field(default_factory=dict)
    description: str = ""

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError(f"Cluster '{self.name}' was asked for.", "It has no devices.", "Describe at least one [[device]].")
        names = [device.name for device in self.devices]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"Cluster '{self.name}' names a device '{name}'.", f"There are {names.count(name)} of that name.", "Name each once."
                )
        for pair in self.pairs:
            unknown = [name for name in pair.split(">") if name not in names]
            if unknown or pair.count(">") != 1:
                raise ConfigError(
                    f"Cluster '{self.name}' describes the link '{pair}'.", f"Its devices are {', '.join(names)}.", "Write 'name>name'."
                )

    @property
    def world_size(self) -> int:
        """Return the number of devices."""
        return len(self.devices)

    def link(self, source: int, destination: int) -> Link:
        """Return the path from rank to rank: the slower of both access links, their latencies added."""
        sender, receiver = self.devices[source], self.devices[destination]
        own = self.pairs.get(f"{sender.name}>{receiver.name}")
        if own is not None:
            return own
        return Link(
            bytes_per_s=min(sender.link.bytes_per_s, receiver.link.bytes_per_s),
            latency_s=sender.link.latency_s + receiver.link.latency_s,
        )

    def without(self, rank: int) -> Cluster:
        """Return the cluster that is left when a device has gone.  Raises ConfigError if none is left."""
        gone = self.devices[rank].name
        return replace(
            self,
            devices=self.devices[:rank] + self.devices[rank + 1 :],
            pairs={pair: link for pair, link in self.pairs.items() if gone not in pair.split(">")},
        )

    def slowed(self, rank: int, factor: float) -> Cluster:
        """Return the cluster with one device `factor` times slower (a straggler)."""
        _require_positive(f"Slowing device '{self.devices[rank].name}'", factor=factor)
        device = self.devices[rank]
        share = None if device.host_share is None else device.host_share / factor
        slow = replace(
            device,
            flops_per_s=device.flops_per_s / factor,
            host_share=share,
            processors=tuple(replace(processor, flops_per_s=processor.flops_per_s / factor) for processor in device.processors),
        )
        return replace(self, devices=(*self.devices[:rank], slow, *self.devices[rank + 1 :]))
