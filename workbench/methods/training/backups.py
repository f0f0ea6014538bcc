"""In-memory backups between devices: a lost device costs only the steps since the last backup, without a shared disk.

Every n steps each device copies its trainable state in memory, and sends the tensors that no other device has to the next in the ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec
from workbench.core.job import Job
from workbench.core.plan import Homes, Plan, Stage, held_by, homes_of, with_backups
from workbench.core.profile import Profile
from workbench.core.schedule import SEND
from workbench.core.serial import from_json, to_json
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.training.phases import AJob, PhasedJob
from workbench.methods.training.prepare import PreparedTraining
from workbench.planners import Problem
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.state import Backups, State, carry_out, spec_of
from workbench.runtime.transport import empty
from workbench.schedules.moves import Move, moves
from workbench.simulator import simulate

_COPIES = 3
"""Number of copies of a device's backup: after the last two backups, and the one in progress."""


class Keeper:
    """One rank's backups during a phase.  kept: outlives the generation; copies of the trainable state of this rank and its neighbour."""

    def __init__(self, session: RankSession[AJob], optimizer: Optimizer | None, kept: Backups, result: RankResult) -> None:
        """Every rank creates one, even if it trains nothing in this phase."""
        self._session, self._optimizer, self._kept, self._result = session, optimizer, kept, result
        self._every = session.rank_job.job.backup_every
        own = {} if optimizer is None else optimizer.named_tensors()
        known = [from_json(text, dict[str, Spec], source="a device") for text in session.exchange(to_json(_specs(own)))]
        self._specs = {name: spec for specs in known for name, spec in specs.items()}
        self._homes = held_by(dict(enumerate(known)))
        result.trained = tuple(self._homes)
        doubled = with_backups(self._homes, [rank for rank, specs in enumerate(known) if specs])
        self._also = [name for name, ranks in doubled.items() if session.rank in ranks and name not in own]
        self._rounds = moves(doubled, self._homes, self._specs, session.rank_job.cluster)

    def restore(self, held: Homes, step: int) -> None:
        """Send the state backed up after a step to the ranks that train it now.  held: the ranks that keep each tensor."""
        own = {} if self._optimizer is None else self._optimizer.named_tensors()
        rounds = moves(self._homes, held, self._specs, self._session.rank_job.cluster)
        mine = self._kept.at(step).tensors if step in self._kept.names() else {}
        self._move("moving the state", rounds, mine, own)
        if self._optimizer is not None:
            self._optimizer.set_num_steps(step)

    def stepped(self) -> None:
        """Back up the state if this step is due for a backup."""
        if self._optimizer is not None and not self._optimizer.num_steps % self._every:
            self.keep()

    def keep(self) -> None:
        """Back up the state after the last step, unless that is done already; all ranks do so at the same step."""
        optimizer = self._optimizer
        if optimizer is None or optimizer.num_steps in self._kept.names():
            return
        own = State(step=optimizer.num_steps, tensors=optimizer.named_tensors()).snapshot()
        others = {name: empty(self._specs[name]) for name in self._also}
        self._move("backups", self._rounds, own.tensors, others)
        self._kept.keep(State(step=own.step, tensors={**own.tensors, **others}))

    def _move(self, name: str, rounds: Sequence[Move], held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        session, result = self._session, self._result
        start_s = session.context.now_s()
        spans = carry_out(rounds, session.rank, session.run, held, into)
        result.spent_s[name] = result.spent_s.get(name, 0.0) + session.context.now_s() - start_s
        sent = sum(span.nbytes for span in spans if span.op.kind == SEND)
        result.nbytes[f"{name}, sent"] = result.nbytes.get(f"{name}, sent", 0) + sent


def backup_s(rank_job: PhasedJob) -> float:
    """Return the expected seconds of one backup of a pipeline's stages."""
    specs, homes = _homes(rank_job.plan, rank_job.profile)
    return _seconds(moves(with_backups(homes, sorted(rank_job.plan.busy_ranks)), homes, specs, rank_job.cluster))


class Substitution(NamedTuple):
    """The cost of replacing devices that leave: loading_s while all devices train on, and the pause of all devices.

    keeping_s: until each device's state is also on the next device.  moving_s: until the new device has it.
    """

    loading_s: float
    keeping_s: float
    moving_s: float

    @property
    def still_s(self) -> float:
        """Return how long all devices pause."""
        return self.keeping_s + self.moving_s


def substitution(cluster: Cluster, profile: Profile, before: Plan, after: Plan) -> Substitution:
    """Return the cost: weights come from each device's storage, the trainable state from the ring's next device after the last step."""
    specs, homes = _homes(before, profile)
    kept = with_backups(homes, sorted(before.busy_ranks))
    left = {name: tuple(rank for rank in ranks if rank in after.busy_ranks) for name, ranks in kept.items()}
    new = [(rank, stage) for stage in after.stages for rank in stage.ranks if rank not in before.busy_ranks]
    loading_s = max((_loading_s(cluster, profile, rank, stage) for rank, stage in new), default=0.0)
    wanted = {name: ranks for name, ranks in _homes(after, profile)[1].items() if left[name]}  # if two neighbours leave: from the disk
    return Substitution(loading_s, _seconds(moves(kept, homes, specs, cluster)), _seconds(moves(wanted, left, specs, cluster)))


def repartition_s(cluster: Cluster, profile: Profile, before: Plan, after: Plan) -> float:
    """Return the seconds that all devices pause to change the plan, if all of them stay.

    Devices whose layers change load them from their own storage; the trainable state comes from the device that trained it.
    """
    specs, homes = _homes(before, profile)
    former = {rank: (stage.start, stage.stop) for stage in before.stages for rank in stage.ranks}
    loading_s = [
        _loading_s(cluster, profile, rank, stage)
        for stage in after.stages
        for rank in stage.ranks
        if former.get(rank) != (stage.start, stage.stop)
    ]
    return max(loading_s, default=0.0) + _seconds(moves(_homes(after, profile)[1], homes, specs, cluster))


def _loading_s(cluster: Cluster, profile: Profile, rank: int, stage: Stage) -> float:
    nbytes = sum(layer.frozen_bytes + layer.trainable_bytes for layer in profile.layers[0][stage.start : stage.stop])
    return nbytes / cluster.devices[rank].storage_bytes_per_s


def _homes(plan: Plan, profile: Profile) -> tuple[dict[str, Spec], Homes]:
    """Return each layer's trainable tensors, and the ranks that train them."""
    trained = [len(STATE_KINDS) * layer.trainable_bytes for layer in profile.layers[0][: plan.num_layers]]
    specs = {f"layer {number}": Spec((nbytes,), "uint8") for number, nbytes in enumerate(trained)}
    return specs, homes_of(plan, {name: (layer,) for layer, name in enumerate(specs)})


def _seconds(rounds: Sequence[Move]) -> float:
    return sum(simulate(one.program, memory=False).makespan_s for one in rounds)


def with_room(profile: Profile, job: Job) -> Profile:
    """Return a profile with room for backups: of a device's own state, and the same amount for its neighbour's."""
    if not job.backup_every:
        return profile
    kept = 2 * _COPIES * len(STATE_KINDS)
    return replace(profile, optimizer_bytes_per_trainable_byte=profile.optimizer_bytes_per_trainable_byte + kept)


def planning_problem(prepared: PreparedTraining, profile: Profile, cluster: Cluster) -> Problem:
    """Return the problem of planning a job's mini-batches, with room for backups."""
    job = prepared.job
    return Problem(
        with_room(profile, job),
        cluster,
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        sequence_length=prepared.typical_length,
        memory_length=prepared.longest,
    )


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}
