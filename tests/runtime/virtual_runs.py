"""A policy that counts steps, its devices in virtual time, and what is told of a run on them; every command is
checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.clusters import devices
from tests.plans import staged_plan
from workbench.core.cluster import Cluster, Device
from workbench.core.device_faults import Fault, FaultSchedule, parse_faults
from workbench.core.errors import PlanError
from workbench.runtime.commands import Ended, Generation, Parts, Ping, Pong, StepDone, Train
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.fleet import Fleet
from workbench.runtime.virtual_devices import VirtualDevices
from workbench.runtime.virtual_work import VirtualWork, VirtualWorld

WORK_S = 0.4  # of a step on one device


@dataclass(frozen=True)
class Job:
    shares: tuple[float, ...]
    first_step: int
    last_step: int
    timeout_s: float = 5.0


class Work(VirtualWork):
    """Each member does its share of a step.  A part is (steps done by its job, the step in which it was lost or -1)."""

    def busy_s(self, job: Job, place: int) -> float:
        return WORK_S * job.shares[place]

    def seconds(self, job: Job, step: int, factors: Mapping[int, float]) -> float:
        return max(factor * self.busy_s(job, place) for place, factor in factors.items())

    def done(self, job: Job, place: int, step: int, factor: float) -> StepDone:
        return StepDone(step, factor * self.busy_s(job, place), (step, place))

    def part(self, job: Job, place: int, end: str, stop: int) -> Any:
        return tuple(range(job.first_step, stop))


@dataclass(frozen=True)
class Predicted:
    job: Job
    factors: tuple[float, ...]

    def seconds(self, step: int) -> float:
        return max(self.busy_s(step, place) for place in range(len(self.job.shares)))

    def busy_s(self, step: int, place: int) -> float:
        return self.factors[place] * Work().busy_s(self.job, place)


@dataclass
class Trainer:
    """A policy of training with state that goes back to the last snapshot at a loss.  at_least: devices that the work
    needs.

    only: those that it wants by itself, whatever their pace.  idle: those that stand by for one that leaves on notice.
    converges_at: the step before which it finds that the work is done.
    """

    total: int
    at_least: int = 1
    snapshot_every: int = 5
    converges_at: int | None = None
    only: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    step: int = 0
    history: list[int] = field(default_factory=list)  # steps in the order in which they were done
    generations: list[Generation] = field(default_factory=list)
    losses: list[tuple[int, int]] = field(default_factory=list)  # (steps done at the loss, step that was gone back to)
    planned_ahead: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # number and ready devices

    @property
    def num_steps(self) -> int:
        return self.total

    @property
    def has_converged(self) -> bool:
        return self.converges_at is not None and self.step >= self.converges_at

    def charged(self, charges: Mapping[str, float]) -> None:
        assert all(0 <= charge <= 1 for charge in charges.values())

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> Generation:
        members = self.only or tuple(rank for rank in ready if factors.get(rank, 1.0) < 10 and rank not in self.idle)
        prepares = self.only
        if self.idle and self.generations and not self.losses:
            prepares = tuple(rank for rank in self.idle if rank in ready)[
                : len(set(self.generations[-1].members) - set(ready))
            ]
            members = tuple(sorted((*members, *prepares)))
        if len(members) < self.at_least:
            raise PlanError("A plan was asked for.", f"{len(members)} devices are too few.", "Add one.")
        speeds = [1 / factors.get(rank, 1.0) for rank in members]
        job = Job(tuple(speed / sum(speeds) for speed in speeds), self.step, self.total)
        plan = staged_plan((1, dict.fromkeys(range(len(members)), 1)), method="toy")
        return Generation(
            number, members, plan, job, Predicted(job, tuple(1 / speed for speed in speeds)), job.timeout_s, prepares
        )

    def plan_ahead(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> None:
        assert len(self.generations) == number - 1, "the generation has begun"
        assert ready, "there is nobody to plan for"
        self.planned_ahead.append((number, ready))

    def part(self, generation: Generation, place: int) -> Job:
        return generation.job

    def begun(self, generation: Generation) -> Generation:
        assert generation.job.first_step == self.step, "a stale plan was begun"
        self.generations.append(generation)
        return generation

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        self._know(done.step)

    def _know(self, step: int) -> None:
        assert step <= self.step, f"step {step} came before {self.step}"
        if step == self.step:
            self.history.append(step)
            self.step += 1

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        raise AssertionError(f"nobody says {event}")

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        assert set(parts) | lost == set(generation.members) and not set(parts) & lost
        for ended in parts.values():
            assert isinstance(ended, Ended)
            for step in ended.part:
                self._know(step)
        if self.has_converged:
            self.step = self.total
        elif lost or any(ended.end == "lost" for ended in parts.values()):
            last = max(generation.job.first_step, self.step - self.step % self.snapshot_every)
            self.losses.append((self.step, min(last, self.step)))
            self.step = min(last, self.step)

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        return generation.members != self.only


@dataclass
class Told:
    policy: Trainer
    devices: Checked
    coordinator: Coordinator
    said: list[str]

    def sent(self, kind: type) -> list[tuple[float, int, Any]]:
        """Return the commands of a kind, each with its seconds and its device."""
        return [command for command in self.devices.commands if isinstance(command[2], kind)]


def prepared(
    policy: Trainer,
    *faults: Fault,
    world_size: int = 4,
    seed: int | None = None,
    adapts: bool = False,
    described: tuple[Device, ...] = (),
    **more: Any,
) -> Told:
    devices = Checked(world_size, Work(), VirtualWorld(seed=seed))
    messages: list[str] = []
    fleet = Fleet(devices, [f"d{rank}" for rank in range(world_size)], FaultSchedule(faults), described=described)
    return Told(
        policy, devices, Coordinator(fleet=fleet, policy=policy, say=messages.append, adapts=adapts, **more), messages
    )


def coordinate(policy: Trainer, *faults: Fault, **settings: Any) -> Told:
    """Run to the end or to a DeviceLostError; every command is checked."""
    outcome = prepared(policy, *faults, **settings)
    try:
        outcome.coordinator.run()
    finally:
        outcome.devices.check(policy)
    return outcome


class Checked(VirtualDevices):
    """Devices that know which of them the coordinator was told are gone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone: set[int] = set()
        self.starved: dict[int, tuple[float, float]] = {}  # from when to when a busy host lets a device answer nothing
        self.cpu_share = 0.3
        self.health: dict[int, Callable[[float], Pong]] = {}  # what a device says of itself, by the time
        self.late: list[tuple[float, float]] = []  # from when to when a busy host lets the coordinator wait

    def cpu_s(self, rank: int) -> float:
        return self.cpu_share * self.now_s() if rank in self.starved else 0.0

    def news(self, timeout_s: float) -> list[Any]:
        assert self.now_s() < 5000, "it hangs"
        if self.late and self.now_s() > self.late[0][0]:
            until_s = self.late.pop(0)[1]
            while self._agenda.next_s <= until_s:
                self._agenda.step()
            self._agenda.now_s = until_s
        result = super().news(timeout_s)
        for rank, kind, _ in result:
            if kind in ("died", "ended"):
                self.gone.add(rank)
        return result

    def start(self, rank: int) -> None:
        self.gone.discard(rank)
        super().start(rank)

    def command(self, rank: int, message: Any) -> None:
        assert rank not in self.gone, f"{rank} is told {message}, though it is known to have gone"
        begin_s, end_s = self.starved.get(rank, (0.0, 0.0))
        if isinstance(message, Ping) and begin_s <= self.now_s() < end_s:
            self._agenda.at(end_s, lambda: super(Checked, self).command(rank, message))
        else:
            super().command(rank, message)

    def _tell(self, rank: int, event: Any) -> None:
        super()._tell(
            rank, self.health[rank](self.now_s()) if isinstance(event, Pong) and rank in self.health else event
        )

    def check(self, policy: Trainer) -> None:
        """Every generation went to its members alone, after the one before had ended on all that live."""
        for generation in policy.generations:
            sent = [
                rank
                for _, rank, message in self.commands
                if isinstance(message, Train) and message.generation == generation.number
            ]
            assert sorted(sent) == sorted(generation.members)


DEVICES = devices(4, bytes_per_s=1e8)


def faults(text: str) -> tuple[Fault, ...]:
    return parse_faults(text, Cluster(name="four", devices=DEVICES))


def members(told: Told) -> list[tuple[int, ...]]:
    return [generation.members for generation in told.policy.generations]
