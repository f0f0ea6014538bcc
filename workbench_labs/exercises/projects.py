"""Lab 'Kit day': a planner of the student's own, judged on clusters that nobody has seen, and run on real boards.

It knows what PAC+'s planner knows (section V-A): seconds and bytes of each layer on each device, memory, the links.  A
device may be left out.  The judge simulates every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import Any

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.timeline import Timeline
from workbench.schedules.pipeline import Slot, gpipe_order, one_f_one_b_order
from workbench.simulator import simulate
from workbench.widgets.tables import Table
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    require_number,
)
from workbench_labs.exercises.cuts import every_cut, stage_bytes, stage_seconds
from workbench_labs.exercises.judging import code_exercise, counts_of, within
from workbench_labs.exercises.pipelines import BACKWARD, CROSSING, named, program_on, schedule_of

Planner = Callable[..., Sequence[int]]
"""(layer_s, layer_bytes, budgets, send_s, micro_batches) -> layers of each device; see Case."""
CASES = 20
MEAN, WORST = 1.05, 1.3
"""A planner's mini-batch over that of the best cut: in the mean of all cases, and in the worst one."""
FASTEST_DEVICE_FLOPS, DEVICE_BYTES = 1e9, 1_000_000_000
"""The devices of a case, which are only simulated: their seconds are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The input of a planner.

    layer_s: [device][layer], seconds of a micro-batch's forward pass.  layer_bytes: what a device keeps of each layer.
    budgets: bytes of each device.  send_s: seconds of a message between neighbours.
    """

    layer_s: list[list[float]]
    layer_bytes: list[int]
    budgets: list[int]
    send_s: float
    micro_batches: int

    def fits(self, counts: Sequence[int]) -> bool:
        """Return whether each device has room for its layers."""
        return within(stage_bytes(counts, self.layer_bytes), self.budgets)

    @property
    def plans(self) -> list[tuple[int, ...]]:
        """Return every plan that fits."""
        return [plan for plan in every_plan(len(self.layer_bytes), len(self.budgets)) if self.fits(plan)]

    @property
    def best(self) -> tuple[int, ...]:
        """Return the plan with the shortest simulated mini-batch."""
        return min(self.plans, key=lambda plan: self.pipeline(plan).makespan_s)

    def ask(self, planner: Planner) -> tuple[int, ...]:
        """Return a planner's answer: layers of each device.  Raises WrongAnswerError if it is none, or does not fit."""
        answer = planner(self.layer_s, self.layer_bytes, self.budgets, self.send_s, self.micro_batches)
        counts = counts_of(answer, "A plan", len(self.budgets), total=len(self.layer_bytes))
        if not self.fits(counts):
            raise WrongAnswerError(
                f"Layers of {self.layer_bytes} MB on devices with {self.budgets} MB: your plan {list(counts)} does not "
                "fit."
            )
        return counts

    def pipeline(self, counts: Sequence[int], order: Callable[..., list[Slot]] = one_f_one_b_order) -> Timeline:
        """Return a mini-batch on the devices that have layers, in their order, with the links (simulated)."""
        ranks = [rank for rank, count in enumerate(counts) if count]
        by_rank = stage_seconds(counts, self.layer_s)
        seconds = [by_rank[rank] for rank in ranks]
        link = Link(bytes_per_s=CROSSING.nbytes / self.send_s)
        devices = tuple(
            Device(name=f"device {rank}", flops_per_s=FASTEST_DEVICE_FLOPS, memory_bytes=DEVICE_BYTES, link=link)
            for rank in ranks
        )
        cluster = Cluster(name="a case", devices=devices)
        schedule = schedule_of(named(order), len(ranks), self.micro_batches)
        backward_s = [BACKWARD * stage_s for stage_s in seconds]
        return simulate(program_on(cluster, schedule, seconds, backward_s, message_s=0.0), memory=False)


def every_plan(num_layers: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Yield how many layers each device gets, for every set of devices and every way to cut."""
    for size in range(1, min(num_layers, num_devices) + 1):
        for used in combinations(range(num_devices), size):
            for counts in every_cut(num_layers, size):
                by_rank = dict(zip(used, counts, strict=True))
                yield tuple(by_rank.get(rank, 0) for rank in range(num_devices))


def draw_case(draws: Random) -> Case:
    """Return a case in which some plan fits: unequal devices, links from fast to slow, little memory."""
    while True:
        size = draws.randint(2, 4)
        layers = [draws.randint(2, 6) / 100 for _ in range(draws.randint(size, 8))]
        layer_bytes = [draws.randint(1, 5) for _ in layers]
        share = sum(layer_bytes) / size
        case = Case(
            layer_s=[[factor * seconds for seconds in layers] for factor in draws.choices([1, 1.5, 2, 3, 4], k=size)],
            layer_bytes=layer_bytes,
            budgets=[max(1, round(share * draws.uniform(0.7, 3.0))) for _ in range(size)],
            send_s=draws.choice([0.002, 0.02, 0.1, 0.3]),
            micro_batches=draws.choice([2, 4, 8]),
        )
        if case.plans:
            return case


def judge_planner(answer: Planner, draws: Random) -> str:
    """Compare a planner's simulated mini-batches with those of the best plans that fit."""
    ratios: list[tuple[float, Case, tuple[int, ...], tuple[int, ...]]] = []
    for _ in range(CASES):
        case = draw_case(draws)
        counts = case.ask(answer)
        best = case.best
        ratio = case.pipeline(counts).makespan_s / case.pipeline(best).makespan_s
        ratios.append((ratio, case, counts, best))
    worst = max(ratios, key=lambda one: one[0])
    mean = sum(ratio for ratio, *_ in ratios) / CASES
    if mean > MEAN or worst[0] > WORST:
        raise WrongAnswerError(
            f"In {CASES} clusters your plans take {mean:.3f} times as long as the best ones in the mean, and "
            f"{worst[0]:.2f} times in the worst; {MEAN} and {WORST} are asked for.",
            _worst_table(*worst),
        )
    return f"In {CASES} random clusters your plans take {mean:.3f} times as long as the best of all plans (simulated)."


def _worst_table(ratio: float, case: Case, counts: Sequence[int], best: Sequence[int]) -> Table:
    rows = [
        (rank, " ".join(f"{1e3 * seconds:g}" for seconds in case.layer_s[rank]), case.budgets[rank], count, other)
        for rank, (count, other) in enumerate(zip(counts, best, strict=True))
    ]
    title = (
        f"The worst case: a message takes {1e3 * case.send_s:g} ms, {case.micro_batches} micro-batches, layers of "
        f"{' '.join(map(str, case.layer_bytes))} MB"
    )
    return comparison(title, ("device", "ms of each layer", "MB", "your layers", "best"), rows)


def two_devices(numbers: Numbers) -> tuple[float, float]:
    """Return the seconds of a mini-batch in GPipe on one device, and on two of the same speed (simulated)."""
    layers = numbers["layers"]
    case = Case(
        layer_s=[[1e-3 * numbers["layer_ms"]] * layers] * 2,
        layer_bytes=[1] * layers,
        budgets=[layers] * 2,
        send_s=1e-3 * numbers["send_ms"],
        micro_batches=numbers["micro_batches"],
    )
    halves = (layers // 2, layers // 2)
    return case.pipeline((layers, 0), gpipe_order).makespan_s, case.pipeline(halves, gpipe_order).makespan_s


def judge_two_devices(answer: Any, numbers: Numbers) -> str:
    """Compare with the simulated mini-batches of one device and of two."""
    alone_s, both_s = two_devices(numbers)
    why = f"One device takes {1e3 * alone_s:g} ms, two take {1e3 * both_s:g} ms (simulated)."
    return require_number(answer, alone_s / both_s, 0.005, why)


def _two_devices(draws: Random) -> Numbers:
    """Return a pipeline of two stages whose messages are shorter than its operations, so that only two are seen."""
    layers, layer_ms = 2 * draws.randint(2, 6), draws.randint(4, 9)
    send_ms = draws.randint(layers * layer_ms // 6 + 1, layers * layer_ms // 4)
    return {"layers": layers, "layer_ms": layer_ms, "send_ms": send_ms, "micro_batches": draws.choice([4, 6, 8])}


def _best_plan(*arguments: Any) -> tuple[int, ...]:
    """Return the best of all plans (simulated) for the arguments of a planner."""
    case = Case(**dict(zip(Case.__dataclass_fields__, arguments, strict=True)))
    return case.best


EXERCISES = (
    Exercise(
        name="two_devices",
        question="""**Is a second device worth it?** (3 points) A model of {layers} equal layers trains on one device: \
{layer_ms} ms for the forward pass of a layer and a micro-batch, twice that for the backward pass. There are \
{micro_batches} micro-batches. Now the second half of the layers moves to a second device of the same speed. All \
forward passes come first, then all backward passes (GPipe); a message takes {send_ms} ms each way, while the devices \
compute on. How many times as fast is a mini-batch then, to 0.5 %?""",
        points=3,
        hints=(
            "Draw both devices on paper for two micro-batches. When does the first begin its first backward pass?",
            "One device: micro-batches x layers x 3 x milliseconds. Two: each stage takes half of it, but the pipeline "
            "fills and drains: one turn more.",
            "(M + 1) (F + B) + 2 C for two stages, where F and B are those of a stage and C is a message.",
        ),
        draw=_two_devices,
        judge=judge_two_devices,
    ),
    code_exercise(
        name="planner",
        question="""**Your planner** (15 points). `planner(layer_s, layer_bytes, budgets, send_s, micro_batches)` \
returns how many layers each device gets, in the devices' order, such as `[3, 0, 1]`; 0 leaves a device out. \
`layer_s[device][layer]` are the seconds of a micro-batch's forward pass (a backward pass takes twice as \
long), `send_s` those of a message between neighbours. The layers of a device must fit into its budget. In 20 random \
clusters the simulated mini-batch (1F1B) shall take at most 1.05 times as long as the best possible one in the mean, \
and 1.3 times in the worst.""",
        points=15,
        hints=(
            "What limits a long pipeline: the slowest stage, or the slowest link? What does a short one add?",
            "A formula in three parts is nearly right: filling, steady state, draining (PAC+, Eq. 5 to 7). A message "
            "is in all three.",
            "Try every set of devices with every cut that fits, and take the one whose formula is smallest; or carry "
            "your event loop of lab 02 over.",
        ),
        judge=judge_planner,
        stand_in=_best_plan,
    ),
)
