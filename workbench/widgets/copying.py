"""Buttons that copy a job on a cluster as a command and as Python, such as what two forms describe."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets as widgets
import traitlets

from workbench.core.cluster import Cluster
from workbench.core.errors import WorkbenchError
from workbench.core.job import Job
from workbench.runs.as_text import as_command, as_python, is_known
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.job_form import JobForm

_EDITED = "# The command line takes these devices without the form's changes, or from a TOML file."


class _CopyButton(anywidget.AnyWidget):
    """A button that copies a text to the clipboard, and shows it.  text: '' if there is nothing to copy."""

    label = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    _esm = Path(__file__).with_name("copy.js")


class CopyButtons(widgets.HBox):
    """Buttons that copy a job on a cluster, as a command and as Python."""

    def __init__(self) -> None:
        self.command = _CopyButton(label="Copy as command", hint="The same run from a terminal")
        self.python = _CopyButton(label="Copy as Python", hint="The same run in a script or another notebook")
        super().__init__([self.command, self.python], layout=widgets.Layout(flex_flow="row wrap"))

    @classmethod
    def of(cls, job_form: JobForm, cluster_form: ClusterForm) -> CopyButtons:
        """Return buttons that always copy what two forms describe."""
        buttons = cls()

        def write() -> None:
            try:
                buttons.show(job_form.job, cluster_form.cluster, cluster_form.origin)
            except WorkbenchError:
                buttons.clear()

        for form in (job_form, cluster_form):
            form.on_change(lambda _: write())
            form.observe(lambda _: write(), names="is_valid")
        write()
        return buttons

    def show(self, job: Job, cluster: Cluster, origin: Cluster) -> None:
        """Copy this job from now on.  origin: the cluster before it was changed in a form."""
        self.python.text = as_python(job, cluster)
        self.command.text = as_command(job, cluster if is_known(cluster) else origin)
        if not is_known(cluster):
            self.command.text = f"{_EDITED}\n{self.command.text}"

    def clear(self) -> None:
        """Copy nothing."""
        self.command.text = self.python.text = ""
