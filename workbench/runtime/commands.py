"""What a coordinator, the devices and a method's policy tell each other, whatever the method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from workbench.core.plan import Plan
from workbench.core.report import Recovery

End = Literal["finished", "paused", "lost"]
"""How a device's part of a generation ended: all work is done; it paused as it was told; or another device was lost."""

# From the coordinator.


class Train(NamedTuple):
    """Form a group with the other members and do a job; a device's rank in it is its place among the members."""

    generation: int
    members: tuple[int, ...]
    job: Any


class Prepare(NamedTuple):
    """Make ready for such a job, alone, while others (or it itself) still work: a generation with this device follows."""

    job: Any
    place: int


class Pause(NamedTuple):
    """End a generation's job before step `before`, or, if the devices agree on another among themselves, after the one under way."""

    generation: int
    before: int


class Abort(NamedTuple):
    """Give up what is under way in a generation: a member of it has gone."""

    generation: int


class Slow(NamedTuple):
    """From the next operation on be `factor` times slower than you are (an injected fault)."""

    factor: float


class Probe(NamedTuple):
    """Measure your pace, alone.  detail: what the method needs for it."""

    detail: Any = None


class Ping(NamedTuple):
    """Give a sign of life, whatever you are at."""


class Leave(NamedTuple):
    """Announce that you leave (an injected fault)."""


class Stop(NamedTuple):
    """End."""


# From a device.


class Ready(NamedTuple):
    """It takes commands."""


class Prepared(NamedTuple):
    """It is ready for the job that it was told to prepare for."""


class Pong(NamedTuple):
    """A sign of life."""


class Leaving(NamedTuple):
    """It leaves as soon as its generation has paused."""


class Probed(NamedTuple):
    """What a probe took, over what it takes the device by its profile."""

    slowness: float


class StepDone(NamedTuple):
    """Told after every step by every member.  content: of the method's own, such as the step's record.

    busy_s: spent computing, without the lateness of a host that is too busy to keep an emulated device's deadlines; 0: unknown.
    """

    step: int
    busy_s: float
    content: Any = None


class Ended(NamedTuple):
    """What a device did of a generation's job.  part: of the method's own; None if it did not come to its first step."""

    generation: int
    end: End
    part: Any = None


class Predictor(Protocol):
    """What the steps of one plan are expected to take."""

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        ...

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step in which a member computes, as slow as it was planned with."""
        ...


def whole(job: Any, place: int) -> Any:
    """Return all of a job, whichever member gets it."""
    return job


class Generation(NamedTuple):
    """Steps that the same devices do under the same plan.

    members: their ranks in the cluster.  plan, job, predictor: number the devices by their places among the members.
    job: what the members are sent.  own(job, place): what of it the member at a place gets.
    timeout_s: after so long members give up one that is silent.
    prepares: where it follows another, these of its members make ready for it while the other still works.
    """

    number: int
    members: tuple[int, ...]
    plan: Plan
    job: Any
    predictor: Predictor
    timeout_s: float = 20.0
    prepares: tuple[int, ...] = ()
    own: Callable[[Any, int], Any] = whole


Parts = Mapping[int, Ended]
"""By rank in the cluster, how each member that was not lost ended its generation."""


class Policy(Protocol):
    """What is particular to a method: how the work is divided, what a loss costs, what is known of a step."""

    @property
    def step(self) -> int:
        """Return how many steps are done; it may fall when a generation has ended with a loss."""
        ...

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        ...

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> Generation:
        """Return the steps that are left as a job of some of the devices that are ready.

        number: of the generation, the first is 1.  factors: how many times slower than its profile each device was found to be.
        Raises PlanError if the work does not fit on them.
        """
        ...

    def begun(self, generation: Generation) -> Generation:
        """Take note that a generation begins, and return it with what it goes on from; not every one that was planned begins."""
        ...

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Take what a member says of a step; of one step every member may say it."""
        ...

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Take another event of a device, such as its progress."""
        ...

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Settle what is done, and what is repeated, after all members have ended or were lost."""
        ...

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        """Return whether the devices' pace asks for another plan than a generation's."""
        ...


@dataclass(kw_only=True)
class Change:
    """Something that befalls a device, and what follows, in seconds of the devices' clock.

    what: such as 'kill beta'.  step: how many were done; known: how many by the time it was noticed.  begun_s: of the generation that it
    led to; stopped_s: when the last member had done the last step before; first: generation and step that came first; resumed_s: when
    the last member had done it.  The rest: see core.report.Recovery.
    """

    what: str
    step: int
    since_s: float
    noticed_s: float | None = None
    begun_s: float | None = None
    stopped_s: float = 0.0
    first: tuple[int, int] | None = None
    resumed_s: float | None = None
    step_s: float = 0.0
    stood_still_s: float = 0.0
    known: int = 0
    repeated: int = 0

    @property
    def recovery(self) -> Recovery | None:
        """Return what it cost; None if no step followed."""
        if self.noticed_s is None or self.begun_s is None or self.resumed_s is None:
            return None
        return Recovery(
            what=self.what,
            step=self.step,
            noticed_s=self.noticed_s - self.since_s,
            planned_s=self.begun_s - self.noticed_s,
            resumed_s=self.resumed_s - self.begun_s,
            step_s=self.step_s,
            stood_still_s=self.stood_still_s,
            repeated=self.repeated,
            noticed_steps=max(0, self.known - self.step),
        )
