"""A form for a Cluster: a map on which each device's speed, memory and link are dragged, and a table to type them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import ipywidgets as widgets
from markupsafe import Markup
from msgspec import Meta

from workbench.core.catalogue import MB, cluster_names, load_cluster
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Device, Link
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.heat import Levels, as_text, read_curve
from workbench.core.medium import Medium
from workbench.core.ranges import Share, require_range
from workbench.core.serial import shown
from workbench.core.units import three_figures
from workbench.plots.cluster_map import Dial, share_of
from workbench.plots.svg import round_step
from workbench.runtime import discovery
from workbench.widgets.cluster_map import ClusterMap, MapDevice
from workbench.widgets.controls import Html, button
from workbench.widgets.fields import Field, Form, require_valid
from workbench.widgets.fields import choice as choice_field

MAX_EDITABLE = 24
RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
LATENCIES = (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
TICKS = tuple(share_of(rate, RATES) for rate in (1, 10, 100, 1000, 10000))
NUM_POSITIONS = 50
"""About so many positions has a scale for speed or memory."""
GigaflopsPerS = Annotated[float, Meta(ge=1e-3, le=1e7)]
Megabytes = Annotated[int, Meta(ge=1, le=10**8)]
MegabitsPerS = Annotated[float, Meta(ge=0.01, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=60_000)]
CAPTION = Markup("<div style='line-height:1.4'><b>Cluster '{}'</b>: {}{}{}</div>")
HINT = Markup("<br><small>{} Drag a knob, or choose it with Tab and use the arrow keys.</small>")
MEDIA: dict[str, Medium] = {"switch, a wire for each": "switch", "Wi-Fi, one air for all": "wifi"}
LEADS: dict[Medium, str] = {
    "switch": "Each link leads to the same switch.",
    "wifi": "All links share the air (green bar): those that send at once divide it, and each message takes it twice.",
}
HEADS = {
    "memory": "memory, MB",
    "bandwidth": "link, Mbit/s",
    "latency": "link's delay one way, ms",
    "sustained": "when hot: [[s, speed], ...]",
}
SPEEDS = {True: "speed, share of a core", False: "speed, GFLOP/s"}


class _Row(NamedTuple):
    """One device's fields."""

    device: Device
    speed: Field
    memory: Field
    bandwidth: Field
    latency: Field
    sustained: Field

    def edited(self) -> Device:
        """Return the device with the fields' values; a value that was not changed stays exactly the same."""
        device, link = self.device, self.device.link
        first = _values(device)
        if self.speed.value != first["speed"]:
            factor = self.speed.value / first["speed"]
            device = replace(
                device,
                flops_per_s=device.flops_per_s * factor,
                host_share=None if device.host_share is None else self.speed.value,
                processors=tuple(
                    replace(processor, flops_per_s=processor.flops_per_s * factor) for processor in device.processors
                ),
            )
        if self.memory.value != first["memory"]:
            device = replace(device, memory_bytes=self.memory.value * MB)
        if self.bandwidth.value != first["bandwidth"]:
            link = replace(link, bytes_per_s=self.bandwidth.value * MEGABIT_BYTES)
        if self.latency.value != first["latency"]:
            link = Link(bytes_per_s=link.bytes_per_s, latency_s=self.latency.value / 1e3)
        if self.sustained.value != _curve_text(device):
            device = replace(device, sustained=_curve(self.sustained.value, device.name))
        return device if link == device.link else replace(device, link=link)


class ClusterForm(Form):
    """Edits a cluster.  cluster: the fields' values now; before any change, the very cluster that was chosen.

    rows: each device's fields, by its name; none if there are too many devices.
    choice: offer other clusters.
    """

    def __init__(self, chosen: str | Path | Cluster = "laptop", *, choice: bool = True) -> None:
        super().__init__()
        cluster = chosen if isinstance(chosen, Cluster) else load_cluster(chosen)
        names = list(cluster_names())
        self._own_cluster = None if cluster.name in names and not isinstance(chosen, Cluster | Path) else cluster
        if self._own_cluster is not None and cluster.name not in names:
            names.insert(0, cluster.name)
        self._origin = cluster
        self.rows: dict[str, _Row] = {}
        self._words = ("", "", "")
        self.choice = widgets.Dropdown(
            options=names,
            value=cluster.name,
            description="Cluster",
            tooltip="A cluster of data/clusters/, or the one given",
        )
        self.reset = widgets.Button(
            description="Reset",
            tooltip="Put every value back",
            icon="undo",
            layout=widgets.Layout(width="7em"),
        )
        self.as_table = widgets.ToggleButton(
            description="Table", tooltip="Show the values in a table, too, to read or type them", icon="table"
        )
        self.medium = choice_field(
            "Medium",
            cluster.medium,
            "Does each device have a wire of its own, or do all share a radio?",
            MEDIA,
        )
        self.map, self.caption = ClusterMap(self._moved), Html()
        self.devices = widgets.GridBox().add_class("workbench-devices")
        self.choice.observe(self._chosen, names="value")
        self.reset.on_click(lambda _: self._load(self._origin))
        self.as_table.observe(lambda _: self._fold(), names="value")
        tooltip = "List real devices of this network on which `workbench devices --announce` runs"
        self.discover = button(
            "Find real devices", tooltip, "search", self._discover, layout=widgets.Layout(width="12em")
        )
        head = widgets.HBox(
            [*([self.choice] if choice else []), self.medium, self.reset, self.as_table, self.discover],
            layout=widgets.Layout(flex_flow="row wrap"),
        )
        self.children = (head, self.caption, self.map, self.devices, self.message, self._page)
        self.medium.observe(lambda _: self._changed(), names="value")
        self.on_change(self._draw)
        self._fold()
        self._load(cluster)

    @property
    def cluster(self) -> Cluster:
        """Return the cluster with the fields' values.  Raises ConfigError for invalid values."""
        require_valid(self._fields())
        devices = tuple(row.edited() for row in self.rows.values()) or self._origin.devices
        medium = self.medium.value
        if devices == self._origin.devices and medium == self._origin.medium:
            return self._origin
        return replace(
            self._origin,
            name=f"{self._origin.name}-edited",
            devices=devices,
            medium=medium,
            jitter_s=self._origin.jitter_s if medium == "wifi" else 0.0,
            frame_loss=self._origin.frame_loss if medium == "wifi" else 0.0,
            description=f"{self._origin.name}, changed in the form",
        )

    @property
    def origin(self) -> Cluster:
        """Return the cluster that was chosen, without the changes."""
        return self._origin

    @property
    def still(self) -> Markup:
        """Return the present picture as HTML that needs no kernel and no script."""
        return CAPTION.format(*self._words, "") + self.map.still

    def _fields(self) -> Iterable[Field]:
        return [field for row in self.rows.values() for field in row[1:]]

    def _described(self) -> Cluster:
        return self.cluster

    def _remark(self) -> str:
        if not self.rows:
            many = self._origin.world_size
            return f"{many} devices are too many for a map: edit a copy of the cluster's TOML file instead."
        if self._origin.is_real:
            return (
                "These are real devices: moving a value changes what is predicted. workbench kit measure writes what "
                "they can do."
            )
        return ""

    def _chosen(self, change: Any) -> None:
        try:
            self._load(
                self._own_cluster
                if self._own_cluster is not None and change["new"] == self._own_cluster.name
                else load_cluster(change["new"])
            )
        except ConfigError as error:
            self.message.show_exception(error)

    def _discover(self) -> None:
        """List candidates: a device is used only after `workbench kit check --trust`."""
        self.message.say("Looking for devices ...")
        try:
            candidates = discovery.discover()
        except WorkbenchError as error:
            self.message.show_exception(error)
            return
        named = ", ".join(
            f"{shown(candidate.name)} at {candidate.address} ({shown(candidate.about.get('cores', '?'), 20)} cores)"
            for candidate in candidates
        )
        users = " ".join(f"USER@{candidate.address}" for candidate in candidates)
        self.message.say(
            f"Candidates in this network: {named}. To use them, give in a terminal: workbench kit init {users}"
            if candidates
            else "No real device announces itself in this network. To use one, give on it: workbench devices "
            "--announce. Emulated devices need nothing of this."
        )

    def _load(self, cluster: Cluster) -> None:
        """Show the values of a cluster."""
        self._origin = cluster
        is_editable = cluster.world_size <= MAX_EDITABLE
        self.rows = {device.name: _row(device) for device in cluster.devices if is_editable}
        self._scales = _scales(cluster)
        self.medium.value = cluster.medium
        for field in self._fields():
            field.observe(lambda _: self._changed(), names="value")
        shares = {device.host_share is not None for device in cluster.devices}
        heads = ["", SPEEDS[shares.pop()] if len(shares) == 1 else "speed", *HEADS.values()]
        cells: list[widgets.Widget] = [Html(head).add_class("workbench-head") for head in heads if self.rows]
        for name, row in self.rows.items():
            cells += [Html(Markup("<b>{}</b>").format(name)), *row[1:]]
        self.devices.children = cells
        self._changed()

    def _fold(self) -> None:
        self.devices.layout.display = "" if self.as_table.value else "none"

    def _positions(self, row: _Row, attribute: str) -> Sequence[float]:
        """Return a scale's positions: the same for all devices."""
        return self._scales[
            f"{attribute}, share" if attribute == "speed" and row.device.host_share is not None else attribute
        ]

    def _stops(self, row: _Row, attribute: str) -> list[Any]:
        """Return the values to which a device's value can be moved: the scale's positions, and the one it had."""
        return sorted({*self._positions(row, attribute), _values(row.device)[attribute]})

    def _moved(self, rank: int, attribute: str, stop: int) -> None:
        row = [*self.rows.values()][rank]
        getattr(row, attribute).value = self._stops(row, attribute)[stop]

    def _draw(self, cluster: Cluster) -> None:
        """Show the cluster on the map, and leave its picture for a notebook without its kernel."""
        about = cluster.description or cluster.in_words
        pairs = (f"{pair.replace('>', ' to ')} {link.mbit_per_s:.6g} Mbit/s" for pair, link in cluster.pairs.items())
        apart = f" Links of their own: {', '.join(pairs)}." if cluster.pairs else ""
        self._words = cluster.name, about, apart
        self.caption.value = CAPTION.format(*self._words, HINT.format(LEADS[cluster.medium]) if self.rows else "")
        self.map.show([*map(self._on_map, self.rows.values())], ticks=TICKS, is_shared=cluster.medium == "wifi")
        self.keep(self.still)

    def _on_map(self, row: _Row) -> MapDevice:
        device, dials = row.device, []
        is_share = device.host_share is not None
        first = _values(device)
        for attribute, label, unit in _labels(is_share):
            value, positions = getattr(row, attribute).value, self._positions(row, attribute)
            dials.append(
                Dial(
                    what=attribute,
                    label=f"{device.name}: {label}",
                    text=f"{value:.6g} {unit}",
                    share=share_of(value, positions),
                    before=share_of(first[attribute], positions),
                    stops=tuple(
                        (share_of(stop, positions), f"{stop:.6g} {unit}") for stop in self._stops(row, attribute)
                    ),
                )
            )
        edited = row.edited()
        more = f"{three_figures(edited.flops_per_s / 1e9)} GFLOP/s" if is_share else device.model
        hot = f"hot: {edited.sustained[-1].speed:.0%}" if edited.sustained else ""
        return MapDevice(device.name, more, dials, hot)


def _values(device: Device) -> dict[str, float]:
    """Return a device's values as its fields have them."""
    return {
        "speed": device.flops_per_s / 1e9 if device.host_share is None else device.host_share,
        "memory": round(device.memory_bytes / 1e6),
        "bandwidth": device.link.mbit_per_s,
        "latency": device.link.latency_s * 1e3,
    }


def _labels(is_share: bool) -> tuple[tuple[str, str, str], ...]:
    """Return each value's field, name and unit.  is_share: the speed is a share of a core."""
    speed = ("share of one core of this machine", "of a core") if is_share else ("speed in GFLOP/s", "GFLOP/s")
    return (
        ("speed", *speed),
        ("memory", "memory for the job, in MB", "MB"),
        ("bandwidth", "link rate in Mbit/s", "Mbit/s"),
        ("latency", "latency of the link in ms, one way", "ms"),
    )


def _scales(cluster: Cluster) -> dict[str, Sequence[float]]:
    """Return the positions of each scale, ascending, the same for all devices of a cluster."""
    speeds = [device.flops_per_s / 1e9 for device in cluster.devices if device.host_share is None]
    return {
        "speed, share": [number / NUM_POSITIONS for number in range(1, NUM_POSITIONS + 1)],
        "speed": _evenly(2 * max(speeds, default=1.0)),
        "memory": _evenly(max(1000, 2 * max(round(device.memory_bytes / 1e6) for device in cluster.devices)), least=1),
        "bandwidth": RATES,
        "latency": LATENCIES,
    }


def _evenly(most: float, *, least: float = 0.0) -> list[float]:
    """Return multiples of a round number, at least `least`, up to `most`."""
    step = max(least, round_step(most / NUM_POSITIONS))
    positions = [float(f"{step * number:.6g}") for number in range(1, math.ceil(most / step - 1e-9) + 1)]
    return [round(position) for position in positions] if least else positions


def _row(device: Device) -> _Row:
    kinds = {
        "speed": GigaflopsPerS if device.host_share is None else Share,
        "memory": Megabytes,
        "bandwidth": MegabitsPerS,
        "latency": Milliseconds,
    }
    values, fields = _values(device), {}
    for attribute, label, _ in _labels(device.host_share is not None):
        kind: Any = kinds[attribute]
        typed = widgets.Text(
            placeholder=f"{device.name}: {label}, typed",
            continuous_update=False,
            layout=widgets.Layout(width="8em"),
        )
        check = partial(_check, kind=kind, device=device.name, what=attribute)
        fields[attribute] = Field(typed, values[attribute], check, is_number=True)
        fields[attribute].add_class(f"workbench-{attribute}")
    typed = widgets.Text(
        placeholder=f"keeps its speed ({device.name})", continuous_update=False, layout=widgets.Layout(width="95%")
    )
    hint = "Seconds of computing, and the speed from then on: [[0, 1.0], [180, 0.8]]; empty: it keeps its speed"
    typed.tooltip = f"{device.name} when it gets hot. {hint}"
    fields["sustained"] = Field(typed, _curve_text(device), partial(_curve, owner=device.name))
    fields["sustained"].add_class("workbench-sustained")
    return _Row(device=device, **fields)


def _curve_text(device: Device) -> str:
    return as_text(device.sustained) if device.sustained else ""


def _curve(text: str, owner: str) -> Levels:
    """Return the levels that a text means.  Raises ConfigError."""
    try:
        written: object = json.loads(text or "[]")
    except ValueError:
        written = text
    return read_curve(written, owner)


def _check(typed: Any, *, kind: Any, device: str, what: str) -> None:
    require_range(typed, kind, device, what)
