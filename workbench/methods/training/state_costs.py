"""The cost of keeping and moving the trained state: memory, and the seconds of a snapshot, a replaced device and
another plan.

A snapshot in memory travels over the devices' links, by the programs of moves that an executed run carries out.  One in
the run's folder does not: the devices write it to their disks and read it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec
from workbench.core.job import Job
from workbench.core.once import once
from workbench.core.plan import Homes, Plan, Stage, with_neighbours
from workbench.core.profile import Profile
from workbench.core.report import StepRecord
from workbench.methods.training.phases import PhasedJob
from workbench.methods.training.prepare import PreparedTraining
from workbench.planners import Problem
from workbench.runtime.flat_optimizer import STATE_KINDS
from workbench.runtime.snapshot import SMALL_BYTES, Snapshot
from workbench.schedules.moves import moves
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
    in_memory_s = (
        keeping_s(rank_job.cluster, rank_job.profile, trained_homes(rank_job.plan), rule)
        if rule.to == "neighbour"
        else 0.0
    )
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


def trained_homes(plan: Plan, *, cached: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the ranks that train each layer, by the name of the layer's state.

    cached: in epochs from an activation cache, in which all that have a share train all layers.
    """
    if cached and plan.cached is not None:
        return {_name(layer): plan.cached.ranks for layer in range(plan.num_layers)}
    return {_name(layer): tuple(stage.ranks) for stage in plan.stages for layer in range(stage.start, stage.stop)}


def doubled(homes: Homes) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have each layer's state after a snapshot in memory.  homes: see trained_homes."""
    return with_neighbours(homes, sorted({rank for ranks in homes.values() for rank in ranks}))


def keeping_s(cluster: Cluster, profile: Profile, homes: Homes, rule: Snapshot) -> float:
    """Return the seconds for which all devices wait for a snapshot at a pause.

    In memory: until each layer's state is also on the next of the devices that train.  On disks: until the slowest
    device has written; a small state is there since the last step.  homes: see trained_homes.
    """
    if rule.to == "neighbour":
        return _seconds(cluster, profile, doubled(homes), homes)
    if rule.is_small:
        return 0.0
    nbytes = _bytes_by_rank(profile, {name: ranks[:1] for name, ranks in homes.items()})
    return max(cluster.devices[rank].stored_s(count) for rank, count in nbytes.items())


def restoring_s(cluster: Cluster, profile: Profile, targets: Homes, homes: Homes, rule: Snapshot) -> float:
    """Return the seconds until each device has the state of the layers that it trains.

    targets: the ranks that train each layer from now on.  homes: the ranks that have each layer's state in memory;
    empty: the devices read it from their disks, a small one in the seconds in which they read the data of their job.
    """
    if homes:
        return _seconds(cluster, profile, targets, homes)
    if rule.is_small:
        return 0.0
    nbytes = _bytes_by_rank(profile, targets)
    return max(cluster.devices[rank].loaded_s(count) for rank, count in nbytes.items())


class Substitution(NamedTuple):
    """The cost of replacing devices that leave: loading_s while all devices continue to train, and the pause of all
    devices.

    keeping_s: seconds of the snapshot after the last step.  moving_s: seconds until the new device has the state.
    """

    loading_s: float
    keeping_s: float
    moving_s: float

    @property
    def still_s(self) -> float:
        """Return how long all devices pause."""
        return self.keeping_s + self.moving_s


IN_MEMORY = Snapshot(every=0, to="neighbour", is_small=False)
"""Snapshots only when the devices pause, in the memory of each device and of the next one."""


def substitution(
    cluster: Cluster, profile: Profile, before: Plan, after: Plan, rule: Snapshot = IN_MEMORY
) -> Substitution:
    """Return the cost: weights come from each device's storage, the trainable state from the snapshot after the last
    step, of which a device that leaves has taken its copy along.
    """
    homes = trained_homes(before)
    new = [(rank, stage) for stage in after.stages for rank in stage.ranks if rank not in before.busy_ranks]
    return Substitution(
        max((_loading_s(cluster, profile, rank, stage) for rank, stage in new), default=0.0),
        keeping_s(cluster, profile, homes, rule),
        restoring_s(cluster, profile, trained_homes(after), _left(homes, after, rule), rule),
    )


def repartition_s(cluster: Cluster, profile: Profile, before: Plan, after: Plan, rule: Snapshot) -> float:
    """Return the seconds that all devices pause to change the plan, if all of them stay.

    Devices whose layers change load them from their own storage; the trainable state comes from the snapshot after the
    last step.
    """
    homes = trained_homes(before)
    former = {rank: (stage.start, stage.stop) for stage in before.stages for rank in stage.ranks}
    loading_s = [
        _loading_s(cluster, profile, rank, stage)
        for stage in after.stages
        for rank in stage.ranks
        if former.get(rank) != (stage.start, stage.stop)
    ]
    kept_s = 0.0 if rule.every == 1 else keeping_s(cluster, profile, homes, rule)
    moved_s = restoring_s(cluster, profile, trained_homes(after), _left(homes, after, rule), rule)
    return max(loading_s, default=0.0) + kept_s + moved_s


def _left(homes: Homes, after: Plan, rule: Snapshot) -> Homes:
    """Return the devices of a plan that have each layer's state in memory; empty if some layer's is on none of them."""
    if rule.to != "neighbour":
        return {}
    left = {name: tuple(rank for rank in ranks if rank in after.busy_ranks) for name, ranks in doubled(homes).items()}
    return left if all(left.values()) else {}


def _loading_s(cluster: Cluster, profile: Profile, rank: int, stage: Stage) -> float:
    nbytes = sum(layer.frozen_bytes + layer.trainable_bytes for layer in profile.layers[0][stage.start : stage.stop])
    return cluster.devices[rank].loaded_s(nbytes)


def _name(layer: int) -> str:
    return f"layer {layer}"


def _state_bytes(profile: Profile) -> dict[str, int]:
    """Return the bytes of each layer's trained parameters and their moments, by the layer's name."""
    return {_name(number): len(STATE_KINDS) * layer.trainable_bytes for number, layer in enumerate(profile.layers[0])}


def _bytes_by_rank(profile: Profile, homes: Homes) -> dict[int, int]:
    nbytes, by_rank = _state_bytes(profile), dict[int, int]()
    for name, ranks in homes.items():
        for rank in ranks:
            by_rank[rank] = by_rank.get(rank, 0) + nbytes[name]
    return by_rank


def _seconds(cluster: Cluster, profile: Profile, targets: Homes, homes: Homes) -> float:
    """Return the seconds of the programs that bring each layer's state from its homes to its targets."""
    specs = {name: Spec((nbytes,), "uint8") for name, nbytes in _state_bytes(profile).items()}
    return sum(makespan_s(move.program) for move in moves(targets, homes, specs, cluster))


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
