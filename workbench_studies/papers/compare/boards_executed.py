"""Points of boards.py that were executed: the same model, task and links on emulated boards, over one of them.

An emulated board has a whole core of the host, whose speed is near that of the catalogue's board.  Costs are measured,
so the executed speedup is also compared with the simulation of the same run.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from workbench import experiment
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.job import Job, Mode
from workbench.core.report import Report, median_s
from workbench.core.run_folder import scratch_folder
from workbench_studies.papers.compare.boards import BATCH, TOKENS, Task, boards
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Row, Settings

ENCODER, DECODER = "all-MiniLM-L6-v2", "SmolLM2-135M"
STEPS, REQUESTS = 5, 6
"""Mini-batches of a training, and requests of a run that answers; the first one is left out of the median."""
TEXTS = 256
"""In the file, of which a tenth is for validation."""
PROMPT_TOKENS, NEW_TOKENS = 8, 16
"""Tokens of a request for a text; a token's seconds are those of the request divided by its new tokens."""
PARADIGMS = (
    *(("hybrid", micro_batches) for micro_batches in (1, 4, 16)),
    ("data_parallel", 1),
    *(("pipeline_parallel", micro_batches) for micro_batches in (4, 16)),
)
"""Paradigms of Parallel Adapters, with numbers of micro-batches."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "Galaxy+": {},
    "Algorithm 1": {"planner": "algorithm_1"},
    **{name: {"system": name} for name in ("galaxy", "sequence_parallel", "edgeshard", "megatron_lm")},
}
"""Options of Galaxy+ and its baselines by name."""
WORDS = ("a", "film", "story", "scene", "plot", "is", "was", "not", "so", "very", "good", "bad", "long", "short")


class Place(NamedTuple):
    """A point of the picture."""

    task: Task
    model: str
    num_boards: int
    mbit_per_s: int


PLACES = (
    *(Place("train", ENCODER, count, rate) for count, rate in product((2, 4), (20, 100, 1000))),
    *(Place("prefill", ENCODER, count, rate) for count, rate in ((2, 100), (2, 1000), (4, 1000))),
    Place("prefill", DECODER, 2, 1000),
    *(Place("decode", DECODER, 2, rate) for rate in (200, 1000)),
)
QUICK = (Place("train", "tiny-bert", 2, 100),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measured seconds of a mini-batch, an answer or a token, and the same simulated from measured costs.

    in_pace: whether the host kept pace with the emulated boards.
    """

    way: str
    seconds: float
    simulated_s: float
    dilation: float
    in_pace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place of the picture, executed on its boards and on one."""

    place: Place
    run: Run
    alone: Run

    @property
    def speedup(self) -> float:
        """Return the executed seconds on one board over those on several."""
        return self.alone.seconds / self.run.seconds

    @property
    def simulated(self) -> float:
        """Return the simulated ones."""
        return self.alone.simulated_s / self.run.simulated_s

    @property
    def in_pace(self) -> bool:
        """Return whether the host kept pace in both runs."""
        return self.run.in_pace and self.alone.in_pace


def emulated_boards(count: int, mbit_per_s: float) -> Cluster:
    """Return the picture's boards, each with a whole core of the host as its processor."""
    return boards(count, mbit_per_s).with_devices(host_share=1.0)


def write_texts(path: Path, count: int) -> None:
    """Write texts that are longer than they may be, so that each has as many tokens as the picture's."""
    draw = random.Random(0)
    lines = (
        json.dumps({"text": " ".join(draw.choice(WORDS) for _ in range(TOKENS + 32)), "label": number % 2})
        for number in range(count)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def ways(place: Place, texts: Path) -> Iterator[tuple[str, Job]]:
    """Yield the ways to do a place's task, of which the fastest in simulation is executed."""
    shape = Job(
        model=place.model, task="classification", data=str(texts), max_length=TOKENS, epochs=1, test_samples=REQUESTS
    )
    if place.task == "train":
        training = replace(
            shape, batch_size=BATCH, train_samples=STEPS * BATCH, validation_samples=BATCH, method="pac_plus"
        )
        for paradigm, micro_batches in PARADIGMS if place.num_boards > 1 else [("standalone", 1)]:
            yield (
                f"Parallel Adapters, {paradigm.replace('_', ' ')}, {micro_batches}",
                replace(training, micro_batches=micro_batches, options={"paradigm": paradigm}),
            )
        return
    options: dict[str, Any] = {"compare": 0}
    if place.task == "decode":
        shape, options = replace(shape, max_length=PROMPT_TOKENS), options | {"generate": NEW_TOKENS}
    for name, system in SYSTEMS.items() if place.num_boards > 1 else [("local", {"system": "local"})]:
        if not (place.task == "decode" and name == "sequence_parallel"):
            yield name, replace(shape, method="galaxy_plus", options=options | system)


def run(place: Place) -> Run:
    """Execute the fastest way at a place that uses more than one board where there are several."""
    cluster = emulated_boards(place.num_boards, place.mbit_per_s)
    with scratch_folder() as folder:
        texts = folder / "texts.jsonl"
        write_texts(texts, TEXTS)
        planned = []
        for name, job in ways(place, texts):
            with suppress(PlanError):  # Megatron-LM cannot divide three groups of heads by two
                simulated = _report(job, cluster, "simulate", folder)
                if len(simulated.plan.busy_ranks) > 1 or place.num_boards == 1:
                    planned.append((_seconds(simulated)[1], name, job))
        _, name, job = min(planned, key=lambda way: way[0])
        report = _report(job, cluster, "execute", folder)
    seconds, simulated_s = _seconds(report)
    tokens = NEW_TOKENS if place.task == "decode" else 1
    return Run(
        way=name,
        seconds=seconds / tokens,
        simulated_s=simulated_s / tokens,
        dilation=report.dilation,
        in_pace=report.valid,
    )


def _report(job: Job, cluster: Cluster, mode: Mode, folder: Path) -> Report:
    return experiment.run(job, cluster, mode, workdir=folder / mode)


def _seconds(report: Report) -> tuple[float, float]:
    """Return the median seconds of the steps after the first, executed (0 if they were not) and simulated."""
    steps = report.steps[1:]
    return median_s(steps, "measured_s") or 0.0, median_s(steps, "predicted_s") or 0.0


def boards_executed(item: Item, settings: Settings) -> Result:
    """Execute the points.  Finished runs are stored if the host kept pace; the next call repeats the others."""

    def run_of(place: Place) -> Run:
        name = re.sub("[^a-z0-9]+", "_", " ".join(map(str, place)).lower())
        file = f"boards-executed/{name}.json"
        run_here = settings.remember(file, Run, partial(run, place))
        if settings.workdir is not None and not run_here.in_pace:
            (settings.workdir / file).unlink()
        settings.progress(
            f"{place.task}, {place.model}, {place.num_boards} boards, {place.mbit_per_s} Mbit/s, {run_here.way}: "
            f"{run_here.seconds * 1e3:.1f} ms, simulated {run_here.simulated_s * 1e3:.1f} ms"
        )
        return run_here

    points = [
        Point(
            place=place, run=run_of(place), alone=run_of(place._replace(num_boards=1, mbit_per_s=PLACES[-1].mbit_per_s))
        )
        for place in (QUICK if settings.quick else PLACES)
    ]
    return compared(item, points)


def compared(item: Item, points: list[Point]) -> Result:
    """Return the comparison of the points."""
    sides = [point.speedup > 1 for point in points]
    return item.result(
        tables={"executed": [_row(point) for point in points]},
        off=median(abs(point.speedup / point.simulated - 1) for point in points) * 100,
        worst=max(abs(point.speedup / point.simulated - 1) for point in points) * 100,
        same_side=sum(side == (point.simulated > 1) for side, point in zip(sides, points, strict=True)),
        in_pace=sum(point.in_pace for point in points),
        points=len(points),
        tokens=TOKENS,
        prompt=PROMPT_TOKENS,
        new=NEW_TOKENS,
        steps=STEPS,
        requests=REQUESTS,
    )


def _row(point: Point) -> Row:
    place, run_here, alone = point.place, point.run, point.alone
    seconds = (run_here.seconds, run_here.simulated_s, alone.seconds, alone.simulated_s)
    return (
        place.task,
        place.model,
        float(place.num_boards),
        float(place.mbit_per_s),
        run_here.way,
        *(1e3 * each for each in seconds),
        point.speedup,
        point.simulated,
        "yes" if point.in_pace else "no",
    )
