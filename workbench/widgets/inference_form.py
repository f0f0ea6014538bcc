"""A form for a job of single-shot inference: model, requests, how long they are, and how they are split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.widgets.controls import WIDE, Html, Message, number

SYSTEMS = {
    "Galaxy+": "galaxy_plus",
    "Galaxy": "galaxy",
    "Megatron-LM": "megatron_lm",
    "sequence parallel": "sequence_parallel",
    "EdgeShard": "edgeshard",
    "one device": "local",
}
PLANNED = "planned"  # a control of None would show nothing
SCHEMES = {"chosen layer by layer": PLANNED, "scheme 1 everywhere": 1, "scheme 2 everywhere": 2}
OVERLAPS = {"as planned": PLANNED, "on": True, "off": False}
_OPTIONS = ("system", "scheme", "overlap")


class InferenceForm(widgets.VBox):
    """Edits a job of the method galaxy_plus.

    job: the Job that the controls describe now; reading it raises ConfigError while they describe none.  What the form does not show
    stays as in the job it began with.
    """

    def __init__(self, job: Job) -> None:
        self._origin = job
        self._callbacks: list[Callable[[Job | None], None]] = []
        self.system = _choice("System", SYSTEMS, job.options.get("system", "galaxy_plus"), "How a sequence is split (section IV-A)")
        self.scheme = _choice(
            "Schemes", SCHEMES, job.options.get("scheme", PLANNED), "Of Galaxy+: which scheme a layer takes (section III-B)"
        )
        self.overlap = _choice("Overlap", OVERLAPS, job.options.get("overlap", PLANNED), "Tiles travel beside computation (section III-D)")
        self.tokens = number("Tokens", job.max_length, "Tokens at which a request is cut")
        self.requests = number("Requests", job.test_samples or 1, "How many requests are answered, one after the other")
        self.message = Message()
        for control in (self.system, self.scheme, self.overlap, self.tokens, self.requests):
            control.observe(lambda _: self._changed(), names="value")
        rows = [widgets.HBox([self.system, self.scheme, self.overlap]), widgets.HBox([self.tokens, self.requests])]
        super().__init__([Html(Markup("<b>The requests</b>")), *rows, self.message])
        self._changed()

    @property
    def job(self) -> Job:
        """Return the job that the controls describe.  Raises ConfigError for what cannot be meant."""
        chosen: dict[str, Any] = {"system": self.system.value, "overlap": self.overlap.value}
        if self.system.value == "galaxy_plus":
            chosen["scheme"] = self.scheme.value
        kept = {name: value for name, value in self._origin.options.items() if name not in _OPTIONS}
        options = kept | {name: value for name, value in chosen.items() if value not in (PLANNED, "galaxy_plus")}
        return replace(self._origin, max_length=self.tokens.value, test_samples=self.requests.value, options=options)

    def on_change(self, callback: Callable[[Job | None], None]) -> None:
        """Call `callback` with every new job; None while there is none."""
        self._callbacks.append(callback)

    def _changed(self) -> None:
        job: Job | None = None
        try:
            job = self.job
            self.message.clear()
        except ConfigError as error:
            self.message.show_exception(error)
        self.scheme.disabled = self.system.value != "galaxy_plus"
        self.overlap.disabled = self.system.value not in ("galaxy_plus", "galaxy")
        for callback in self._callbacks:
            callback(job)


def _choice(description: str, options: dict[str, Any], value: Any, tooltip: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=list(options.items()),
        value=value,
        description=description,
        tooltip=tooltip,
        style=WIDE,
        layout=widgets.Layout(width="23em"),
    )
