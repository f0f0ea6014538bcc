"""Send a run's events to an experiment tracker: TensorBoard or trackio, both on this computer, without a network."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Self

from workbench.assets.fetch import cache_folder
from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, installation
from workbench.core.job import Job, Mode, Tracker
from workbench.core.report import Report, busy_note
from workbench.core.serial import to_builtins
from workbench.methods.base import Event

PROJECT = "edge-llm-workbench"


class TensorBoardSink:
    """Writes TensorBoard's event files to a folder of the run's own below the cache's folder 'tensorboard'.

    shown: what a person does to see them.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = cache_folder() / "tensorboard"
        self.shown = f"tensorboard --logdir {folder}"
        self._writer: Any = SummaryWriter(str(folder / name))
        self.text("job", "\n".join(f"    {key} = {value}" for key, value in settings.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars; a name's part before its first '/' is the chart's group."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, words: str) -> None:
        """Write a text."""
        self._writer.add_text(name, words)

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


class TrackioSink:
    """Writes to trackio's own data base on this computer, as a run of the project PROJECT; see TensorBoardSink."""

    shown = f"trackio show --project {PROJECT}"

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import trackio

        self._trackio: Any = trackio
        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the result's
            self._run: Any = trackio.init(project=PROJECT, name=name, config=dict(settings), **quiet)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""
        self._run.log(dict(values), step=step)

    def text(self, name: str, words: str) -> None:
        """Write a text."""
        self._run.log({name: self._trackio.Markdown(words)})

    def close(self) -> None:
        """Write the rest."""
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()  # the run's own method would be called again, and print, when Python ends


Sink = TensorBoardSink | TrackioSink
SINKS: dict[Tracker, type[Sink]] = {"tensorboard": TensorBoardSink, "trackio": TrackioSink}


def require_tracker(tracker: Tracker) -> None:
    """Raise ConfigError if the tracker is unknown or its package is not installed."""
    request = f"The tracker '{tracker}' was asked for."
    if tracker != "none" and tracker not in SINKS:
        raise ConfigError(request, "It is unknown.", f"There are none, {', '.join(SINKS)}.")
    if tracker != "none" and find_spec(tracker) is None:
        raise ConfigError(
            request,
            f"The package '{tracker}' is not installed.",
            f"Install it: {installation('trackers')}.",
        )


class Tracking:
    """A context manager that sends one run to a tracker.  `update` takes the run's events, `finish` its report.

    Names begin with the group of their chart: loss, step_s/predicted, step_s/measured, memory_bytes/DEVICE,
    validation/METRIC, test/METRIC, peak_memory_bytes/predicted/DEVICE.  Steps are counted from 1 through all epochs.
    Measured step times are the report's, in seconds of the devices' clock, so they come at the end.
    tracker: 'none' does nothing.  Raises ConfigError if it is unknown or not installed.
    """

    def __init__(self, tracker: Tracker, job: Job, cluster: Cluster, mode: Mode = "execute") -> None:
        require_tracker(tracker)
        self._names = cluster.names
        self._first: dict[int, int] = {}
        self._num_steps = 0
        self._sink: Sink | None = None
        if tracker != "none":
            settings = to_builtins(job) | {"cluster": cluster.name, "mode": mode}
            started = time.strftime("%Y%m%d-%H%M%S")
            name = f"{job.method}-{job.task}-{mode}-{started}".replace("/", "_")
            self._sink = SINKS[tracker](name, settings)

    @property
    def shown(self) -> str:
        """Return the command that shows the run; '' without a tracker."""
        return self._sink.shown if self._sink else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._sink is not None:
            if kind is not None:
                self._sink.text("outcome", "stopped" if issubclass(kind, KeyboardInterrupt) else f"failed: {error}")
            self._sink.close()

    def update(self, event: Event) -> None:
        """Send what one of the run's events says; the other kinds are ignored."""
        if self._sink is None:
            return
        if event.kind == "predicted":
            self._first, self._num_steps = {}, len(event.predicted)
            for number, record in enumerate(event.predicted, 1):
                self._first.setdefault(record.epoch, number - record.step)
                self._log({"step_s/predicted": record.predicted_s}, number)
        elif event.kind == "step":
            self._log({"loss": event.loss}, self._number(event.epoch, event.step))
        elif event.kind == "scores":
            end = self._first.get(event.epoch + 1, self._num_steps + 1) - 1
            self._log({f"validation/{name}": value for name, value in event.metrics.items()}, end)
        elif event.kind == "device" and event.device is not None and event.epoch >= 0 and event.step >= 0:
            state, name = event.device, self._names[event.rank]
            values = {"memory_bytes": state.used_bytes, "busy_share": state.busy_share, "metered_j": state.metered_j}
            values = {f"{quantity}/{name}": value for quantity, value in values.items()}
            self._log(values, self._number(event.epoch, event.step))

    def finish(self, report: Report) -> None:
        """Send what only the report knows: measured step times, the peak of memory, the test's metrics, and what kind
        of numbers these are.
        """
        if self._sink is None:
            return
        for number, step in enumerate(report.steps, 1):
            self._log({"step_s/measured": step.measured_s}, number)
        last, peak_bytes = max(1, len(report.steps)), dict[str, int]()
        for timeline in report.timelines.values():
            kind = "predicted" if timeline.source == "simulated" else "measured"
            peaks = {rank: timeline.peak_bytes(rank) for rank in range(len(timeline.memory))}
            names = {f"peak_memory_bytes/{kind}/{timeline.device_names[rank]}": peak for rank, peak in peaks.items()}
            peak_bytes |= {name: max(peak, peak_bytes.get(name, 0)) for name, peak in names.items()}
        self._log(peak_bytes | {f"test/{name}": value for name, value in report.metrics.items()}, last)
        self._sink.text(
            "numbers", "\n\n".join(filter(None, (f"Measured numbers are {report.label}.", busy_note(report))))
        )

    def _number(self, epoch: int, step: int) -> int:
        return self._first.get(epoch, 1) + step

    def _log(self, values: Mapping[str, float | None], step: int) -> None:
        numbers = {name: float(value) for name, value in values.items() if value is not None}
        if numbers and self._sink is not None:
            self._sink.log(numbers, step)
