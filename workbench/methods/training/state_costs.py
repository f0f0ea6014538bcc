"""The cost of keeping and moving the trained state: memory, and the seconds of a snapshot, a replaced device and
another plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec
from workbench.core.job import Job
from workbench.core.once import once
from workbench.core.plan import Homes, Plan, Stage, homes_of, with_neighbours
from workbench.core.profile import Profile
from workbench.core.report import StepRecord
from workbench.methods.training.phases import PhasedJob
from workbench.methods.training.prepare import PreparedTraining
from workbench.planners import Problem
from workbench.runtime.flat_optimizer import STATE_KINDS
from workbench.runtime.snapshot import SMALL_BYTES
from workbench.schedules.moves import Move, moves
from workbench.simulator import makespan_s

_COPIES = 3
"""Number of copies of a device's state in memory: the last two snapshots, and the one in progress."""


def snapshots_s(rank_job: PhasedJob, steps: Sequence[StepRecord]) -> float:
    """Return the expected seconds for which a run's snapshots hold its devices up.

    Within an epoch a device hands its files to the system, which writes them while the device computes: only the next
    snapshot waits for them.  At the end of an epoch all wait until they are on the disk.
    """
    rule, num_steps = rank_job.snapshot, len(steps)
    disk_s = {cached: _on_disk_s(rank_job, cached=cached) for cached in {step.cached for step in steps}}
    in_memory_s = _in_memory_s(rank_job) if rule.to == "neighbour" else 0.0
    now_s = written_s = held_s = 0.0
    for done, step in enumerate(steps, start=1):
        now_s += step.predicted_s or 0.0
        ends_epoch = done == num_steps or steps[done].step == 0
        if not (ends_epoch or rule.is_due(done)):
            continue
        wait_s = in_memory_s
        if ends_epoch or rule.to == "disk":
            wait_s = max(0.0, written_s - now_s)
            written_s = now_s + wait_s + disk_s[step.cached]
            wait_s += disk_s[step.cached] if ends_epoch else 0.0
        now_s, held_s = now_s + wait_s, held_s + wait_s
    return held_s


def _on_disk_s(rank_job: PhasedJob, *, cached: bool) -> float:
    """Return the seconds until the slowest device has its part of a snapshot on its disk."""
    each_s = (
        rank_job.cluster.devices[rank].stored_s(
            len(STATE_KINDS) * sum(layer.trainable_bytes for layer in rank_job.layers[start:stop])
        )
        for rank, (start, stop) in rank_job.writers(cached=cached).items()
    )
    return max(each_s, default=0.0)


def _in_memory_s(rank_job: PhasedJob) -> float:
    """Return the expected seconds of one snapshot of a pipeline's stages in the devices' memory."""
    specs, homes = _homes(rank_job.plan, rank_job.profile)
    return _seconds(moves(with_neighbours(homes, sorted(rank_job.plan.busy_ranks)), homes, specs, rank_job.cluster))


class Substitution(NamedTuple):
    """The cost of replacing devices that leave: loading_s while all devices continue to train, and the pause of all
    devices.

    keeping_s: seconds until each device's state is also on the next device.  moving_s: seconds until the new device has
    it.
    """

    loading_s: float
    keeping_s: float
    moving_s: float

    @property
    def still_s(self) -> float:
        """Return how long all devices pause."""
        return self.keeping_s + self.moving_s


def substitution(cluster: Cluster, profile: Profile, before: Plan, after: Plan) -> Substitution:
    """Return the cost: weights come from each device's storage, the trainable state from the ring's next device after
    the last step.
    """
    specs, homes = _homes(before, profile)
    homes_before = with_neighbours(homes, sorted(before.busy_ranks))
    homes_left = {
        name: tuple(rank for rank in ranks if rank in after.busy_ranks) for name, ranks in homes_before.items()
    }
    new = [(rank, stage) for stage in after.stages for rank in stage.ranks if rank not in before.busy_ranks]
    loading_s = max((_loading_s(cluster, profile, rank, stage) for rank, stage in new), default=0.0)
    targets = {
        name: ranks for name, ranks in _homes(after, profile)[1].items() if homes_left[name]
    }  # if two neighbours leave: from the disk
    return Substitution(
        loading_s,
        _seconds(moves(homes_before, homes, specs, cluster)),
        _seconds(moves(targets, homes_left, specs, cluster)),
    )


def repartition_s(cluster: Cluster, profile: Profile, before: Plan, after: Plan) -> float:
    """Return the seconds that all devices pause to change the plan, if all of them stay.

    Devices whose layers change load them from their own storage; the trainable state comes from the device that trained
    it.
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
    return cluster.devices[rank].loaded_s(nbytes)


def _homes(plan: Plan, profile: Profile) -> tuple[dict[str, Spec], Homes]:
    """Return each layer's trainable tensors, and the ranks that train them."""
    trained = [len(STATE_KINDS) * layer.trainable_bytes for layer in profile.layers[0][: plan.num_layers]]
    specs = {f"layer {number}": Spec((nbytes,), "uint8") for number, nbytes in enumerate(trained)}
    return specs, homes_of(plan, {name: (layer,) for layer, name in enumerate(specs)})


def _seconds(rounds: Sequence[Move]) -> float:
    return sum(makespan_s(move.program) for move in rounds)


def with_room(profile: Profile, job: Job) -> Profile:
    """Return a profile with room for snapshots in memory: a copy of a small state that is being written to the disk, or
    copies of a device's own state, and the same amount for its neighbour's.
    """
    if job.snapshot_to != "neighbour":
        return replace(profile, most_copied_bytes=SMALL_BYTES)
    copied_bytes = 2 * _COPIES * len(STATE_KINDS)
    return replace(
        profile, optimizer_bytes_per_trainable_byte=profile.optimizer_bytes_per_trainable_byte + copied_bytes
    )


def planning_problem(prepared: PreparedTraining, profile: Profile, cluster: Cluster) -> Problem:
    """Return the problem of planning a job's mini-batches, with room for snapshots in memory."""
    job = prepared.job
    sizes = {"batch_size": job.batch_size, "micro_batches": job.micro_batches}
    lengths = {"sequence_length": prepared.typical_length, "memory_length": prepared.longest}
    return _problem(with_room(profile, job), cluster, **sizes, **lengths)


@once
def _problem(profile: Profile, cluster: Cluster, **sizes: Any) -> Problem:
    """Return a problem: the same to all who compare plans for it, so that they share its results (see core.once)."""
    return Problem(profile, cluster, **sizes)
