"""Forms for a Job, as data/forms.toml describes its method's fields, and for a Cluster: each device's speed, memory and link."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import ipywidgets as widgets
import traitlets
from markupsafe import Markup

from workbench import discovery
from workbench.core.catalogue import cluster_names, data_folder, load_cluster
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.job import Job
from workbench.core.ranges import Count, require_range
from workbench.core.serial import from_builtins, read_toml, shown
from workbench.methods import METHODS
from workbench.methods.fine_tuning.prepare import FineTuningOptions
from workbench.methods.pac_plus.prepare import PacPlusOptions
from workbench.plots import cluster as draw_cluster
from workbench.tasks import TASKS
from workbench.widgets.controls import FigureBox, Html, Message, Panel, button, described, number

MAX_EDITABLE = 12
MEGABIT_BYTES = 1e6 / 8


class _Rate(widgets.HBox):
    """A slider over the usual link rates, and a field for any other rate: a SelectionSlider shows a typed value but ignores it."""

    value = traitlets.Float()

    def __init__(self, rate: float, **settings: Any) -> None:
        rates = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000} | {rate})
        settings["layout"] = widgets.Layout(flex="1 1 auto", width="0", min_width="8.5em")
        self.slider = widgets.SelectionSlider(options=[(f"{one:g}", one) for one in rates], value=rate, readout=False, **settings)
        self.field = widgets.BoundedFloatText(
            value=rate, min=0.01, max=1e6, tooltip=settings["tooltip"], layout=widgets.Layout(width="5em")
        )
        self._nearest = lambda: min(rates, key=lambda one: abs(math.log(one / self.value)))
        super().__init__([self.slider, self.field], value=rate)
        widgets.link((self, "value"), (self.field, "value"))
        self.slider.observe(lambda change: self._slid(change["new"]), names="value")
        self.observe(lambda _: setattr(self.slider, "value", self._nearest()), names="value")

    def _slid(self, rate: float) -> None:
        if rate != self._nearest():  # otherwise the slider only follows the field
            self.value = rate


class _Row(NamedTuple):
    """One device's sliders."""

    device: Device
    speed: widgets.FloatSlider
    memory: widgets.IntSlider
    bandwidth: _Rate
    latency: widgets.FloatSlider

    def edited(self) -> Device:
        """Return the device with the sliders' values; a value whose slider was not moved stays exactly the same."""
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


class ClusterForm(Panel):
    """Edits a cluster.  cluster: the controls' values now; before any change, the very cluster that was chosen.

    choice: offer other clusters.  overview: show a figure of the devices below the sliders.
    continuous: use every position of a slider while it is dragged, not only the last one.
    """

    def __init__(
        self, chosen: str | Path | Cluster = "laptop", *, choice: bool = True, overview: bool = True, continuous: bool = False
    ) -> None:
        given = chosen if isinstance(chosen, Cluster) else load_cluster(chosen)
        names = list(cluster_names())
        self._own = None if given.name in names and not isinstance(chosen, Cluster | Path) else given
        if self._own is not None and given.name not in names:
            names.insert(0, given.name)
        self._origin = given
        self._rows: list[_Row] = []
        self._callbacks: list[Callable[[Cluster], None]] = []
        self._continuous = continuous
        self.choice = widgets.Dropdown(
            options=names, value=given.name, description="Cluster", tooltip="A cluster of data/clusters/, or the one given"
        )
        self.reset = widgets.Button(description="Reset", tooltip="Put every slider back", icon="undo", layout=widgets.Layout(width="7em"))
        self.devices = widgets.VBox(layout=widgets.Layout(max_width="82em"))
        self.message = Message()
        self.overview = FigureBox(draw_cluster(given))
        self.choice.observe(self._chosen, names="value")
        self.reset.on_click(lambda _: self._load(self._origin))
        told = "List the devices that announce themselves in this network"
        self.discover = button("Discover", told, "search", self._discover, layout=widgets.Layout(width="8em"))
        head = widgets.HBox([*([self.choice] if choice else []), self.reset, self.discover])
        shown = [Html(Markup("<b>The devices</b>")), head, self.devices, self.message]
        super().__init__([*shown, self.overview] if overview else shown)
        self._has_overview = overview
        self._load(given)

    @property
    def cluster(self) -> Cluster:
        """Return the cluster with the sliders' values.  Raises ConfigError for invalid values."""
        devices = tuple(row.edited() for row in self._rows) or self._origin.devices
        if devices == self._origin.devices:
            return self._origin
        return replace(
            self._origin, name=f"{self._origin.name}-edited", devices=devices, description=f"{self._origin.name}, changed in the form"
        )

    def on_change(self, callback: Callable[[Cluster], None]) -> None:
        """Call `callback` with every new cluster."""
        self._callbacks.append(callback)

    def sliders(self, device: str) -> dict[str, Any]:
        """Return a device's sliders by name: speed, memory, bandwidth, latency.  Raises ConfigError for an unknown device."""
        for row in self._rows:
            if row.device.name == device:
                return {name: getattr(row, name) for name in row._fields[1:]}
        raise ConfigError(
            f"The sliders of device '{device}' were asked for.",
            f"There are {[row.device.name for row in self._rows]}.",
            "Name one of them.",
        )

    def _chosen(self, change: Any) -> None:
        try:
            self._load(self._own if self._own is not None and change["new"] == self._own.name else load_cluster(change["new"]))
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
        named = ", ".join(f"{shown(one.name)} at {one.address} ({shown(one.about.get('cores', '?'), 20)} cores)" for one in found)
        users = " ".join(f"USER@{one.address}" for one in found)
        todo = f"workbench kit init {users}" if found else "workbench devices --announce, on a device"
        self.message.say(f"Candidates in this network: {named or 'none'}. Next: {todo}")

    def _load(self, cluster: Cluster) -> None:
        """Show the values of a cluster."""
        self._origin = cluster
        self._rows = [_row(device, self._continuous) for device in cluster.devices] if cluster.world_size <= MAX_EDITABLE else []
        for row in self._rows:
            for slider in row[1:]:
                slider.observe(self._changed, names="value")
        # Four sliders in a row, or two where the page is narrow.
        pair = widgets.Layout(grid_template_columns="1fr 1fr", grid_gap="0 0.5em", flex="1 1 35em")
        wrapped, named = widgets.Layout(flex_flow="row wrap", flex="1 1 0"), widgets.Layout(width="5em", flex="0 0 auto")
        self.devices.children = [
            widgets.HBox(
                [
                    Html(Markup("<b>{}</b>").format(row.device.name), layout=named),
                    widgets.HBox([widgets.GridBox(two, layout=pair) for two in (row[1:3], row[3:])], layout=wrapped),
                ]
            )
            for row in self._rows
        ]
        if self._rows and cluster.is_real:
            self.message.say("These are real devices: sliders change what is predicted. workbench kit measure writes what they can do.")
        elif self._rows:
            self.message.clear()
        else:
            self.message.say(f"{cluster.world_size} devices are too many for sliders: edit a copy of the cluster's TOML file instead.")
        self._changed(None)

    def _changed(self, change: Any) -> None:
        try:
            cluster = self.cluster
            if self._has_overview:
                self.overview.show(draw_cluster(cluster))
        except ConfigError as error:
            self.message.show_exception(error)
            return
        for callback in self._callbacks:
            callback(cluster)


def _speed(device: Device) -> float:
    return device.flops_per_s / 1e9 if device.host_share is None else device.host_share


def _row(device: Device, continuous: bool) -> _Row:
    def settings(description: str, tooltip: str) -> dict[str, Any]:
        own = {"description": description, "tooltip": f"{device.name}: {tooltip}", "continuous_update": continuous}
        return own | {"style": {"description_width": "4.5em"}, "layout": widgets.Layout(width="auto")}

    speed, memory, latency_ms = _speed(device), round(device.memory_bytes / 1e6), device.link.latency_s * 1e3
    # A browser moves a slider onto its grid of steps, so the grid must contain the initial value.
    if device.host_share is None:
        told, most, step = ("GFLOP/s", "speed in GFLOP/s"), 2 * speed, speed / 50
    else:
        told, most, step = ("speed", "share of one core of this machine"), max(1.0, speed), 0.001
    memory_step = max(1, 10 ** (int(math.log10(max(memory, 10))) - 1))
    least, largest = memory % memory_step or memory_step, max(1000, 2 * memory)
    in_mb, in_ms = settings("MB", "memory for the job, in MB"), settings("ms", "latency of the link in ms, one way")
    return _Row(
        device=device,
        speed=widgets.FloatSlider(value=speed, min=step, max=most, step=step, readout_format=".2f", **settings(*told)),
        memory=widgets.IntSlider(value=memory, min=least, max=largest, step=memory_step, **in_mb),
        bandwidth=_Rate(device.link.bytes_per_s / MEGABIT_BYTES, **settings("Mbit/s", "link rate in Mbit/s")),
        latency=widgets.FloatSlider(value=latency_ms, max=max(20.0, 2 * latency_ms), step=0.1, readout_format=".1f", **in_ms),
    )


_SETTINGS = {"pac_plus": PacPlusOptions, "fine_tuning": FineTuningOptions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A control of a form, see data/forms.toml.  values: by the words that are shown."""

    label: str
    tooltip: str
    values: dict[str, Any] = field(default_factory=dict)
    default: int = 0
    is_typed: bool = False
    needs: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def first(self) -> Any:
        """Return the default."""
        return next(iter(self.values.values()), self.default)

    def control(self, value: Any) -> Any:
        """Return the control."""
        if not self.values:
            return number(self.label, int(value or 0), self.tooltip)
        if self.is_typed:
            return described(widgets.Combobox, self.label, self.tooltip, options=tuple(self.values), value=value, ensure_option=False)
        listed = self.values if value in self.values.values() else {str(value): value, **self.values}
        return described(widgets.Dropdown, self.label, self.tooltip, options=list(listed.items()), value=value)


def form_of(method: str) -> dict[str, Field]:
    """Return the fields of a method's form, by the name of the job's attribute or of the method's option."""
    path = data_folder() / "forms.toml"
    forms = read_toml(path)
    return {name: _field(name, text or forms["training"][name], str(path)) for name, text in forms.get(method, forms["training"]).items()}


def _field(name: str, text: dict[str, Any], source: str) -> Field:
    values, needs = text.get("values", {}), text.get("needs", {})
    if values == "options":
        methods = {method: settings for method, settings in _SETTINGS.items() if name in get_type_hints(settings)}
        first, *_ = methods.values()
        values, needs = [getattr(first(), name), *get_args(get_type_hints(first)[name])], {"method": tuple(methods)}
    if not isinstance(values, dict):
        values = {value: value for value in {"methods": METHODS, "tasks": TASKS}.get(str(values), values)}
    return from_builtins(text | {"values": values, "needs": needs}, Field, source=f"'{name}' of '{source}'")


class JobForm(Panel):
    """Edits a job.  Settings that the form does not show (learning rate, lengths, other options) keep the values of the initial job.

    job: the Job that the controls describe now; reading it raises ConfigError if they describe none.
    """

    def __init__(self, job: Job | None = None) -> None:
        self._origin = job = job or Job()
        self._callbacks: list[Callable[[Job], None]] = []
        self._fields = form_of(job.method)
        self.controls: dict[str, Any] = {}
        for name, entry in self._fields.items():
            self.controls[name] = entry.control(getattr(job, name) if hasattr(job, name) else job.options.get(name, entry.first))
        self.message = Message()
        for control in self.controls.values():
            control.observe(lambda _: self._changed(), names="value")
        shown, half = list(self.controls.values()), (len(self.controls) + 1) // 2
        boxes = [widgets.VBox(column, layout=widgets.Layout(margin="0 2em 0 0")) for column in (shown[:half], shown[half:])]
        super().__init__([Html(Markup("<b>The job</b>")), widgets.HBox(boxes, layout=widgets.Layout(flex_flow="row wrap")), self.message])
        self._changed()

    @property
    def job(self) -> Job:
        """Return the job that the controls describe.  Raises ConfigError if they describe none."""
        at = {name: control.value for name, control in self.controls.items()}
        method = at.get("method", self._origin.method)
        # Another method does not have the options of the initial job's method.
        options = dict(self._origin.options) if method == self._origin.method else {}
        changed: dict[str, Any] = {}
        for name, entry in self._fields.items():
            value = at[name]
            if hasattr(self._origin, name):
                changed[name] = self._attribute(name, value)
            elif not self._means(entry):
                options.pop(name, None)
            elif value == entry.first != options.get(name, value):
                del options[name]
            elif value != options.get(name, entry.first):
                if not entry.values:
                    require_range(value, Count, f"An option of {method}", name)
                options[name] = value
        if "batch_size" in changed and "micro_batches" not in changed:
            changed["micro_batches"] = 1  # a step of forward passes is not cut
        return replace(self._origin, options=options, **changed)

    @staticmethod
    def _attribute(name: str, value: Any) -> Any:
        if name == "model" and not value.strip():
            raise ConfigError("A job without a model was asked for.", "The field is empty.", "Choose a model.")
        if name.endswith("_samples") and value < 0:
            what = name.replace("_", " ").replace("train", "training")
            raise ConfigError(f"{value} {what} were asked for.", "It must be 0 (all) or more.", "Raise it.")
        return value.strip() if name == "model" else (value or None) if name.endswith("_samples") else value

    def on_change(self, callback: Callable[[Job], None]) -> None:
        """Call `callback` with every new valid job."""
        self._callbacks.append(callback)

    def _means(self, entry: Field) -> bool:
        """Return whether a field has an effect with the other fields' values."""
        return all(self.controls[name].value in values for name, values in entry.needs.items())

    def _changed(self) -> None:
        for name, entry in self._fields.items():
            self.controls[name].disabled = not self._means(entry)
        try:
            job = self.job
        except ConfigError as error:
            self.message.show_exception(error)
            return
        self.message.clear()
        for callback in self._callbacks:
            callback(job)
