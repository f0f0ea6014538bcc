"""The steps of a phase on one rank: its part of the model, its optimizer, its handlers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic

from torch import nn

from workbench.core.errors import DivergedError, WorkbenchError
from workbench.core.files import make_folder
from workbench.core.plan import DISK
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import RankSession
from workbench.methods.training.handlers import PlannedStep, StepShape, share_of
from workbench.methods.training.phases import AJob, APhasedJob, Loaded, Phase, RankJob
from workbench.runtime.executor import Execution, Handler
from workbench.runtime.flat_optimizer import FlatAdamW, LinearSchedule, Optimizer
from workbench.runtime.memory import release_free_memory


class StepPhase(ABC, Generic[APhasedJob]):
    """The steps of a phase on one rank, however they train (see worker.run_steps)."""

    def __init__(self, session: RankSession[APhasedJob], phase: Phase, result: RankResult) -> None:
        self.session, self.rank_job, self.phase, self.result = session, session.rank_job, phase, result
        self.compute: Any = None

    @property
    def takes_part(self) -> bool:
        """Return whether this rank has a share of the work."""
        return self.compute is not None

    def shape(self, planned: PlannedStep) -> StepShape:
        """Return the shape of the next step as this run does it: by default as planned."""
        return planned.shape

    def restart(self) -> None:
        """Count the steps from the first one again, after a warm-up: by default no step depends on the count."""
        return

    @abstractmethod
    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step's operations by kind."""

    def loss(self, done: Execution, epoch: int, step: int) -> float:
        """Return this rank's part of the loss of a step that is done.  Raises DivergedError if it is not finite."""
        loss = float(sum(content for value, content in done.outputs.items() if value.name == "loss"))
        if not math.isfinite(loss):
            raise DivergedError(
                f"Training with learning_rate = {self.rank_job.job.peak_learning_rate:g} was asked for.",
                f"It diverged: the loss is {loss} in step {step + 1} of epoch {epoch + 1}.",
                "Lower learning_rate.",
            )
        return loss


class RankPhase(StepPhase[AJob]):
    """A phase that trains by backpropagation on one rank.

    optimizer: set by `load`; None on a rank without a share, which only waits.  layers: [start, stop) of those that the
    optimizer trains.
    is_writer: whether this rank saves the state that is the same on all ranks with these layers.  label: the epochs'
    name in progress messages; '' names each by its number.
    """

    label = ""

    def __init__(self, session: RankSession[AJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        self.layers = (0, self.rank_job.plan.num_layers)
        self.is_writer = False
        self.optimizer: Optimizer | None = None

    @property
    def takes_part(self) -> bool:
        """Return whether this rank trains layers (see StepPhase)."""
        return self.optimizer is not None

    @abstractmethod
    def load(self, epoch: int) -> None:
        """Create layers and optimizer as they are before an epoch; a resumed run restores its trainable state
        afterwards.
        """

    def take(self, loaded: Loaded) -> bool:
        """Use the layers that this device has loaded already, if they belong to this phase; return whether they do."""
        return False

    def hand_on(self) -> Loaded | None:
        """Return the loaded layers for another job of this device, which restores the trained weights."""
        return None

    def restart(self) -> None:
        """Set the learning rate schedule, which has no steps for a warm-up, to its beginning (see StepPhase)."""
        if self.optimizer is not None:
            self.optimizer.set_num_steps(0)

    def epoch(self, epoch: int, begin: int) -> AbstractContextManager[None]:
        """Return a context that is open during an epoch's steps from `begin` on."""
        return nullcontext()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Report work between epochs and record how long it takes."""
        self.session.progress.phase(name)
        start_s = self.session.context.now_s()
        yield
        self.result.phases_s[name] = (start_s, self.session.context.now_s())

    def told_of(self, error: WorkbenchError) -> None:
        """Note that data of the same devices cannot be used.  Other devices may lack it or have another part; that is
        no error.
        """
        if self.rank_job.is_same:
            self.result.notes.append(str(error))

    def release(self) -> None:
        """Free the memory of layers and optimizer."""
        self.compute = self.optimizer = None
        release_free_memory()


class StagePhase(RankPhase[AJob]):
    """A phase of a pipeline on one rank: the stage's layers and this rank's samples of each mini-batch."""

    def __init__(self, session: RankSession[AJob], phase: Phase, result: RankResult) -> None:
        super().__init__(session, phase, result)
        plan = self.rank_job.present
        self.index = plan.stage_of(session.rank)
        if self.index is not None:
            stage = plan.stages[self.index]
            self.is_writer, self.layers = session.rank == stage.ranks[0], (stage.start, stage.stop)

    def take(self, loaded: Loaded) -> bool:
        """Use a loaded stage (see RankPhase)."""
        if self.index is None or loaded.layers != self.layers:
            return False
        self.compute, self.optimizer = loaded.compute, loaded.optimizer
        loaded.optimizer.give_up_step()
        return True

    def hand_on(self) -> Loaded | None:
        """Return the stage (see RankPhase)."""
        return None if self.optimizer is None else Loaded(self.layers, self.compute, self.optimizer)

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps of an epoch."""
        return len(self.phase.steps(0))

    @property
    def activations_folder(self) -> Path | None:
        """Return the folder for the stage's activations, which it makes; None if they do not go to the disk."""
        if self.index is None or self.rank_job.present.stages[self.index].activations != DISK:
            return None
        return make_folder(self.session.context.own_folder(self.rank_job.folder))

    def handler_fields(self, planned: PlannedStep, epoch: int) -> dict[str, Any]:
        """Return this rank's part of a step as fields of StepHandlers."""
        assert self.index is not None
        plan = self.rank_job.plan
        stage = plan.stages[self.index]
        fields_of_step = {
            "compute": self.compute,
            "optimizer": self.optimizer,
            "layers": self.rank_job.layers[stage.start : stage.stop],
        }
        return share_of(self.session.rank, plan, planned, self.rank_job.split) | fields_of_step | {"epoch": epoch}


def make_optimizer(rank_job: RankJob, module: nn.Module, steps_per_epoch: int) -> FlatAdamW:
    """Return AdamW with the job's learning rates."""
    job = rank_job.job
    schedule = LinearSchedule(
        peak=job.peak_learning_rate,
        num_steps=job.epochs * steps_per_epoch,
        warmup_fraction=job.warmup_fraction,
    )
    return FlatAdamW(module, learning_rate=schedule, weight_decay=job.weight_decay)
