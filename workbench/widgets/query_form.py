"""A form for a job of P-RGE: queries, samples, steps, and which forward passes run side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.p_rge.prepare import require_known
from workbench.widgets.controls import WIDE, Html, Message, number

EXECUTIONS = {
    "auto (by measurement)": "auto",
    "sequential": "sequential",
    "outer: queries side by side": "outer",
    "inner: both signs side by side": "inner",
    "both: all in one pass": "both",
}
LOSSES = {"without its queries": "drop", "again, with all": "repeat"}


class QueryForm(widgets.VBox):
    """Edits a job of the method p_rge.

    job: the Job that the controls describe now; reading it raises ConfigError while they describe none.  What the form does not show
    stays as in the job it began with.
    """

    def __init__(self, job: Job) -> None:
        self._origin = job
        self._callbacks: list[Callable[[Job | None], None]] = []
        options = job.options
        self.queries = number("Queries q", int(options.get("queries", 4)), "Random directions of a step, divided among the devices")
        self.batch_size = number("Samples E", job.batch_size, "Samples of each query")
        self.steps = number("Steps", int(options.get("steps") or 10), "Steps of the run")
        self.execution = _choice("Execution", EXECUTIONS, options.get("execution", "auto"), "Which passes of a device run side by side")
        self.after_loss = _choice(
            "A lost step", LOSSES, options.get("after_loss", "drop"), "What becomes of the step in which a device dies: it is made ..."
        )
        self.message = Message()
        for control in (self.queries, self.batch_size, self.steps, self.execution, self.after_loss):
            control.observe(lambda _: self._changed(), names="value")
        rows = [[self.queries, self.batch_size, self.steps], [self.execution, self.after_loss]]
        super().__init__([Html(Markup("<b>The job</b>")), *map(widgets.HBox, rows), self.message])
        self._changed()

    @property
    def job(self) -> Job:
        """Return the job that the controls describe.  Raises ConfigError for what cannot be meant."""
        shown: dict[str, Any] = {
            "queries": self.queries.value,
            "steps": self.steps.value,
            "execution": self.execution.value,
            "after_loss": self.after_loss.value,
        }
        defaults = {"execution": "auto", "after_loss": "drop"}
        kept = {name: value for name, value in self._origin.options.items() if name not in shown}
        options = kept | {name: value for name, value in shown.items() if value != defaults.get(name)}
        # A zeroth-order step has no micro-batches.
        job = replace(self._origin, batch_size=self.batch_size.value, micro_batches=1, options=options)
        require_known(job)
        return job

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
        for callback in self._callbacks:
            callback(job)


def _choice(description: str, options: dict[str, Any], value: Any, tooltip: str) -> widgets.Dropdown:
    return widgets.Dropdown(
        options=list(options.items()),
        value=value,
        description=description,
        tooltip=tooltip,
        style=WIDE,
        layout=widgets.Layout(width="26em"),
    )
