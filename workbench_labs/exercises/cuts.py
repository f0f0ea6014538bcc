"""Lab 'Cut for unequal devices': a model's layers over devices of different speed and memory.

PAC+'s planner does the same (section V-A, Eq. 3-6: the slowest stage sets the pace).  The judge tries every cut; the
last exercise is judged by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

from workbench.core.proportions import proportional_parts
from workbench.core.timeline import Timeline
from workbench.schedules.pipeline import one_f_one_b_order
from workbench_labs.course.verdict import Exercise, Numbers, WrongAnswerError, comparison, require_number
from workbench_labs.exercises.groups import DIVIDE, TRACE
from workbench_labs.exercises.judging import (
    Function,
    code_exercise,
    counts_of,
    is_none,
    require_best,
    spans_of,
    within,
)
from workbench_labs.exercises.pipelines import BACKWARD, named, schedule_of, simulated

Seconds = Sequence[Sequence[float]]
"""[device][layer] -> seconds of the layer's forward pass on the device."""
CASES = 50
CLOSE = 1e-9
BEATEN = 0.02
"""By this share of a step's time a cut must be shorter to count as better."""


def every_cut(num_layers: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Yield how many layers each device gets, for every way to cut: contiguous, in order, at least one for each."""
    for ends in combinations(range(1, num_layers), num_devices - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *ends, num_layers)))


def stage_seconds(counts: Sequence[int], layer_s: Seconds) -> list[float]:
    """Return each device's seconds for its layers."""
    return [sum(device_s[start:stop]) for device_s, (start, stop) in zip(layer_s, spans_of(counts), strict=True)]


def stage_bytes(counts: Sequence[int], layer_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of each device's layers."""
    return [sum(layer_bytes[start:stop]) for start, stop in spans_of(counts)]


def makespan_s(counts: Sequence[int], layer_s: Seconds, num_micro_batches: int) -> float:
    """Return the seconds of a mini-batch in 1F1B with free links (simulated); a backward pass takes twice a forward."""
    return pipeline(counts, layer_s, num_micro_batches).makespan_s


def pipeline(counts: Sequence[int], layer_s: Seconds, num_micro_batches: int) -> Timeline:
    """Return a mini-batch in 1F1B with free links (simulated)."""
    seconds = stage_seconds(counts, layer_s)
    schedule = schedule_of(named(one_f_one_b_order), len(counts), num_micro_batches)
    return simulated(schedule, {"F": seconds, "B": [BACKWARD * stage_s for stage_s in seconds]})


def cut_of(answer: Any, num_layers: int, num_devices: int) -> tuple[int, ...]:
    """Return an answer as numbers of layers, by device.  Raises WrongAnswerError."""
    return counts_of(answer, "A cut", num_devices, total=num_layers, least=1)


def best_cut(layer_s: Seconds) -> tuple[int, ...]:
    """Return the cut with the fastest slowest stage, of all cuts."""
    return min(every_cut(len(layer_s[0]), len(layer_s)), key=lambda cut: max(stage_seconds(cut, layer_s)))


def _case(draws: Random, num_devices: int | None = None, num_layers: int | None = None) -> list[list[float]]:
    """Return seconds of layers that differ a little, on devices that differ much."""
    size = num_devices or draws.randint(2, 4)
    layers = [draws.randint(2, 6) for _ in range(num_layers or draws.randint(size, 9))]
    slowness = [draws.choice([1, 1.5, 2, 3, 4]) for _ in range(size)]
    return [[factor * seconds for seconds in layers] for factor in slowness]


def judge_cut(answer: Function, draws: Random) -> str:
    """Compare the slowest stage of a student's cut with that of the best of all cuts."""
    for _ in range(CASES):
        layer_s = _case(draws)
        size, layers = len(layer_s), len(layer_s[0])
        require_fastest(cut_of(answer(layer_s), layers, size), every_cut(layers, size), layer_s)
    return f"Its slowest stage is as fast as that of the best of all cuts, in {CASES} random clusters."


def require_fastest(counts: tuple[int, ...], possible: Iterable[tuple[int, ...]], layer_s: Seconds) -> None:
    """Raise WrongAnswerError if another cut has a faster slowest stage."""
    rows = [
        (device, " ".join(f"{seconds:g}" for seconds in layer_s[device]), counts[device], f"{stage_s:g}")
        for device, stage_s in enumerate(stage_seconds(counts, layer_s))
    ]
    case = comparison("The case", ("device", "seconds of each layer", "your layers", "its stage (s)"), rows)
    text = f"With your cut {list(counts)} the slowest stage"
    require_best(counts, possible, lambda cut: max(stage_seconds(cut, layer_s)), text, case)


def judge_cut_within(answer: Function, draws: Random) -> str:
    """Compare with the best of all cuts that fit; where none fits, None is right."""
    refused = 0
    for _ in range(CASES):
        layer_s = _case(draws)
        size, layers = len(layer_s), len(layer_s[0])
        layer_bytes = [draws.randint(1, 5) for _ in range(layers)]
        share = sum(layer_bytes) / size
        budgets = [max(1, round(share * draws.uniform(0.6, 1.8))) for _ in range(size)]
        possible = [cut for cut in every_cut(layers, size) if within(stage_bytes(cut, layer_bytes), budgets)]
        answered = answer(layer_s, layer_bytes, budgets)
        case = f"Layers of {layer_bytes} MB on devices with {budgets} MB"
        if is_none(answered, possible, case):
            refused += 1
            continue
        counts = cut_of(answered, layers, size)
        if counts not in possible:
            raise WrongAnswerError(f"{case}: your cut {list(counts)} needs {stage_bytes(counts, layer_bytes)} MB.")
        require_fastest(counts, possible, layer_s)
    return f"It is the best cut that fits, in {CASES} random clusters; in {refused} of them it says that none fits."


def judge_ways(answer: Any, numbers: Numbers) -> str:
    """Compare with the number of all cuts: (l - 1) over (d - 1)."""
    layers, devices = numbers["layers"], numbers["devices"]
    ways = sum(1 for _ in combinations(range(layers - 1), devices - 1))
    return require_number(
        answer, ways, 0, f"{devices - 1} ends among the {layers - 1} places between layers: {ways} ways."
    )


def judge_beat(answer: Any, numbers: Numbers) -> str:
    """Is the simulated mini-batch shorter than with any cut whose slowest stage is as fast as possible?"""
    layer_s, micro_batches = numbers["layer_s"], numbers["micro_batches"]
    counts = cut_of(answer, len(layer_s[0]), len(layer_s))
    own_s, balanced_s = makespan_s(counts, layer_s, micro_batches), _balanced_s(layer_s, micro_batches)
    if own_s > balanced_s * (1 - BEATEN):
        raise WrongAnswerError(
            f"With {list(counts)} a mini-batch takes {own_s:g} s; with the planner's cut {balanced_s:g} s."
        )
    return f"{own_s:g} s instead of {balanced_s:g} s: the slowest stage is not all that counts (simulated)."


def _balanced_s(layer_s: Seconds, num_micro_batches: int) -> float:
    """Return the least makespan among the cuts with the fastest slowest stage."""
    cuts = list(every_cut(len(layer_s[0]), len(layer_s)))
    slowest = {cut: max(stage_seconds(cut, layer_s)) for cut in cuts}
    least = min(slowest.values())
    return min(makespan_s(cut, layer_s, num_micro_batches) for cut in cuts if slowest[cut] <= least + CLOSE)


def _beatable(draws: Random) -> Numbers:
    """Return a case in which another cut is better than the balanced ones, and the equal cut is not."""
    while True:
        layer_s, micro_batches = _case(draws, num_devices=3, num_layers=7), 2
        best = min(makespan_s(cut, layer_s, micro_batches) for cut in every_cut(7, 3))
        balanced_s = _balanced_s(layer_s, micro_batches)
        equal_s = makespan_s(tuple(equal_cut(7, 3)), layer_s, micro_batches)
        if best < balanced_s * (1 - 2 * BEATEN) and equal_s >= balanced_s:
            return {"layer_s": layer_s, "micro_batches": micro_batches}


EXERCISES = (
    Exercise(
        name="ways",
        question="""**How many ways?** (2 points) A model of {layers} layers is cut over {devices} devices, in their \
order, with one layer or more for each. In how many ways can that be done?""",
        points=2,
        hints=(
            "Try it with 3 layers on 2 devices, then with 4 layers on 2 devices.",
            "A cut is a choice of the places between layers at which a new device begins.",
            "`math.comb` counts choices.",
        ),
        draw=lambda draws: {"layers": draws.randint(8, 24), "devices": draws.randint(3, 5)},
        judge=judge_ways,
    ),
    TRACE,
    code_exercise(
        name="cut",
        question="""**Write the planner** (10 points). `cut(layer_s)` gets the seconds of each layer on each device: \
`layer_s[device][layer]`. It returns how many layers each device gets, such as `[3, 1]`: contiguous, in the devices' \
order, one layer or more for each. The slowest device must be as fast as possible.""",
        points=10,
        hints=(
            "How fast can the first d devices be with the first n layers? Answer that for d = 1, then for d = 2.",
            "best[d][n] = the minimum over k of max(best[d - 1][k], seconds of layers k to n on device d - 1).",
            "Keep for each (d, n) the k that was best, and walk back from the end.",
        ),
        judge=judge_cut,
        stand_in=best_cut,
    ),
    code_exercise(
        name="cut_within",
        question="""**With memory** (10 points). `cut_within(layer_s, layer_bytes, budgets)` gets also each layer's \
bytes and each device's budget. It returns the best cut that fits, or `None` if none fits.""",
        points=10,
        hints=(
            "Which of the two lines of your planner decides what a device may take?",
            "A range of layers that does not fit takes infinitely long.",
            "If the best of all is infinite, no cut fits.",
        ),
        judge=judge_cut_within,
    ),
    Exercise(
        name="beat",
        question="""**Beat it** (5 points). With few micro-batches the slowest stage is not all that counts. Find a \
cut of `layer_s = lab.numbers("beat")["layer_s"]` with a shorter mini-batch ({micro_batches} micro-batches, 1F1B, free \
links) than the planner's. `cutting.makespan_s(counts, layer_s, {micro_batches})` is the simulator.""",
        points=5,
        hints=(
            "Look at the Gantt chart of the planner's cut. Who waits while the pipeline fills and drains?",
            "There are only 15 cuts: `cutting.every_cut(7, 3)`.",
            "`min(..., key=...)` finds the best one.",
        ),
        draw=_beatable,
        judge=judge_beat,
    ),
    DIVIDE,
)


def equal_cut(num_layers: int, num_devices: int) -> list[int]:
    """Return a cut that gives each device as many layers as the others, or one more."""
    return list(proportional_parts(num_layers, (1,) * num_devices))
