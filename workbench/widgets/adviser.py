"""The adviser in a notebook: which method, technique and plan for a job on some devices, ranked, with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.errors import WorkbenchError
from workbench.core.job import Job
from workbench.methods.base import Event
from workbench.models.configuration import require_known
from workbench.plots.choices import choices
from workbench.runs import advice_text
from workbench.runs.advice import Advice, Goal, advise
from workbench.tasks import TASKS
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import Headline, Html, Message, Panel, button, described
from workbench.widgets.copying import CopyButtons
from workbench.widgets.explorer import Latest
from workbench.widgets.fields import Field, choice, ranged, require_valid, text
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.job_form import form_of
from workbench.widgets.tables import Table

GOALS: dict[str, Goal] = {"time": "time", "energy": "energy", "memory": "memory"}
PURPOSES = {"training": "train", "training, data stay": "stay", "answering": "serve"}
COSTS = {"measured here": False, "the catalogue's": True}


class _Request(NamedTuple):
    job: Job
    cluster: Cluster
    origin: Cluster
    settings: dict[str, Any]


class Adviser(Panel):
    """Simulates every sensible combination for a job on the devices of a form, and shows the ranked table, the picture
    of time, energy and memory, and the reason.  Of each combination it copies the command and the Python.

    devices: a cluster's name or file, a Cluster, or a form that the notebook shows already.  job: its model, task and
    sizes are the first ones; the method is the adviser's to choose.
    advice: the newest answer, None before the first one.
    """

    def __init__(
        self,
        devices: str | Path | Cluster | ClusterForm = "laptop",
        job: Job | None = None,
        *,
        adviser: Callable[..., Advice] = advise,
        computed: bool = False,
    ) -> None:
        self._job, self._adviser = job or Job(), adviser
        self.advice: Advice | None = None
        self._answered: _Request | None = None
        # An answer comes in another thread.  Nothing is explained while half of it is shown.
        self._showing = threading.RLock()
        self.cluster_form = devices if isinstance(devices, ClusterForm) else ClusterForm(devices)
        self.controls = self._controls(computed)
        tooltip = "Simulate every sensible combination on these devices, and rank them"
        self.ask_button = button("Advise", tooltip, "balance-scale", self.ask, "info")
        self.cluster_form.observe(lambda _: self._enable(), names="is_valid")
        for field in self.controls.values():
            field.observe(lambda _: self._enable(), names="value")
        self.message, self.headline, self.table, self.reason = Message(), Headline(), Html(), Html()
        self.choice = described(widgets.Dropdown, "Combination", "Which one is explained and copied", width="44em")
        self.choice.observe(lambda _: self._explain(), names="value")
        self.copies, self.figure = CopyButtons(), FigureBox()
        self._answers = (self.table, self.choice, self.reason, self.copies, self.figure)
        self._latest: Latest[_Request] = Latest(self._work)
        half = (len(self.controls) + 1) // 2
        fields = list(self.controls.values())
        margin = widgets.Layout(margin="0 2em 0 0")
        columns = widgets.HBox(
            [widgets.VBox(column, layout=margin) for column in (fields[:half], fields[half:])],
            layout=widgets.Layout(flex_flow="row wrap"),
        )
        own_form = [] if isinstance(devices, ClusterForm) else [self.cluster_form]
        super().__init__([*own_form, columns, self.ask_button, self.message, self.headline, *self._answers])
        self._show(None)

    def _controls(self, computed: bool) -> dict[str, Field]:
        models, tasks = form_of(self._job.method)["model"].values, {name: name for name in TASKS}
        until = "Rank by what it takes until the validation metric reaches this; 0: the whole run"
        return {
            "model": text("Model", self._job.model, "A model by name, file or shape", require_known, models),
            "task": choice("Task", self._job.task, "What is learnt", tasks),
            "purpose": choice("For", "train", "What the devices do", PURPOSES),
            "goal": choice("What counts", "time", "By what the combinations are ranked", GOALS),
            "score": ranged("Score to reach", 0, until, 0.0, 1.0),
            "costs": choice("Costs", computed, "Where the seconds of the layers come from", COSTS),
        }

    def ask(self) -> None:
        """Answer what the controls say, in the background."""
        try:
            require_valid(self.controls.values())
            request = self._request()
        except WorkbenchError as error:
            self.message.show_exception(error)
            return
        self.ask_button.disabled = True
        self.message.say("Simulating every sensible combination ...")
        self._latest.ask(request)

    def wait(self) -> None:
        """Wait until no answer is being looked for."""
        self._latest.wait()

    def _request(self) -> _Request:
        now = {name: field.value for name, field in self.controls.items()}
        job = replace(self._job, model=now["model"], task=now["task"])
        settings = {
            "goal": now["goal"],
            "score": now["score"] or None,
            "keeps_data": now["purpose"] == "stay",
            "serves": now["purpose"] == "serve",
            "computed": now["costs"],
        }
        return _Request(job, self.cluster_form.cluster, self.cluster_form.origin, settings)

    def _work(self, request: _Request) -> None:
        def tell(event: Event) -> None:
            if event.message:
                self.message.say(event.message)

        try:
            advice = self._adviser(request.job, request.cluster, progress=tell, **request.settings)
            with self._showing:
                self._answered = request
                self._show(advice)
            self.message.clear()
        except Exception as error:  # nobody would see the error of a thread
            with self._showing:
                self._show(None)
            self.message.show_exception(error)
        finally:
            self._enable()

    def _show(self, advice: Advice | None) -> None:
        """Show an answer, or none."""
        self.advice = advice
        for part in self._answers:
            part.layout.display = "none" if advice is None else ""
        if advice is None:
            self.headline.value = Markup()
            self.choice.options = []
            self.copies.clear()
            return
        faint = [number for number, choice in enumerate(advice.choices) if choice.is_dominated]
        table = Table(
            advice_text.columns(advice),
            advice_text.rows(advice),
            title=advice_text.title(advice),
            note=advice_text.STAR,
            more=advice_text.impossible(advice.refused),
            faint=faint,
        )
        self.headline.say(*_parted(advice_text.conclusion(advice)))
        self.table.value = table._repr_html_()
        if (drafts := advice.drafts) is not None:
            more = [*advice_text.impossible(drafts.refused), advice_text.draft_conclusion(drafts)]
            assert self._answered is not None, "what was answered"
            commands = advice_text.draft_commands(drafts, self._answered.origin.name)
            self.table.value += Table(
                advice_text.DRAFT_COLUMNS,
                advice_text.draft_rows(drafts),
                title=advice_text.draft_title(drafts),
                note=advice_text.DRAFT_NOTE,
                more=[*more, *commands],
            )._repr_html_()
        self.choice.options = [
            (f"{number}: {choice.name}", number - 1) for number, choice in enumerate(advice.choices, 1)
        ]
        self.choice.value = 0
        self.figure.show(choices(advice_text.points(advice), label=f"simulated, {advice.costs} costs"))
        self._explain()
        self.keep(Markup(self.headline.value) + Markup(self.table.value))

    def _explain(self) -> None:
        """Explain the chosen combination, and let the buttons copy it."""
        with self._showing:
            if self.advice is None or self._answered is None or self.choice.value is None:
                return
            choice = self.advice.choices[self.choice.value]
            self.reason.value = Markup("<div role='status' style='line-height:1.4'>{}</div>").format(choice.decides)
            self.copies.show(choice.job, self._answered.cluster, self._answered.origin)

    def _enable(self) -> None:
        is_valid = all(field.error is None for field in self.controls.values()) and self.cluster_form.is_valid
        self.ask_button.disabled = not is_valid


def _parted(sentences: str) -> tuple[str, str]:
    """Return the first sentence, and the others."""
    first, _, rest = sentences.partition(". ")
    return (f"{first}.", rest) if rest else (first, "")
