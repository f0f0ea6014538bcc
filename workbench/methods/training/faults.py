"""Simulate a whole run, and one with faults (loss, leave, slowdown, return): the real coordinator with devices in
virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from workbench.core.cluster import Cluster, Factors
from workbench.core.errors import DeviceLostError
from workbench.core.plan import Homes
from workbench.core.report import EpochRecord, StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Planned, Prediction, ignore
from workbench.methods.common.session import transfers_of
from workbench.methods.training.heating import Stretch, gets_hot, heated, with_seconds
from workbench.methods.training.interrupted import same_batches
from workbench.methods.training.phases import PhasedJob, Plans, RankJob
from workbench.methods.training.state_costs import doubled, keeping_s, restoring_s, snapshots_s, trained_homes
from workbench.methods.training.step_policy import StartedGeneration, StepPolicy, timetable_at
from workbench.methods.training.timetable import Timetable
from workbench.runtime import commands as c
from workbench.runtime.commands import Generation, Parts, is_broken
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.fleet import fleet_of
from workbench.runtime.virtual_devices import VirtualDevices
from workbench.runtime.virtual_work import EMULATED, PREPARE_S, VirtualWork, VirtualWorld
from workbench.simulator import makespan_s

CHANGES = "changes of devices"
"""The name of the seconds in which steps were lost or repeated, devices met, and state was moved."""

Links = tuple[tuple[str, float], ...]
"""How many times slower some links are, by 'sender>receiver'."""


@dataclass(frozen=True, slots=True, eq=False)
class VirtualJob:
    """The steps of a generation on virtual devices.  begins_s: seconds before the first step."""

    job: RankJob
    first_step: int
    last_step: float
    timeout_s: float
    begins_s: float


class _Work(VirtualWork):
    """Steps of training on virtual devices.

    cluster: the described devices.  devices: those that do the work; they know which links are slow.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.names = cluster.names
        world = VirtualWorld() if cluster.is_real else EMULATED
        curves = [device.sustained for device in cluster.devices]
        self.devices = VirtualDevices(cluster.world_size, self, world, curves=curves)
        self._slowed = lru_cache(maxsize=None)(slowed)

    def _links(self) -> Links:
        return tuple((f"{self.names[rank]}>{to}", factor) for (rank, to), factor in self.devices.slow_links.items())

    def begin(self, job: VirtualJob, now_s: float) -> tuple[float, tuple[()]]:
        return job.begins_s, ()

    def seconds(self, job: VirtualJob, step: int, factors: Factors) -> float:
        return self._at_present(job, factors).seconds(step)

    def _at_present(self, job: VirtualJob, factors: Factors) -> Timetable:
        """Return a job's steps at the devices' present speeds."""
        return self._slowed(job, tuple(factors.values()), self._links())

    def until_free_s(self, job: VirtualJob, place: int, step: int, done: float, factors: Factors) -> float:
        return self._at_present(job, factors).until_free_s(step, place, done)

    def done(self, job: VirtualJob, place: int, step: int, factor: float) -> c.StepDone:
        links, unslowed = self._links(), (1.0,) * job.job.cluster.world_size
        transfers = (
            transfers_of(job.job.cluster, self._slowed(job, unslowed, links).messages(step, place)) if links else ()
        )
        return c.StepDone(step, factor * self._slowed(job, unslowed).busy_s(step, place), transfers=transfers)

    def heating_s(self, job: VirtualJob, place: int, step: int, factor: float) -> float:
        unslowed = (1.0,) * job.job.cluster.world_size
        return factor * self._slowed(job, unslowed).heating_s(step, place)

    def part(self, job: VirtualJob, place: int, end: c.End, stop: int) -> int:
        return stop


def slowed(virtual: VirtualJob, factors: tuple[float, ...], links: Links = ()) -> Timetable:
    """Return a job's steps with their seconds.  factors: how many times slower each device is."""
    slower: dict[int | str, float] = {place: factor for place, factor in enumerate(factors) if factor != 1}
    slower |= links
    return timetable_at(range(len(factors)), virtual.job, slower)


class VirtualPolicy(StepPolicy):
    """A StepPolicy whose devices only count steps.

    clock: returns the virtual seconds.
    """

    clock: Callable[[], float]

    def part(self, generation: Generation, place: int) -> VirtualJob:
        """Return the job as it is, because virtual devices read no part of it (see Policy)."""
        return generation.job if isinstance(generation.job, VirtualJob) else super().part(generation, place)


class VirtualTraining(VirtualPolicy):
    """A VirtualPolicy of a method that backpropagates."""

    def __init__(self, method: Plans, planned: Planned[Any], first: RankJob) -> None:
        super().__init__(method, planned, first, ignore)
        # The step of the last snapshot in memory, and the devices that keep each layer's state.
        self._snapshot: tuple[int, Homes] = 0, {}
        self._kept_s = 0.0  # the seconds of the snapshot at the last pause

    def begun(self, generation: Generation) -> Generation:
        """Begin a generation with the steps that it repeats, and the transfers before them (see Policy)."""
        job, timetable = generation.job, generation.predictor
        assert isinstance(timetable, Timetable)
        epoch, begin = self._timetable.epoch_of(self._step)
        begins_s = 0.0
        if self.generations:
            former = self.last
            # A step of a cached epoch changes if the devices' shares of the samples change.
            if begin and not same_batches(former.job.plan, job.plan, cached=timetable.is_cached(epoch)):
                begin = 0
            places = {
                former.members.index(rank): place
                for place, rank in enumerate(generation.members)
                if rank in former.members
            }
            programs = replace(job, start_epoch=epoch, start_step=begin).taken_over(former.job, places)
            begins_s = sum(makespan_s(program) for program in programs)
            begins_s += self._kept_s + self._restored_s(former, generation)
            if self._reads_layers(former, generation, is_cached=timetable.is_cached(epoch)):
                begins_s += PREPARE_S
        self._step = timetable.number(epoch, begin)
        self._begin(generation)
        if job.missing:
            self.say(job.missing)
        last_step = min(timetable.num_steps, replace(job, start_epoch=epoch, start_step=begin).until)
        return generation._replace(job=VirtualJob(job, self._step, last_step, generation.timeout_s, begins_s))

    def _restored_s(self, former: StartedGeneration, generation: Generation) -> float:
        """Return the seconds until the devices of a generation have the trained state of the next step.

        What moves within a plan counts in the prediction without faults.
        """
        job, members = generation.job, generation.members
        if not self._step or (former.members, former.job.plan) == (members, job.plan):
            return 0.0
        epoch, begin = self._timetable.epoch_of(self._step)
        targets = trained_homes(job.plan.at(self._step), cached=self._timetable.is_cached(epoch))
        step, kept = self._snapshot
        homes = {name: tuple(members.index(rank) for rank in ranks if rank in members) for name, ranks in kept.items()}
        in_memory = begin > 0 and step == self._step and all(homes.values())
        return restoring_s(job.cluster, job.profile, targets, homes if in_memory else {}, job.snapshot)

    def _reads_layers(self, former: StartedGeneration, generation: Generation, *, is_cached: bool) -> bool:
        """Return whether a device that stays has to read layers; one that comes has prepared itself.

        From a cache they are read to compute a lost device's activations again.  Layers that move within a plan count
        in the prediction without faults.
        """
        if is_cached:
            return not set(former.members) <= set(generation.members)
        if former.job.plan == generation.job.plan:
            return False

        def layers(job: RankJob, place: int, step: int) -> tuple[int, int] | None:
            plan = job.plan.at(step)
            index = plan.stage_of(place)
            return None if index is None else (plan.stages[index].start, plan.stages[index].stop)

        staying = [rank for rank in generation.members if rank in former.members]
        before = [layers(former.job, former.members.index(rank), max(0, self._step - 1)) for rank in staying]
        now = [layers(generation.job, generation.members.index(rank), self._step) for rank in staying]
        return any(new is not None and new != old for old, new in zip(before, now, strict=True))

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Take a snapshot at a pause, and go back to the last one after a loss (see Policy)."""
        super().ended(generation, parts, lost)
        rule, job, broken = generation.job.job.snapshot, generation.job, is_broken(parts, lost)
        epoch, begin = self._timetable.epoch_of(self._step)
        begins = self._timetable.number(epoch, 0)
        last = rule.last(self._step) if broken else self._step
        homes: Homes = {}
        if last > job.first_step:
            cached = self._timetable.is_cached(self._timetable.epoch_of(last - 1)[0])
            homes = trained_homes(job.job.plan.at(last - 1), cached=cached)
        self._kept_s = 0.0
        if homes and begin and not broken and not rule.is_due(self._step):
            self._kept_s = keeping_s(job.job.cluster, job.job.profile, homes, rule)
        if rule.to == "disk":
            self._step = max(last, begins)
            return
        if homes:
            kept_by = doubled(homes)
            self._snapshot = last, {name: [generation.members[place] for place in kept_by[name]] for name in kept_by}
        step, kept = self._snapshot
        kept = {name: tuple(rank for rank in ranks if rank not in lost) for name, ranks in kept.items()}
        self._snapshot = step, kept
        if broken:
            self._step = max(step if all(kept.values()) else 0, begins)


def under_policy(prediction: Prediction, policy: VirtualPolicy) -> Prediction:
    """Return a prediction with its job's faults: each step's seconds and samples, the cost of the faults, and the
    events in words.  phases_s gets the seconds of CHANGES.  If no device is left, it ends with the last finished step.

    The other devices first end the operation that they are doing.  A device without an address starts as an emulated
    one does, one with an address as over SSH (see VirtualWorld).
    """
    first, work = policy.first, _Work(policy.cluster)
    policy.clock = work.devices.now_s
    fleet = fleet_of(work.devices, first.cluster, first.job)
    coordinator = Coordinator(fleet=fleet, policy=policy, say=policy.say, adapts=policy.adapts)
    try:
        coordinator.run()
    except DeviceLostError as error:
        policy.notes.append(str(error))
    taken_s = {step: seconds for step, seconds in work.devices.taken_s.items() if step < policy.step}
    finished_steps = tuple(
        _as_done(step, number, policy) for number, step in enumerate(prediction.steps[: policy.step])
    )
    epochs = tuple(epoch for epoch in prediction.epochs if epoch.epoch in {step.epoch for step in finished_steps})
    return replace(
        with_seconds(replace(prediction, steps=finished_steps, epochs=epochs), taken_s),
        phases_s=prediction.phases_s | {CHANGES: coordinator.passed_s - sum(taken_s.values())},
        recoveries=coordinator.recoveries,
        notes=(*prediction.notes, *policy.notes),
    )


def _as_done(step: StepRecord, number: int, policy: StepPolicy) -> StepRecord:
    """Return a step with the samples of those devices that did it."""
    by = policy.generation_at(number)
    return step if by is None else replace(step, samples=by.timetable.samples(number))


def predict(rank_job: PhasedJob) -> Prediction:
    """Return every step's simulated seconds, the timeline of a middle step of each phase, and the seconds between
    phases.  The steps of devices that get hot take as long as they do then, in the timelines too.
    """
    steps: list[StepRecord] = []
    epochs: list[EpochRecord] = []
    timelines: dict[str, Timeline] = {}
    shown: dict[str, int] = {}  # the step of each timeline
    phases_s: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    for phase in rank_job.phases():
        predictor = rank_job.predictor(phase)
        nbytes |= phase.nbytes
        for epoch in phase.epochs:
            planned = phase.steps(epoch)
            if epoch == max(phase.epochs.start, rank_job.begins_at[0]):
                middle = rank_job.traced_step(epoch, len(planned))
                title = f"Step {middle + 1} of {'a' if phase.cached else 'the'} {phase.name}"
                shown[f"{phase.name}, predicted"] = len(steps) + middle
                timelines[f"{phase.name}, predicted"] = predictor.timeline(planned[middle], title=title)
            epoch_records = predictor.records(epoch, planned)
            steps += epoch_records
            epochs.append(
                EpochRecord(
                    epoch=epoch, cached=phase.cached, seconds=sum(step.predicted_s or 0.0 for step in epoch_records)
                )
            )
        for name, programs in phase.moves().items():
            phases_s[name] = sum(makespan_s(program) for program in programs)
    if held_s := snapshots_s(rank_job, steps):
        phases_s["snapshots"] = held_s
    if rank_job.changes_s:
        phases_s["changes of the plan"] = rank_job.changes_s
    prediction = Prediction(
        steps=tuple(steps), epochs=tuple(epochs), timelines=timelines, phases_s=phases_s, bytes=nbytes
    )
    cluster = rank_job.cluster
    if not gets_hot(cluster):
        return prediction
    stretch = Stretch(Timetable(rank_job), tuple(range(cluster.world_size)), range(len(steps)))
    timetables = heated(cluster, [stretch])
    taken_s = {step: timetable.seconds(step) for step, timetable in timetables.items()}
    hot = {name: timetables[step].timeline(step, title=timelines[name].title) for name, step in shown.items()}
    return replace(with_seconds(prediction, taken_s), timelines=hot)
