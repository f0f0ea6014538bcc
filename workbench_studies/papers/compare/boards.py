"""When do two (four) boards beat one?  The best plan of all methods over one board, by model size and link, simulated.

Every board is the catalogue's; costs are computed from sizes and its figures, with all weights in 8 bits.  Training is
one mini-batch; prefill is one sequence of the same length, decode one more token after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from workbench.core.catalogue import load_device
from workbench.core.cluster import MEGABIT_BYTES, Cluster, Link
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.step_parts import Term
from workbench.core.timeline import Timeline
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners import INFERENCE_SYSTEMS
from workbench.methods.galaxy_plus.prices import Programs
from workbench.methods.step_parts import parts_s
from workbench.planners import Problem, TrainingProblem, candidates, standalone
from workbench.planners.fixed import data_parallel
from workbench.profiler.analytic import NumberFormat, Technique, TechniqueSizes, analytic_profile
from workbench.profiler.descriptions import describe
from workbench.simulator import simulate
from workbench.simulator.steps import mini_batches, step_program
from workbench_studies.papers.result import Progress

Task = Literal["train", "prefill", "decode"]
TASKS: tuple[Task, ...] = ("train", "prefill", "decode")
MODELS = (
    "all-MiniLM-L6-v2",
    "DistilBERT",
    "SmolLM2-135M",
    "GPT2-Medium",
    "GPT2-Large",
    "TinyLlama-1.1B",
    "OPT-2.7B",
    "Llama2-7B",
)
MBIT_PER_S = (20, 50, 100, 200, 500, 1000, 2500)
COUNTS = (2, 4)
WIRELESS_UP_TO = 200
"""Mbit/s: slower links are Wi-Fi's, with its latency, faster ones a cable's."""
WIRELESS_S, CABLE_S = 2e-3, 1e-4
TOKENS, BATCH = 128, 16
BOARD = "rpi-5"
WEIGHT_BYTES_PER_S = 8e9
"""[assumed] rate at which the board reads weights, which bounds a single token: half of the 17 GB/s of its memory."""
INT8 = NumberFormat(matrix_bytes=1.0, table_bytes=1.0)
TECHNIQUES: tuple[Technique, ...] = ("lora", "parallel_adapters")
NEVER_DRAINED = "lora, never drained"
IN_FLIGHT = 8
"""Mini-batches of a pipeline that never drains, of which the later half is timed."""
LESS = FP32_BYTES / INT8.matrix_bytes


class Way(NamedTuple):
    """A way to do a task: its name, and its seconds and timeline on any links.

    seconds: on the given links.  program: that of a mini-batch on any links; None if the way takes several programs or
    does not train.
    """

    name: str
    replay: Callable[[Cluster], tuple[float, Timeline]]
    seconds: float = math.inf
    program: Callable[[Cluster], Program] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of the picture.  seconds: those of the best way on `count` boards; None: nothing fits.  alone_s: those on
    one board; None: it has too little memory.
    term: what decides the best way's seconds.
    """

    task: Task
    model: str
    parameters: int
    count: int
    mbit_per_s: int
    way: str = ""
    seconds: float | None = None
    alone_s: float | None = None
    term: Term | None = None

    @property
    def speedup(self) -> float | None:
        """Return the seconds on one board over those on several."""
        return self.alone_s / self.seconds if self.alone_s and self.seconds else None


def boards(count: int, mbit_per_s: float, board: str = BOARD) -> Cluster:
    """Return equal boards of the catalogue on one kind of link."""
    latency_s = WIRELESS_S if mbit_per_s <= WIRELESS_UP_TO else CABLE_S
    link = Link(bytes_per_s=mbit_per_s * MEGABIT_BYTES, latency_s=latency_s)
    devices = tuple(replace(load_device(board, name=f"board {rank + 1}"), link=link) for rank in range(count))
    return Cluster(name=f"{count} boards", devices=devices)


def point(task: Task, model: str, count: int, mbit_per_s: int) -> Point:
    """Return the best way on some boards over the best on one."""
    described = describe(model)
    unplanned = Point(
        task=task,
        model=model,
        parameters=described.params,
        count=count,
        mbit_per_s=mbit_per_s,
        alone_s=_alone_s(task, model),
    )
    planned = list(_ways(task, model, boards(count, mbit_per_s)))
    if not planned:
        return unplanned
    best = min(planned, key=lambda way: way.seconds)
    return replace(unplanned, way=best.name, seconds=best.seconds, term=_term(best, boards(count, mbit_per_s)))


@lru_cache
def _alone_s(task: Task, model: str) -> float | None:
    planned = list(_ways(task, model, boards(1, MBIT_PER_S[-1])))
    return min(way.seconds for way in planned) if planned else None


def _ways(task: Task, model: str, cluster: Cluster) -> Iterator[Way]:
    if task == "train":
        yield from _sensible_ways(trainings(model, cluster), cluster)
    elif task == "prefill" or describe(model).kind == "decoder":
        yield from _sensible_ways(_answers(model, cluster, is_token=task == "decode"), cluster)


@lru_cache
def _training_profile(model: str, technique: Technique, count: int, board: str) -> Profile:
    sizes = TechniqueSizes(predicts_words=describe(model).kind == "decoder")
    return analytic_profile(
        model,
        boards(count, MBIT_PER_S[0], board),
        technique=technique,
        sequence_lengths=(TOKENS,),
        numbers=INT8,
        sizes=sizes,
    )


def trainings(model: str, cluster: Cluster) -> Iterator[Way]:
    """Yield every way to train a mini-batch on all boards that fits, and on one board the way without others."""
    count = cluster.world_size
    for technique in TECHNIQUES:
        costs = _training_profile(model, technique, count, cluster.devices[0].model)
        for micro_batches in (1,) if count == 1 else (1, 4, 16):
            problem = Problem(costs, cluster, sequence_length=TOKENS, batch_size=BATCH, micro_batches=micro_batches)
            for name, plan in _training_plans(problem):
                program = partial(_program, problem, plan)
                yield Way(f"{technique}, {name}", partial(_step, program), program=program)
                if (
                    technique == "lora"
                    and len(plan.stages) > 1
                    and all(len(stage.shares) == 1 for stage in plan.stages)
                ):
                    undivided = replace(plan, micro_batch_size=BATCH, num_micro_batches=1)
                    yield Way(NEVER_DRAINED, partial(_pace, costs, undivided))


def _training_plans(problem: TrainingProblem) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that fit: one board, data parallel, and the best of stages and groups."""
    makers: dict[str, Callable[[TrainingProblem], Plan]] = {"one board": standalone}
    if problem.cluster.world_size > 1:
        makers = {"stages": lambda problem: candidates(problem, objective="bottleneck")[0]}
        if problem.micro_batches == 1:
            makers["data parallel"] = data_parallel
    for name, make in makers.items():
        try:
            yield name, make(problem)
        except PlanError:
            continue


def _program(problem: TrainingProblem, plan: Plan, cluster: Cluster) -> Program:
    return step_program(replace(problem, cluster=cluster), plan)


def _step(program: Callable[[Cluster], Program], cluster: Cluster) -> tuple[float, Timeline]:
    timeline = simulate(program(cluster), memory=False)
    return timeline.makespan_s, timeline


def _pace(costs: Profile, plan: Plan, cluster: Cluster) -> tuple[float, Timeline]:
    """Return the seconds of a mini-batch in an asynchronous pipeline that is full."""
    short, timeline = (
        mini_batches(costs, cluster, plan, tokens=TOKENS, count=count) for count in (IN_FLIGHT // 2, IN_FLIGHT)
    )
    return (timeline.makespan_s - short.makespan_s) / (IN_FLIGHT - IN_FLIGHT // 2), timeline


def _answers(model: str, cluster: Cluster, *, is_token: bool) -> Iterator[Way]:
    profile = _inference_profile(model, cluster.world_size)
    problem = Problem(profile, cluster, sequence_length=TOKENS, memory_length=TOKENS + 1)
    for name, make in INFERENCE_SYSTEMS.items():
        if (name == "local") == (cluster.world_size == 1) and not (is_token and name == "sequence_parallel"):
            try:
                plan = replace(make(problem), length=TOKENS)
            except PlanError:
                continue
            yield Way(name, partial(_answer, profile, plan, is_token))


@lru_cache
def _inference_profile(model: str, count: int) -> InferenceProfile:
    described = describe(model)
    # A weight in 8 bits takes a quarter of the bytes, and of the time to read it.
    rates = {"weight_bytes_per_s": LESS * WEIGHT_BYTES_PER_S, "vocabulary": described.vocab}
    once = {"weight_bytes_per_s": None}  # an encoder reads its weights once for a whole text
    described_profile = analytic_inference(
        model, boards(count, MBIT_PER_S[0]), **rates if described.kind == "decoder" else once
    )
    stacks = tuple(
        replace(
            stack,
            **{name: round(getattr(stack, name) / LESS) for name in ("unit_bytes", "column_bytes", "layer_bytes")},
        )
        for stack in described_profile.stacks
    )
    ends = {name: round(getattr(described_profile, name) / LESS) for name in ("first_bytes", "last_bytes")}
    return replace(described_profile, stacks=stacks, **ends)


def _answer(profile: InferenceProfile, plan: InferencePlan, is_token: bool, cluster: Cluster) -> tuple[float, Timeline]:
    programs = Programs(cluster, profile.stacks, profile)
    prepared = programs.token(plan, (TOKENS,)) if is_token else programs.sequence(plan, (TOKENS,))
    timeline = simulate(prepared.program, memory=False)
    return timeline.makespan_s, timeline


def _sensible_ways(ways: Iterator[Way], cluster: Cluster) -> Iterator[Way]:
    """Leave out ways that use one board where there are several."""
    for way in ways:
        seconds, timeline = way.replay(cluster)
        busy = sum(timeline.busy_s(rank) > 0 for rank in range(timeline.world_size))
        if busy > 1 or cluster.world_size == 1:
            yield way._replace(seconds=seconds)


def _term(way: Way, cluster: Cluster) -> Term:
    """Return what decides a way's seconds (see methods.step_parts)."""
    step_s, timeline = way.replay(cluster)
    parts = parts_s(timeline, step_s, cluster, lambda other: way.replay(other)[0])
    return max(parts, key=lambda term: parts[term])


def points(notify: Progress, models: Sequence[str] = MODELS) -> list[Point]:
    """Return every point of the picture."""
    figure_points = []
    for model in models:
        notify(model)
        figure_points += [point(task, model, count, rate) for task in TASKS for count in COUNTS for rate in MBIT_PER_S]
    return figure_points
