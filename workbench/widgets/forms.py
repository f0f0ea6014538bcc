"""Forms for a Job, with the fields that its method declares, and for a Cluster: each device's speed, memory and
link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import ipywidgets as widgets
import traitlets
from markupsafe import Markup

from workbench.core.catalogue import cluster_names, load_cluster
from workbench.core.cluster import Cluster, Device, Link
from workbench.core.effects import effects_of
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.job import Job
from workbench.core.methods import SETTINGS_FIELD, FormField, declaration_of, registered
from workbench.core.ranges import Count, require_range
from workbench.core.serial import shown
from workbench.methods.base import as_published, published_settings
from workbench.plots import cluster as draw_cluster
from workbench.runtime import discovery
from workbench.tasks import TASKS
from workbench.widgets.controls import FigureBox, Html, Message, Panel, button, described, number

MAX_EDITABLE = 12
MEGABIT_BYTES = 1e6 / 8


class _Rate(widgets.HBox):
    """A slider over the usual link rates, and a field for any other rate: a SelectionSlider shows a typed value but
    ignores it.
    """

    value = traitlets.Float()

    def __init__(self, rate: float, **settings: Any) -> None:
        rates = sorted({1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000} | {rate})
        settings["layout"] = widgets.Layout(flex="1 1 auto", width="0", min_width="8.5em")
        self.slider = widgets.SelectionSlider(
            options=[(f"{one:g}", one) for one in rates], value=rate, readout=False, **settings
        )
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
        self,
        chosen: str | Path | Cluster = "laptop",
        *,
        choice: bool = True,
        overview: bool = True,
        continuous: bool = False,
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
            options=names,
            value=given.name,
            description="Cluster",
            tooltip="A cluster of data/clusters/, or the one given",
        )
        self.reset = widgets.Button(
            description="Reset", tooltip="Put every slider back", icon="undo", layout=widgets.Layout(width="7em")
        )
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
            self._origin,
            name=f"{self._origin.name}-edited",
            devices=devices,
            description=f"{self._origin.name}, changed in the form",
        )

    def on_change(self, callback: Callable[[Cluster], None]) -> None:
        """Call `callback` with every new cluster."""
        self._callbacks.append(callback)

    def sliders(self, device: str) -> dict[str, Any]:
        """Return a device's sliders by name: speed, memory, bandwidth, latency.  Raises ConfigError for an unknown
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
        todo = f"workbench kit init {users}" if found else "workbench devices --announce, on a device"
        self.message.say(f"Candidates in this network: {named or 'none'}. Next: {todo}")

    def _load(self, cluster: Cluster) -> None:
        """Show the values of a cluster."""
        self._origin = cluster
        self._rows = (
            [_row(device, self._continuous) for device in cluster.devices] if cluster.world_size <= MAX_EDITABLE else []
        )
        for row in self._rows:
            for slider in row[1:]:
                slider.observe(self._changed, names="value")
        # Four sliders in a row, or two where the page is narrow.
        pair = widgets.Layout(grid_template_columns="1fr 1fr", grid_gap="0 0.5em", flex="1 1 35em")
        wrapped, named = (
            widgets.Layout(flex_flow="row wrap", flex="1 1 0"),
            widgets.Layout(width="5em", flex="0 0 auto"),
        )
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
            self.message.say(
                "These are real devices: sliders change what is predicted. workbench kit measure writes what "
                "they can do."
            )
        elif self._rows:
            self.message.clear()
        else:
            self.message.say(
                f"{cluster.world_size} devices are too many for sliders: edit a copy of the cluster's TOML file "
                "instead."
            )
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
        latency=widgets.FloatSlider(
            value=latency_ms, max=max(20.0, 2 * latency_ms), step=0.1, readout_format=".1f", **in_ms
        ),
    )


def form_of(method: str) -> dict[str, FormField]:
    """Return the fields of a method's form by name, with the values that there are.  The first value of an option is
    its default.
    """
    declared = declaration_of(method)
    kinds, defaults = get_type_hints(declared.options), declared.defaults
    form = dict(declared.form)
    if any(published_settings(declared.options)):
        form["as_published"] = SETTINGS_FIELD
    for name, entry in form.items():
        values: Iterable[Any] = ()
        if name in ("method", "task"):
            values = registered() if name == "method" else TASKS
        elif name in kinds and get_origin(kinds[name]) is Literal:
            values = [defaults[name], *get_args(kinds[name])]
        if not entry.values:
            form[name] = replace(entry, values={value: value for value in values})
    return form


def _control(entry: FormField, value: Any) -> Any:
    if not entry.values:
        return number(entry.label, int(value or 0), entry.tooltip)
    if entry.is_typed:
        return described(
            widgets.Combobox, entry.label, entry.tooltip, options=tuple(entry.values), value=value, ensure_option=False
        )
    listed = entry.values if value in entry.values.values() else {str(value): value, **entry.values}
    return described(widgets.Dropdown, entry.label, entry.tooltip, options=list(listed.items()), value=value)


class JobForm(Panel):
    """Edits a job.  Settings that the form does not show (learning rate, lengths, other options) keep the values of the
    initial job.

    job: the Job that the controls describe now; reading it raises ConfigError if they describe none.
    """

    def __init__(self, job: Job | None = None) -> None:
        self._origin = job = job or Job()
        self._callbacks: list[Callable[[Job], None]] = []
        self._form: dict[str, FormField] = {}
        self._made: dict[str, Any] = {}
        self.controls: dict[str, Any] = {}
        self.message = Message()
        self._columns = widgets.HBox(layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([Html(Markup("<b>The job</b>")), self._columns, self.message])
        self._show(job.method)

    @property
    def method(self) -> str:
        """Return the method whose fields are shown."""
        return self.controls["method"].value if "method" in self.controls else self._origin.method

    def _show(self, method: str) -> None:
        """Show the fields of a method.  A field that it shares with a method that was shown before keeps its value."""
        form = form_of(method)
        if "method" in self._form:  # the way back
            form = {"method": self._form["method"]} | form
        self._form, self.controls = form, {}
        for name, entry in form.items():
            key = f"{name}: {entry}"
            if key not in self._made:
                self._made[key] = _control(entry, self._first(name))
                self._made[key].observe(lambda _: self._changed(), names="value")
            self.controls[name] = self._made[key]
        shown, half = list(self.controls.values()), (len(self.controls) + 1) // 2
        margin = widgets.Layout(margin="0 2em 0 0")
        self._columns.children = [widgets.VBox(column, layout=margin) for column in (shown[:half], shown[half:])]
        self._shown = method
        self._changed()

    def _first(self, name: str) -> Any:
        """Return a field's first value: the initial job's, or else the default."""
        if hasattr(self._origin, name):
            return getattr(self._origin, name)
        return self._origin.options.get(name, self._default(name))

    def _default(self, name: str) -> Any:
        """Return the value that a field has without an option of its name in the job."""
        values = self._form[name].values
        return next(iter(values.values())) if values else declaration_of(self.method).defaults[name] or 0

    @property
    def job(self) -> Job:
        """Return the job that the controls describe.  Raises ConfigError if they describe none."""
        method = self.method
        # Another method does not have the options of the initial job's method.
        options = dict(self._origin.options) if method == self._origin.method else {}
        changed: dict[str, Any] = {}
        for name, entry in self._form.items():
            value = self.controls[name].value
            if hasattr(self._origin, name):
                changed[name] = self._attribute(name, value)
            elif self.controls[name].disabled:
                options.pop(name, None)
            elif value == self._default(name) != options.get(name, value):
                del options[name]
            elif value != options.get(name, self._default(name)):
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

    def _has_effect(self, name: str) -> bool:
        """Return whether an option has an effect with the values of the others, by what its type declares (see
        core.effects).
        """
        declared = declaration_of(self.method)
        values = {other: control.value for other, control in self.controls.items() if other in declared.defaults}
        # A default's words need not be a value of the option: 'planned' leaves it to the planner.
        chosen = declared.defaults | {other: value for other, value in values.items() if value != self._default(other)}
        at: Any = SimpleNamespace(options=SimpleNamespace(**chosen))  # effects with `reads` look at options alone
        return all(effect.holds(at) for effect in effects_of(declared.options).get(name, ()) if effect.reads)  # type: ignore[arg-type]  # mypy: a type is hashable

    def _changed(self) -> None:
        if self.method != self._shown:
            self._show(self.method)
            return
        for name, control in self.controls.items():
            control.disabled = not self._has_effect(name)
        try:
            job = self.job
            self._say_published(job)
        except ConfigError as error:
            self.message.show_exception(error)
            return
        for callback in self._callbacks:
            callback(job)

    def _say_published(self, job: Job) -> None:
        """Name the settings of the paper that replace what the form shows, or show none."""
        published = as_published(job)
        changed = {one.name: getattr(published, one.name) for one in fields(Job) if one.name != "options"}
        changed = {name: value for name, value in changed.items() if value != getattr(job, name)}
        changed |= {name: value for name, value in published.options.items() if name not in job.options}
        if changed:
            self.message.say(
                f"The paper's settings: {', '.join(f'{name} = {value}' for name, value in changed.items())}."
            )
        else:
            self.message.clear()
