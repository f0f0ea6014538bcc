"""`workbench bench live`: what the live view costs a step, at about ten steps a second.

One run trains on emulated devices.  Blocks of its steps with a live view alternate with blocks without one, so both
sides see the same machine.  The view draws and sends its parts as in a notebook; a browser's work is not measured.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

from workbench.core.catalogue import load_cluster
from workbench.core.job import Job
from workbench.core.run_folder import scratch_folder
from workbench.experiment import run
from workbench.methods.base import Event
from workbench.runs.progress import RunState
from workbench.widgets.live import LiveView, parts_of
from workbench.widgets.run_panel import LiveProgress
from workbench_studies.bench.frame import Figures, Progress, jobs_of

BLOCK = 12
"""Steps of a block; the first WARM_UP of each do not count."""
WARM_UP = 2
DRAWINGS = 50


class Alternating:
    """Receives a run's events and shows every second block of its steps in a live view."""

    def __init__(self, job: Job) -> None:
        self._job, self._cluster = job, load_cluster("laptop")
        self._past: list[Event] = []
        self._live: LiveProgress | None = None
        self._steps = 0

    def __call__(self, event: Event) -> None:
        """Take an event (see Event)."""
        if event.watch is not None:
            event.watch()  # here, because the first view begins later
        if event.kind == "step":
            self._steps += 1
            if self._steps % BLOCK == 0:
                self.switch(is_on=self._steps // BLOCK % 2 == 1)
        if self._live is not None:
            self._live.update(event)
        self._past.append(event)

    def switch(self, *, is_on: bool) -> None:
        """Begin or end to show the run; a new view gets to know what has happened."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
        self._live = LiveProgress(self._job, self._cluster, view=LiveView()) if is_on else None
        if self._live is not None:
            for event in self._past:
                self._live.update(event)
            self._live.__enter__()

    def drawing_s(self) -> float:
        """Return the processor seconds of one drawing of the whole run."""
        state = RunState(self._job, self._cluster)
        for event in self._past:
            state.update(event)
        begin_s = time.thread_time()
        for _ in range(DRAWINGS):
            parts_of(state.snapshot(), state.course, self._cluster)
        return (time.thread_time() - begin_s) / DRAWINGS


def bench(progress: Progress) -> Figures:
    """Return the median ratio of a step with the view to one without, over neighbouring blocks, and its spread."""
    [(_, job)] = jobs_of("live").items()
    view = Alternating(job)
    with scratch_folder() as folder:
        try:
            report = run(job, load_cluster("laptop"), progress=view, workdir=folder / "run")
        finally:
            view.switch(is_on=False)
    seconds = [step.measured_s or 0.0 for step in report.steps]
    num_blocks = len(seconds) // BLOCK
    blocks = [median(seconds[number * BLOCK + WARM_UP : (number + 1) * BLOCK]) for number in range(num_blocks)]
    slowdowns = []
    for number, (first, second) in enumerate(pairwise(blocks)):
        with_view, without = (second, first) if number % 2 == 0 else (first, second)
        slowdowns.append(with_view / without)
        progress(
            f"live, blocks {number + 1} and {number + 2}: a step takes {slowdowns[-1]:.3f} times as long with the view"
        )
    return {
        "steps_per_s": 1 / median(blocks[::2]),
        "with_view_over_without": median(slowdowns),
        "ratio_min": min(slowdowns),
        "ratio_max": max(slowdowns),
        "drawing_ms": 1e3 * view.drawing_s(),
        "valid": report.valid,
    }
