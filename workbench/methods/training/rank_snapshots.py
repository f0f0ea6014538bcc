"""One rank's snapshots: taken on the job's schedule, on the disk or in the memory of devices that store each other's
state, and restored.

In memory, a device copies its trained tensors and sends those that no other device has to the next device in the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self

from torch import Tensor

from workbench.core.costs import Spec
from workbench.core.plan import Homes, held_by, with_neighbours
from workbench.core.schedule import SEND
from workbench.core.serial import from_json, to_json
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import RankSession
from workbench.methods.training.phases import AJob
from workbench.methods.training.rank_phases import RankPhase
from workbench.runtime.flat_optimizer import Optimizer
from workbench.runtime.snapshot import Position, SnapshotWriter
from workbench.runtime.state import carry_out, load_state, spec_of
from workbench.runtime.step_values import empty
from workbench.schedules.moves import Move, moves


class KeptInMemory:
    """A device's last two snapshots in memory, each of the device's and of its neighbour's tensors.  They outlive the
    phases and generations.

    Two, because a device may be lost while the newer one is being sent.  Then only some devices have the newer one.
    """

    def __init__(self) -> None:
        self._tensors: dict[Position, Mapping[str, Tensor]] = {}

    def keep(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        """Store a snapshot, and drop the one before the last."""
        self._tensors[position] = tensors
        for older in sorted(self._tensors)[:-2]:
            del self._tensors[older]

    def forget_after(self, position: Position) -> None:
        """Drop later snapshots.  Their steps are repeated, possibly with different results."""
        for later in [taken for taken in self._tensors if taken > position]:
            del self._tensors[later]

    def names(self) -> dict[Position, tuple[str, ...]]:
        """Return the names of the tensors in each snapshot."""
        return {position: tuple(tensors) for position, tensors in self._tensors.items()}

    def at(self, position: Position) -> Mapping[str, Tensor]:
        """Return a snapshot's tensors; none if there is no such snapshot."""
        return self._tensors.get(position, {})


class Neighbours(Generic[AJob]):
    """The devices of a phase, which keep each other's state in memory.  Every rank creates one, even if it trains
    nothing.
    """

    def __init__(
        self, session: RankSession[AJob], optimizer: Optimizer | None, in_memory: KeptInMemory, result: RankResult
    ) -> None:
        self._session, self._optimizer, self._kept, self._result = session, optimizer, in_memory, result
        own_tensors = self._tensors()
        specs = {name: spec_of(tensor) for name, tensor in own_tensors.items()}
        specs_of_ranks = [
            from_json(text, dict[str, Spec], source="a device") for text in session.exchange(to_json(specs))
        ]
        self._specs = {name: spec for specs in specs_of_ranks for name, spec in specs.items()}
        self._homes = held_by(dict(enumerate(specs_of_ranks)))
        result.trained = tuple(self._homes)
        doubled = with_neighbours(self._homes, [rank for rank, specs in enumerate(specs_of_ranks) if specs])
        self._others = [name for name, ranks in doubled.items() if session.rank in ranks and name not in own_tensors]
        self._rounds = moves(doubled, self._homes, self._specs, session.rank_job.cluster)

    def keep(self, position: Position) -> None:
        """Take a snapshot; all ranks that train do so at the same step."""
        own_tensors = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        others = {name: empty(self._specs[name]) for name in self._others}
        self._move("snapshots", self._rounds, own_tensors, others)
        self._kept.keep(position, own_tensors | others)

    def restore(self, position: Position, homes: Homes) -> None:
        """Send a snapshot to the ranks that train its tensors now.  homes: the ranks that keep each tensor."""
        rounds = moves(self._homes, homes, self._specs, self._session.rank_job.cluster)
        self._move("moving the state", rounds, self._kept.at(position), self._tensors())

    def _tensors(self) -> Mapping[str, Tensor]:
        return {} if self._optimizer is None else self._optimizer.named_tensors()

    def _move(
        self, name: str, rounds: Sequence[Move], tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]
    ) -> None:
        session, result = self._session, self._result
        start_s = session.context.now_s()
        spans = carry_out(rounds, session.rank, session.run, tensors, into)
        result.spent_s[name] = result.spent_s.get(name, 0.0) + session.context.now_s() - start_s
        sent_bytes = sum(span.nbytes for span in spans if span.op.kind == SEND)
        result.nbytes[f"{name}, sent"] = result.nbytes.get(f"{name}, sent", 0) + sent_bytes


class RankSnapshots(Generic[AJob]):
    """One rank's snapshots during a phase whose layers are loaded; use it as a context manager.

    begins: where the phase begins.  in_memory: this device's memory.
    """

    def __init__(self, phase: RankPhase[AJob], begins: Position, in_memory: KeptInMemory) -> None:
        rank_job, optimizer = phase.rank_job, phase.optimizer
        self._rank_job, self._optimizer, self._rule = rank_job, optimizer, rank_job.snapshot
        self._session, self._result = phase.session, phase.result
        self._position = begins
        self._taken: Position | None = begins
        self._neighbours: Neighbours[AJob] | None = None
        in_memory.forget_after(begins)
        if self._rule.to == "neighbour":
            self._neighbours = Neighbours(phase.session, optimizer, in_memory, phase.result)
        self._writer: SnapshotWriter | None = None
        if phase.is_writer and optimizer is not None:
            self._writer = SnapshotWriter(rank_job.folder, rank_job.fingerprint, phase.layers, optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._writer is not None:
            self._writer.close()

    def restore(self, num_steps: int) -> None:
        """Restore the snapshot with which the job begins.  num_steps: number of the run's steps before it."""
        optimizer, rank_job = self._optimizer, self._rank_job
        if rank_job.homes and self._neighbours is not None:
            self._neighbours.restore(self._position, rank_job.homes)
            self._taken = None  # the ranks that train the tensors now may not be those that keep them
        elif rank_job.state and optimizer is not None:
            load_state(rank_job.state, rank_job.fingerprint, optimizer.named_tensors())
        if optimizer is not None and (rank_job.homes or rank_job.state):
            optimizer.set_num_steps(num_steps)

    def stepped(self, position: Position, then: Callable[[], None]) -> None:
        """Take a snapshot after a step within an epoch, if it is due.  then: called when it is written."""
        self._position = position
        is_due = self._optimizer is not None and self._rule.is_due(self._optimizer.num_steps)
        if is_due and self._writer is not None and self._neighbours is None and self._writer.is_small:
            self._taken = position
            self._writer.write_copy(position, then)
            return
        if is_due:
            self._take()
        self.wait()  # `then` is called in the order of the steps
        then()

    def wait(self) -> None:
        """Wait until the last snapshot is written."""
        if self._writer is not None:
            self._writer.wait()

    def pause(self) -> None:
        """Take a snapshot after the last step, unless there is one, so that no step is repeated and a leaving device's
        state is not lost.
        """
        if self._taken != self._position and self._optimizer is not None:
            self._take()
        self.wait()

    def end_epoch(self, epoch: int) -> None:
        """Take the snapshot at the end of an epoch."""
        self._position = self._taken = Position(epoch + 1, 0)
        start_s = self._session.context.now_s()
        self._write()
        if self._writer is not None:
            spent_s = self._result.spent_s
            spent_s["snapshots"] = spent_s.get("snapshots", 0.0) + self._session.context.now_s() - start_s

    def _take(self) -> None:
        self._taken = self._position
        if self._neighbours is not None:
            self._neighbours.keep(self._position)
        else:
            self._write()

    def _write(self) -> None:
        if self._writer is not None:
            # A run that may converge may end an epoch or two before the last one done, and go on from there later.
            keeps_moments = self._rule.is_small or self._rank_job.job.converged_after > 0
            self._writer.write(self._position, keeps_moments=keeps_moments)
