"""A form for a Job, made from the table of its method's fields: described controls, and one line for invalid settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.ranges import Count, require_range
from workbench.methods import METHODS
from workbench.methods.fine_tuning.prepare import FineTuningOptions
from workbench.methods.pac_plus.prepare import PacPlusOptions
from workbench.tasks import TASKS
from workbench.widgets.controls import Html, Message, Panel, described, number

_FAMILIES = ("bert", "gpt2", "llama", "opt", "t5", "bart", "vit")
MODELS = {name: name for name in ("all-MiniLM-L6-v2", "SmolLM2-135M", *(f"tiny-{family}" for family in _FAMILIES))}
FAULTS = {
    text: text
    for text in ("", "leave:1@step4", "kill:1@step4", "kill:1@step4; return:1@step12", "leave:1@step4; return:1@step14; kill:2@step20")
}
TYPED = (MODELS, FAULTS)
"""Tables of values that are only examples: other values may be typed."""
PLANNED = "planned"  # a control cannot show None


class Field(NamedTuple):
    """A control of a form.

    values: by the words that are shown, the default first; none: a number.  default: of a number.  is_option: of the method, not of the
    job.  needs: for some other fields, the values with which this field has an effect; with any other value it is greyed out.
    """

    label: str
    tooltip: str
    values: Mapping[str, Any] = {}
    default: int = 0
    is_option: bool = True
    needs: Mapping[str, tuple[Any, ...]] = {}

    @property
    def first(self) -> Any:
        """Return the default."""
        return next(iter(self.values.values()), self.default)

    def control(self, value: Any) -> Any:
        """Return the control."""
        if not self.values:
            return number(self.label, int(value or 0), self.tooltip)
        if any(self.values is one for one in TYPED):
            return described(widgets.Combobox, self.label, self.tooltip, options=tuple(self.values), value=value, ensure_option=False)
        listed = self.values if value in self.values.values() else {str(value): value, **self.values}
        return described(widgets.Dropdown, self.label, self.tooltip, options=list(listed.items()), value=value)


def _of_job(label: str, tooltip: str, values: Mapping[str, str] | None = None) -> Field:
    return Field(label, tooltip, values or {}, is_option=False)


def _choice(label: str, tooltip: str, name: str) -> Field:
    """Return the field of an option, with the values from the method's own settings."""
    methods = {method: settings for method, settings in _SETTINGS.items() if name in get_type_hints(settings)}
    settings = next(iter(methods.values()))
    values = dict.fromkeys((getattr(settings(), name), *get_args(get_type_hints(settings)[name])))
    return Field(label, tooltip, {value: value for value in values}, needs={"method": tuple(methods)})


_SETTINGS = {"pac_plus": PacPlusOptions, "fine_tuning": FineTuningOptions}
TRAINING = {
    "method": _of_job("Method", "The published method that trains", {name: name for name in METHODS}),
    "model": _of_job("Model", "A name of the list, a folder, or a hub name", MODELS),
    "task": _of_job("Task", "What the model learns; sentiment needs no network", {name: name for name in TASKS}),
    "train_samples": _of_job("Train samples", "How many training samples; 0 takes all"),
    "epochs": _of_job("Epochs", "Passes over the training samples"),
    "batch_size": _of_job("Batch size", "Samples of one optimizer step, over all devices"),
    "micro_batches": _of_job("Micro-batches", "Into how many a mini-batch is cut for the pipeline"),
    "reduction": Field("Reduction r", "The side network is r times narrower than the backbone", default=8, needs={"method": ("pac_plus",)}),
    "seed": _of_job("Seed", "Of order, initial weights and dropout"),
    "technique": _choice("Technique", "What is trained in or beside the backbone", "technique"),
    "paradigm": _choice("Paradigm", "How the devices share the work (section VI-A)", "paradigm"),
    "initialization": _choice("Initialization", "How the side network begins (section IV-C)", "initialization"),
    "backbone_dtype": _choice("Backbone type", "In what the backbone's weights are kept (section IV-D)", "backbone_dtype"),
    "cache_dtype": Field(
        "Cache type",
        "In what activations are cached (section IV-B)",
        {name: name for name in ("bfloat16", "float32", "int8")},
        needs={"method": ("pac_plus",)},
    ),
}
"""The fields of a method that has no table."""

FIELDS: dict[str, dict[str, Field]] = {
    "confidant": {
        **{name: TRAINING[name] for name in ("model", "task", "train_samples", "epochs", "batch_size")},
        "technique": Field(
            "Technique", "What is trained", {"all weights": "full", **{name: name for name in ("lora", "adapters", "serial")}}
        ),
        "partition": Field(
            "Partition",
            "Where the model is cut (section 3.2)",
            {
                "within memory (Eq. 3)": "memory_aware",
                "the same, best order": "any_order",
                "evenly (PipeDream)": "even",
                "by speed (FTPipeHD)": "capacity",
            },
        ),
        "devices": Field("Devices", "How many train, in the cluster's order; the others stand by. 0: all"),
        "drain_every": Field("Window", "Mini-batches of a window, which is a step of the report", default=32),
        "backup_every": _of_job("Backup every", "Steps between two backups that devices keep for each other; 0: none"),
        "faults": _of_job("Faults", "What is done to devices: KIND:DEVICE@stepN, as often as you like", FAULTS),
    },
    "p_rge": {
        "queries": Field("Queries q", "Random directions of a step, divided among the devices", default=4),
        "batch_size": _of_job("Samples E", "Samples of each query"),
        "steps": Field("Steps", "Steps of the run; 0 takes those of the job's epochs"),
        "execution": Field(
            "Execution",
            "Which passes of a device run side by side",
            {
                "auto (by measurement)": "auto",
                "sequential": "sequential",
                "outer: queries side by side": "outer",
                "inner: both signs side by side": "inner",
                "both: all in one pass": "both",
            },
        ),
        "after_loss": Field(
            "A lost step",
            "What becomes of the step in which a device dies: it is made ...",
            {"without its queries": "drop", "again, with all": "repeat"},
        ),
    },
    "galaxy_plus": {
        "system": Field(
            "System",
            "How a sequence is split (section IV-A)",
            {
                "Galaxy+": "galaxy_plus",
                "Galaxy": "galaxy",
                "Megatron-LM": "megatron_lm",
                "sequence parallel": "sequence_parallel",
                "EdgeShard": "edgeshard",
                "one device": "local",
            },
        ),
        "scheme": Field(
            "Schemes",
            "Of Galaxy+: which scheme a layer takes (section III-B)",
            {"chosen layer by layer": PLANNED, "scheme 1 everywhere": 1, "scheme 2 everywhere": 2},
            needs={"system": ("galaxy_plus",)},
        ),
        "overlap": Field(
            "Overlap",
            "Tiles travel beside computation (section III-D)",
            {"as planned": PLANNED, "on": True, "off": False},
            needs={"system": ("galaxy_plus", "galaxy")},
        ),
        "max_length": _of_job("Tokens", "Tokens at which a request is cut"),
        "test_samples": _of_job("Requests", "How many requests are answered, one after the other; 0 takes all"),
    },
}
"""For each method the fields of its form, by the name of the job's attribute or of the method's option."""


class JobForm(Panel):
    """Edits a job.  Settings that the form does not show (learning rate, lengths, other options) keep the values of the initial job.

    job: the Job that the controls describe now; reading it raises ConfigError if they describe none.
    """

    def __init__(self, job: Job | None = None) -> None:
        self._origin = job = job or Job()
        self._callbacks: list[Callable[[Job], None]] = []
        self._fields = FIELDS.get(job.method, TRAINING)
        self.controls: dict[str, Any] = {}
        for name, field in self._fields.items():
            self.controls[name] = field.control(job.options.get(name, field.first) if field.is_option else getattr(job, name))
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
        for name, field in self._fields.items():
            value = at[name]
            if not field.is_option:
                changed[name] = self._attribute(name, value)
            elif not self._means(field):
                options.pop(name, None)
            elif value == field.first != options.get(name, value):
                del options[name]
            elif value != options.get(name, field.first):
                if not field.values:
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

    def _means(self, field: Field) -> bool:
        """Return whether a field has an effect with the other fields' values."""
        return all(self.controls[name].value in values for name, values in field.needs.items())

    def _changed(self) -> None:
        for name, field in self._fields.items():
            self.controls[name].disabled = not self._means(field)
        try:
            job = self.job
        except ConfigError as error:
            self.message.show_exception(error)
            return
        self.message.clear()
        for callback in self._callbacks:
            callback(job)
