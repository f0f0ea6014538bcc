"""A panel with Simulate, Run, Stop and Resume, and a run's progress as HTML, live, in a panel or a cell's output.

The run works in a thread, the kernel stays free, and failures are shown.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import ipywidgets as widgets
from IPython.core.getipython import get_ipython
from IPython.display import display
from markupsafe import Markup
from tqdm import tqdm

from workbench import experiment
from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, FaultKind, FaultSchedule
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.core.job import Fidelity, Job, Mode, Tracker
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.methods.base import Event
from workbench.plots.trace import trace_text
from workbench.runs.progress import RunState
from workbench.runs.tracking import Tracking
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import Html, Message, WorkPanel, button, described
from workbench.widgets.copying import CopyButtons
from workbench.widgets.download import trace_button
from workbench.widgets.job_form import JobForm
from workbench.widgets.live import LiveView, head_of, parts_of
from workbench.widgets.tables import report_table

T = TypeVar("T")


def bar(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate over the items and show the progress in the cell's output; the output is removed at the end."""
    shown: Iterable[T] = tqdm(items, desc=description, leave=False, file=sys.stdout)
    return shown


REFRESH_S = 0.25
"""Time between two drawings: often enough for the eye, and at most a per cent of a step (`workbench bench live`)."""


class LiveProgress:
    """A context manager whose `update` receives a run's events.

    stop: once set, the next event ends the run as Ctrl-C would.  view: shows the run; None: one in the cell's output,
    which the last state replaces as HTML; outside a notebook, phases and the last state are printed.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        *,
        stop: threading.Event | None = None,
        view: LiveView | None = None,
    ) -> None:
        self.state, self.view = RunState(job, cluster), view or LiveView()
        self._cluster, self._stop = cluster, stop or threading.Event()
        self._in_cell, self._handle = view is None, None
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="workbench-progress", daemon=True)

    def __enter__(self) -> Self:
        self._news.set()
        self._draw()
        if self._in_cell and _is_notebook():
            self._handle = display(self.view, display_id=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.state.finish(kind)
        self._over.set()
        self._thread.join()
        self._news.set()
        self._draw()
        if self._handle is not None:
            self._handle.update(self)
            self.view.close()
        elif self._in_cell:
            tqdm.write(str(self.state.snapshot()))

    def update(self, event: Event) -> None:
        """Process one of the run's events.  Raises KeyboardInterrupt if the run must stop."""
        self.state.update(event)
        if event.watch is not None:
            event.watch()
        if event.kind == "phase" and self._in_cell and self._handle is None:
            tqdm.write(event.message)
        self._news.set()
        if self._stop.is_set():
            raise KeyboardInterrupt

    def _refresh(self) -> None:
        while not self._over.is_set():
            self._draw()
            self._over.wait(REFRESH_S)

    def _draw(self) -> None:
        now = self.state.snapshot()
        if self._news.is_set():
            self._news.clear()
            self.view.show(parts_of(now, self.state.course, self._cluster))
        else:
            self.view.head = head_of(now)  # time goes on

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self.state.snapshot()), "text/html": self.view.still}


def _is_notebook() -> bool:
    """Return whether a kernel runs this process, so that a widget can be displayed."""
    shell = get_ipython()
    return shell is not None and shell.has_trait("kernel")


Runner = Callable[..., Report]
Described = tuple[Job, Cluster, Plan | None]


class DeviceButtons(widgets.HBox):
    """Buttons that make a device of a run leave on notice, die, or come back; shown while a run offers that."""

    def __init__(self, cluster: Cluster) -> None:
        self._faults: FaultSchedule | None = None
        self.device = described(widgets.Dropdown, "Device", "To which device something is done", width="18em")
        self.name(cluster)
        doing: dict[str, tuple[str, str, Callable[[], object]]] = {
            "Retire": ("It leaves on notice: its layers move before it goes", "sign-out", lambda: self._do("leave")),
            "Kill": ("It is gone at once", "bolt", lambda: self._do("kill")),
            "Bring back": ("It comes back after it has left or was killed", "sign-in", self._bring_back),
        }
        buttons = [button(name, tooltip, icon, action) for name, (tooltip, icon, action) in doing.items()]
        super().__init__([self.device, *buttons])
        self.offer(None)

    def name(self, cluster: Cluster) -> None:
        """Take over the names of the devices; the first one is chosen."""
        options = tuple((device.name, rank) for rank, device in enumerate(cluster.devices))
        if options != self.device.options:
            self.device.options = options
            self.device.index = 0  # Dropdown chooses none

    def offer(self, faults: FaultSchedule | None) -> None:
        """Show the buttons; hide them if faults is None."""
        self._faults = faults
        self.layout.display = "none" if faults is None else "flex"

    def _do(self, kind: FaultKind) -> None:
        if self._faults is not None:
            self._faults.add(Fault(kind=kind, rank=self.device.value, start=0.0))

    def _bring_back(self) -> None:
        if self._faults is not None:
            self._faults.end(self.device.value, 0.0)


class RunPanel(WorkPanel):
    """Simulates or runs what two forms describe.

    `report(mode)` gives a notebook's cell the Report of exactly that job and cluster: the panel's if it has already
    made one, else it runs now, in the cell.  chosen_plan: returns the plan to run instead of the planner's.
    tracker: where losses, times, memory and metrics are sent, too.
    runner: experiment.run, or a stand-in in tests.  devices: buttons that act on a device during the run.
    """

    def __init__(
        self,
        job_form: JobForm,
        cluster_form: ClusterForm,
        *,
        fidelity: Fidelity = "auto",
        chosen_plan: Callable[[], Plan] | None = None,
        tracker: Tracker = "none",
        runner: Runner = experiment.run,
    ) -> None:
        self._job_form, self._cluster_form = job_form, cluster_form
        self._fidelity, self._runner, self._chosen_plan, self._tracker = fidelity, runner, chosen_plan, tracker
        self._finished: list[Report] = []
        self._interrupted: tuple[Job, Cluster] | None = None
        self.simulate_button = button(
            "Simulate", "Replay the job in virtual time: seconds", "clock-o", lambda: self.start("simulate"), "info"
        )
        self.run_button = button(
            "Run", "Train for real, emulated or on a kit", "play", lambda: self.start("execute"), "success"
        )
        self.stop_button = button("Stop", "End the run at its next step", "stop", self.stop, "warning")
        goes_on = "Go on with the run that was stopped or failed, from its last completed step"
        self.resume_button = button("Resume", goes_on, "step-forward", lambda: self.start("execute", resume=True))
        self.message, self.live, self.result = Message(), LiveView(), Html()
        self.devices = DeviceButtons(cluster_form.cluster)
        cluster_form.on_change(self.devices.name)
        for form in (job_form, cluster_form):
            form.observe(lambda _: self._enable(), names="is_valid")
        job_form.on_change(lambda _: self._enable())
        cluster_form.on_change(lambda _: self._enable())
        buttons = widgets.HBox([self.simulate_button, self.run_button, self.stop_button, self.resume_button])
        copies = CopyButtons.of(job_form, cluster_form)
        self.trace = trace_button(self._trace)
        self.trace.layout.display = "none"
        super().__init__([buttons, copies, self.devices, self.message, self.live, self.result, self.trace])

    def start(self, mode: Mode, *, resume: bool = False) -> None:
        """Start in a thread; errors in the forms are shown at once.  resume: see experiment.run."""
        self._start(partial(self._run, mode, resume))

    def report(self, mode: Mode) -> Report:
        """Return the report of the forms' job on the forms' cluster.

        Raises the run's errors; a run that was stopped can be resumed in the panel.  If the panel is running, waits for
        that run first.
        """
        self.wait()
        job, cluster, plan = self._described()
        for report in reversed(self._finished):
            if (report.job, report.cluster, report.mode) == (job, cluster, mode) and plan in (None, report.plan):
                return report
        try:
            with self._in_cell():
                return self._report_of((job, cluster, plan), mode)
        except KeyboardInterrupt:
            request, problem = (
                f"{'A run' if mode == 'execute' else 'A simulation'} was asked for in this cell.",
                "It was stopped.",
            )
            todo = "Press Resume in the panel to go on from the last completed step, then run this cell again."
            raise RuntimeSetupError(request, problem, todo if mode == "execute" else "Run this cell again.") from None

    def _described(self) -> Described:
        """Return the job and cluster of the forms, and the plan to run (None: the planner's).  Raises ConfigError for
        invalid settings.
        """
        return self._job_form.job, self._cluster_form.cluster, self._chosen_plan() if self._chosen_plan else None

    def _report_of(
        self, described: Described, mode: Mode, *, resume: bool = False, view: LiveView | None = None
    ) -> Report:
        """Run a job; meanwhile the buttons for its devices are offered."""
        job, cluster, plan = described
        how: dict[str, Any] = {"fidelity": self._fidelity, "resume": resume} | (
            {} if plan is None else {"chosen_plan": plan}
        )
        with (
            Tracking(self._tracker, job, cluster, mode) as tracking,
            LiveProgress(job, cluster, stop=self._stop, view=view) as live,
        ):

            def take(event: Event) -> None:
                if event.faults is not None:
                    self.devices.offer(event.faults)
                tracking.update(event)
                live.update(event)

            try:
                report = self._runner(job, cluster, mode, progress=take, **how)
            except BaseException:
                self._interrupted = (job, cluster) if mode == "execute" else self._interrupted
                raise
            finally:
                self.devices.offer(None)
            tracking.finish(report)
        self._interrupted = None if mode == "execute" else self._interrupted
        self._finished.append(report)
        return report

    def _run(self, mode: Mode, resume: bool, described: Described) -> Callable[[], None]:
        """Run in the panel's thread; return what shows the outcome."""
        try:
            report = self._report_of(described, mode, resume=resume, view=self.live)
        except KeyboardInterrupt:
            words = "Stopped. Nothing is left running; Run starts again, Resume goes on from the last completed step."
            return partial(self.message.say, words)
        return partial(self._show, report, report_table(report)._repr_html_())

    def _work(self, *work: Any) -> None:
        super()._work(*work)
        self.keep(self.live.still + Markup(self.result.value))

    def _clear(self) -> None:
        self.live.show({})
        self.result.value, self.trace.layout.display = Markup(), "none"

    def _show(self, report: Report, table: str) -> None:
        self.message.clear()
        self.result.value = table
        self.trace.layout.display = "" if report.timelines else "none"

    def _trace(self) -> tuple[str, str]:
        """Return the file's name and text of the newest report's timelines."""
        report = self._finished[-1]
        return f"{report.job.method}-trace.json", trace_text(report)

    def _can_resume(self) -> bool:
        """Return whether the forms describe the interrupted run."""
        try:
            return self._interrupted == (self._job_form.job, self._cluster_form.cluster)
        except ConfigError:
            return False

    def _enable(self) -> None:
        with self._changing:
            is_valid = self._job_form.is_valid and self._cluster_form.is_valid
            self.simulate_button.disabled = self.run_button.disabled = self.running or not is_valid
            self.stop_button.disabled = not self.running
            self.resume_button.disabled = self.running or not self._can_resume()
