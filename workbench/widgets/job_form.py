"""A form for a Job: described controls, and one line that says what cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods import METHODS
from workbench.tasks import TASKS
from workbench.widgets.controls import WIDE, Html, Message, number

MODELS = ("all-MiniLM-L6-v2", "SmolLM2-135M", *(f"tiny-{family}" for family in ("bert", "gpt2", "llama", "opt", "t5", "bart", "vit")))
DEFAULT_REDUCTION = 8


class Choice(NamedTuple):
    """An option that a method knows.  values: the default first."""

    label: str
    methods: tuple[str, ...]
    values: tuple[str, ...]
    tooltip: str


_BOTH, _PAC_PLUS = ("pac_plus", "fine_tuning"), ("pac_plus",)
CHOICES = {
    "technique": Choice("Technique", ("fine_tuning",), ("lora", "full", "adapters"), "What is trained in or beside the backbone"),
    "paradigm": Choice(
        "Paradigm", _BOTH, ("hybrid", "standalone", "data_parallel", "pipeline_parallel"), "How the devices share the work (section VI-A)"
    ),
    "initialization": Choice(
        "Initialization",
        _PAC_PLUS,
        ("fan_in", "pruned", "torch_pruned", "distilled", "gaussian", "zero", "all_zero"),
        "How the side network begins (section IV-C)",
    ),
    "backbone_dtype": Choice(
        "Backbone type",
        _PAC_PLUS,
        ("float32", "float16", "bfloat16", "int8", "int4", "nf4"),
        "In what the backbone's weights are kept (section IV-D)",
    ),
    "cache_dtype": Choice("Cache type", _PAC_PLUS, ("bfloat16", "float32", "int8"), "In what activations are cached (section IV-B)"),
}
"""Options with a control of their own; a method that does not know one has it greyed out."""

_NUMBERS = ("epochs", "batch_size", "micro_batches", "seed")


class JobForm(widgets.VBox):
    """Edits a job.  What the form does not show (learning rate, lengths, other options) stays as in the job it began with.

    job: the Job that the controls describe now; reading it raises ConfigError while they describe none.
    """

    def __init__(self, job: Job | None = None) -> None:
        self._origin = job or Job()
        self._callbacks: list[Callable[[Job], None]] = []
        self.controls = self._make_controls(self._origin)
        self.message = Message()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._show_known()
        half = (len(self.controls) + 1) // 2
        columns = [list(self.controls.values())[:half], list(self.controls.values())[half:]]
        boxes = [widgets.VBox(column, layout=widgets.Layout(margin="0 2em 0 0")) for column in columns]
        super().__init__([Html(Markup("<b>The job</b>")), widgets.HBox(boxes, layout=widgets.Layout(flex_flow="row wrap")), self.message])

    @staticmethod
    def _make_controls(job: Job) -> dict[str, Any]:
        wide = widgets.Layout(width="24em")

        def choice(kind: Any, description: str, value: str, options: tuple[str, ...], tooltip: str, **settings: Any) -> Any:
            listed = options if value in options else (value, *options)
            return kind(options=listed, value=value, description=description, tooltip=tooltip, style=WIDE, layout=wide, **settings)

        return {
            "method": choice(widgets.Dropdown, "Method", job.method, tuple(METHODS), "The published method that trains"),
            "model": choice(
                widgets.Combobox, "Model", job.model, MODELS, "A name of the list, a folder, or a hub name", ensure_option=False
            ),
            "task": choice(widgets.Dropdown, "Task", job.task, TASKS, "What the model learns; sentiment needs no network"),
            "train_samples": number("Train samples", job.train_samples or 0, "How many training samples; 0 takes all"),
            "epochs": number("Epochs", job.epochs, "Passes over the training samples; all but the first run from the cache"),
            "batch_size": number("Batch size", job.batch_size, "Samples of one optimizer step, over all devices"),
            "micro_batches": number("Micro-batches", job.micro_batches, "Into how many a mini-batch is cut for the pipeline"),
            "reduction": number(
                "Reduction r",
                int(job.options.get("reduction", DEFAULT_REDUCTION)),
                "The side network is r times narrower than the backbone",
            ),
            "seed": number("Seed", job.seed, "Of order, initial weights and dropout"),
            **{
                name: choice(widgets.Dropdown, one.label, str(job.options.get(name, one.values[0])), one.values, one.tooltip)
                for name, one in CHOICES.items()
            },
        }

    @property
    def job(self) -> Job:
        """Return the job that the controls describe.  Raises ConfigError if they describe none."""
        at = {name: control.value for name, control in self.controls.items()}
        if not at["model"].strip():
            raise ConfigError("A job without a model was asked for.", "The field is empty.", "Choose a model.")
        if at["reduction"] < 1:
            raise ConfigError(f"A reduction of {at['reduction']} was asked for.", "It must be at least 1.", "Raise it; 8 is usual.")
        if at["train_samples"] < 0:
            raise ConfigError(f"{at['train_samples']} training samples were asked for.", "It must be 0 (all) or more.", "Raise it.")
        # Another method does not know the options of the one that the form began with.
        options = dict(self._origin.options) if at["method"] == self._origin.method else {}
        shown: dict[str, int | str] = {"reduction": DEFAULT_REDUCTION} if at["method"] == "pac_plus" else {}
        shown |= {name: one.values[0] for name, one in CHOICES.items() if at["method"] in one.methods}
        for name, default in shown.items():
            if at[name] != options.get(name, default):
                options[name] = at[name]
        return replace(
            self._origin,
            method=at["method"],
            model=at["model"].strip(),
            task=at["task"],
            train_samples=at["train_samples"] or None,
            options=options,
            **{name: at[name] for name in _NUMBERS},
        )

    def on_change(self, callback: Callable[[Job], None]) -> None:
        """Call `callback` with every new valid job."""
        self._callbacks.append(callback)

    def _show_known(self) -> None:
        method = self.controls["method"].value
        self.controls["reduction"].disabled = method != "pac_plus"
        for name, one in CHOICES.items():
            self.controls[name].disabled = method not in one.methods

    def _changed(self, change: Any) -> None:
        self._show_known()
        try:
            job = self.job
        except ConfigError as error:
            self.message.show_exception(error)
            return
        self.message.clear()
        for callback in self._callbacks:
            callback(job)
