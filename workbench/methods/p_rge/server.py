"""A device's side of a run whose other devices may die: it does one job after the other as the coordinator says (runs on an engine)."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from workbench.core.errors import DeviceLostError, RuntimeSetupError
from workbench.core.schedule import STEP
from workbench.methods.common.layers import layers_seconds
from workbench.methods.common.reporting import LOADING, WAITING
from workbench.methods.common.session import RankSession
from workbench.methods.p_rge.compute import StageCompute
from workbench.methods.p_rge.layout import shape_of
from workbench.methods.p_rge.messages import Abort, Ended, Pause, Probe, Probed, Ready, Slow, Stop, Train
from workbench.methods.p_rge.session import RankJob, RankPart
from workbench.methods.p_rge.worker import Training, batch_of, is_loss, ready_compute
from workbench.models.loading import import_family
from workbench.planners.query_costs import Passing
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import CommandListener
from workbench.runtime.memory import MemoryBudget
from workbench.runtime.pacing import Pacer
from workbench.runtime.process_group import group


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """What a device is told once.  address: of the coordinator's commands.  slow_down: the injected factor in force."""

    model: str
    address: str
    slow_down: float = 1.0


def serve_rank(context: RankContext, setup: ServerSetup) -> None:
    """Do what the coordinator says until it says stop.  The loss of another device is told, an error of this one raised."""
    import_family(setup.model)
    with MemoryBudget(context.device.name, context.device.memory_bytes) as budget, _Server(context, setup, budget) as server:
        server.run()


class _Server:
    """Pause, Abort and Slow act at once, in the listener's thread; jobs wait for the main thread."""

    def __init__(self, context: RankContext, setup: ServerSetup, budget: MemoryBudget) -> None:
        self._context, self._budget, self._factor = context, budget, setup.slow_down
        self._compute: StageCompute | None = None
        self._session: RankSession[RankJob] | None = None
        self._generation = -1
        self._paused = threading.Event()
        self._job: RankJob | None = None
        self._place = 0  # the rank that this device has in the job
        self._jobs: queue.SimpleQueue[Train | Probe | Stop] = queue.SimpleQueue()
        self._listener = CommandListener(context, setup.address, self._take)
        context.publish(Ready())

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()

    def run(self) -> None:
        """Do jobs until told to stop."""
        while not self._context.should_stop():
            try:
                command = self._jobs.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(command, Stop):
                return
            if isinstance(command, Train):
                self._job, self._place = command.job, command.members.index(self._context.rank)
                self._context.publish(Ended(command.generation, self._train(command)))
            elif self._job is not None and self._compute is not None:
                self._context.publish(Probed(self._slowness(self._job, self._compute)))

    def _take(self, command: Any) -> None:
        match command:
            case Pause():
                if command.generation == self._generation:
                    self._paused.set()
            case Abort():
                session = self._session
                if session is not None and command.generation == self._generation:
                    session.executor.abort(DeviceLostError("A step was under way.", "A device has gone.", "It is made without."))
            case Slow():
                self._factor = command.factor
                self._slow_down()
            case Train():
                self._generation = command.generation
                self._paused.clear()
                self._jobs.put(command)
            case _:
                self._jobs.put(command)

    def _slow_down(self) -> None:
        session = self._session
        if session is not None and session.slows_down:
            session.pacer.factor = self._factor

    def _slowness(self, job: RankJob, compute: StageCompute) -> float:
        """Return how many times longer than by its profile this device takes for one query, on the layers that it has."""
        passing, batch = Passing(1, "both"), batch_of(job, job.change.step)
        shape = shape_of(job.train, job.job.seed, job.change, job.change.step, width=job.packing_width)
        incoming = None
        if not compute.model.is_first:
            incoming = torch.zeros(2 * shape.rows, shape.tokens, compute.model.backbone.hidden_size, dtype=compute.model.dtype)
        layers = job.profile.layers[self._place][compute.start : compute.stop]
        expected_s = layers_seconds(layers, "F", 2 * len(batch), shape.length) + layers_seconds(layers, STEP, 1, 1)
        if not expected_s:
            return 1.0
        pacer = Pacer(self._factor, dilation=self._context.dilation)
        paced = pacer.run(lambda: compute.forward(job, passing, incoming, batch, job.change.step, [0]), expected_s)
        return (paced.end_s - paced.start_s - paced.late_s) / (self._context.dilation * expected_s)

    def _train(self, command: Train) -> RankPart:
        job, rank = command.job, self._place
        context = replace(self._context, rank=rank, world_size=len(command.members), cluster=job.cluster)
        try:
            with (
                group(context, job.timeout_s, name=f"generation-{command.generation}") as process_group,
                RankSession(context, job, process_group, self._budget) as session,
            ):
                self._session = session
                self._slow_down()
                session.progress.phase(LOADING)
                index = job.plan.stage_of(rank)
                assert index is not None, "only members of the plan are told to train"
                self._compute = ready_compute(job, index, self._compute)
                session.progress.phase(WAITING)
                training = Training(session, job, self._compute, wants_pause=self._paused.is_set)
                session.barrier(training.program(job.first_step))
                return training.steps()
        except (DeviceLostError, RuntimeSetupError, RuntimeError) as error:
            if not isinstance(error, RuntimeSetupError) and not is_loss(error):
                raise
            return RankPart(rank=rank, end="lost", error=str(error).splitlines()[0])
        finally:
            self._session = None
