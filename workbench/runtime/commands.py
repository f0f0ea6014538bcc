"""Messages between the coordinator, the devices and a method's policy, the same for every method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

from msgspec import Meta

from workbench.core.cluster import Factors
from workbench.core.plan import Plan
from workbench.core.ranges import Fraction, Seconds, Slowing
from workbench.core.schedule import Ranks
from workbench.core.timeline import Span

End = Literal["finished", "paused", "lost"]
"""How a device's part of a generation ended: all work is done, it paused on request, or another device was lost."""

# Sent by the coordinator.


class Train(NamedTuple):
    """Form a group with the other members and run a job.  A device's rank in the group is its position among the
    members.
    """

    generation: int
    members: Ranks
    job: Any


class Prepare(NamedTuple):
    """Prepare for a job while other devices (or this one) are still working.  A generation with this device follows."""

    job: Any
    place: int


class Pause(NamedTuple):
    """Stop a generation's job before step `before`, or after the current step if the devices choose the step
    themselves.
    """

    generation: int
    before: int


class Abort(NamedTuple):
    """Abort the current work of a generation because a member was lost."""

    generation: int


class Slow(NamedTuple):
    """Slow down by `factor` from the next operation on (an injected fault).

    to: name of a device; then only messages to it are slowed down.
    """

    factor: float
    to: str = ""


class Probe(NamedTuple):
    """Measure this device's speed, without the others.  detail: data that the method needs for it."""

    detail: Any = None


class Order(NamedTuple):
    """Work that arrives while a generation's job is under way.  content: data that the method needs for it."""

    generation: int
    content: Any = None


class Ping(NamedTuple):
    """Reply with a Pong at once, even during a job."""


class Leave(NamedTuple):
    """Announce that this device leaves (an injected fault)."""


class Stop(NamedTuple):
    """End the job."""


# Sent by a device.  Messages of real devices are checked against these ranges when they are decoded.

Step = Annotated[int, Meta(ge=0, le=10**9)]
Clock = Annotated[float, Meta(ge=-1e12, le=1e12)]
Joules = Annotated[float, Meta(ge=-1e15, le=1e15)]


class Ready(NamedTuple):
    """The device accepts commands."""


class Prepared(NamedTuple):
    """The device is prepared for the requested job."""


class Pong(NamedTuple):
    """The reply to a Ping; real devices fill it in.

    charge: charge of the battery from 0 to 1; None: mains power.  is_throttled: heat slows it down.  meter_j: joules
    used since any moment.
    memory_bytes: memory that the run may use in all, without the memory of other programs; None: as described.
    """

    charge: Fraction | None = None
    is_throttled: bool = False
    meter_j: Joules | None = None
    memory_bytes: Annotated[int, Meta(ge=-(10**18), le=10**18)] | None = None


class Leaving(NamedTuple):
    """The device leaves as soon as its generation has paused."""


class Probed(NamedTuple):
    """The measured time of a probe, divided by the time that the device's profile predicts."""

    slowness: Slowing


MOST_SPANS = 600
"""Maximum number of spans of a device's step that is shown during a run; a step with more is not shown."""
ShownSpans = Annotated[tuple[Span, ...], Meta(max_length=MOST_SPANS)]


class Progress(TypedDict, total=False):
    """The values that a device publishes for the user.  Real devices send no other keys; each is missing where it has
    no meaning.
    """

    phase: Annotated[str, Meta(max_length=300)]
    epoch: Step
    step: Step
    num_steps: Step
    cached: bool
    samples: Step
    loss: float
    step_s: Clock | None
    busy_s: Clock | None
    used_bytes: Annotated[int, Meta(ge=0, le=10**18)] | None
    spans: ShownSpans


class Transfer(NamedTuple):
    """One end of a message in a step.

    pair: 'sender>receiver'.  time_s: the time at which its sender began, or at which its receiver had it, on one clock.
    expected_s: seconds by the cluster's description.
    """

    pair: Annotated[str, Meta(max_length=300)]
    value: Annotated[str, Meta(max_length=300)]
    time_s: Clock
    expected_s: Annotated[float, Meta(gt=0, le=1e9)]


class StepDone(NamedTuple):
    """Sent by every member after each step.

    content: the method's data, such as the step's record.

    busy_s: compute time, without delays caused by a host too busy to meet an emulated device's deadlines; 0: unknown.
    transfers: this member's ends of the step's long messages.
    """

    step: Step
    busy_s: Seconds
    content: Any = None
    transfers: tuple[Transfer, ...] = ()


class Ended(NamedTuple):
    """The device's result for a generation's job.

    part: the method's data; None if the device did not reach its first step.  why: the reason why it could not join
    the others, or ''.
    """

    generation: Step
    end: End
    part: Any = None
    why: str = ""


class Predictor(Protocol):
    """Predicts the step times of one plan."""

    def seconds(self, step: int) -> float:
        """Return the predicted seconds of a step."""

    def busy_s(self, step: int, place: int) -> float:
        """Return the predicted compute seconds of a member in a step, with the slowdown assumed by the plan."""


class Generation(NamedTuple):
    """A sequence of steps done by the same devices under the same plan.

    members: their ranks in the cluster.  plan, job, predictor: number the devices by their position among the members.
    job: the job that is sent to the members (see Policy.part).
    timeout_s: a member that is silent for longer counts as lost.
    prepares: the members that prepare for this generation while the previous one is still working.
    """

    number: int
    members: Ranks
    plan: Plan
    job: Any
    predictor: Predictor
    timeout_s: float = 20.0
    prepares: Ranks = ()


Parts = Mapping[int, Ended]
"""How each surviving member ended its generation, by rank in the cluster."""


def is_broken(parts: Parts, lost: frozenset[int]) -> bool:
    """Return whether a generation ended because a device was lost, be it one that the others could not reach."""
    return bool(lost) or any(ended.end == "lost" for ended in parts.values())


def is_finished(parts: Parts, lost: frozenset[int]) -> bool:
    """Return whether all members of a generation did all of its work."""
    return not lost and all(ended.end == "finished" for ended in parts.values())


class Policy(Protocol):
    """The method-specific decisions: how the work is divided, how a loss is handled, how steps are recorded."""

    @property
    def step(self) -> int:
        """Return the number of completed steps.  It may decrease when a generation ends with a loss."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps in the whole run."""

    @property
    def has_converged(self) -> bool:
        """Return whether the run ends before its last step, as soon as its devices have paused."""
        return False

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the next generation: the remaining steps as a job for some of the ready devices.

        number: the generation's number, starting at 1.  factors: each device's measured slowdown relative to its
        profile, by rank; each link's, by 'sender>receiver'; and the share of its memory that a device has for the run,
        by its name.
        Raises PlanError if the work does not fit on the devices.
        """

    def charged(self, charges: Mapping[str, float]) -> None:
        """Take the present charge of devices, from 0 to 1, by name, before the work of a leaving device is planned."""
        return

    def plan_ahead(self, number: int, ready: Ranks, factors: Factors) -> None:
        """Plan the next generation after a loss, while the other devices end their work (arguments: see `generation`).

        Once they have ended it, `generation` returns this plan.  By default it plans only then.
        """
        return

    def part(self, generation: Generation, place: int) -> Any:
        """Return the part of a generation's job that is sent to the member at `place`.  By default this is the whole
        job.
        """
        return generation.job

    def begun(self, generation: Generation) -> Generation:
        """Record that a planned generation begins, and return it with its starting state.  Not every planned generation
        begins.
        """

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Process a member's report on a step.  Every member may report on the same step."""

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Process another event of a device, such as its progress."""

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Decide which steps are done and which must be repeated, after all members have ended or were lost."""

    def differs(self, generation: Generation, ready: Ranks, factors: Factors) -> bool:
        """Return whether the devices' current speed calls for a new plan."""
