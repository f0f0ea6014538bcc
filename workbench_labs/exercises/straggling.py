"""Lab 'Break it': a rule that says which devices a service leaves out (Galaxy+, section III-E).

The judge serves streams on the workbench's virtual devices, which break by scripts that nobody has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from statistics import median
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import Fault
from workbench.methods.galaxy_plus.serving.records import ServingReport
from workbench.methods.galaxy_plus.serving.rescheduler import Rescheduler, compare
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_number,
)
from workbench_labs.exercises.judging import Function, code_exercise, require_close
from workbench_labs.inference_problem import Service, described_problem, settings_for
from workbench_labs.ruling import Rule, ruled_by

CASES = 40
REQUESTS = 200
NOISE = 0.05
ENOUGH = 0.97
"""A rule's goodput must be this share of the better of two: never leaving out, and the workbench's own rule."""
TOKENS, LAYERS = 284, 2


class World(Service):
    """The lab's service (see Service)."""

    __slots__ = ()

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.problem.cluster.world_size

    def slowed_s(self, rank: int, factor: float) -> float:
        """Return the seconds of a request if a device is so many times slower and all wait for it."""
        return self.times(self.first, {rank: factor}).seconds

    def without_s(self, rank: int) -> float:
        """Return the seconds of a request if a device is left out."""
        return self.times(self.planner(tuple(device for device in range(self.size) if device != rank)), {}).seconds

    def serve(
        self, faults: Sequence[Fault], *, decided_by: type[Rescheduler], reaction: str = "exclude", seed: int = 0
    ) -> ServingReport:
        """Return the report of REQUESTS requests, back to back (simulated)."""
        settings = settings_for(self.request_s, reaction=reaction)
        return self.stream(faults, settings, num_requests=REQUESTS, noise=NOISE, seed=seed, decided_by=decided_by)


@cache
def world() -> World:
    """Return the lab's service: two layers of DistilBERT on the paper's environment B, by the catalogue."""
    problem = described_problem("DistilBERT", load_cluster("galaxy-env-b"), length=TOKENS)
    stacks = tuple(replace(stack, num_layers=LAYERS) for stack in problem.profile.stacks)
    return World.of(replace(problem, profile=replace(problem.profile, stacks=stacks)))


def scripts(draws: Random) -> dict[str, tuple[Fault, ...]]:
    """Return three scripts of faults, in seconds of the lab's service: long, mild, and short ones again and again."""
    whole_s = REQUESTS * world().request_s

    def slow(rank: int, start: float, end: float, factor: float) -> Fault:
        return Fault(kind="slow", rank=rank, start=start * whole_s, end=end * whole_s, factor=round(factor, 2))

    begin, rank = draws.uniform(0.18, 0.25), draws.randrange(2)
    return {
        "long": (slow(rank, begin, begin + 0.6, draws.uniform(4.5, 6.0)),),
        "mild": (slow(draws.randrange(2), draws.uniform(0.1, 0.15), 2.0, draws.uniform(1.2, 1.3)),),
        "short": tuple(
            slow(draws.randrange(2), turn / 11, turn / 11 + 0.032, draws.uniform(5.0, 6.0)) for turn in range(1, 11)
        ),
    }


def goodput(report: ServingReport) -> float:
    """Return the answers in the time that an undisturbed request takes: at most 1."""
    return REQUESTS * world().request_s / report.end_s


@cache
def undecided(seed: int) -> tuple[tuple[str, tuple[Fault, ...], int, float], ...]:
    """Return for each of a seed's scripts its name, its faults, the noise's seed, and the goodput that is possible."""
    draws, cases = Random(seed), []
    for name, faults in scripts(draws).items():
        noise = draws.getrandbits(16)
        never = world().serve(faults, decided_by=Rescheduler, reaction="none", seed=noise)
        ours = world().serve(faults, decided_by=Rescheduler, seed=noise)
        cases.append((name, faults, noise, max(goodput(never), goodput(ours))))
    return tuple(cases)


def judge_rule(answer: Rule, draws: Random) -> str:
    """Serve three streams under hidden scripts, and compare with never leaving out and with the workbench's rule."""
    seed, rows = draws.getrandbits(32), []
    usual_ms = [draws.uniform(5.0, 40.0) for _ in range(world().size)]
    for name, faults, noise, possible in undecided(seed):
        report = world().serve(faults, decided_by=ruled_by(answer, usual_ms), seed=noise)
        reached = goodput(report)
        counts = (len(report.events_of("excluded")), len(report.events_of("readmitted")))
        rows.append((name, f"{reached:.2f}", f"{possible:.2f}", *counts))
        if reached < ENOUGH * possible:
            columns = ("script", "yours", "possible", "left out", "taken back")
            raise WrongAnswerError(
                f"With the script '{name}' the goodput is {reached:.2f}; {possible:.2f} are possible.",
                comparison("Goodput (simulated)", columns, rows),
            )
    return (
        "Goodput "
        + ", ".join(f"{reached} of {possible} ({name})" for name, reached, possible, *_ in rows)
        + " (simulated)."
    )


def judge_slowness(answer: Function, draws: Random) -> str:
    """Compare with the workbench's comparison of devices, block by block."""
    for _ in range(CASES):
        size, blocks = draws.randint(3, 5), draws.choice([3, 5])
        expected = [[draws.uniform(1, 5) for _ in range(blocks)] for _ in range(size)]
        factors, error = [draws.choice([1, 1, 2, 4]) for _ in range(size)], draws.uniform(0.5, 2)
        measured = [
            [seconds * factor * error * draws.uniform(0.9, 1.1) for seconds in device_s]
            for device_s, factor in zip(expected, factors, strict=True)
        ]
        by_rank = [
            {rank: dict(enumerate(device_s)) for rank, device_s in enumerate(table)} for table in (measured, expected)
        ]
        true = list(compare(*by_rank).values())
        cells = [[" ".join(f"{each:.2f}" for each in device_s) for device_s in table] for table in (measured, expected)]
        columns = {"device": range(size), "seconds by block, measured": cells[0], "expected": cells[1]}
        case = f"{size} devices, {blocks} blocks."
        require_close(answer(measured, expected), true, "The slowness", case, given=columns)
    return f"It is the workbench's, in {CASES} cases."


def break_even(rank: int, percent: float) -> float:
    """Return how many times slower a device must be until waiting takes `percent` longer than leaving it out."""
    least_s, low, high = (1 + percent / 100) * world().without_s(rank), 1.0, 32.0
    while high / low > 1.005:
        factor = (low * high) ** 0.5
        low, high = (factor, high) if world().slowed_s(rank, factor) < least_s else (low, factor)
    return low


def judge_break_even(answer: Any, numbers: Numbers) -> str:
    """Is a request that waits as much longer than one without the device as required, to a twentieth?"""
    waits_s, least_s = (
        world().slowed_s(numbers["device"], max(1.0, number_of(answer))),
        world().without_s(numbers["device"]),
    )
    if number_of(answer) < 1 or abs(waits_s / least_s / (1 + numbers["percent"] / 100) - 1) > 0.05:
        raise WrongAnswerError(f"Then a request takes {waits_s:.3f} s; without the device it takes {least_s:.3f} s.")
    return f"Waiting takes {waits_s:.3f} s, leaving it out {least_s:.3f} s (simulated)."


def judge_outage(answer: Any, numbers: Numbers) -> str:
    """Compare with silence, plan, reading and the repeated request, one after the other."""
    reads_s = numbers["megabytes"] / numbers["megabytes_per_s"]
    expected = numbers["silence_s"] + numbers["plan_s"] + reads_s + numbers["request_s"]
    parts = f"{numbers['silence_s']:g} + {numbers['plan_s']:g} + {reads_s:g} + {numbers['request_s']:g}"
    return require_number(answer, expected, 0.005, f"{parts} = {expected:g} s.")


def three_in_a_row(times_ms: list[float | None], history: list[list[float | None]]) -> list[int]:
    """Return the devices that were slow in the last three reports."""
    lately = [*history, times_ms][-3:]

    def is_slow(device: int) -> bool:
        usual = median(round_ms[device] or 0.0 for round_ms in [*history, times_ms][:3])
        return len(lately) == 3 and all((round_ms[device] or 0.0) > 1.8 * usual for round_ms in lately)

    return [device for device in range(len(times_ms)) if is_slow(device)]


EXERCISES = (
    Exercise(
        name="break_even",
        question="""**When does waiting cost more?** (5 points) A new plan pays only if it saves enough. \
How many times slower must device {device} be until a request that waits for it takes {percent} % longer than one \
without it? `world.slowed_s({device}, 2.0)` are the seconds of a request if it is two times slower, \
`world.without_s({device})` those without it. Your answer may be 5 % off, in seconds.""",
        points=5,
        hints=(
            "At 1.0 waiting is faster, at 8.0 it is not. Try something between.",
            "Halve the range again and again: a loop of ten steps.",
            "You look for the factor at which `world.slowed_s` is `world.without_s` and the per cent more.",
        ),
        draw=lambda draws: {"device": draws.randrange(3), "percent": draws.choice([15, 20, 25, 30, 40])},
        judge=judge_break_even,
    ),
    code_exercise(
        name="slowness",
        question="""**Who is slow?** (5 points) `slowness(measured, expected)` gets the seconds of each device for \
each block, `[device][block]`, as reported and as the plan expects them. For each block: divide measured by expected, \
then by the median of this quotient over the *other* devices. A device's slowness is the median of its blocks (their \
number is odd). So a cost model that is wrong for all makes no straggler.""",
        points=5,
        hints=(
            "First a table of quotients, measured over expected.",
            "For device d and block b: quotient[d][b] over the median of quotient[e][b] for all e but d.",
            "`statistics.median` takes any list; the last step is a median over blocks.",
        ),
        judge=judge_slowness,
    ),
    code_exercise(
        name="rule",
        question="""**Write the rule** (15 points). `rule(times_ms, history)` is asked at each report. `times_ms[d]` \
are the milliseconds of device d's work, `None` if it does not answer; `history` are the former reports, oldest first. \
Return the devices to leave out now, as a list. Each device has a usual time of its own; no fault begins before the \
fourth report, so `history[0]` shows it. Reports are off by some 5 %. A device that is left out is still tried now and \
then.

Three services have hidden scripts. One device is slow for long, then recovers (*long*). One is 1.2 to 1.3 times \
slower all the time (*mild*). The two fast ones are slow for an instant, again and again (*short*). Each time your \
goodput must be 97 % of what is possible: the better of never leaving out and the workbench's own rule.""",
        points=15,
        hints=(
            "Find with `world` where waiting takes as long as leaving out: about 1.5 times slower. Below it waiting is "
            "better.",
            "One slow report may be a spike. How long does a device have to be slow before you believe it? And the "
            "devices that you left out: when do they come back?",
            "Leave d out if in each of the last three reports it took more than 1.8 times its usual time. The same "
            "condition takes it back.",
        ),
        judge=judge_rule,
        stand_in=three_in_a_row,
    ),
    Exercise(
        name="outage",
        question="""**A frozen device** (2 points). It stops answering in the middle of a request. The portal \
notices its silence after {silence_s} s, plans in {plan_s} s, the others read {megabytes} MB at {megabytes_per_s} \
MB/s, and the request of {request_s} s begins again. How many seconds after the freeze is it \
answered, to 0.5 %?""",
        points=2,
        hints=(
            "What happens one after the other?",
            "Which of these would a killed device spare you?",
            "Silence, plan, reading, request.",
        ),
        draw=lambda draws: {
            "silence_s": draws.choice([2, 3, 5]),
            "plan_s": draws.choice([0.1, 0.2, 0.4]),
            "megabytes": draws.choice([30, 45, 60]),
            "megabytes_per_s": draws.choice([30, 60]),
            "request_s": draws.choice([0.5, 0.8, 1.2]),
        },
        judge=judge_outage,
    ),
)
