"""The runs of this computer in a notebook: filter them, lay the losses and metrics of several over each other, tag,
remove.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from IPython.display import display
from markupsafe import Markup

from workbench.core.errors import WorkbenchError
from workbench.core.report import Report
from workbench.plots import overlay
from workbench.plots.overlay import TOP_SMOOTHING
from workbench.plots.style import empty, notebook_renderers
from workbench.runs import history
from workbench.runs.comparison import settings_of
from workbench.runs.history import PastRun
from workbench.widgets.controls import Html, Message, Panel, button, described
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.tables import Table

MOST_ROWS = 25
_COLUMNS = "max-content max-content minmax(10em, 1fr) minmax(12em, 1fr) max-content"
_CELL = Markup("<div style='line-height:1.4;padding-top:4px{}'>{}</div>")


class RunHistory(Panel):
    """A row for each run of this computer, newest first, and below them a figure of those that are chosen.

    folders: list the runs in these instead.  A copy of the figure is an output of the cell: it is hidden (page.css)
    until the notebook is opened without its kernel.
    """

    def __init__(self, folders: Sequence[Path | str] = ()) -> None:
        self._folders = folders
        self.runs: list[PastRun] = []
        self._reports: dict[tuple[str, float], Report] = {}
        self._chosen: list[str] = []
        self._display_id = f"workbench-history-{id(self)}"
        self._is_displayed = False
        self.filter = described(
            widgets.Text, "Filter", "Show runs with these words", placeholder="a method, model, task, device or tag"
        )
        self.axis = described(
            widgets.Dropdown, "Over", "What the horizontal axis counts", options=["steps", "epochs", "seconds"]
        )
        self.smoothing = described(
            widgets.FloatSlider,
            "Smoothing",
            "Share of the loss before that a smoothed loss keeps",
            value=0.6,
            max=TOP_SMOOTHING,
            step=0.02,
            continuous_update=False,
            readout_format=".2f",
        )
        self.words = described(
            widgets.Text, "Tags", "Tags for the chosen runs", placeholder="words with blanks", continuous_update=False
        )
        self.table = widgets.GridBox(layout=widgets.Layout(grid_template_columns=_COLUMNS, grid_gap="0 14px"))
        self.message, self.differences, self.figure = Message(), Html(), FigureBox()
        self.tag = button("Tag", "Give the chosen runs these tags instead of theirs", "tag", self._tag)
        self.remove = button("Remove", "Delete what the chosen runs have kept", "trash", lambda: self._ask(True))
        self.confirm = button("Remove for good", "Delete them now", "trash", self._remove, "danger")
        self.cancel = button("Keep them", "Delete nothing", "times", lambda: self._ask(False))
        look = button("Look again", "List the runs again", "refresh", self.refresh)
        self.filter.observe(lambda _: self._list(), names="value")
        for control in (self.axis, self.smoothing):
            control.observe(lambda _: self._draw(), names="value")
        scrolled = widgets.Layout(overflow="auto", max_height="24em")
        super().__init__(
            [
                widgets.HBox([self.filter, look]),
                widgets.Box([self.table], layout=scrolled),
                widgets.HBox([self.words, self.tag, self.remove, self.confirm, self.cancel]),
                self.message,
                widgets.HBox([self.axis, self.smoothing]),
                self.differences,
                self.figure,
            ]
        )
        self.add_class("workbench-history")
        self._ask(False)
        self.refresh()

    def _ipython_display_(self) -> None:
        super()._ipython_display_()
        self._is_displayed = True
        display(self._bundle(self._figure()), raw=True, display_id=self._display_id)

    @property
    def chosen(self) -> list[PastRun]:
        """Return the chosen runs, in the order in which they were chosen."""
        by_folder = {run.folder: run for run in self.runs}
        return [by_folder[folder] for folder in self._chosen if folder in by_folder]

    def choose(self, *names: str) -> None:
        """Choose runs by name or tag, instead of those chosen."""
        self._chosen = [run.folder for run in self.runs if run.name in names or {*names} & {*run.tags}]
        self._list()

    def refresh(self) -> None:
        """List the runs again."""
        self.message.clear()
        try:
            self.runs = history.find_runs(self._folders)
        except WorkbenchError as error:
            self.runs = []
            self.message.show_exception(error)
        self._list()

    def _list(self) -> None:
        matching = [run for run in self.runs if run.matches(self.filter.value)]
        cells: list[widgets.Widget] = []
        for run in matching[:MOST_ROWS]:
            check = widgets.Checkbox(
                value=run.folder in self._chosen,
                description=run.name,
                tooltip=f"Choose {run.name}",
                indent=False,
                layout=widgets.Layout(width="auto"),
            )
            check.observe(lambda change, folder=run.folder: self._toggle(folder, change["new"]), names="value")
            cells.append(check)
            red = ";color:var(--jp-error-color1, #B00020)" if run.state == "damaged" else ""
            tags = " ".join(f"[{word}]" for word in run.tags)
            for text in (f"{run.state}, {history.ago(run.changed_s)} ago", run.did, run.figures, tags):
                cells.append(Html(_CELL.format(red, text)))
        self.table.children = cells
        if not self.runs:
            self.message.say(f"No runs in {', '.join(map(str, self._folders)) or history.runs_folder()} yet.")
        elif len(matching) > MOST_ROWS:
            self.message.say(f"{MOST_ROWS} of {len(matching)} runs are shown: filter for the others.")
        self._draw()

    def _toggle(self, folder: str, is_chosen: bool) -> None:
        self._chosen = [chosen for chosen in self._chosen if chosen != folder] + [folder] * is_chosen
        self._ask(False)
        self._draw()

    def _draw(self) -> None:
        self.words.value = " ".join(self.chosen[0].tags) if len(self.chosen) == 1 else self.words.value
        for control in (self.tag, self.remove, self.words):
            control.disabled = not self.chosen
        figure = self._figure()
        self.figure.show(figure)
        if self._is_displayed:
            display(self._bundle(figure), raw=True, display_id=self._display_id, update=True)

    def _figure(self) -> go.Figure:
        """Return the chosen runs' figure, and show in which settings they differ."""
        reports: dict[str, Report] = {}
        for run in self.chosen:
            if run.state != "finished":
                self.message.say(f"{run.name} is {run.state}: it has no report to draw.")
                continue
            try:
                reports[self._name(run)] = self._report(run)
            except WorkbenchError as error:
                self.message.show_exception(error)
        self.differences.value = _differences(reports)._repr_html_() if len(reports) > 1 else Markup()
        if not reports:
            return empty(
                title="Loss and metric of each training",
                label="",
                why="Choose two or more finished runs above." if self.runs else "There are no runs yet.",
            )
        return overlay(
            {name: [report] for name, report in reports.items()}, axis=self.axis.value, smoothing=self.smoothing.value
        )

    def _name(self, run: PastRun) -> str:
        """Return what the figure calls a run: its tags, or its name; both where two runs have the same tags."""
        same = sum(other.tags == run.tags for other in self.chosen)
        tags = ", ".join(run.tags)
        return run.name if not tags else tags if same == 1 else f"{tags} ({run.name})"

    def _report(self, run: PastRun) -> Report:
        key = run.folder, run.changed_s
        if key not in self._reports:
            self._reports[key] = Report.read(run.report, most_bytes=history.LARGEST_REPORT)
        return self._reports[key]

    @staticmethod
    def _bundle(figure: go.Figure) -> dict[str, Any]:
        text = {"text/plain": figure.layout.title.text}
        return notebook_renderers()["plotly_mimetype"].to_mimebundle(figure.to_dict()) | text

    def _tag(self) -> None:
        self._do(lambda run: history.tag(run, self.words.value.split()))

    def _ask(self, asks: bool) -> None:
        """Show the question whether the chosen runs are to be removed."""
        for control, shown in ((self.remove, not asks), (self.confirm, asks), (self.cancel, asks)):
            control.layout.display = "" if shown else "none"

    def _remove(self) -> None:
        self._ask(False)
        self._do(history.remove)

    def _do(self, change: Any) -> None:
        """Change every chosen run; a refusal is shown."""
        refused: WorkbenchError | None = None
        for run in self.chosen:
            try:
                change(run)
            except WorkbenchError as error:
                refused = error
        self.refresh()
        if refused is not None:
            self.message.show_exception(refused)


def _differences(reports: dict[str, Report]) -> Table:
    """Return the settings in which runs differ, a column for each run."""
    settings_by_name = {name: settings_of(report) for name, report in reports.items()}
    every = dict.fromkeys(setting for settings in settings_by_name.values() for setting in settings)
    rows = [
        [setting.removeprefix("option."), *cells]
        for setting in every
        if len({*(cells := [str(settings.get(setting, "-")) for settings in settings_by_name.values()])}) > 1
    ]
    rows = rows or [["all settings", *["the same"] * len(settings_by_name)]]
    return Table(("setting", *settings_by_name), rows, title="Settings that differ")
