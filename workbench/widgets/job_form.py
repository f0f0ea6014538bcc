"""A form for a Job, with the fields that its method declares."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.effects import effects_of
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.core.methods import SETTINGS_FIELD, FormField, declaration_of, registered
from workbench.core.ranges import Count, range_of, require_range
from workbench.methods.option_values import as_published, published_settings, read_options, require_width
from workbench.models.configuration import ModelFacts, is_tiny, local_folder, model_facts, require_known
from workbench.models.families import FAMILIES
from workbench.tasks import TASKS
from workbench.widgets.controls import Html
from workbench.widgets.fields import Field, Form, choice, number, require_valid, text


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
        if name == "model":
            values = [*entry.values, *(f"tiny-{family}" for family in FAMILIES)]
        if name == "model" or not entry.values:
            form[name] = replace(entry, values={value: value for value in values})
    return form


@functools.lru_cache(maxsize=8)
def _facts(model: str) -> ModelFacts:
    return model_facts(model)


class JobForm(Form):
    """Edits a job.  Settings that the form does not show (learning rate, lengths, other options) keep the values of the
    initial job.

    job: the Job that the fields describe now; reading it raises ConfigError if they describe none.
    """

    def __init__(self, job: Job | None = None) -> None:
        super().__init__()
        self._origin = job = job or Job()
        self._form: dict[str, FormField] = {}
        self._fields_by_key: dict[str, Field] = {}
        self.controls: dict[str, Field] = {}
        self._columns = widgets.HBox(layout=widgets.Layout(flex_flow="row wrap"))
        self.children = (Html(Markup("<b>The job</b>")), self._columns, self.message, self._page)
        self._show(job.method)

    @property
    def method(self) -> str:
        """Return the method whose fields are shown."""
        return str(self.controls["method"].value) if "method" in self.controls else self._origin.method

    def _show(self, method: str) -> None:
        """Show the fields of a method.  A field that it shares with a method that was shown before keeps its value."""
        form = form_of(method)
        if "method" in self._form:  # the way back
            form = {"method": self._form["method"]} | form
        self._form, self.controls = form, {}
        for name, entry in form.items():
            key = f"{name}: {entry}"
            if key not in self._fields_by_key:
                self._fields_by_key[key] = self._field(name, entry)
                self._fields_by_key[key].observe(lambda _: self._changed(), names="value")
            self.controls[name] = self._fields_by_key[key]
        shown, half = list(self.controls.values()), (len(self.controls) + 1) // 2
        margin = widgets.Layout(margin="0 2em 0 0")
        self._columns.children = [widgets.VBox(column, layout=margin) for column in (shown[:half], shown[half:])]
        self._shown = method
        self._changed()

    def _field(self, name: str, entry: FormField) -> Field:
        value = self._first(name)

        def check(typed: Any) -> None:
            self._check(name, entry, typed)

        if not entry.values:
            return number(entry.label, int(value or 0), entry.tooltip, check)
        if entry.is_typed:
            return text(entry.label, value, entry.tooltip, check, entry.values)
        values = entry.values if value in entry.values.values() else {str(value): value, **entry.values}
        return choice(entry.label, value, entry.tooltip, values, check)

    def _check(self, name: str, entry: FormField, value: Any) -> None:
        """Raise WorkbenchError for a value that the field cannot have."""
        if name == "model":
            if not value:
                raise ConfigError("A job without a model was asked for.", "The field is empty.", "Choose a model.")
            with suppress(MissingDataError):  # the name is right; a run says what to fetch
                require_known(value)
        elif not self._is_option(name):
            if not entry.values and (value or not name.endswith("_samples")):
                require_range(value, range_of(Job, name), "A job", name)
        elif value != self._default(name, entry):
            self._check_option(name, entry, value)

    def _check_option(self, name: str, entry: FormField, value: Any) -> None:
        settings = declaration_of(self.method).options
        if not entry.values:
            require_range(value, Count, f"An option of {self.method}", name)
        read_options(self.method, settings, {name: value})
        model = self.controls["model"].value if "model" in self.controls else self._origin.model
        size = entry.at_most or entry.divides
        # A default fits every model.  A model that is not on this machine is not fetched to check a field.
        if not size or ("model" in self.controls and self.controls["model"].error) or not self._is_here(model):
            return
        limit = getattr(_facts(model), size)
        if entry.at_most:
            require_width(self.method, name, value, model, limit)
        elif limit % value:
            raise ConfigError(
                f"The option {name} = {value:,} of {self.method} was asked for.",
                f"'{model}' is {limit} wide, which is not a multiple of {value:,}.",
                "Choose one of its divisors.",
            )

    def _is_option(self, name: str) -> bool:
        """Return whether a field is an option of the method, not a setting of the job.  Both may have one name."""
        return name in declaration_of(self.method).defaults

    @staticmethod
    def _is_here(model: str) -> bool:
        try:
            return is_tiny(model) or local_folder(model) is not None
        except MissingDataError:
            return False

    def _first(self, name: str) -> Any:
        """Return a field's first value: the initial job's, or else the default."""
        if not self._is_option(name):
            return getattr(self._origin, name)
        return self._origin.options.get(name, self._default(name, self._form[name]))

    def _default(self, name: str, entry: FormField) -> Any:
        """Return the value that a field has without an option of its name in the job."""
        return next(iter(entry.values.values())) if entry.values else declaration_of(self.method).defaults[name] or 0

    @property
    def job(self) -> Job:
        """Return the job that the fields describe.  Raises WorkbenchError if they describe none."""
        require_valid(self.controls.values())
        method = self.method
        # Another method does not have the options of the initial job's method.
        options = dict(self._origin.options) if method == self._origin.method else {}
        changed: dict[str, Any] = {}
        for name, entry in self._form.items():
            value = self.controls[name].value
            if not self._is_option(name):
                changed[name] = (value or None) if name.endswith("_samples") else value
                continue
            default = self._default(name, entry)
            if self.controls[name].disabled:
                options.pop(name, None)
            elif value == default != options.get(name, value):
                del options[name]
            elif value != options.get(name, default):
                options[name] = value
        if "batch_size" in changed and "micro_batches" not in changed:
            changed["micro_batches"] = 1  # a step of forward passes is not cut
        return replace(self._origin, options=options, **changed)

    def _fields(self) -> Iterable[Field]:
        return self.controls.values()

    def _described(self) -> Job:
        return self.job

    def _has_effect(self, name: str) -> bool:
        """Return whether an option has an effect with the values of the others, by what its type declares (see
        core.effects).
        """
        declared = declaration_of(self.method)
        values = {other: control.value for other, control in self.controls.items() if other in declared.defaults}
        # A default's words need not be a value of the option: 'planned' leaves it to the planner.
        chosen = declared.defaults | {
            other: value for other, value in values.items() if value != self._default(other, self._form[other])
        }
        context: Any = SimpleNamespace(options=SimpleNamespace(**chosen))  # effects with `reads` look at options alone
        return all(effect.holds(context) for effect in effects_of(declared.options).get(name, ()) if effect.reads)  # type: ignore[arg-type]  # mypy: a type is hashable

    def _changed(self) -> None:
        if self.method != self._shown:
            self._show(self.method)
            return
        for name, control in self.controls.items():
            control.disabled = not self._has_effect(name)
        super()._changed()

    def _remark(self) -> str:
        """Name the settings of the paper that replace what the form shows."""
        job = self.job
        published = as_published(job)
        changed = {field.name: getattr(published, field.name) for field in fields(Job) if field.name != "options"}
        changed = {name: value for name, value in changed.items() if value != getattr(job, name)}
        changed |= {name: value for name, value in published.options.items() if name not in job.options}
        words = ", ".join(f"{name} = {value}" for name, value in changed.items())
        return f"The paper's settings: {words}." if words else ""
