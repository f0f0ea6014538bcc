"""A form for a Job, as data/forms.toml describes its method's fields: described controls, and one line for invalid settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_type_hints

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.ranges import Count, require_range
from workbench.core.serial import from_builtins, read_toml
from workbench.methods import METHODS
from workbench.methods.fine_tuning.prepare import FineTuningOptions
from workbench.methods.pac_plus.prepare import PacPlusOptions
from workbench.tasks import TASKS
from workbench.widgets.controls import Html, Message, Panel, described, number

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
