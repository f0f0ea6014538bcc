"""Fields of forms and labs: a control with its label, and next to it an alert about a value that cannot be used.

What was typed stays as it was typed, so that it can be mended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import ipywidgets as widgets
import traitlets
from msgspec import Meta

from workbench.core.catalogue import data_folder
from workbench.core.errors import WorkbenchError
from workbench.core.ranges import require_range
from workbench.core.serial import read_toml
from workbench.widgets.controls import Message, Panel, described

Check = Callable[[Any], object]
"""Raises WorkbenchError for a value that cannot be used."""


LONG = 30
"""Characters of a text that needs a wide field."""


class Field(widgets.VBox):
    """A control, and below it an alert about a value that cannot be used.

    value: what was typed or chosen; a number where the text is one, else the text.  error: why it cannot be used.
    """

    value = traitlets.Any()

    def __init__(self, control: Any, value: Any, check: Check, *, is_number: bool = False) -> None:
        self.control, self.alert, self._check, self._is_number = control, Message(), check, is_number
        self.error: WorkbenchError | None = None
        self._is_text = isinstance(control, widgets.Text)
        super().__init__([control, self.alert], value=value)
        self.add_class("workbench-field")
        self._write()
        control.observe(lambda change: self._typed(change["new"]), names="value")
        self.observe(lambda _: self._write(), names="value")

    @property
    def description(self) -> str:
        """Return the label."""
        return str(self.control.description)

    @property
    def tooltip(self) -> str:
        """Return the tooltip, which is the control's name for a screen reader."""
        return str(self.control.tooltip)

    @property
    def disabled(self) -> bool:
        """Return whether the value has no effect, so that it cannot be changed."""
        return bool(self.control.disabled)

    @disabled.setter
    def disabled(self, disabled: bool) -> None:
        self.control.disabled = disabled

    def check(self) -> None:
        """Show why the value cannot be used, or that it can.  A disabled field's value is not used."""
        self.error = None
        try:
            if not self.disabled:
                self._check(self.value)
        except WorkbenchError as error:
            self.error = error
        if self.error is None:
            self.alert.clear()
        else:
            self.alert.show_exception(self.error)

    def _write(self) -> None:
        """Show the value, unless the text already means it."""
        if not self._is_text:
            self.control.value = self.value
        elif self._parse(self.control.value) != self.value:
            self.control.value = f"{self.value:.12g}" if isinstance(self.value, float) else str(self.value)
        self.check()

    def _typed(self, value: Any) -> None:
        self.value = self._parse(value)

    def _parse(self, value: Any) -> Any:
        return read_number(value) if self._is_number else value.strip() if self._is_text else value


def read_number(text: str) -> int | float | str:
    """Return the number that a text means, a whole one where it is whole; the text itself if it means none."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text.strip()
    if not math.isfinite(number):
        return text.strip()
    return int(number) if number.is_integer() and "." not in text else number


def number(label: str, value: float, tooltip: str, check: Check, *, width: str = "18em") -> Field:
    """Return a field for a number."""
    return Field(_typed(widgets.Text, label, tooltip, width), value, check, is_number=True)


def text(label: str, value: str, tooltip: str, check: Check, values: Iterable[str]) -> Field:
    """Return a field for a text, which offers some values in a list."""
    options = tuple(values)
    width = "24em" if max(map(len, options), default=0) < LONG else "60em"
    return Field(_typed(widgets.Combobox, label, tooltip, width, options=options), value, check)


def _fine(value: Any) -> None:
    """Accept every value of a list."""


def choice(label: str, value: Any, tooltip: str, values: Mapping[str, Any], check: Check = _fine) -> Field:
    """Return a list of values, by the words that are shown."""
    return Field(described(widgets.Dropdown, label, tooltip, options=list(values.items()), value=value), value, check)


def lab_controls(lab: str, options: Mapping[str, Sequence[Any]] | None = None, **values: Any) -> list[Any]:
    """Return a lab's controls as data/labs.toml describes them, in its order.

    options: choices of the menus that the file leaves open.  values: first values instead of the file's.
    """
    controls: list[Any] = []
    for name, written in read_toml(data_folder() / "labs.toml")[lab].items():
        settings = written | ({"value": values[name]} if name in values else {})
        label, tooltip, unit = settings.pop("label"), settings.pop("tooltip"), settings.pop("unit", "")
        is_slider = settings.pop("is_slider", False)
        choices = (options or {}).get(name, settings.pop("options", None))
        if is_slider:
            settings["options"] = [
                (f"{choice:g} {unit}".strip(), choice) for choice in sorted({*choices, settings["value"]})
            ]
            controls.append(described(widgets.SelectionSlider, label, tooltip, **settings))
        elif choices is not None:
            settings["options"] = list(choices.items() if isinstance(choices, dict) else choices)
            controls.append(described(widgets.Dropdown, label, tooltip, **settings))
        elif "step" in settings:
            kind = widgets.IntSlider if isinstance(settings["step"], int) else widgets.FloatSlider
            controls.append(described(kind, label, tooltip, **settings))
        else:
            controls.append(ranged(label, settings["value"], tooltip, settings["min"], settings["max"]))
    return controls


def ranged(label: str, value: float, tooltip: str, least: float, most: float) -> Field:
    """Return a field for a number in a range; for a whole one if both ends are whole."""
    base: Any = int if isinstance(least, int) and isinstance(most, int) else float
    kind = Annotated[base, Meta(ge=least, le=most)]
    return number(label, value, tooltip, lambda typed: require_range(typed, kind, "The field", label))


def _typed(kind: type[Any], label: str, tooltip: str, width: str, **settings: Any) -> Any:
    return described(kind, label, tooltip, width=width, continuous_update=False, placeholder=tooltip, **settings)


def require_valid(fields: Iterable[Field]) -> None:
    """Raise the first field's error."""
    for field in fields:
        if field.error is not None:
            raise field.error


class Form(Panel):
    """Fields that describe something.  is_valid: whether they do."""

    is_valid = traitlets.Bool(True)

    def __init__(self) -> None:
        self.message = Message()
        self._callbacks: list[Callable[[Any], None]] = []
        super().__init__([])

    def on_change(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with every new valid description."""
        self._callbacks.append(callback)

    def _fields(self) -> Iterable[Field]:
        """Return the fields."""
        raise NotImplementedError

    def _described(self) -> Any:
        """Return what the fields describe.  Raises WorkbenchError if they describe nothing."""
        raise NotImplementedError

    def _remark(self) -> str:
        """Return a remark on a valid description, or ''."""
        raise NotImplementedError

    def _changed(self) -> None:
        """Read the fields, and show their mistakes or call the callbacks."""
        for field in self._fields():
            field.check()
        is_read = all(field.error is None for field in self._fields())  # a field's error stands next to it
        try:
            described = self._described() if is_read else None
            remark = self._remark() if is_read else ""
        except WorkbenchError as error:
            self.message.show_exception(error)
            self.is_valid = False
            return
        if remark:
            self.message.say(remark)
        else:
            self.message.clear()
        self.is_valid = is_read
        if is_read:
            for callback in self._callbacks:
                callback(described)
