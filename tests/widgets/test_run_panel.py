from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from widget_reports import CLUSTER, make_report

from tests.waiting import LIMIT_S
from workbench.core.device_faults import FaultSchedule
from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError
from workbench.core.job import Job
from workbench.core.report import Report
from workbench.methods.base import Event
from workbench.widgets import ClusterForm, JobForm, RunPanel


class Runner:
    """Stands in for experiment.run: `act` is what happens in the middle of a run."""

    def __init__(self, act: Callable[[Callable[[Event], None]], None] = lambda progress: None) -> None:
        self.act, self.calls = act, []

    def __call__(
        self, job: Job, cluster: Any, mode: str, *, progress: Callable[[Event], None], **settings: Any
    ) -> Report:
        self.calls.append((job, cluster, mode, settings))
        progress(Event("phase", message="Training"))
        self.act(progress)
        return make_report(job, mode=mode)


def panel_of(runner: Runner) -> RunPanel:
    return RunPanel(JobForm(), ClusterForm(CLUSTER), runner=runner, fidelity="paced")


@pytest.mark.parametrize(("button", "mode"), [("simulate_button", "simulate"), ("run_button", "execute")])
def test_a_button_runs_what_the_forms_say(button: str, mode: str) -> None:
    runner = Runner()
    panel = panel_of(runner)
    getattr(panel, button).click()
    panel.wait()
    assert runner.calls == [(Job(), CLUSTER, mode, {"fidelity": "paced", "resume": False})]
    assert "Finished in" in panel.live.head and "4.0 times shorter" in panel.result.value
    assert not panel.run_button.disabled and panel.stop_button.disabled


def test_a_run_that_ends_before_the_click_is_over_leaves_the_buttons_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_wait(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "workbench-run":
            thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_wait)
    panel = panel_of(Runner())
    panel.run_button.click()
    assert not panel.running and not panel.run_button.disabled and panel.stop_button.disabled


def test_the_kernel_stays_free_and_stop_ends_the_run() -> None:
    begun, stopped = threading.Event(), threading.Event()

    def wait_for_stop(progress: Callable[[Event], None]) -> None:
        begun.set()
        stopped.wait(LIMIT_S)
        progress(Event("step", epoch=0, step=0, num_steps=9, loss=0.7))
        raise AssertionError("the stop was not noticed")

    panel = panel_of(Runner(wait_for_stop))
    panel.run_button.click()
    assert begun.wait(LIMIT_S) and panel.running and panel.run_button.disabled and not panel.stop_button.disabled
    panel.start("simulate")  # a second run is refused, and says so
    assert "One is in progress" in panel.message.value
    panel.stop_button.click()
    stopped.set()
    panel.wait()
    assert "Stopped" in panel.live.head and "Stopped." in panel.message.value
    assert not panel.running and not panel.run_button.disabled


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DeviceLostError("Device 'beta' was lost", "at step 3.")])
def test_stop_pressed_while_a_run_ends_says_nothing_over_its_outcome(error: BaseException) -> None:
    def fail(progress: Callable[[Event], None]) -> None:
        raise error

    panel = panel_of(Runner(fail))
    panel.message.observe(lambda _: panel.stop(), names="value")  # as the outcome is shown
    panel.run_button.click()
    panel.wait()
    assert "Stopping" not in panel.message.value
    assert ("Stopped." if isinstance(error, KeyboardInterrupt) else "was lost") in panel.message.value


def test_resume_goes_on_with_the_very_run_that_was_interrupted() -> None:
    def fail(progress: Callable[[Event], None]) -> None:
        raise DeviceLostError("Device 'beta' was lost", "at step 3.")

    runner, form = Runner(fail), JobForm()
    panel = RunPanel(form, ClusterForm(CLUSTER), runner=runner)
    assert panel.resume_button.disabled  # nothing was interrupted
    panel.simulate_button.click()
    panel.wait()
    assert panel.resume_button.disabled  # a simulation leaves nothing to go on with
    panel.run_button.click()
    panel.wait()
    assert not panel.resume_button.disabled
    form.controls["seed"].value = 1
    assert panel.resume_button.disabled  # that is another run
    form.controls["seed"].value = 0
    runner.act = lambda progress: None
    panel.resume_button.click()
    panel.wait()
    assert runner.calls[-1][3]["resume"] is True and panel.resume_button.disabled
    assert "Finished in" in panel.live.head


def test_the_timelines_of_a_finished_run_can_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = panel_of(Runner())
    assert panel.trace.layout.display == "none"
    panel.simulate_button.click()
    panel.wait()
    assert panel.trace.layout.display == ""
    sent: list[dict[str, str]] = []
    monkeypatch.setattr(panel.trace, "send", sent.append)
    panel.trace._handle_custom_msg({"kind": "asked"}, [])
    assert sent[0]["name"] == "pac_plus-trace.json" and "predicted (simulated): 0 alpha" in sent[0]["text"]


@pytest.mark.parametrize(
    "error", [DeviceLostError("Device 'beta' was lost", "at step 3."), ZeroDivisionError("our own <bug>")]
)
def test_what_fails_is_shown(error: Exception) -> None:
    def fail(progress: Callable[[Event], None]) -> None:
        raise error

    panel = panel_of(Runner(fail))
    panel.run_button.click()
    panel.wait()
    assert "role='alert'" in panel.message.value and "Failed after" in panel.live.head
    assert ("Device &#39;beta&#39; was lost at step 3." in panel.message.value) != (
        "our own &lt;bug&gt;" in panel.message.value
    )
    assert ("Traceback" in panel.message.value) == isinstance(error, ZeroDivisionError)
    with pytest.raises(type(error)):
        panel.report("execute")


def test_a_form_that_means_nothing_is_told_before_anything_starts() -> None:
    runner = Runner()
    form = JobForm()
    panel = RunPanel(form, ClusterForm(CLUSTER), runner=runner)
    form.controls["epochs"].value = 0
    panel.run_button.click()
    assert "epochs = 0" in panel.message.value and not runner.calls
    form.controls["epochs"].value = 2
    panel.run_button.click()
    panel.wait()
    assert panel.result.value and panel.live.head
    form.controls["epochs"].value = 0
    panel.run_button.click()  # an old result does not stay under a new error
    assert "epochs = 0" in panel.message.value and panel.result.value == panel.live.head == ""


def test_a_notebook_shows_an_error_of_configuration_as_its_sentence() -> None:
    assert ConfigError("A job asks for epochs = 0.", "Raise it.")._render_traceback_() == [
        "ConfigError: A job asks for epochs = 0. Raise it."
    ]


def test_a_cell_uses_the_panels_report_of_the_same_job_only() -> None:
    runner = Runner()
    form = JobForm()
    panel = RunPanel(form, ClusterForm(CLUSTER), runner=runner)
    panel.run_button.click()
    example_report = panel.report("execute")  # waits for the panel
    assert example_report is panel.report("execute") and len(runner.calls) == 1
    assert panel.report("simulate").mode == "simulate" and len(runner.calls) == 2
    form.controls["seed"].value = 1
    assert panel.report("execute").job.seed == 1 and len(runner.calls) == 3


def test_devices_leave_are_killed_and_come_back_while_a_run_goes_on() -> None:
    faults = FaultSchedule()
    shown = []

    def press(progress: Callable[[Event], None]) -> None:
        progress(Event("faults", faults=faults))
        shown.append(panel.devices.layout.display)
        retire, kill, back = panel.devices.children[1:]
        retire.click()
        panel.devices.device.value = 2
        kill.click()
        assert [(fault.kind, fault.rank, begins) for fault, begins in faults.due(0.1)] == [
            ("leave", 0, True),
            ("kill", 2, True),
        ]
        back.click()
        assert [(fault.rank, begins) for fault, begins in faults.due(0.2)] == [(2, False)]

    panel = panel_of(Runner(press))
    panel.run_button.click()
    panel.wait()
    assert "Finished in" in panel.live.head, panel.message.value
    assert shown == ["flex"] and panel.devices.layout.display == "none"


def test_while_a_cell_runs_nothing_else_starts_and_a_stopped_cell_can_be_resumed() -> None:
    def stop(progress: Callable[[Event], None]) -> None:
        assert panel.run_button.disabled and panel.simulate_button.disabled and not panel.stop_button.disabled
        panel.start("execute")
        assert "One is in progress" in panel.message.value
        panel.stop_button.click()
        progress(Event("phase", message="Training"))

    runner = Runner(stop)
    panel = RunPanel(JobForm(), ClusterForm(CLUSTER), runner=runner)
    with pytest.raises(RuntimeSetupError, match=r"It was stopped\. Press Resume in the panel"):
        panel.report("execute")
    assert not panel.run_button.disabled and not panel.resume_button.disabled and panel.stop_button.disabled
    runner.act = lambda progress: None
    panel.resume_button.click()
    panel.wait()
    assert runner.calls[-1][3]["resume"] is True
    calls = len(runner.calls)
    assert panel.report("execute").mode == "execute" and len(runner.calls) == calls  # the cell finds the panel's report
