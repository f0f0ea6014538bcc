"""The device's side of a run that can lose devices: it runs one job after another on command (runs on an engine)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist

from workbench.core.errors import DeviceLostError, RuntimeSetupError
from workbench.core.threads import in_background
from workbench.runtime import commands as c
from workbench.runtime.context import RankContext
from workbench.runtime.executor import Executor
from workbench.runtime.jobs import tells_of_peer
from workbench.runtime.memory import release_free_memory
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group


class Controls:
    """Lets the coordinator control a running job.  orders: work that arrived for it."""

    def __init__(self) -> None:
        self.factor, self._slow_links = 1.0, dict[str, float]()
        self._pause_before: int | None = None
        self._step = -1
        self._lock = threading.Lock()
        self._given_up: BaseException | None = None
        self._executor: Executor | None = None
        self._pacer: Pacer | None = None
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def wants_pause(self) -> bool:
        """Return whether to stop after the current step, together with all other devices."""
        return self._pause_before is not None

    def begins(self, step: int) -> bool:
        """Return whether to start a step.  False if all pause before it.  For jobs in which the devices do not agree on
        a last step.
        """
        with self._lock:
            self._step = step
            return self._pause_before is None or step < self._pause_before

    def watch(self, executor: Executor, pacer: Pacer | None) -> None:
        """Connect aborts to an executor and slowdowns to a pacer (None: this device cannot be slowed down)."""
        with self._lock:
            self._executor, self._pacer = executor, pacer
            executor.transport.slow_links = self._slow_links
            if pacer is not None:
                pacer.slow_down(self.factor)
            given_up = self._given_up
        if given_up is not None:
            executor.abort(given_up)

    def is_wanted(self) -> bool:
        """Return whether the job is still wanted (not aborted)."""
        return self._given_up is None

    def pause(self, before: int) -> None:
        """Request a pause.  A step that has already begun past it is aborted."""
        with self._lock:
            self._pause_before = before
            has_begun = self._step >= before
        if has_begun:
            self.give_up()

    def give_up(self) -> None:
        """Abort the current step with an error."""
        with self._lock:
            self._given_up = DeviceLostError("A step was under way.", "The devices are changing.", "It is made again.")
            if self._executor is not None:
                self._executor.abort(self._given_up)

    def slow_down(self, factor: float, to: str = "") -> None:
        """Slow down by `factor` from the next operation on.

        to: name of a device; then only messages to it are slowed down.
        """
        if to:
            self._slow_links[to] = factor
            return
        with self._lock:
            self.factor = factor
            if self._pacer is not None:
                self._pacer.slow_down(factor)

    def renew(self) -> None:
        """Reset for the next job."""
        with self._lock:
            self._given_up = self._executor = self._pacer = None
            self._pause_before, self._step = None, -1
            self.orders = queue.SimpleQueue()


class Worker(Protocol):
    """Does a method's work on a device.  It is a context manager, so that it can release its resources."""

    def __enter__(self) -> Any:
        """Acquire resources."""

    def __exit__(self, *exc: Any) -> None:
        """Release all resources."""

    def train(
        self, context: RankContext, process_group: dist.ProcessGroup, job: Any, controls: Controls
    ) -> tuple[c.End, Any]:
        """Run a job as a member of `process_group`.  Returns how it ended, and the part that Ended reports to the
        policy.

        context: has the rank and size of this group.  Publishes StepDone after each step.  If another device is lost,
        this method either returns 'lost' or raises.
        """

    def prepare(self, job: Any, place: int) -> None:
        """Load the data that the member at `place` needs for a job.  Runs in a separate thread during another job."""

    def slowness(self, factor: float, detail: Any) -> float | None:
        """Return this device's slowdown relative to its profile, including the injected `factor`.  None if it cannot be
        measured.
        """


def serve_device(context: RankContext, worker: Worker) -> None:
    """Run the commands of the coordinator until it sends Stop.

    The loss of another device is reported to the coordinator.  An error of this device is raised.
    """
    with worker:
        server = _Server(context, worker)
        for command in server.commands():
            if not isinstance(command, c.Train):
                server.do(command)
                continue
            members, job, controls = command.members, command.job, server.controls
            member = replace(context, rank=members.index(context.rank), world_size=len(members), cluster=job.cluster)
            try:
                with group(
                    member, job.timeout_s, name=f"generation-{command.generation}", is_wanted=controls.is_wanted
                ) as opened:
                    end, part = worker.train(member, opened, job, controls)
                    # Before the group closes and memory is freed: meanwhile the next generation is made.
                    context.publish(c.Ended(command.generation, end, part))
            except (DeviceLostError, RuntimeSetupError, RuntimeError) as error:
                if not isinstance(error, RuntimeSetupError) and not tells_of_peer(error):
                    raise
                why = error.found if isinstance(error, RuntimeSetupError) else ""  # what kept it from joining
                context.publish(c.Ended(command.generation, "lost", why=why))
            release_free_memory()


class _Server:
    """Runs commands.  Pause, Abort and Slow act at once in the listener's thread; jobs run in the main thread.

    A separate thread prepares jobs.
    """

    def __init__(self, context: RankContext, worker: Worker) -> None:
        self._context, self._worker = context, worker
        self.controls = Controls()
        self._generation = -1
        self._is_at_work = False
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        assert context.channel is not None
        context.channel.listen(self._take)
        context.publish(c.Ready())

    def commands(self) -> Iterator[Any]:
        """Yield the commands for the main thread until Stop arrives."""
        while not self._context.should_stop():
            try:
                command = self._jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(command, c.Stop):
                return
            self._is_at_work = True
            yield command
            self._is_at_work = False

    def do(self, command: Any) -> None:
        """Prepare for a job, or measure the device's speed."""
        match command:
            case c.Prepare():
                self._worker.prepare(command.job, command.place)
                self._context.publish(c.Prepared())
            case c.Probe():
                slowness = self._worker.slowness(self.controls.factor, command.detail)
                if slowness is not None:
                    self._context.publish(c.Probed(slowness))

    def _take(self, command: Any) -> None:
        match command:
            case c.Pause() if command.generation == self._generation:
                self.controls.pause(command.before)
            case c.Abort() if command.generation == self._generation:
                self.controls.give_up()
            case c.Order() if command.generation == self._generation:
                self.controls.orders.put(command.content)
            case c.Pause() | c.Abort() | c.Order():
                pass  # it belongs to a job that has ended
            case c.Slow():
                self.controls.slow_down(command.factor, command.to)
            case c.Prepare() if self._is_at_work:  # for the job after the current one
                in_background(self.do, command, name="prepare")
            case c.Leave():
                self._context.publish(c.Leaving())
            case c.Train():
                self._generation = command.generation
                self.controls.renew()
                self._jobs.put(command)
            case _:
                self._jobs.put(command)
