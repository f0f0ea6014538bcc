"""A device's side of a run whose other devices may go: it does one job after the other as the coordinator says (runs on an engine)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from workbench.core.errors import DeviceLostError, RuntimeSetupError
from workbench.runtime import commands as c
from workbench.runtime.context import RankContext
from workbench.runtime.executor import Executor
from workbench.runtime.jobs import tells_of_peer
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group


class Controls:
    """How the coordinator reaches into a job that is under way."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._pause_before: int | None = None
        self._step = -1
        self._lock = threading.Lock()
        self._given_up: BaseException | None = None
        self._executor: Executor | None = None
        self._pacer: Pacer | None = None

    def wants_pause(self) -> bool:
        """Return whether to end after the step under way, together with all others."""
        return self._pause_before is not None

    def begins(self, step: int) -> bool:
        """Return whether to do a step; not if all pause before it.  For jobs whose devices do not agree on their last step themselves."""
        with self._lock:
            self._step = step
            return self._pause_before is None or step < self._pause_before

    def watch(self, executor: Executor, pacer: Pacer | None) -> None:
        """Let aborts reach an executor and slow-downs a pacer (None: of a device that is not slowed down)."""
        with self._lock:
            self._executor, self._pacer = executor, pacer
            if pacer is not None:
                pacer.factor = self.factor
            given_up = self._given_up
        if given_up is not None:
            executor.abort(given_up)

    def is_wanted(self) -> bool:
        """Return whether the job was not given up."""
        return self._given_up is None

    def pause(self, before: int) -> None:
        """Ask for a pause; a step that has begun in spite of it is given up."""
        with self._lock:
            self._pause_before = before
            has_begun = self._step >= before
        if has_begun:
            self.give_up()

    def give_up(self) -> None:
        """End the step under way with an error."""
        with self._lock:
            self._given_up = DeviceLostError("A step was under way.", "The devices are changing.", "It is made again.")
            if self._executor is not None:
                self._executor.abort(self._given_up)

    def slow_down(self, factor: float) -> None:
        """Be so many times slower from the next operation on."""
        with self._lock:
            self.factor = factor
            if self._pacer is not None:
                self._pacer.factor = factor

    def renew(self) -> None:
        """Make ready for the next job."""
        with self._lock:
            self._given_up = self._executor = self._pacer = None
            self._pause_before, self._step = None, -1


class Worker(Protocol):
    """What a method does on a device; a context manager, so that it can let go of what it keeps."""

    def __enter__(self) -> Any:
        """Begin."""
        ...

    def __exit__(self, *exc: Any) -> None:
        """Let go of everything."""
        ...

    def train(self, context: RankContext, process_group: dist.ProcessGroup, job: Any, controls: Controls) -> tuple[c.End, Any]:
        """Do a job as one of `process_group`; return how it ended, and the part that Ended brings to the policy.

        context: with the rank and size of this group.  Publishes StepDone after each step.  The loss of another device either is
        an end ('lost') or is raised.
        """
        ...

    def prepare(self, job: Any, place: int) -> None:
        """Load what such a job needs of the member at `place`; in a thread of its own while another job is under way."""
        ...

    def slowness(self, factor: float, detail: Any) -> float | None:
        """Return how many times longer than by its profile this device takes, `factor` times slowed down; None: nothing to tell by."""
        ...


def serve_device(context: RankContext, address: str, worker: Worker) -> None:
    """Do what the coordinator at `address` says until it says stop.  The loss of another device is told, an error of this one raised."""
    with worker, _Server(context, address, worker) as server:
        for command in server.commands():
            if isinstance(command, c.Train):
                context.publish(c.Ended(command.generation, *server.train(command)))
            else:
                server.do(command)


class _Server:
    """Pause, Abort, Slow and Ping act at once, in the listener's thread; jobs wait for the main thread, which one prepares for beside."""

    def __init__(self, context: RankContext, address: str, worker: Worker) -> None:
        self._context, self._worker = context, worker
        self._controls = Controls()
        self._generation = -1
        self._is_at_work = False
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        assert context.channel is not None
        self._stop_listening = context.channel.listen(address, self._take)
        context.publish(c.Ready())

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop_listening()

    def commands(self) -> Iterator[Any]:
        """Yield what is to be done in the main thread, until told to stop."""
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
        """Prepare for a job, or measure the device's pace."""
        match command:
            case c.Prepare():
                self._worker.prepare(command.job, command.place)
                self._context.publish(c.Prepared())
            case c.Probe():
                found = self._worker.slowness(self._controls.factor, command.detail)
                if found is not None:
                    self._context.publish(c.Probed(found))

    def _take(self, command: Any) -> None:
        match command:
            case c.Pause() if command.generation == self._generation:
                self._controls.pause(command.before)
            case c.Abort() if command.generation == self._generation:
                self._controls.give_up()
            case c.Pause() | c.Abort():
                pass  # of a job that has ended
            case c.Slow():
                self._controls.slow_down(command.factor)
            case c.Ping():
                self._context.publish(c.Pong())
            case c.Prepare() if self._is_at_work:  # for the job after the one under way
                threading.Thread(target=self.do, args=(command,), name="prepare", daemon=True).start()
            case c.Leave():
                self._context.publish(c.Leaving())
            case c.Train():
                self._generation = command.generation
                self._controls.renew()
                self._jobs.put(command)
            case _:
                self._jobs.put(command)

    def train(self, command: c.Train) -> tuple[c.End, Any]:
        """Do a job as one of its members; return how it ended, and the worker's part of it."""
        members, job, controls = command.members, command.job, self._controls
        context = replace(self._context, rank=members.index(self._context.rank), world_size=len(members), cluster=job.cluster)
        name = f"generation-{command.generation}"
        try:
            with group(context, job.timeout_s, name=name, is_wanted=controls.is_wanted) as process_group:
                return self._worker.train(context, process_group, job, controls)
        except (DeviceLostError, RuntimeSetupError, RuntimeError) as error:
            if not isinstance(error, RuntimeSetupError) and not tells_of_peer(error):
                raise
            return "lost", None
