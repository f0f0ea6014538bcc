"""Buttons that copy what two forms describe, as a command and as Python."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as widgets
import traitlets

from workbench.core.errors import WorkbenchError
from workbench.runs.as_text import as_command, as_python, is_known
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.job_form import JobForm

_EDITED = "# The command line takes these devices without the form's changes, or from a TOML file."


class _CopyButton(anywidget.AnyWidget):
    """A button that copies a text to the clipboard, and shows it.  text: '' if there is nothing to copy."""

    label = traitlets.Unicode().tag(sync=True)
    told = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    _esm = Path(__file__).with_name("copy.js")


class CopyButtons(widgets.HBox):
    """Buttons that copy what two forms describe, as a command and as Python."""

    def __init__(self, job_form: JobForm, cluster_form: ClusterForm) -> None:
        self._forms = job_form, cluster_form
        self.command = _CopyButton(label="Copy as command", told="The same run from a terminal")
        self.python = _CopyButton(label="Copy as Python", told="The same run in a script or another notebook")
        super().__init__([self.command, self.python], layout=widgets.Layout(flex_flow="row wrap"))
        for form in self._forms:
            form.on_change(lambda _: self._write())
            form.observe(lambda _: self._write(), names="is_valid")
        self._write()

    def _write(self) -> None:
        job_form, cluster_form = self._forms
        try:
            job, cluster = job_form.job, cluster_form.cluster
        except WorkbenchError:
            self.command.text = self.python.text = ""
            return
        self.python.text = as_python(job, cluster)
        self.command.text = as_command(job, cluster if is_known(cluster) else cluster_form.origin)
        if not is_known(cluster):
            self.command.text = f"{_EDITED}\n{self.command.text}"
