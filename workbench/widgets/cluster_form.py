"""A form for a Cluster: each device's speed, memory and link."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ipywidgets as widgets
from markupsafe import Markup
from msgspec import Meta

from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.ranges import Share, require_range
from workbench.core.serial import shown
from workbench.plots import cluster as draw_cluster
from workbench.runtime import discovery
from workbench.widgets.controls import FigureBox, Html, button
from workbench.widgets.fields import Form, SliderField, require_valid

MAX_EDITABLE = 12
MEGABIT_BYTES = 1e6 / 8
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
LATENCIES = (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
NUM_POSITIONS = 50
"""Positions of a slider for speed."""
GigaflopsPerS = Annotated[float, Meta(ge=1e-3, le=1e7)]
Megabytes = Annotated[int, Meta(ge=1, le=10**8)]
MegabitsPerS = Annotated[float, Meta(ge=0.01, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=60_000)]
HEADS = {"memory": "memory, MB", "bandwidth": "link, Mbit/s", "latency": "link's delay one way, ms"}
SPEEDS = {True: "speed, share of a core", False: "speed, GFLOP/s"}


class _Row(NamedTuple):
    """One device's fields."""

    device: Device
    speed: SliderField
    memory: SliderField
    bandwidth: SliderField
    latency: SliderField

    def edited(self) -> Device:
        """Return the device with the fields' values; a value that was not changed stays exactly the same."""
        device, link = self.device, self.device.link
        if self.speed.value != _speed(device):
            factor = self.speed.value / _speed(device)
            device = replace(
                device,
                flops_per_s=device.flops_per_s * factor,
                host_share=None if device.host_share is None else self.speed.value,
                processors=tuple(replace(one, flops_per_s=one.flops_per_s * factor) for one in device.processors),
            )
        if self.memory.value != round(device.memory_bytes / 1e6):
            device = replace(device, memory_bytes=self.memory.value * 1_000_000)
        if self.bandwidth.value != link.bytes_per_s / MEGABIT_BYTES:
            link = replace(link, bytes_per_s=self.bandwidth.value * MEGABIT_BYTES)
        if self.latency.value != link.latency_s * 1e3:
            link = Link(bytes_per_s=link.bytes_per_s, latency_s=self.latency.value / 1e3)
        return device if link == device.link else replace(device, link=link)


class ClusterForm(Form):
    """Edits a cluster.  cluster: the fields' values now; before any change, the very cluster that was chosen.

    choice: offer other clusters.  overview: show a figure of the devices below the sliders.
    continuous: use every position of a slider while it is dragged, not only the last one.
    """

    def __init__(
        self,
        chosen: str | Path | Cluster = "laptop",
        *,
        choice: bool = True,
        overview: bool = True,
        continuous: bool = False,
    ) -> None:
        super().__init__()
        given = chosen if isinstance(chosen, Cluster) else load_cluster(chosen)
        names = list(cluster_names())
        self._own = None if given.name in names and not isinstance(chosen, Cluster | Path) else given
        if self._own is not None and given.name not in names:
            names.insert(0, given.name)
        self._origin = given
        self._rows: list[_Row] = []
        self._continuous = continuous
        self.choice = widgets.Dropdown(
            options=names,
            value=given.name,
            description="Cluster",
            tooltip="A cluster of data/clusters/, or the one given",
        )
        self.reset = widgets.Button(
            description="Reset",
            tooltip="Put every slider back",
            icon="undo",
            layout=widgets.Layout(width="7em"),
        )
        self.devices = widgets.GridBox().add_class("workbench-devices")
        self.overview = FigureBox(draw_cluster(given))
        self.choice.observe(self._chosen, names="value")
        self.reset.on_click(lambda _: self._load(self._origin))
        told = "List real devices of this network on which `workbench devices --announce` runs"
        self.discover = button("Find real devices", told, "search", self._discover, layout=widgets.Layout(width="12em"))
        head = widgets.HBox(
            [*([self.choice] if choice else []), self.reset, self.discover], layout=widgets.Layout(flex_flow="row wrap")
        )
        parts = [Html(Markup("<b>The devices</b>")), head, self.devices, self.message, self._page]
        self.children = (*parts, self.overview) if overview else tuple(parts)
        if overview:
            self.on_change(lambda cluster: self.overview.show(draw_cluster(cluster)))
        self._load(given)

    @property
    def cluster(self) -> Cluster:
        """Return the cluster with the fields' values.  Raises ConfigError for invalid values."""
        require_valid(self._fields())
        devices = tuple(row.edited() for row in self._rows) or self._origin.devices
        if devices == self._origin.devices:
            return self._origin
        return replace(
            self._origin,
            name=f"{self._origin.name}-edited",
            devices=devices,
            description=f"{self._origin.name}, changed in the form",
        )

    @property
    def origin(self) -> Cluster:
        """Return the cluster that was chosen, without the changes."""
        return self._origin

    def sliders(self, device: str) -> dict[str, SliderField]:
        """Return a device's fields by name: speed, memory, bandwidth, latency.  Raises ConfigError for an unknown
        device.
        """
        for row in self._rows:
            if row.device.name == device:
                return {name: getattr(row, name) for name in row._fields[1:]}
        raise ConfigError(
            f"The sliders of device '{device}' were asked for.",
            f"There are {[row.device.name for row in self._rows]}.",
            "Name one of them.",
        )

    def _fields(self) -> Iterable[SliderField]:
        return [field for row in self._rows for field in row[1:]]

    def _described(self) -> Cluster:
        return self.cluster

    def _remark(self) -> str:
        if not self._rows:
            many = self._origin.world_size
            return f"{many} devices are too many for sliders: edit a copy of the cluster's TOML file instead."
        if self._origin.is_real:
            return (
                "These are real devices: sliders change what is predicted. workbench kit measure writes what they "
                "can do."
            )
        return ""

    def _chosen(self, change: Any) -> None:
        try:
            self._load(
                self._own if self._own is not None and change["new"] == self._own.name else load_cluster(change["new"])
            )
        except ConfigError as error:
            self.message.show_exception(error)

    def _discover(self) -> None:
        """List candidates: a device is used only after `workbench kit check --trust`."""
        self.message.say("Looking for devices ...")
        try:
            found = discovery.discover()
        except WorkbenchError as error:
            self.message.show_exception(error)
            return
        named = ", ".join(
            f"{shown(one.name)} at {one.address} ({shown(one.about.get('cores', '?'), 20)} cores)" for one in found
        )
        users = " ".join(f"USER@{one.address}" for one in found)
        self.message.say(
            f"Candidates in this network: {named}. To use them, give in a terminal: workbench kit init {users}"
            if found
            else "No real device announces itself in this network. To use one, give on it: workbench devices "
            "--announce. Emulated devices need nothing of this."
        )

    def _load(self, cluster: Cluster) -> None:
        """Show the values of a cluster."""
        self._origin = cluster
        self._rows = (
            [_row(device, self._continuous) for device in cluster.devices] if cluster.world_size <= MAX_EDITABLE else []
        )
        for field in self._fields():
            field.observe(lambda _: self._changed(), names="value")
        shares = {device.host_share is not None for device in cluster.devices}
        heads = ["", SPEEDS[shares.pop()] if len(shares) == 1 else "speed", *HEADS.values()]
        cells: list[widgets.Widget] = [Html(head).add_class("workbench-head") for head in heads if self._rows]
        for row in self._rows:
            cells.append(Html(Markup("<b>{}</b>").format(row.device.name)))
            cells += row[1:]
        self.devices.children = cells
        self._changed()


def _speed(device: Device) -> float:
    return device.flops_per_s / 1e9 if device.host_share is None else device.host_share


def _row(device: Device, continuous: bool) -> _Row:
    def field(what: str, unit: str, value: float, positions: Iterable[float], kind: Any, told: str) -> SliderField:
        made = SliderField(
            f"{device.name}: {told}",
            unit,
            value,
            positions,
            lambda typed: require_range(typed, kind, device.name, what),
            continuous=continuous,
        )
        made.add_class(f"workbench-{what}")
        return made

    speed, memory = _speed(device), round(device.memory_bytes / 1e6)
    memory_step = max(1, 10 ** (int(math.log10(max(memory, 10))) - 1))
    memories = range(memory_step, max(1000, 2 * memory) + 1, memory_step)
    most = 2 * speed if device.host_share is None else max(1.0, speed)
    speeds = [float(f"{most * (at + 1) / NUM_POSITIONS:.6g}") for at in range(NUM_POSITIONS)]
    is_share = device.host_share is not None
    unit, told = ("of a core", "share of one core of this machine") if is_share else ("GFLOP/s", "speed in GFLOP/s")
    return _Row(
        device=device,
        speed=field("speed", unit, speed, speeds, Share if is_share else GigaflopsPerS, told),
        memory=field("memory", "MB", memory, memories, Megabytes, "memory for the job, in MB"),
        bandwidth=field(
            "bandwidth",
            "Mbit/s",
            device.link.bytes_per_s / MEGABIT_BYTES,
            RATES,
            MegabitsPerS,
            "link rate in Mbit/s",
        ),
        latency=field(
            "latency",
            "ms",
            device.link.latency_s * 1e3,
            LATENCIES,
            Milliseconds,
            "latency of the link in ms, one way",
        ),
    )
