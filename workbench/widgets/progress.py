"""A run's progress as HTML or plain lines, for the panel, and live for a cell's output, where the last state stays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from IPython.display import display
from markupsafe import Markup
from tqdm import tqdm

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.methods.base import Event
from workbench.plots.style import BLUE, LIGHT_GREY, ORANGE, byte_unit
from workbench.progress import DeviceRow, EpochRow, RunState, Snapshot

BAR_CHARACTERS = 24
T = TypeVar("T")
RED = "var(--jp-error-color1, #B00020)"


def bar(items: Sequence[T], what: str) -> Iterable[T]:
    """Iterate over the items and show the progress in the cell's output; the output is removed at the end."""
    shown: Iterable[T] = tqdm(items, desc=what, leave=False, file=sys.stdout)
    return shown


def as_text(now: Snapshot) -> str:
    """Return the state as plain lines."""
    lines = [now.headline]
    for epoch in _bars(now):
        full = round(_share(epoch) * BAR_CHARACTERS)
        lines.append(f"{_name(epoch):<24} [{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {_words(epoch)}".rstrip())
    return "\n".join([*lines, *now.notes])


def as_html(now: Snapshot) -> Markup:
    """Return the state with a bar for each epoch, a line for each device, and the time of each phase."""
    colour = RED if now.outcome in ("stopped", "failed") else "inherit"
    parts = [Markup("<div style='font-weight:bold;color:{};margin-bottom:4px' role='status'>{}</div>").format(colour, now.headline)]
    if bars := Markup().join(map(_bar, _bars(now))):
        grid = Markup("<div style='display:grid;grid-template-columns:max-content 14em 1fr;gap:2px 12px;align-items:center'>{}</div>")
        parts.append(grid.format(bars))
    if not now.outcome and any(device.phase for device in now.devices):
        parts.append(_devices(now.devices))
    small = [*now.notes]
    if len(now.phases) > 1:
        ends = [begin_s for _, begin_s in now.phases[1:]] + [now.elapsed_s]
        took = [f"{name} {end_s - begin_s:.1f} s" for (name, begin_s), end_s in zip(now.phases, ends, strict=True)]
        small.append("; ".join(took))
    parts += [Markup("<div style='margin-top:6px;font-size:smaller;opacity:.75'>{}</div>").format(line) for line in small]
    return Markup("<div style='line-height:1.4'>{}</div>").format(Markup().join(parts))


def _bars(now: Snapshot) -> tuple[EpochRow, ...]:
    """Return the epochs to draw: all while the run is in progress, the trained ones when it is over."""
    return tuple(epoch for epoch in now.epochs if epoch.done or not now.outcome)


def _share(epoch: EpochRow) -> float:
    return epoch.done / epoch.num_steps if epoch.num_steps else 0.0


def _name(epoch: EpochRow) -> str:
    if epoch.answers:
        return "requests"
    return f"epoch {epoch.epoch + 1}{' (from the cache)' * epoch.cached}"


def _words(epoch: EpochRow) -> str:
    unit = "answered" if epoch.answers else "steps"
    if not epoch.done:
        return f"{epoch.num_steps} {'to answer' if epoch.answers else unit}" if epoch.num_steps else ""
    words = f"{epoch.done} of {epoch.num_steps} {unit}, {epoch.seconds:.1f} s"
    return words if epoch.loss is None else f"{words}, mean loss {epoch.loss:.3f}"


def _bar(epoch: EpochRow) -> Markup:
    name, share = _name(epoch), _share(epoch)
    bar = Markup(
        "<span>{name}</span><div role='progressbar' aria-label='{name}' aria-valuenow='{share:.0f}' aria-valuemin='0' aria-valuemax='100'"
        " style='background:{behind};height:14px'><div style='width:{share:.1f}%;background:{colour};height:100%'></div></div>"
        "<span>{words}</span>"
    )
    colour = ORANGE if epoch.cached else BLUE
    return bar.format(name=name, share=100 * share, behind=LIGHT_GREY, colour=colour, words=_words(epoch))


def _devices(devices: tuple[DeviceRow, ...]) -> Markup:
    cells = Markup().join(Markup("<i>{}</i>").format(name) for name in ("device", "doing", "computing", "memory of the job"))
    for device in devices:
        busy = "" if device.busy_share is None else f"{device.busy_share:.0%} of a step"
        memory = ""
        if device.used_bytes is not None:
            budget = byte_unit(device.budget_bytes).text(device.budget_bytes)
            memory = f"{byte_unit(device.used_bytes).text(device.used_bytes)} of {budget}"
        cell = Markup("<span style='color:{};font-weight:bold'>{{}}</span>").format(RED) if device.is_lost else Markup("<span>{}</span>")
        cells += Markup().join(cell.format(text) for text in (device.name, device.doing, busy, memory))
    return Markup("<div style='display:grid;grid-template-columns:repeat(4,max-content);gap:0 18px;margin-top:6px'>{}</div>").format(cells)


REFRESH_S = 0.5


class LiveProgress:
    """A context manager whose `update` receives a run's events.

    stop: once set, the next event ends the run as Ctrl-C would.  show: draws the run elsewhere than in the cell's output.
    """

    def __init__(
        self, job: Job, cluster: Cluster, *, stop: threading.Event | None = None, show: Callable[[Snapshot], None] | None = None
    ) -> None:
        self.state = RunState(job, cluster)
        self._stop, self._show = stop or threading.Event(), show
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="workbench-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._show is None:  # no handle exists outside a notebook
            handle = display(self, display_id=True)
            self._show = lambda _: handle.update(self) if handle is not None else None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.state.finish(kind)
        self._over.set()
        self._thread.join()
        self._draw()

    def update(self, event: Event) -> None:
        """Process one of the run's events.  Raises KeyboardInterrupt if the run must stop."""
        self.state.update(event)
        if self._stop.is_set():
            raise KeyboardInterrupt

    def _refresh(self) -> None:
        while not self._over.is_set():
            self._draw()
            self._over.wait(REFRESH_S)

    def _draw(self) -> None:
        assert self._show is not None, "it is drawn from its beginning on"
        self._show(self.state.snapshot())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        now = self.state.snapshot()
        return {"text/plain": as_text(now), "text/html": as_html(now)}
